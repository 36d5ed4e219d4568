//! Power settings of exclusive CPUs: `enforcement.cpuPower`.
//!
//! # Algorithm
//! The files are read when the exclusive or online CPUs change, and every few seconds while a setting is applied.
//! A file with another value is written, see [`numaward_enforce::power`].
//!
//! # Invariants
//! - The original value is stored before a file is written.
//! - A value that another program has written since is kept. A value that the kernel reset while a CPU was offline is written
//!   again.
//! - A failed write is reported once, and retried only when the exclusive or online CPUs change. Restores are always retried.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_enforce::{
    power::{Power, PowerPlan, PowerRecord, PowerRecords, PowerTargets, PowerWrite, expect_reset, plan},
    records::revert,
};
use numaward_guarantee::{error::AdmissionError, power::power_settings};
use numaward_model::EventReport;
use numaward_topology::CpuSet;

use crate::core::Core;

/// Interval for reading the settings.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// CPUs by description of a setting or problem.
type CpusByText = BTreeMap<String, CpuSet>;

/// Controller of power settings.
#[derive(Debug)]
pub(super) struct PowerSettings {
    power: Power,
    /// Exclusive CPUs.
    cpus: CpuSet,
    /// CPUs that were online at the last check.
    online: CpuSet,
    last_check: Option<Instant>,
    /// Failed writes by file: the value and the error.
    failed: BTreeMap<String, (String, String)>,
    /// Problems as reported last.
    problems: CpusByText,
}

/// Result of one round of writes.
#[derive(Debug, Default)]
struct WriteOutcome {
    set: CpusByText,
    restored: CpusByText,
    foreign: CpusByText,
    problems: CpusByText,
}

impl PowerSettings {
    pub(super) fn new(root: &Path) -> Self {
        Self {
            power: Power::new(root),
            cpus: CpuSet::new(),
            online: CpuSet::new(),
            last_check: None,
            failed: BTreeMap::new(),
            problems: CpusByText::new(),
        }
    }

    pub(super) fn tick(&mut self, core: &mut Core, now: Instant) {
        let wanted = core.config.enforcement.power_settings().map(power_settings).unwrap_or_default();
        // No process runs on hidden CPUs, so they may sleep.
        let ledger = &core.store.state.ledger;
        let exclusive = || ledger.allocations().filter_map(|(_, _, held)| held.cpus.as_ref());
        let cpus =
            if wanted.is_empty() { CpuSet::new() } else { exclusive().flat_map(CpuSet::iter).collect() };
        let is_idle = cpus.is_empty() && core.store.state.power.is_empty();
        if is_idle && cpus == self.cpus {
            return;
        }
        let online = core.policy.machine.cpu_ids();
        let is_other = cpus != self.cpus || online != self.online;
        let is_due = self.last_check.is_none_or(|last_check| now.duration_since(last_check) >= POLL_INTERVAL);
        if !is_other && !is_due {
            return;
        }
        if is_other {
            self.failed.clear();
        }
        (self.cpus, self.online, self.last_check) = (cpus, online, Some(now));
        if let Err(error) = self.reconcile(core, &wanted) {
            tracing::error!(%error, "power settings are not changed: their originals cannot be stored");
        }
    }

    fn reconcile(&mut self, core: &mut Core, wanted: &PowerTargets) -> Result<(), AdmissionError> {
        let mut before = core.store.state.power.clone();
        expect_reset(&mut before, &self.online);
        let (seen, refused) = self.power.read_settings(wanted, &self.cpus);
        let PowerPlan { mut writes, mut held, foreign } =
            plan(&seen, wanted, &before, |path| self.power.read(path));
        // Some files can be read only while their CPU is offline, and are records only now.
        expect_reset(&mut held, &self.online);
        let mut outcome = WriteOutcome::default();
        for of in &foreign {
            add_cpus(&mut outcome.foreign, format!("{} {}", of.knob, of.value), &of.cpus);
        }
        for of in &refused {
            add_cpus(&mut outcome.problems, format!("{}: {}", of.knob, of.reason), &of.cpus);
        }
        writes.retain(|write| {
            let failed =
                self.failed.get(&write.path).filter(|(value, _)| *value == write.value && !write.is_back);
            if let Some((_, reason)) = failed {
                add_cpus(&mut outcome.problems, format!("{}: {reason}", write.knob), &write.cpus);
                revert(&mut held, &before, &write.path);
            }
            failed.is_none()
        });
        core.save_part(|state| &mut state.power, held.clone())?;
        // A write that another setting blocked can succeed afterwards.
        let mut again = Vec::new();
        for write in writes {
            self.write(core, write, &before, &mut held, &mut outcome, Some(&mut again));
        }
        for write in again {
            self.write(core, write, &before, &mut held, &mut outcome, None);
        }
        let given_up = held.values().filter(|of| of.value.is_given_up).count();
        let is_refused = outcome.problems.values().map(CpuSet::len).sum();
        core.metrics.power_settings(held.len() - given_up, given_up, is_refused);
        core.save_part(|state| &mut state.power, held)?;
        self.report(core, outcome);
        Ok(())
    }

    /// Writes a setting. If another setting blocks it, it is added to `again`, if present.
    fn write(
        &mut self,
        core: &Core,
        write: PowerWrite,
        before: &PowerRecords,
        held: &mut PowerRecords,
        outcome: &mut WriteOutcome,
        again: Option<&mut Vec<PowerWrite>>,
    ) {
        let result = self.power.write(&write);
        if let (Err(error), Some(again)) = (&result, again)
            && error.is_busy()
        {
            again.push(write);
            return;
        }
        core.metrics.wrote_power(result.is_ok());
        let PowerWrite { path, knob, cpus, value, is_back } = write;
        match result {
            Ok(()) if is_back => {
                held.remove(&path);
                add_cpus(&mut outcome.restored, format!("{knob} {value}"), &cpus);
            }
            Ok(()) => {
                if let Some(of) = held.get_mut(&path) {
                    of.value.before = None;
                }
                add_cpus(&mut outcome.set, format!("{knob} {value}"), &cpus);
            }
            Err(error) => {
                let reason = error.to_string();
                add_cpus(&mut outcome.problems, format!("{knob}: {reason}"), &cpus);
                if !is_back {
                    // If the file has taken another value, that value has to be restored.
                    let now = self.power.read(&path).ok().flatten();
                    let is_changed = |of: &PowerRecord| {
                        now.as_ref().is_some_and(|now| of.value.before.as_ref() != Some(now))
                    };
                    match held.get_mut(&path).filter(|of| is_changed(of)) {
                        Some(of) => of.value.written = now.unwrap_or_default(),
                        None => revert(held, before, &path),
                    }
                    self.failed.insert(path, (value, reason));
                }
            }
        }
    }

    fn report(&mut self, core: &Core, outcome: WriteOutcome) {
        let WriteOutcome { set, restored, foreign, problems } = outcome;
        let cpus = &self.cpus;
        let report = |severity, what: String, texts: &CpusByText| {
            let list = |(text, cpus): (&String, &CpuSet)| format!("{text} (CPUs {cpus})");
            let list: Vec<String> = texts.iter().map(list).collect();
            let message = format!("{what}: {}.", list.join("; "));
            let all: CpuSet = texts.values().flat_map(CpuSet::iter).collect();
            core.report(
                None,
                EventReport::new(EventKind::CpuPower, message).severity(severity).detail("cpus", &all),
            );
        };
        if !set.is_empty() {
            report(Severity::Info, format!("Set on exclusive CPUs {cpus}"), &set);
        }
        if !restored.is_empty() {
            report(Severity::Info, "Restored the original settings".to_owned(), &restored);
        }
        if !foreign.is_empty() {
            report(
                Severity::Warning,
                "Another program wrote these settings, and they are kept".to_owned(),
                &foreign,
            );
        }
        if !problems.is_empty() && problems != self.problems {
            report(Severity::Warning, format!("Not as configured on exclusive CPUs {cpus}"), &problems);
        }
        self.problems = problems;
    }
}

fn add_cpus(texts: &mut CpusByText, what: String, cpus: &CpuSet) {
    texts.entry(what).or_default().extend(cpus.iter());
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use numaward_api as api;
    use numaward_config::Config;
    use numaward_guarantee::request::Request;
    use numaward_model::port::ObservedHost as _;

    use super::*;
    use crate::core::release;
    use crate::{
        reconciler::{AdmissionOutcome, ReconcilerLoop, tests::reconciler_loop},
        testing::{self as fixture, TestHost},
    };

    const CPU: &str = "sys/devices/system/cpu";

    /// Host with one cgroup and power settings of eight CPUs.
    struct PowerBench {
        dir: tempfile::TempDir,
        host: Arc<TestHost>,
        config: Config,
    }

    impl PowerBench {
        fn new(power: &str) -> Self {
            let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
            for cgroup in ["", "a"] {
                fixture::cgroup(&dir.path().join("cgroup").join(cgroup), &host.machine.lock().unwrap());
            }
            let mut config = Config {
                state_directory: dir.path().join("state"),
                host_root: dir.path().to_owned(),
                ..Config::default()
            };
            config.enforcement.cpu_power = serde_json::from_str(power).unwrap();
            let bench = Self { dir, host, config };
            for cpu in 0..8 {
                bench.write(&format!("cpu{cpu}/cpufreq/scaling_governor"), "schedutil");
                bench.write(&format!("cpu{cpu}/power/pm_qos_resume_latency_us"), "0");
            }
            bench
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.dir.path().join(CPU).join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn start(&self) -> ReconcilerLoop {
            reconciler_loop(&self.config, &self.dir.path().join("cgroup"), &self.host)
        }

        fn governors(&self) -> [String; 8] {
            self.read_each_cpu("cpufreq/scaling_governor")
        }

        fn latencies(&self) -> [String; 8] {
            self.read_each_cpu("power/pm_qos_resume_latency_us")
        }

        fn read_each_cpu(&self, file: &str) -> [String; 8] {
            std::array::from_fn(|cpu| {
                fixture::line(&self.dir.path().join(CPU).join(format!("cpu{cpu}/{file}")))
            })
        }

        /// Sets the offline CPUs. The next periodic check is not due yet.
        fn offline(&self, reconciler: &mut ReconcilerLoop, cpus: &str) {
            let mut machine = (*TestHost::small().machine()).clone();
            let offline: CpuSet = cpus.parse().unwrap();
            machine.cpus.retain(|cpu, _| !offline.contains(*cpu));
            machine.nodes.values_mut().for_each(|node| node.cpus = &node.cpus - &offline);
            *self.host.machine.lock().unwrap() = Arc::new(machine);
            let ReconcilerLoop { controllers, core, .. } = reconciler;
            let now = controllers.host.power.last_check.unwrap_or_else(Instant::now);
            crate::reconciler::upkeep::maintain(core, now);
            controllers.host.power.tick(core, now);
        }

        fn happened(&self) -> Vec<String> {
            let happened = std::mem::take(&mut *self.host.happened.lock().unwrap());
            let of = happened.into_iter().filter(|(_, report)| report.kind == EventKind::CpuPower);
            of.map(|(_, report)| report.message).collect()
        }
    }

    /// Admits a workload with CPUs 1-3.
    fn admit(reconciler: &mut ReconcilerLoop) {
        let request = Request::new(&api::AllocationRequest {
            cpus: Some(api::Cpus::whole(3)),
            ..api::AllocationRequest::new("a", api::Target::Cgroup("/a".to_owned()), "256Mi")
        });
        assert!(matches!(reconciler.admit(&request.unwrap(), false), Ok(AdmissionOutcome::Admitted(_))));
    }

    /// Runs the next periodic check.
    fn check_again(reconciler: &mut ReconcilerLoop) {
        let ReconcilerLoop { controllers, core, .. } = reconciler;
        let power = &mut controllers.host.power;
        let later = power.last_check.map_or_else(Instant::now, |last_check| last_check + POLL_INTERVAL);
        power.tick(core, later);
    }

    fn on_1_to_3(here: &str, elsewhere: &str) -> [String; 8] {
        std::array::from_fn(|cpu| if (1..=3).contains(&cpu) { here } else { elsewhere }.to_owned())
    }

    const BOTH: &str = r#"{"governor": "performance", "wakeUpLatency": 0}"#;

    #[test]
    fn settings_last_until_release() {
        let bench = PowerBench::new(BOTH);
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        assert!(bench.happened().is_empty(), "no CPU is exclusive");
        admit(&mut reconciler);
        check_again(&mut reconciler);
        assert_eq!(bench.governors(), on_1_to_3("performance", "schedutil"));
        assert_eq!(bench.latencies(), on_1_to_3("n/a", "0"));
        let set =
            "Set on exclusive CPUs 1-3: governor performance (CPUs 1-3); wake-up latency n/a (CPUs 1-3).";
        assert_eq!(bench.happened(), [set]);
        check_again(&mut reconciler);
        assert!(bench.happened().is_empty(), "reported once");
        // The daemon is restarted before the release.
        drop(reconciler);
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        assert_eq!(bench.latencies(), on_1_to_3("n/a", "0"));
        release::release(&mut reconciler.core, "a").unwrap();
        check_again(&mut reconciler);
        assert_eq!(
            (bench.governors(), bench.latencies()),
            (on_1_to_3("schedutil", "schedutil"), on_1_to_3("0", "0"))
        );
        let back =
            "Restored the original settings: governor schedutil (CPUs 1-3); wake-up latency 0 (CPUs 1-3).";
        assert_eq!(bench.happened(), [back]);
        assert!(reconciler.core.store.state.power.is_empty());
    }

    #[test]
    fn start_restores_unconfigured_settings() {
        let mut bench = PowerBench::new(BOTH);
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        check_again(&mut reconciler);
        drop(reconciler);
        bench.config.enforcement.cpu_power = serde_json::from_str(r#"{"wakeUpLatency": 20}"#).unwrap();
        drop(bench.start());
        assert_eq!(bench.governors(), on_1_to_3("schedutil", "schedutil"));
        assert_eq!(bench.latencies(), on_1_to_3("20", "0"));
        bench.config.enforcement.mode = api::EnforcementMode::Off;
        drop(bench.start());
        assert_eq!(bench.latencies(), on_1_to_3("0", "0"));
    }

    #[test]
    fn foreign_value_is_kept() {
        let bench = PowerBench::new(BOTH);
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        check_again(&mut reconciler);
        bench.happened();
        bench.write("cpu2/cpufreq/scaling_governor", "powersave");
        check_again(&mut reconciler);
        assert_eq!(
            bench.happened(),
            ["Another program wrote these settings, and they are kept: governor powersave (CPUs 2)."]
        );
        check_again(&mut reconciler);
        drop(reconciler);
        let mut reconciler = bench.start();
        check_again(&mut reconciler);
        assert!(bench.happened().is_empty(), "not reported again after a restart");
        release::release(&mut reconciler.core, "a").unwrap();
        check_again(&mut reconciler);
        let mut expected = on_1_to_3("schedutil", "schedutil");
        "powersave".clone_into(&mut expected[2]);
        assert_eq!(bench.governors(), expected);
    }

    #[test]
    fn failed_setting_is_reported_once() {
        let bench = PowerBench::new(BOTH);
        for cpu in 1..=3 {
            fs::remove_file(bench.dir.path().join(CPU).join(format!("cpu{cpu}/cpufreq/scaling_governor")))
                .unwrap();
        }
        // The file keeps its value after a write.
        let latency = bench.dir.path().join(CPU).join("cpu3/power/pm_qos_resume_latency_us");
        fs::remove_file(&latency).unwrap();
        std::os::unix::fs::symlink(bench.dir.path().join("null"), &latency).unwrap();
        fs::create_dir(bench.dir.path().join("null")).unwrap();
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        check_again(&mut reconciler);
        let happened = bench.happened();
        assert_eq!(happened.len(), 2, "{happened:?}");
        assert!(happened[0].ends_with("wake-up latency n/a (CPUs 1-2)."), "{happened:?}");
        let problem = "Not as configured on exclusive CPUs 1-3: governor: there is no cpufreq/scaling_governor for them \
            (CPUs 1-3); wake-up latency: power/pm_qos_resume_latency_us cannot be read: ";
        assert!(happened[1].starts_with(problem), "{happened:?}");
        check_again(&mut reconciler);
        assert!(bench.happened().is_empty());
        release::release(&mut reconciler.core, "a").unwrap();
        check_again(&mut reconciler);
        assert!(reconciler.core.store.state.power.is_empty());
    }

    #[test]
    fn ignored_value_is_written_once() {
        let bench = PowerBench::new(r#"{"governor": "performance"}"#);
        // The file accepts every write and has no value.
        let governor = bench.dir.path().join(CPU).join("cpu1/cpufreq/scaling_governor");
        fs::remove_file(&governor).unwrap();
        std::os::unix::fs::symlink("/dev/null", &governor).unwrap();
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        check_again(&mut reconciler);
        let happened = bench.happened();
        assert!(happened[0].ends_with("governor performance (CPUs 2-3)."), "{happened:?}");
        let problem = "it holds \"\" after \"performance\" was written (CPUs 1).";
        assert!(happened[1].ends_with(problem), "{happened:?}");
        assert_eq!(reconciler.core.store.state.power.len(), 2, "nothing has to be restored there");
        fs::remove_file(&governor).unwrap();
        fs::write(&governor, "schedutil\n").unwrap();
        check_again(&mut reconciler);
        assert_eq!(bench.governors()[1], "schedutil");
        assert!(bench.happened().is_empty(), "reported once");
        release::release(&mut reconciler.core, "a").unwrap();
        check_again(&mut reconciler);
        admit(&mut reconciler);
        check_again(&mut reconciler);
        assert_eq!(bench.governors()[1], "performance");
    }

    #[test]
    fn rewrites_after_cpu_was_offline() {
        for is_restarted in [false, true] {
            let bench = PowerBench::new(BOTH);
            let mut reconciler = bench.start();
            admit(&mut reconciler);
            check_again(&mut reconciler);
            bench.happened();
            // The file cannot be read while the CPU is offline. A directory in its place cannot be read either.
            let governor = bench.dir.path().join(CPU).join("cpu2/cpufreq/scaling_governor");
            fs::remove_file(&governor).unwrap();
            fs::create_dir(&governor).unwrap();
            bench.offline(&mut reconciler, "2");
            assert_eq!(bench.latencies(), on_1_to_3("n/a", "0"));
            if is_restarted {
                drop(reconciler);
                reconciler = bench.start();
            }
            bench.happened();
            fs::remove_dir(&governor).unwrap();
            bench.write("cpu2/cpufreq/scaling_governor", "schedutil");
            bench.write("cpu2/power/pm_qos_resume_latency_us", "0");
            bench.offline(&mut reconciler, "");
            let set =
                "Set on exclusive CPUs 1-3: governor performance (CPUs 2); wake-up latency n/a (CPUs 2).";
            assert_eq!(bench.happened(), [set]);
            assert_eq!(
                (bench.governors(), bench.latencies()),
                (on_1_to_3("performance", "schedutil"), on_1_to_3("n/a", "0"))
            );
            // The same value, but no CPU was offline: another program wrote it.
            bench.write("cpu2/cpufreq/scaling_governor", "schedutil");
            check_again(&mut reconciler);
            let foreign =
                "Another program wrote these settings, and they are kept: governor schedutil (CPUs 2).";
            assert_eq!(bench.happened(), [foreign]);
            release::release(&mut reconciler.core, "a").unwrap();
            check_again(&mut reconciler);
            assert_eq!(
                (bench.governors(), bench.latencies()),
                (on_1_to_3("schedutil", "schedutil"), on_1_to_3("0", "0"))
            );
            assert!(reconciler.core.store.state.power.is_empty());
        }
    }

    #[test]
    fn keeps_foreign_value_of_offline_cpu() {
        let bench = PowerBench::new(BOTH);
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        check_again(&mut reconciler);
        bench.happened();
        bench.offline(&mut reconciler, "2");
        bench.write("cpu2/cpufreq/scaling_governor", "powersave");
        bench.offline(&mut reconciler, "");
        assert_eq!(
            bench.happened(),
            ["Another program wrote these settings, and they are kept: governor powersave (CPUs 2)."]
        );
        check_again(&mut reconciler);
        assert_eq!(bench.governors()[2], "powersave");
    }

    #[test]
    fn cpu_hotplug_retries_failed_writes() {
        let bench = PowerBench::new(r#"{"governor": "performance"}"#);
        // The file accepts every write and has no value.
        let governor = bench.dir.path().join(CPU).join("cpu2/cpufreq/scaling_governor");
        fs::remove_file(&governor).unwrap();
        std::os::unix::fs::symlink("/dev/null", &governor).unwrap();
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        check_again(&mut reconciler);
        bench.offline(&mut reconciler, "2");
        fs::remove_file(&governor).unwrap();
        fs::write(&governor, "schedutil\n").unwrap();
        bench.offline(&mut reconciler, "");
        assert_eq!(bench.governors(), on_1_to_3("performance", "schedutil"));
    }

    #[test]
    fn is_inactive_by_default() {
        let bench = PowerBench::new("{}");
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        check_again(&mut reconciler);
        assert_eq!(
            (bench.latencies(), reconciler.controllers.host.power.last_check),
            (on_1_to_3("0", "0"), None)
        );
        assert!(bench.happened().is_empty());
        let ledger = bench.dir.path().join("state/ledger.json");
        assert!(!ledger.exists() || !fs::read_to_string(ledger).unwrap().contains("power"));
    }
}
