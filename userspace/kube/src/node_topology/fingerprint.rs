//! The fingerprint of the pods that an object accounts for.
//!
//! A scheduler that takes what it has placed off the published amounts must know when an object has caught up. So the
//! object carries a hash of the pods it knows of, by namespace and name; the scheduler compares it with that of the
//! pods it knows of.
//!
//! Algorithm (version `v001`): of each pod the 64-bit xxHash of its name, seeded with that of its namespace; of these,
//! sorted and written as little-endian, the 64-bit xxHash again, in hexadecimal.
//!
//! Source: the documentation and test data of `k8stopologyawareschedwg/podfingerprint`.

use twox_hash::XxHash64;

/// The attribute that has it.
pub const ATTRIBUTE: &str = "nodeTopologyPodsFingerprint";
/// The attribute that says over which pods it is.
pub const METHOD_ATTRIBUTE: &str = "nodeTopologyPodsFingerprintMethod";
/// Over all pods of the Kubernetes node.
pub const METHOD: &str = "all";

/// The fingerprint of pods by namespace and name, in any order.
pub fn from_pods<'a>(pods: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let hash = |(namespace, name): (&str, &str)| {
        XxHash64::oneshot(XxHash64::oneshot(0, namespace.as_bytes()), name.as_bytes())
    };
    let mut hashes: Vec<u64> = pods.into_iter().map(hash).collect();
    hashes.sort_unstable();
    let bytes: Vec<u8> = hashes.into_iter().flat_map(u64::to_le_bytes).collect();
    format!("pfp0v001{:016x}", XxHash64::oneshot(0, &bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published test data.
    #[test]
    fn known_sets_have_their_known_fingerprints() {
        let three =
            [("production", "jaeger-dpgjk"), ("production", "nginx-rt684"), ("production", "envoy-g9m22")];
        assert_eq!(from_pods(three), "pfp0v001607b76a0e9d3aeb4");
        let mut ten = vec![
            ("analytics", "controller-69dkj"),
            ("kube-public", "subscriber-tq6v7"),
            ("kube-public", "transformer-hfbng"),
            ("kube-public", "validator-c6pn5"),
            ("kube-system", "proxy-wszrd"),
            ("middleware", "processor-jkrl4"),
            ("network", "gateway-vsll5"),
            ("network", "importer-kzdfr"),
            ("network", "importer-q5vt9"),
            ("staging", "prometheus-bwgbn"),
        ];
        assert_eq!(from_pods(ten.clone()), "pfp0v001567144e4a561bb5a");
        ten.reverse();
        assert_eq!(from_pods(ten.clone()), "pfp0v001567144e4a561bb5a");
        ten.pop();
        assert_ne!(from_pods(ten), "pfp0v001567144e4a561bb5a");
    }
}
