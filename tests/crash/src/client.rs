//! What is asked on the control socket.

use std::path::PathBuf;

use anyhow::{Result, bail};
use numaward_api as api;

pub(crate) struct Client {
    socket: PathBuf,
}

/// What came of a request. An error is something else: the daemon did not answer, or not as it should.
pub(crate) enum Answer<T> {
    Done(T),
    /// The engine says no.
    Refused,
    /// There is no such allocation.
    Unknown,
    /// It died on the way, or was dead before.
    None,
}

impl Client {
    pub(crate) fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// What is held; none if nobody answers.
    pub(crate) fn allocations(&self) -> Result<Option<api::Allocations>> {
        match self.ask("GET", "/api/v1/allocations", "")? {
            Some((200, body)) => Ok(Some(serde_json::from_str(&body)?)),
            None => Ok(None),
            other => bail!("asked for the allocations: {other:?}"),
        }
    }

    pub(crate) fn admit(&self, asked: &api::AllocationRequest) -> Result<Answer<Box<api::Allocation>>> {
        match self.ask("POST", "/api/v1/allocations", &serde_json::to_string(asked)?)? {
            Some((201, body)) => Ok(Answer::Done(serde_json::from_str(&body)?)),
            Some((409, body)) if body.contains("\"rejection\"") => Ok(Answer::Refused),
            None => Ok(Answer::None),
            other => bail!("asked for {asked:?}: {other:?}"),
        }
    }

    pub(crate) fn release(&self, name: &str) -> Result<Answer<()>> {
        match self.ask("DELETE", &format!("/api/v1/allocations/{name}"), "")? {
            Some((204, _)) => Ok(Answer::Done(())),
            Some((404, _)) => Ok(Answer::Unknown),
            None => Ok(Answer::None),
            other => bail!("released {name}: {other:?}"),
        }
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Result<Option<(u16, String)>> {
        numaward_tests_daemon::ask(&self.socket, method, path, body)
    }
}
