//! Client of the control socket.

use std::path::PathBuf;

use anyhow::{Result, bail};
use numaward_api as api;

pub(crate) struct ControlClient {
    socket: PathBuf,
}

/// Outcome of a request. Any other outcome, such as an unexpected status, is an error.
pub(crate) enum RequestOutcome<T> {
    Done(T),
    /// The daemon refused the request.
    Refused,
    /// The guarantee does not exist.
    Unknown,
    /// The daemon died before it answered.
    None,
}

impl ControlClient {
    pub(crate) fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Returns all guarantees; `None` if the daemon does not answer.
    pub(crate) fn allocations(&self) -> Result<Option<api::Allocations>> {
        match self.ask("GET", "/api/v1/allocations", "")? {
            Some((200, body)) => Ok(Some(serde_json::from_str(&body)?)),
            None => Ok(None),
            other => bail!("asked for the allocations: {other:?}"),
        }
    }

    pub(crate) fn admit(
        &self,
        asked: &api::AllocationRequest,
    ) -> Result<RequestOutcome<Box<api::Allocation>>> {
        match self.ask("POST", "/api/v1/allocations", &serde_json::to_string(asked)?)? {
            Some((201, body)) => Ok(RequestOutcome::Done(serde_json::from_str(&body)?)),
            Some((409, body)) if body.contains("\"rejection\"") => Ok(RequestOutcome::Refused),
            None => Ok(RequestOutcome::None),
            other => bail!("asked for {asked:?}: {other:?}"),
        }
    }

    pub(crate) fn release(&self, name: &str) -> Result<RequestOutcome<()>> {
        match self.ask("DELETE", &format!("/api/v1/allocations/{name}"), "")? {
            Some((204, _)) => Ok(RequestOutcome::Done(())),
            Some((404, _)) => Ok(RequestOutcome::Unknown),
            None => Ok(RequestOutcome::None),
            other => bail!("released {name}: {other:?}"),
        }
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Result<Option<(u16, String)>> {
        numaward_tests_daemon::ask(&self.socket, method, path, body)
    }
}
