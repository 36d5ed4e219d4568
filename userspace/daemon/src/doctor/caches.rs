//! Whether L3 caches and memory bandwidth can be shared out and counted, where they are to be.

use std::{path::Path, sync::Arc};

use numaward_config::resctrl::{Monitor, Resctrl as Wanted};
use numaward_enforce::resctrl::{HostKernel, Info, Resctrl};
use numaward_guarantee::caches::shares;

use super::{Outcome, ok, warn};

const FIX: &str = "mount it (mount -t resctrl resctrl /sys/fs/resctrl, or in /etc/fstab), and let the daemon write there: \
    ReadWritePaths=/sys/fs/resctrl in its unit, the component resctrl on Kubernetes. Processors without RDT or QoS, and most \
    virtual machines, have nothing of the kind";

/// Looks at the tree at `root`, as this process sees it.
pub(super) fn caches(root: &Path, wanted: &Wanted) -> Outcome {
    let (info, is_made_up) = match Resctrl::new(root, Arc::new(HostKernel)).read_info() {
        Ok(found) => found,
        Err(error) => return warn(format!("no class is held and nothing is counted: {error}"), FIX),
    };
    let classes = wanted.classes.values();
    let asks = [
        (
            classes.clone().any(|of| of.l3_ways.or(of.l3_percent).is_some()),
            info.caches.is_some(),
            "sharing out L3 caches",
        ),
        (
            classes.clone().any(|of| of.memory_bandwidth_percent.is_some()),
            info.bandwidth.is_some(),
            "sharing out memory bandwidth",
        ),
        (wanted.monitor != Monitor::Off, info.monitoring.is_some(), "counting"),
    ];
    let missing: Vec<&str> = asks
        .into_iter()
        .filter(|(is_asked, is_there, _)| *is_asked && !is_there)
        .map(|(_, _, what)| what)
        .collect();
    let there = features(&info);
    if !missing.is_empty() {
        let missing = missing.join(", ");
        return warn(
            format!("this host does not have: {missing}; it has: {there}"),
            "configure what this host has; a mount option or the firmware may hide the rest",
        );
    }
    let refused = info.refused(&shares(wanted));
    if !refused.is_empty() {
        return warn(
            format!("not to be held on this host: {}; {there}", refused.join("; ")),
            "configure classes with fewer ways, or shares that this host takes",
        );
    }
    let groups = [info.caches.as_ref().map(|of| of.groups), info.bandwidth.as_ref().map(|of| of.groups)];
    let most = groups.into_iter().flatten().min().map(|groups| groups.saturating_sub(1) as usize);
    if let Some(most) = most.filter(|most| *most < classes.len()) {
        let count = classes.len();
        return warn(
            format!("{count} classes are configured, and {most} can be held at once; {there}"),
            "configure fewer classes, or let workloads have the same",
        );
    }
    if let Err(errno) = rustix::fs::access(root, rustix::fs::Access::WRITE_OK) {
        return warn(format!("{} cannot be written ({errno})", root.display()), FIX);
    }
    let whose = if is_made_up { "; this is a made-up tree, not the kernel's" } else { "" };
    ok(format!("{there}{whose}"))
}

/// What the host has, in words.
fn features(info: &Info) -> String {
    let caches = info.caches.as_ref().map(|of| {
        format!(
            "{} with {} ways, at least {} each, {} groups",
            of.resources.join(" and "),
            of.mask.count_ones(),
            of.least,
            of.groups
        )
    });
    let bandwidth = info.bandwidth.as_ref().map(|of| {
        format!("memory bandwidth from {} in steps of {}, {} groups", of.least, of.step, of.groups)
    });
    let monitoring = info
        .monitoring
        .as_ref()
        .map(|of| format!("counting of {} in {} groups", of.events.join(", "), of.groups));
    let there: Vec<String> = [caches, bandwidth, monitoring].into_iter().flatten().collect();
    if there.is_empty() { "nothing".to_owned() } else { there.join("; ") }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_api::doctor::CheckResult;

    use super::*;

    fn wanted(text: &str) -> Wanted {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_a_host_has_is_compared_with_what_is_configured() {
        let dir = tempfile::tempdir().unwrap();
        let both = r#"{"monitor": "guaranteed", "classes": {"a": {"l3Ways": 2}, "b": {"memoryBandwidthPercent": 50}}}"#;
        let judge = |text: &str| caches(dir.path(), &wanted(text));
        let (verdict, finding, _) = judge(both);
        assert!(verdict == CheckResult::Warn && finding.contains("resctrl is not mounted at "), "{finding}");
        let put = |file: &str, text: &str| {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("MADE-UP", "for a test\n");
        put("info/L3/cbm_mask", "7ff\n");
        put("info/L3/min_cbm_bits", "1\n");
        put("info/L3/num_closids", "3\n");
        let (verdict, finding, _) = judge(both);
        let expected = "this host does not have: sharing out memory bandwidth, counting; it has: L3 with 11 ways, at least 1 each, \
            3 groups";
        assert!(verdict == CheckResult::Warn && finding == expected, "{finding}");
        let (verdict, finding, _) = judge(r#"{"classes": {"a": {"l3Ways": 2}}}"#);
        assert!(
            verdict == CheckResult::Ok && finding.ends_with("a made-up tree, not the kernel's"),
            "{finding}"
        );
        let most =
            r#"{"classes": {"a": {"l3Ways": 8, "exclusive": true}, "b": {"l3Ways": 3, "exclusive": true}}}"#;
        let (verdict, finding, _) = judge(most);
        let expected = "not to be held on this host: all exclusive classes leave 0 of the ways to those without a class, which need 1; L3";
        assert!(verdict == CheckResult::Warn && finding.starts_with(expected), "{finding}");
        let (_, finding, _) = judge(r#"{"classes": {"a": {"l3Ways": 12}}}"#);
        assert!(finding.contains("class a: 12 of the L3 cache's ways are asked for: it has 11"), "{finding}");
        let three = r#"{"classes": {"a": {"l3Ways": 2}, "b": {"l3Ways": 2}, "c": {"l3Ways": 2}}}"#;
        let (verdict, finding, _) = judge(three);
        assert!(
            verdict == CheckResult::Warn && finding.contains("3 classes are configured, and 2 can be held"),
            "{finding}"
        );
        put("info/L3/cbm_mask", "none\n");
        let (verdict, finding, _) = judge(both);
        assert!(verdict == CheckResult::Warn && finding.contains("\"none\" is not a mask"), "{finding}");
    }
}
