//! Fingerprint of the pods that a NodeResourceTopology includes.
//!
//! # Problem
//! A scheduler subtracts the pods that it has just placed from the published amounts, and must know when an object
//! includes them. So the object carries a hash of the names and namespaces of the included pods, which the scheduler
//! compares with the hash of the pods that it knows.
//!
//! # Algorithm (version `v001`)
//! For each pod, the 64-bit xxHash of its name is computed with the xxHash of its namespace as the seed. These hashes
//! are sorted, written as little-endian and hashed again; the result is written in hexadecimal.
//!
//! Source: the documentation and test data of `k8stopologyawareschedwg/podfingerprint`.

use twox_hash::XxHash64;

/// Attribute with the fingerprint.
pub const ATTRIBUTE: &str = "nodeTopologyPodsFingerprint";
/// Attribute with the set of pods that the fingerprint covers.
pub const METHOD_ATTRIBUTE: &str = "nodeTopologyPodsFingerprintMethod";
/// Value of [`METHOD_ATTRIBUTE`] for all pods of the Kubernetes node.
pub const METHOD: &str = "all";

/// Returns the fingerprint of pods, given by namespace and name in any order.
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
    fn matches_published_fingerprints() {
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
