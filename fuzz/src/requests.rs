//! Target for the bodies of requests on the control socket.

use numaward_api as api;
use numaward_guarantee::request::{self, Request, Resize};
use serde::{Serialize, de::DeserializeOwned};

/// Parses a body, and asserts that the serialized value parses to the same value.
fn read<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(data: &[u8]) -> Option<T> {
    let asked: T = serde_json::from_slice(data).ok()?;
    let text = serde_json::to_string(&asked).unwrap();
    assert_eq!(serde_json::from_str::<T>(&text).ok().as_ref(), Some(&asked), "{text}");
    Some(asked)
}

fn check(asked: &api::AllocationRequest) {
    match Request::new(asked) {
        Ok(request) => {
            assert_eq!(request.name, asked.name);
            let _ = (request.limited(), request.hugepages().count());
        }
        Err(error) => {
            assert!(!error.field.is_empty() && !error.problem.is_empty() && !error.allowed.is_empty());
        }
    }
}

/// Parses the input as the body of each kind of request.
pub(crate) fn run(data: &[u8]) {
    if let Some(asked) = read::<api::AllocationRequest>(data) {
        check(&asked);
    }
    if let Some(asked) = read::<api::Resize>(data)
        && let Err(error) = Resize::new("name".to_owned(), &asked)
    {
        assert!(!error.field.is_empty());
    }
    if let Some(asked) = read::<api::PlanRequest>(data) {
        check(&asked.request);
        let _ = request::limits(asked.max_moves, asked.max_bytes.as_deref());
    }
    if let Some(asked) = read::<api::RebalanceRequest>(data) {
        check(&asked.request);
    }
}
