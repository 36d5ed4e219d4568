//! The HTTP route that loads the configuration again (`POST /api/v1/reload`). Only on the control socket, because the answer may quote
//! values of the files.

use axum::{
    Json,
    extract::State,
    http::{StatusCode, Uri},
    response::Response,
};
use numaward_api::{self as api, problem::CONTENT_TYPE};
use numaward_config::Problems;
use numaward_guarantee::error::AdmissionError;
use tokio::sync::{mpsc, oneshot};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{refusal, refused, respond};

/// Maximum number of reloads that wait. Each client waits for its own.
const MAX_WAITING: usize = 8;

/// Reason why a reload changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The files are invalid.
    #[error("nothing has changed: {0}")]
    Invalid(#[from] Problems),
    /// The reconciler does not take the declared guarantees.
    #[error(transparent)]
    Guarantees(#[from] AdmissionError),
    #[error("the configuration cannot be compared with that in effect: {0}")]
    Compare(#[from] serde_json::Error),
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
        result.await.map_err(|_| AdmissionError::Stopping)?
    }
}

pub(super) fn routes() -> OpenApiRouter<ReloadHandle> {
    OpenApiRouter::new().routes(routes!(reload))
}

/// Loads the configuration again, and applies the changed keys that need no restart: `guarantees` and `log.level`. If a file is invalid,
/// nothing changes. Only on the control socket.
#[utoipa::path(
    post,
    path = "/api/v1/reload",
    tag = "control",
    responses(
        (status = 200, description = "The changes, and those that need a restart", body = api::Reload),
        (status = 404, description = "This is not the control socket", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A file is invalid, and nothing has changed", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The request timed out, too many requests are pending, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
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
    })
}
