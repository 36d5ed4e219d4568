//! Targets for resource claims: the kubelet's requests, claims as the API server reports them, and their opaque parameters.

use numaward_engine::Terms;
use numaward_kube::dra::{
    claim::read_text,
    messages::{ClaimId, ClaimsRequest},
    parameters,
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
        assert!(!claim.parts.is_empty());
    }
}

pub(crate) fn parameters(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut terms = Terms::default();
    match parameters::apply(text, &mut terms) {
        Ok(()) => {
            assert!(data.len() <= 10 << 10 && text.contains("Placement"));
            // Parameters choose no nodes, and do not move the claim.
            let Terms { isolate, resctrl_class, cpu_kinds, hide_siblings, same_cache, .. } = terms.clone();
            let allowed =
                Terms { isolate, resctrl_class, cpu_kinds, hide_siblings, same_cache, ..Terms::default() };
            assert_eq!(terms, allowed);
            let mut again = terms.clone();
            assert_eq!(parameters::apply(text, &mut again), Ok(()));
            assert_eq!(again, terms);
        }
        // The error is part of an event, whatever the text is.
        Err(error) => assert!(error.to_string().len() < 1 << 10, "{error}"),
    }
}
