//! `enforcement.interrupts: move-away`: interrupts and kernel work leave exclusive CPUs, and are restored. Also placement near a
//! network card with a node that the firmware reports.

use std::{fs::File, time::Duration};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::{Cache, GuestTopology};

use crate::systemd::boot_unit;

const MIB: u64 = 1 << 20;
const LIBRARIES: [&str; 14] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libcap-ng.so.0",
    "libcap.so.2",
    "libgcrypt.so.20",
    "libglib-2.0.so.0",
    "libgpg-error.so.0",
    "liblz4.so.1",
    "liblzma.so.5",
    "libm.so.6",
    "libnuma.so.1",
    "libpcre2-8.so.0",
    "libsystemd.so.0",
    "libzstd.so.1",
];

/// Returns the value of a key in a section.
fn line<'a>(report: &'a ScriptReport, section: &str, key: &str) -> &'a str {
    let mut lines = report.section(section).lines();
    let found = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
    found.unwrap_or_else(|| panic!("no {key} in section {section}:\n{report}"))
}

#[test]
fn moves_and_restores_interrupts() {
    let Some(bench) = TestEnvironment::open() else { return };
    // CPUs 3-5 are on node 1, with the network card; the disk has a queue and an interrupt for each CPU.
    let machine = GuestTopology::parse(None, Some("3,3"), Some("512M,512M"), None).unwrap();
    let folder = Cache::locate().unwrap().root().join("tools/irqbalance");
    let disk = tempfile::NamedTempFile::new().unwrap();
    File::set_len(disk.as_file(), 8 * MIB).unwrap();
    let vm = bench.vm(machine).network_on(1).disk(disk.path()).limit(Duration::from_mins(10));
    let vm = LIBRARIES
        .iter()
        .chain(&["irqbalance"])
        .fold(vm, |vm, file| vm.file(folder.join(file), format!("/irqbalance/{file}")));
    let report = boot(&vm, include_str!("interrupts.sh"));
    eprintln!("{report}");

    for section in ["near eth0", "near the PCI address"] {
        let expected = "Cpus_allowed_list:\t3\nMems_allowed_list:\t1\ncode 0";
        assert_eq!(report.section(section), expected, "the node of the card:\n{report}");
    }

    let at = |section: &str, key: &str| line(&report, section, key).to_owned();
    let of = |section: &str| ["card", "new", "workqueues", "rps"].map(|key| at(section, key));
    let before = ["0-5", "3f", "3f", "18"];
    assert_eq!(of("before"), before);
    for section in ["held", "held by nobody", "held again"] {
        // CPUs 3 and 4 are exclusive; CPU 5 is the remaining CPU on the card's node.
        assert_eq!(of(section), ["5", "27", "27", "00"], "{section}:\n{report}");
        assert_eq!(at(section, "card's effective"), "5", "{section}:\n{report}");
    }
    let events: Vec<_> = report.section("events").lines().collect();
    let says = |what: &str| {
        let found = events.iter().rfind(|event| event.contains(what));
        *found.unwrap_or_else(|| panic!("no event says {what:?}:\n{report}"))
    };
    let moved = says("Moved off exclusive CPUs 3-4: ");
    assert!(moved.contains("-input.0)") && moved.contains("RPS of eth0 rx-0"), "{moved}");
    // The kernel manages the affinity of the disk's queues itself.
    let stay = says("These stay on exclusive CPUs 3-4: ");
    for cpu in ["to CPU 3", "to CPU 4"] {
        assert!(stay.contains(&at("disk", cpu)), "{cpu}: {stay}\n{report}");
    }
    assert_eq!(report.section("disk while held"), report.section("disk"));
    let figures = report.section("figures");
    assert!(figures.contains("numaward_interrupt_affinities{state=\"stays\"} 2"), "{figures}");

    assert_eq!(of("released"), before, "the daemon was killed twice in between");
    assert_eq!(of("administrator"), ["1", "3f", "3f", "18"], "what others write stays");
    assert_eq!(of("uninstalled"), before);

    assert!(report.section("banned").ends_with("00000018"), "{report}");
    assert_eq!(report.section("reached with irqbalance"), "", "these can be moved:\n{report}");
    let looked_at: u32 = report.section("looked at with irqbalance").parse().unwrap();
    assert!(looked_at >= 3, "{looked_at} interrupts:\n{report}");
    assert!(report.section("unbanned").ends_with("00000000"), "{report}");
}

#[test]
fn drop_in_of_page_allows_moves() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("3,3"), Some("1G,512M"), None).unwrap();
    let vm = bench.vm_with_systemd(machine).network_on(1).limit(Duration::from_mins(15));
    let report = boot_unit(vm, "interrupts", include_str!("interrupts_unit.sh"));
    eprintln!("{report}");

    let of = |section: &str| ["workqueues", "new", "rps"].map(|key| line(&report, section, key));
    assert_eq!(of("closed"), ["3f", "3f", "18"], "{report}");
    assert!(report.section("closed events").contains("Read-only file system"), "{report}");
    assert_eq!(of("open"), ["27", "27", "00"], "{report}");
    let events = report.section("open events");
    assert!(events.contains("Moved off exclusive CPUs 3-4: "), "{report}");
    assert!(!events.contains("Read-only file system"), "{report}");
    assert_eq!(report.section("outside of it").matches("ead-only file system").count(), 2, "{report}");
}
