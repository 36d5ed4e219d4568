//! Asks the daemon on its control socket.

use std::{fmt::Write as _, path::PathBuf, time::Duration};

use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use numaward_daemon::api::{self, Refusal};
use serde::de::DeserializeOwned;
use tokio::{net::UnixStream, time::timeout};

/// Longer than the daemon takes to answer, or to say that it cannot.
const TIME_LIMIT: Duration = Duration::from_secs(35);
/// More than all allocations of a large host take.
const MAX_BYTES: usize = 64 << 20;

/// The daemon did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    /// Nobody answers.
    #[error(
        "no numaward daemon is reachable on its control socket {}: {reason}; does `numaward run` run, and is \
         this root? (--socket names another)",
        .socket.display()
    )]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// It refuses.
    #[error("{}", in_words(.0))]
    Refused(Box<Refusal>),
    /// The answer makes no sense.
    #[error("the daemon on {} answered {status} and what is not numaward's: {reason}; is it of another version?", .socket.display())]
    Malformed {
        /// The socket.
        socket: PathBuf,
        /// The HTTP status.
        status: StatusCode,
        /// What is wrong with it.
        reason: String,
    },
}

impl ControlError {
    /// Whether the engine decided against the request.
    pub(crate) fn is_rejection(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.rejection.is_some())
    }
}

fn in_words(refusal: &Refusal) -> String {
    match &refusal.rejection {
        Some(rejection) => format!("refused: {}", self::rejection(rejection)),
        None => refusal.detail.clone(),
    }
}

/// Why the engine decided so, node by node.
pub(crate) fn rejection(rejection: &api::Rejection) -> String {
    let mut text = format!("{} ({})", rejection.message, rejection.reason);
    for lack in &rejection.shortfalls {
        let amount = |amount: u64| match lack.resource.as_str() {
            "cpu" => amount.to_string(),
            _ => crate::table::size(amount),
        };
        let enough = if lack.free >= lack.requested { "" } else { ", too little" };
        let _ = write!(
            text,
            "\n  node {}: {} requested {}, free {}{enough}",
            lack.node,
            lack.resource,
            amount(lack.requested),
            amount(lack.free),
        );
    }
    text
}

/// The control socket of a daemon.
#[derive(Debug)]
pub(crate) struct Control {
    socket: PathBuf,
}

impl Control {
    pub(crate) fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Asks for an allocation.
    pub(crate) async fn admit(
        &self,
        asked: &api::AllocationRequest,
    ) -> Result<api::Allocation, ControlError> {
        self.ask(Method::POST, "/api/v1/allocations", Some(asked)).await
    }

    /// Asks what would happen.
    pub(crate) async fn dry_run(&self, asked: &api::AllocationRequest) -> Result<api::DryRun, ControlError> {
        self.ask(Method::POST, "/api/v1/allocations?dryRun=true", Some(asked)).await
    }

    /// Asks what is held.
    pub(crate) async fn allocations(&self) -> Result<api::Allocations, ControlError> {
        self.ask(Method::GET, "/api/v1/allocations", None).await
    }

    /// Ends an allocation.
    pub(crate) async fn release(&self, name: &str) -> Result<(), ControlError> {
        let (status, body) = self
            .send(Method::DELETE, &format!("/api/v1/allocations/{}", encoded(name)), Bytes::new())
            .await?;
        if status.is_success() { Ok(()) } else { Err(self.failure(status, &body)) }
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        asked: Option<&api::AllocationRequest>,
    ) -> Result<T, ControlError> {
        let body = asked.map(serde_json::to_vec).transpose().map(Option::unwrap_or_default);
        let body = body.map_err(|error| self.malformed(StatusCode::OK, &error))?;
        let (status, body) = self.send(method, path, body.into()).await?;
        if !status.is_success() {
            return Err(self.failure(status, &body));
        }
        serde_json::from_slice(&body).map_err(|error| self.malformed(status, &error))
    }

    fn failure(&self, status: StatusCode, body: &[u8]) -> ControlError {
        match serde_json::from_slice::<Refusal>(body) {
            Ok(refusal) => ControlError::Refused(Box::new(refusal)),
            Err(error) => self.malformed(status, &error),
        }
    }

    fn malformed(&self, status: StatusCode, error: &serde_json::Error) -> ControlError {
        ControlError::Malformed { socket: self.socket.clone(), status, reason: error.to_string() }
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), ControlError> {
        let unreachable = |reason| ControlError::Unreachable { socket: self.socket.clone(), reason };
        match timeout(TIME_LIMIT, self.exchange(method, path, body)).await {
            Ok(answer) => answer.map_err(unreachable),
            Err(_) => Err(unreachable(format!("no answer within {} seconds", TIME_LIMIT.as_secs()))),
        }
    }

    async fn exchange(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes), String> {
        let text = |error: hyper::Error| error.to_string();
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "numaward")
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| error.to_string())?;
        let response = sender.send_request(request).await.map_err(text)?;
        let status = response.status();
        let body =
            Limited::new(response.into_body(), MAX_BYTES).collect().await.map_err(|e| e.to_string())?;
        Ok((status, body.to_bytes()))
    }
}

/// A name as part of a path (RFC 3986).
fn encoded(name: &str) -> String {
    let mut text = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/:@".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_encoded() {
        assert_eq!(encoded("system.slice/a\\x2db@1.service"), "system.slice/a%5Cx2db@1.service");
        assert_eq!(encoded("50% ?#ä"), "50%25%20%3F%23%C3%A4");
    }

    #[test]
    fn a_rejection_names_node_and_lack() {
        let lack = |node, free| api::Shortfall { node, resource: "cpu".to_owned(), requested: 2, free };
        let text = rejection(&api::Rejection {
            reason: "TopologyAffinityError".to_owned(),
            message: "no".to_owned(),
            shortfalls: vec![lack(0, 1), lack(1, 2)],
        });
        assert_eq!(
            text,
            "no (TopologyAffinityError)\n  node 0: cpu requested 2, free 1, too little\n  node 1: cpu requested 2, free 2"
        );
    }
}
