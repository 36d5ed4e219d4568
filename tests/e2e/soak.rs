//! Workloads are created and removed on a real kernel with all probes, and the daemon's resources do not grow.

use std::{env, time::Duration};

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::GuestTopology;
use serde::Deserialize;

/// Name of the variable with the duration in minutes.
const MINUTES: &str = "NUMAWARD_SOAK_MINUTES";
const SAMPLES: u32 = 30;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SoakSample {
    commands: f64,
    others: f64,
    resident_kib: f64,
    threads: f64,
    descriptors: f64,
    cgroups: f64,
    series: f64,
    /// Sum over all maps of the probes.
    entries: f64,
    state_bytes: f64,
    /// Start and end, in seconds.
    ten_scrapes: [f64; 2],
}

impl SoakSample {
    fn scrapes(&self) -> f64 {
        self.ten_scrapes[1] - self.ten_scrapes[0]
    }
}

/// Returns the median of a figure of the samples.
fn median(samples: &[SoakSample], of: impl Fn(&SoakSample) -> f64) -> f64 {
    let mut all: Vec<_> = samples.iter().map(of).collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

#[test]
fn daemon_resources_do_not_grow() {
    let Some(bench) = TestEnvironment::open() else { return };
    let minutes = env::var(MINUTES).map_or(3_u32, |text| text.parse().unwrap());
    let machine = GuestTopology::parse(None, Some("2,2"), Some("640M,640M"), None).unwrap();
    let vm = bench.vm(machine).limit(Duration::from_mins(u64::from(minutes) + 10));
    let (seconds, script) = (minutes * 60, include_str!("soak.sh"));
    let report = boot(&vm, &format!("seconds={seconds}\npause={}\n{script}", seconds / SAMPLES));
    eprintln!("{report}");
    let parse = |text: &str| {
        serde_json::from_str::<SoakSample>(text).unwrap_or_else(|error| panic!("{error}: {text}"))
    };
    let samples: Vec<_> = report.section("samples").lines().map(parse).collect();
    let end = parse(report.section("in the end"));
    assert_eq!(report.section("failures"), "", "{report}");
    assert!(end.commands > f64::from(10 * minutes) && end.others > f64::from(5 * minutes), "{end:?}");
    // Skips the first samples: caches and pools have to fill first.
    let (early, late) =
        (&samples[samples.len() / 5..samples.len() * 2 / 5], &samples[samples.len() * 4 / 5..]);
    for (name, more, of) in [
        ("resident memory, in KiB", 1.05, (|sample| sample.resident_kib) as fn(&SoakSample) -> f64),
        ("threads", 1.0, |sample| sample.threads),
        ("cgroups", 1.5, |sample| sample.cgroups),
        ("series", 1.2, |sample| sample.series),
        ("entries of maps", 1.2, |sample| sample.entries),
        ("the ledger", 1.1, |sample| sample.state_bytes),
        // The duration is measured in an emulated machine on a host that may be busy.
        ("ten scrapes, in seconds", 2.0, SoakSample::scrapes),
    ] {
        let (early, late) = (median(early, of), median(late, of));
        eprintln!("{name}: {early} early, {late} late");
        assert!(late <= early * more, "{name}: {early} early, {late} late\n{report}");
    }
    // The number of descriptors depends on the connected clients. At the end none is connected, so the number must be the
    // smallest.
    let least = early.iter().map(|sample| sample.descriptors).fold(f64::INFINITY, f64::min);
    eprintln!("descriptors: {least} early at least, {} in the end", end.descriptors);
    assert!(end.descriptors <= least, "descriptors: {least} early, {} in the end\n{report}", end.descriptors);
    report.section("end");
}
