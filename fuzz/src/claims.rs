//! Target for resource claims: the kubelet's requests, and claims as the API server reports them.

use numaward_kube::dra::{
    claim::read_text,
    messages::{ClaimId, ClaimsRequest},
};
use prost::Message as _;

/// Name of the Kubernetes node, and of the pool of its devices.
const NODE: &str = "n1";

pub(crate) fn run(data: &[u8]) {
    if let Ok(request) = ClaimsRequest::decode(data) {
        // A claim takes at least two bytes.
        assert!(request.claims.len() <= data.len() / 2);
        assert_eq!(ClaimsRequest::decode(&request.encode_to_vec()[..]), Ok(request));
    }
    let asked = ClaimId { namespace: "ns".to_owned(), uid: "u1".to_owned(), name: "db".to_owned() };
    if let Ok(claim) = read_text(data, NODE, &asked) {
        for part in &claim.parts {
            assert!(part.consumed.values().any(|amount| !amount.is_zero()), "{part:?}");
            assert!(part.consumed.values().all(|amount| amount.units().is_some()), "{part:?}");
            assert!(!part.request.contains('/') && !part.device.is_empty(), "{part:?}");
            assert_eq!(part.prepared(NODE, "cdi").pool_name, NODE);
        }
        assert_eq!(claim.parts.len(), 1);
    }
}
