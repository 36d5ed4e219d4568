//! Requests of the daemon's API that concern guarantees.

use hyper::{Method, body::Bytes};
use numaward_api as api;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;

use crate::client::{ClientError, Server};

const ALLOCATIONS_PATH: &str = "/api/v1/allocations";
const REBALANCE_PATH: &str = "/api/v1/rebalance";

impl Server {
    /// Requests a guarantee.
    pub(crate) async fn admit(
        &self,
        request: &api::AllocationRequest,
    ) -> Result<api::Allocation, ClientError> {
        self.request(Method::POST, ALLOCATIONS_PATH, body(request)).await
    }

    /// Requests the decision about a guarantee without making it.
    pub(crate) async fn dry_run(&self, request: &api::AllocationRequest) -> Result<api::DryRun, ClientError> {
        self.request(Method::POST, &format!("{ALLOCATIONS_PATH}?dryRun=true"), body(request)).await
    }

    /// Requests a change of a guarantee; a dry run returns only the outcome.
    pub(crate) async fn resize(
        &self,
        name: &str,
        request: &api::Resize,
        dry_run: bool,
    ) -> Result<api::ResizeOutcome, ClientError> {
        let query = if dry_run { "?dryRun=true" } else { "" };
        self.request(
            Method::PATCH,
            &format!("{ALLOCATIONS_PATH}/{}{query}", percent_encode(name)),
            body(request),
        )
        .await
    }

    /// Returns all guarantees.
    pub(crate) async fn allocations(&self) -> Result<api::Allocations, ClientError> {
        self.get(ALLOCATIONS_PATH).await
    }

    /// Requests a plan of moves that make a request fit.
    pub(crate) async fn plan(&self, request: &api::PlanRequest) -> Result<api::MovePlan, ClientError> {
        self.request(Method::POST, "/api/v1/plan", body(request)).await
    }

    /// Starts the moves of a plan.
    pub(crate) async fn rebalance(
        &self,
        request: &api::RebalanceRequest,
    ) -> Result<api::Rebalance, ClientError> {
        self.request(Method::POST, REBALANCE_PATH, body(request)).await
    }

    /// Returns the progress of the rebalance.
    pub(crate) async fn rebalance_progress(&self) -> Result<api::Rebalance, ClientError> {
        self.get(REBALANCE_PATH).await
    }

    /// Cancels the rebalance.
    pub(crate) async fn cancel_rebalance(&self) -> Result<api::Rebalance, ClientError> {
        self.request(Method::DELETE, REBALANCE_PATH, Bytes::new()).await
    }

    /// Returns the guarantees as the kubelet's state files.
    pub(crate) async fn kubelet_state(&self) -> Result<api::KubeletState, ClientError> {
        self.get("/api/v1/kubelet-state").await
    }

    /// Requests that the daemon loads its configuration again.
    pub(crate) async fn reload(&self) -> Result<api::Reload, ClientError> {
        self.request(Method::POST, "/api/v1/reload", Bytes::new()).await
    }

    /// Ends a guarantee.
    pub(crate) async fn release(&self, name: &str) -> Result<(), ClientError> {
        self.send(Method::DELETE, &format!("{ALLOCATIONS_PATH}/{}", percent_encode(name)), Bytes::new())
            .await
            .map(drop)
    }
}

fn body(request: &impl Serialize) -> Bytes {
    // The types consist of text and numbers, which always serialize.
    serde_json::to_vec(request).unwrap_or_default().into()
}

/// Characters that stay in a path (RFC 3986).
const PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/')
    .remove(b':')
    .remove(b'@');

/// Percent-encodes a name as part of a path.
pub(crate) fn percent_encode(name: &str) -> String {
    utf8_percent_encode(name, PATH).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_encodes_names() {
        assert_eq!(percent_encode("system.slice/a\\x2db@1.service"), "system.slice/a%5Cx2db@1.service");
        assert_eq!(percent_encode("50% ?#ä"), "50%25%20%3F%23%C3%A4");
    }
}
