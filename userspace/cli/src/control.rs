//! Allocations: asks for them.

use std::fmt::Write as _;

use hyper::{Method, body::Bytes};
use numaward_api as api;
use serde::Serialize;

use crate::client::{ClientError, Server};

const PATH: &str = "/api/v1/allocations";
const REBALANCE: &str = "/api/v1/rebalance";

impl Server {
    /// Asks for an allocation.
    pub(crate) async fn admit(&self, asked: &api::AllocationRequest) -> Result<api::Allocation, ClientError> {
        self.ask(Method::POST, PATH, body(asked)).await
    }

    /// Asks what would happen.
    pub(crate) async fn dry_run(&self, asked: &api::AllocationRequest) -> Result<api::DryRun, ClientError> {
        self.ask(Method::POST, &format!("{PATH}?dryRun=true"), body(asked)).await
    }

    /// Asks for a change of an allocation, or what it would come to.
    pub(crate) async fn resize(
        &self,
        name: &str,
        asked: &api::Resize,
        dry_run: bool,
    ) -> Result<api::ResizeOutcome, ClientError> {
        let query = if dry_run { "?dryRun=true" } else { "" };
        self.ask(Method::PATCH, &format!("{PATH}/{}{query}", encoded(name)), body(asked)).await
    }

    /// Asks what is held.
    pub(crate) async fn allocations(&self) -> Result<api::Allocations, ClientError> {
        self.get(PATH).await
    }

    /// Asks for moves that make a request fit.
    pub(crate) async fn plan(&self, asked: &api::PlanRequest) -> Result<api::MovePlan, ClientError> {
        self.ask(Method::POST, "/api/v1/plan", body(asked)).await
    }

    /// Begins to carry them out.
    pub(crate) async fn rebalance(
        &self,
        asked: &api::RebalanceRequest,
    ) -> Result<api::Rebalance, ClientError> {
        self.ask(Method::POST, REBALANCE, body(asked)).await
    }

    /// Asks how far that is.
    pub(crate) async fn rebalance_progress(&self) -> Result<api::Rebalance, ClientError> {
        self.get(REBALANCE).await
    }

    /// Cancels it.
    pub(crate) async fn cancel_rebalance(&self) -> Result<api::Rebalance, ClientError> {
        self.ask(Method::DELETE, REBALANCE, Bytes::new()).await
    }

    /// Asks for what is promised, as the kubelet's state files.
    pub(crate) async fn kubelet_state(&self) -> Result<api::KubeletState, ClientError> {
        self.get("/api/v1/kubelet-state").await
    }

    /// Ends an allocation.
    pub(crate) async fn release(&self, name: &str) -> Result<(), ClientError> {
        self.send(Method::DELETE, &format!("{PATH}/{}", encoded(name)), Bytes::new()).await.map(drop)
    }
}

fn body(asked: &impl Serialize) -> Bytes {
    // Text and numbers: it can always be written.
    serde_json::to_vec(asked).unwrap_or_default().into()
}

/// A name as part of a path (RFC 3986).
pub(crate) fn encoded(name: &str) -> String {
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
}
