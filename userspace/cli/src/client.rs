//! Asks the daemon.

use std::{net::SocketAddr, time::Duration};

use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use numaward_daemon::http::Problem;
use serde::de::DeserializeOwned;
use tokio::{net::TcpStream, time::timeout};

/// The daemon answers local requests at once, unless it is busy or hung.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// More than the largest host's workloads take.
const MAX_BYTES: usize = 256 << 20;

/// The daemon gave no usable answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// Nobody answers there.
    #[error(
        "no numaward daemon is reachable at {address}: {reason}; is `numaward run` running there? \
         (--address names another)"
    )]
    Unreachable {
        /// Where it was sought.
        address: SocketAddr,
        /// What went wrong.
        reason: String,
    },
    /// It answered with an error, or is no numaward.
    #[error("{address}{path} answered {status}: {detail}")]
    Refused {
        /// Who answered.
        address: SocketAddr,
        /// What was asked for.
        path: &'static str,
        /// The HTTP status.
        status: StatusCode,
        /// What was said.
        detail: String,
    },
    /// The answer makes no sense.
    #[error("{address}{path} answered what is not numaward's: {source}; is it of another version?")]
    Malformed {
        /// Who answered.
        address: SocketAddr,
        /// What was asked for.
        path: &'static str,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// Gets the JSON at a path.
pub(crate) async fn get<T: DeserializeOwned>(
    address: SocketAddr,
    path: &'static str,
) -> Result<T, ClientError> {
    let (status, body) = match timeout(TIME_LIMIT, fetch(address, path)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(reason)) => return Err(ClientError::Unreachable { address, reason }),
        Err(_) => {
            let reason = format!("no answer within {} seconds", TIME_LIMIT.as_secs());
            return Err(ClientError::Unreachable { address, reason });
        }
    };
    if status != StatusCode::OK {
        let detail = match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => problem.detail,
            Err(_) => "no numaward answers there".to_owned(),
        };
        return Err(ClientError::Refused { address, path, status, detail });
    }
    serde_json::from_slice(&body).map_err(|source| ClientError::Malformed { address, path, source })
}

async fn fetch(address: SocketAddr, path: &str) -> Result<(StatusCode, Bytes), String> {
    let text = |error: hyper::Error| error.to_string();
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
    tokio::spawn(connection);
    let request = Request::get(path)
        .header(header::HOST, address.to_string())
        .header(header::ACCEPT, "application/json")
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let response = sender.send_request(request).await.map_err(text)?;
    let status = response.status();
    let body =
        Limited::new(response.into_body(), MAX_BYTES).collect().await.map_err(|error| error.to_string())?;
    Ok((status, body.to_bytes()))
}
