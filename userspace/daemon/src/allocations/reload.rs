//! The HTTP route that loads the configuration again (`POST /api/v1/reload`). Only on the control socket, because the answer may quote
//! values of the files.

use std::time::Duration;

use axum::{
    Json,
    extract::State,
    http::{StatusCode, Uri},
    response::Response,
};
use numaward_api::{self as api, problem::CONTENT_TYPE};
use numaward_config::Problems;
use numaward_guarantee::error::AdmissionError;
use numaward_http::TIME_LIMIT;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{refusal, refused, respond};

/// Maximum number of reloads that wait. Each client waits for its own.
const MAX_WAITING: usize = 8;

/// Time after which a client is told that the reload goes on: shorter than that of requests in general, which may have no effect.
const ANSWER_TIMEOUT: Duration = TIME_LIMIT.saturating_sub(Duration::from_secs(1));

/// Reason why a reload failed. Unless a variant says otherwise, nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The files are invalid.
    #[error("nothing has changed: {0}")]
    Invalid(#[from] Problems),
    /// The reconciler does not take the declared guarantees, or has applied only a part of them. The next reload tries again.
    #[error(transparent)]
    Guarantees(#[from] AdmissionError),
    #[error("the configuration cannot be compared with that in effect: {0}")]
    Compare(#[from] serde_json::Error),
    /// The reload has not ended, and goes on.
    #[error(
        "the reload has not ended within {} seconds; it goes on, and the log of the daemon will have its result",
        ANSWER_TIMEOUT.as_secs()
    )]
    Slow,
}

/// A request to load the configuration again, as the channel for its answer.
pub type ReloadRequest = oneshot::Sender<Result<api::Reload, ReloadError>>;

/// Sends reload requests to the task that follows the configuration.
#[derive(Clone, Debug)]
pub struct ReloadHandle(mpsc::Sender<ReloadRequest>);

impl ReloadHandle {
    /// Creates a handle and the queue of its requests.
    pub fn new() -> (Self, mpsc::Receiver<ReloadRequest>) {
        let (sender, queue) = mpsc::channel(MAX_WAITING);
        (Self(sender), queue)
    }

    async fn reload(&self) -> Result<api::Reload, ReloadError> {
        let (answer, result) = oneshot::channel();
        self.0.try_send(answer).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => AdmissionError::Busy,
            mpsc::error::TrySendError::Closed(_) => AdmissionError::Stopping,
        })?;
        let result = timeout(ANSWER_TIMEOUT, result).await.map_err(|_| ReloadError::Slow)?;
        result.map_err(|_| AdmissionError::Stopping)?
    }
}

pub(super) fn routes() -> OpenApiRouter<ReloadHandle> {
    OpenApiRouter::new().routes(routes!(reload))
}

/// Loads the configuration again, and applies the changed keys that need no restart, such as `guarantees` and `log.level`. If a file is
/// invalid, nothing changes. Only on the control socket.
#[utoipa::path(
    post,
    path = "/api/v1/reload",
    tag = "control",
    responses(
        (status = 200, description = "The changes, and those that need a restart", body = api::Reload),
        (status = 404, description = "This is not the control socket", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A file is invalid, and nothing has changed", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 500, description = "Not all declared guarantees could be applied; the next reload tries again", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The reload has not ended in time, but goes on, and the log of the daemon will have its result; or too many requests are pending, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn reload(State(handle): State<ReloadHandle>, uri: Uri) -> Result<Json<api::Reload>, Response> {
    handle.reload().await.map(Json).map_err(|error| match &error {
        ReloadError::Invalid(_) => {
            respond(refusal(StatusCode::UNPROCESSABLE_ENTITY, error.to_string(), uri.path()))
        }
        ReloadError::Guarantees(error) => refused(error, uri.path()),
        ReloadError::Compare(_) => {
            respond(refusal(StatusCode::INTERNAL_SERVER_ERROR, error.to_string(), uri.path()))
        }
        ReloadError::Slow => respond(refusal(StatusCode::SERVICE_UNAVAILABLE, error.to_string(), uri.path())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn slow_reload_goes_on() {
        let (handle, mut requests) = ReloadHandle::new();
        let answered = reload(State(handle), Uri::from_static("/api/v1/reload")).await;
        let response = answered.unwrap_err();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let body = axum::body::to_bytes(response.into_body(), 1 << 12).await.unwrap();
        let text = String::from_utf8_lossy(&body);
        assert!(text.contains("it goes on, and the log of the daemon will have its result"), "{text}");
        assert!(requests.recv().await.is_some());
    }
}
