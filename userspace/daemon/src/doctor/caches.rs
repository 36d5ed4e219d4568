//! Check of resctrl: the host can partition and count L3 caches and memory bandwidth as configured.

use std::{path::Path, sync::Arc};

use numaward_config::resctrl::{Monitor, Resctrl as ResctrlConfig};
use numaward_enforce::resctrl::{HostKernel, Info, Resctrl};
use numaward_guarantee::caches::shares;

use super::{Outcome, ok, warn};

const FIX: &str = "mount it (mount -t resctrl resctrl /sys/fs/resctrl, or in /etc/fstab), and let the daemon write there: \
    ReadWritePaths=/sys/fs/resctrl in its unit, the component resctrl on Kubernetes. Processors without RDT or QoS, and most \
    virtual machines, have no resctrl";

/// Checks the resctrl tree at `root` with the permissions of this process.
pub(super) fn caches(root: &Path, config: &ResctrlConfig) -> Outcome {
    let (info, is_made_up) = match Resctrl::new(root, Arc::new(HostKernel)).read_info() {
        Ok(found) => found,
        Err(error) => return warn(format!("no class is applied and nothing is counted: {error}"), FIX),
    };
    let classes = config.classes.values();
    let features = [
        (
            classes.clone().any(|class| class.l3_ways.or(class.l3_percent).is_some()),
            info.caches.is_some(),
            "partitioning of L3 caches",
        ),
        (
            classes.clone().any(|class| class.memory_bandwidth_percent.is_some()),
            info.bandwidth.is_some(),
            "limits of memory bandwidth",
        ),
        (config.monitor != Monitor::Off, info.monitoring.is_some(), "counting"),
    ];
    let missing: Vec<&str> = features
        .into_iter()
        .filter(|(is_configured, is_available, _)| *is_configured && !is_available)
        .map(|(_, _, feature)| feature)
        .collect();
    let available = describe(&info);
    if !missing.is_empty() {
        let missing = missing.join(", ");
        return warn(
            format!("this host does not have: {missing}; it has: {available}"),
            "configure what this host has; a mount option or the firmware may hide the rest",
        );
    }
    let refused = info.refused(&shares(config));
    if !refused.is_empty() {
        return warn(
            format!("this host cannot apply these classes: {}; it has: {available}", refused.join("; ")),
            "configure classes with fewer ways, or shares that this host accepts",
        );
    }
    let groups = [
        info.caches.as_ref().map(|caches| caches.groups),
        info.bandwidth.as_ref().map(|bandwidth| bandwidth.groups),
    ];
    let max_classes = groups.into_iter().flatten().min().map(|groups| groups.saturating_sub(1) as usize);
    if let Some(max_classes) = max_classes.filter(|max| *max < classes.len()) {
        let count = classes.len();
        return warn(
            format!(
                "{count} classes are configured, and this host can apply {max_classes} at once; it has: {available}"
            ),
            "configure fewer classes, and let several workloads use the same class",
        );
    }
    if let Err(errno) = rustix::fs::access(root, rustix::fs::Access::WRITE_OK) {
        return warn(format!("{} cannot be written ({errno})", root.display()), FIX);
    }
    let origin = if is_made_up { "; this tree is made up for tests, not the kernel's" } else { "" };
    ok(format!("{available}{origin}"))
}

/// Describes the features of the host.
fn describe(info: &Info) -> String {
    let caches = info.caches.as_ref().map(|caches| {
        format!(
            "{} with {} ways, at least {} each, {} groups",
            caches.resources.join(" and "),
            caches.mask.count_ones(),
            caches.least,
            caches.groups
        )
    });
    let bandwidth = info.bandwidth.as_ref().map(|bandwidth| {
        let (least, step, groups) = (bandwidth.least, bandwidth.step, bandwidth.groups);
        format!("memory bandwidth from {least} in steps of {step}, {groups} groups")
    });
    let monitoring = info.monitoring.as_ref().map(|monitoring| {
        format!("counting of {} in {} groups", monitoring.events.join(", "), monitoring.groups)
    });
    let available: Vec<String> = [caches, bandwidth, monitoring].into_iter().flatten().collect();
    if available.is_empty() { "nothing".to_owned() } else { available.join("; ") }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_api::doctor::CheckResult;

    use super::*;

    fn parse(text: &str) -> ResctrlConfig {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn compares_host_with_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let both = r#"{"monitor": "guaranteed", "classes": {"a": {"l3Ways": 2}, "b": {"memoryBandwidthPercent": 50}}}"#;
        let verdict_of = |text: &str| caches(dir.path(), &parse(text));
        let (verdict, finding, _) = verdict_of(both);
        assert!(verdict == CheckResult::Warn && finding.contains("resctrl is not mounted at "), "{finding}");
        let write = |file: &str, text: &str| {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("MADE-UP", "for a test\n");
        write("info/L3/cbm_mask", "7ff\n");
        write("info/L3/min_cbm_bits", "1\n");
        write("info/L3/num_closids", "3\n");
        let (verdict, finding, _) = verdict_of(both);
        let expected = "this host does not have: limits of memory bandwidth, counting; it has: L3 with 11 ways, at least 1 each, \
            3 groups";
        assert!(verdict == CheckResult::Warn && finding == expected, "{finding}");
        let (verdict, finding, _) = verdict_of(r#"{"classes": {"a": {"l3Ways": 2}}}"#);
        assert!(
            verdict == CheckResult::Ok && finding.ends_with("made up for tests, not the kernel's"),
            "{finding}"
        );
        let exclusive =
            r#"{"classes": {"a": {"l3Ways": 8, "exclusive": true}, "b": {"l3Ways": 3, "exclusive": true}}}"#;
        let (verdict, finding, _) = verdict_of(exclusive);
        let expected = "this host cannot apply these classes: all exclusive classes leave 0 of the ways to those without a class, which need 1; it has: L3";
        assert!(verdict == CheckResult::Warn && finding.starts_with(expected), "{finding}");
        let (_, finding, _) = verdict_of(r#"{"classes": {"a": {"l3Ways": 12}}}"#);
        assert!(finding.contains("class a: 12 of the L3 cache's ways are asked for: it has 11"), "{finding}");
        let three = r#"{"classes": {"a": {"l3Ways": 2}, "b": {"l3Ways": 2}, "c": {"l3Ways": 2}}}"#;
        let (verdict, finding, _) = verdict_of(three);
        assert!(
            verdict == CheckResult::Warn
                && finding.contains("3 classes are configured, and this host can apply 2"),
            "{finding}"
        );
        write("info/L3/cbm_mask", "none\n");
        let (verdict, finding, _) = verdict_of(both);
        assert!(verdict == CheckResult::Warn && finding.contains("\"none\" is not a mask"), "{finding}");
    }
}
