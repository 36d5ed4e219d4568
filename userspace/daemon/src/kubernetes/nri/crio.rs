//! Annotations by which CRI-O changes the CPUs of a pod's containers itself.
//!
//! # Problem
//! With the runtime handler `high-performance`, which a `PerformanceProfile` creates, CRI-O writes cpuset partitions, CPU quotas,
//! the affinity of interrupts and power settings of the CPUs in a container's specification. These are the CPUs that numaward has
//! chosen, and numaward writes the same files.
//!
//! Source: CRI-O, `pkg/annotations/v2` and `internal/runtimehandlerhooks`.

use numaward_kube::nri::types::Pod;

/// Annotations with the setting that CRI-O changes for each.
const CHANGES: [(&str, &str); 6] = [
    ("cpu-c-states.crio.io", "idle states"),
    ("cpu-freq-governor.crio.io", "frequency governor"),
    ("cpu-load-balancing.crio.io", "cpuset partition"),
    ("cpu-quota.crio.io", "CPU quota"),
    ("cpu-shared.crio.io", "shared CPUs"),
    ("irq-load-balancing.crio.io", "affinity of interrupts"),
];

/// Returns a warning for a pod with annotations that let CRI-O change settings of its CPUs.
pub(super) fn warning(pod: &Pod) -> Option<String> {
    let has = |wanted: &str| pod.annotations.keys().any(|key| key.split('/').next() == Some(wanted));
    let found: Vec<_> = CHANGES.iter().filter(|(key, _)| has(key)).collect();
    if found.is_empty() {
        return None;
    }
    let found: Vec<_> = found.iter().map(|(key, setting)| format!("{key} ({setting})")).collect();
    Some(format!(
        "CRI-O changes settings of this pod's CPUs too, because of its annotations: {}. Use numaward's settings instead, and remove \
         these annotations.",
        found.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_settings() {
        let pod = |keys: &[&str]| Pod {
            annotations: keys.iter().map(|key| ((*key).to_owned(), "disable".to_owned())).collect(),
            ..Pod::default()
        };
        let text = warning(&pod(&["cpu-quota.crio.io", "cpu-shared.crio.io/main", "numaward.io/placement"]))
            .unwrap();
        assert!(text.contains("cpu-quota.crio.io (CPU quota), cpu-shared.crio.io (shared CPUs)."), "{text}");
        assert_eq!(warning(&pod(&["shm-size.crio.io", "numaward.io/placement"])), None);
    }
}
