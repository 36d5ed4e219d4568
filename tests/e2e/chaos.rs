//! After each of these faults, the daemon's reports match the kernel again: no memory, no file descriptors, clock jumps, CPUs and
//! memory that go offline and online, full maps, a bus that does not answer, removed cgroups.

use std::time::Duration;

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::GuestTopology;

#[test]
fn reports_match_kernel_after_faults() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("3,3"), Some("640M,640M"), None).unwrap();
    // The kernel can offline a block of a movable zone unless boot memory lies in it: the initial RAM disk and the firmware's
    // tables lie in the last two blocks of a node, the kernel itself anywhere with KASLR. The zone has three blocks per node.
    let vm = bench.vm_with_systemd(machine).append("movablecore=768M nokaslr").limit(Duration::from_mins(15));
    let report = boot(&vm, include_str!("chaos.sh"));
    let refused = report.section("without descriptors");
    assert!(refused.contains("numaward"), "{refused}");
    let memory = report.section("memory that went");
    let blocks: u32 = memory.trim().parse().unwrap();
    assert!(blocks > 0, "no block of memory could be emptied");
    let slots = report.section("slots");
    let slot_figure = |name: &str| {
        let line = slots.lines().find(|line| line.starts_with(&format!("numaward_probe_map_{name}{{")));
        let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        value.unwrap_or_else(|| panic!("no {name} in {slots:?}"))
    };
    let (entries, capacity) = (slot_figure("entries"), slot_figure("capacity"));
    assert!(capacity > 0.0 && entries >= capacity, "{entries} of {capacity} slots were taken");
    for family in
        ["numaward_cpu_manager_pinning_errors_total", "numaward_memory_manager_pinning_errors_total"]
    {
        let errors = report.samples("errors", family);
        assert!(errors.values().all(|count| *count == 0.0), "{family}: {errors:?}");
    }
    let bus = report.section("without an answer of the bus");
    assert!(bus.contains("the bus accepts connections but does not answer"), "{bus}");
}
