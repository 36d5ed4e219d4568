//! Power settings of exclusive CPUs: the frequency governor, the energy preference, the wake-up latency.
//!
//! Problem: a CPU that sleeps deeply or runs slowly to save energy answers late. A workload that has it alone may prefer
//! speed, and only there.
//!
//! Terms: a *setting* is a file with one of the three, and what it is to hold. Governor and preference are those of a
//! *policy* of cpufreq, which may be that of several CPUs. [`PowerRecord`] is what was found in one and what was written instead.
//! A setting is *given up* where somebody else wrote it since.
//!
//! Algorithm: [`Power::read_settings`] reads the files, [`plan`] decides, and [`Power::write`] writes and reads back. The preference
//! is written before the governor and given back after it: some drivers take no preference while the governor is
//! `performance`, which implies one.
//!
//! A CPU that was offline has other settings when it is back: the kernel makes some of them anew. [`expect_reset`] takes note
//! of that while the CPU is offline, so that what was found before is written over, and is nobody's.
//!
//! Invariants: what holds neither what was written nor what was found before the write is somebody else's, and is not
//! written any more: neither anew nor back. If a CPU was never seen offline, what was found first counts as somebody else's, too.
//! A policy that also serves a CPU which is not exclusive is left alone. A file that is missing is no error of this host:
//! drivers differ.
//!
//! Sources: Documentation/admin-guide/pm/cpufreq.rst, Documentation/admin-guide/pm/intel_pstate.rst,
//! Documentation/admin-guide/pm/amd-pstate.rst, Documentation/ABI/testing/sysfs-devices-power,
//! `drivers/base/power/sysfs.c`, `drivers/cpuidle/governor.c`.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use numaward_topology::{CpuId, CpuSet};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

const CPUS: &str = "sys/devices/system/cpu";

/// What can be set. In the order in which they are set.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, derive_more::Display,
)]
#[serde(rename_all = "camelCase")]
pub enum PowerKnob {
    /// `energy_performance_preference` of cpufreq.
    #[display("energy preference")]
    EnergyPreference,
    /// `scaling_governor` of cpufreq.
    #[display("governor")]
    Governor,
    /// `pm_qos_resume_latency_us` of the CPU: how long it may take to wake up, in µs. `0` is any time, and `n/a` no time at
    /// all.
    #[display("wake-up latency")]
    WakeUpLatency,
}

impl PowerKnob {
    /// Its file, from the directory of a CPU.
    fn file(self) -> &'static str {
        match self {
            Self::EnergyPreference => "cpufreq/energy_performance_preference",
            Self::Governor => "cpufreq/scaling_governor",
            Self::WakeUpLatency => "power/pm_qos_resume_latency_us",
        }
    }

    /// The file with the values that it takes, if there is one: beside its own, which is this.
    pub fn choices(self, path: &str) -> Option<String> {
        let name = match self {
            Self::EnergyPreference => "energy_performance_available_preferences",
            Self::Governor => "scaling_available_governors",
            Self::WakeUpLatency => return None,
        };
        Some(format!("{}/{name}", path.rsplit_once('/')?.0))
    }

    /// The file of a CPU, from the host's root.
    pub fn path(self, cpu: CpuId) -> String {
        format!("{CPUS}/cpu{cpu}/{}", self.file())
    }
}

/// What is to be set, as the kernel shows it.
pub type PowerTargets = BTreeMap<PowerKnob, String>;

/// A file that holds a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The file, from the host's root, without symbolic links.
    pub path: String,
    /// What it is.
    pub knob: PowerKnob,
    /// The CPUs that it is of.
    pub cpus: CpuSet,
    /// What it holds.
    pub value: String,
}

/// A setting that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedSetting {
    /// What it is.
    pub knob: PowerKnob,
    /// The CPUs that it is of.
    pub cpus: CpuSet,
    /// Why.
    pub reason: String,
}

/// What was found in a file, and what was written instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PowerRecord {
    /// What it is.
    pub knob: PowerKnob,
    /// The CPUs that it is of.
    pub cpus: CpuSet,
    /// What was found.
    pub found: String,
    /// What was written.
    pub written: String,
    /// What it may hold besides, without anybody having written it: what it held before the write, if the daemon died before
    /// that, or what was found, if its CPUs were offline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// Whether somebody else wrote it since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_given_up: bool,
}

/// What was written, by file.
pub type PowerRecords = BTreeMap<String, PowerRecord>;

/// What is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PowerWrite {
    /// The file, from the host's root.
    pub path: String,
    /// What it is.
    pub knob: PowerKnob,
    /// The CPUs that it is of.
    pub cpus: CpuSet,
    /// What it is to hold.
    pub value: String,
    /// Whether that is what was found.
    pub is_back: bool,
}

/// What is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PowerPlan {
    /// What is to be written, in this order.
    pub writes: Vec<PowerWrite>,
    /// What is to be known of it before.
    pub held: PowerRecords,
    /// What somebody else wrote: it holds this now.
    pub foreign: Vec<Setting>,
}

/// A setting was not written.
#[derive(Debug, thiserror::Error)]
pub enum PowerError {
    /// The kernel does not know the value.
    #[error("{path}: the kernel takes no {value:?} there{}", choices(.known.as_deref()))]
    Unknown {
        /// The file.
        path: PathBuf,
        /// What was to be written.
        value: String,
        /// What it takes, as far as it says so.
        known: Option<String>,
    },
    /// The kernel refuses, or the daemon may not.
    #[error("{path}: {source}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel took something else.
    #[error("{path}: it holds {found:?} after {wanted:?} was written")]
    Different {
        /// The file.
        path: PathBuf,
        /// What was written.
        wanted: String,
        /// What it holds.
        found: String,
    },
}

fn choices(known: Option<&str>) -> String {
    known.map(|known| format!("; it takes {}", known.trim())).unwrap_or_default()
}

impl PowerError {
    /// Whether it may go once the other settings are written.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if Errno::from_io_error(source) == Some(Errno::BUSY))
    }
}

/// The power settings of a host.
#[derive(Clone, Debug)]
pub struct Power {
    root: PathBuf,
}

impl Power {
    /// Those of the host with this root directory.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Reads what is wanted of these CPUs, and what of it is not possible.
    pub fn read_settings(&self, wanted: &PowerTargets, cpus: &CpuSet) -> (Vec<Setting>, Vec<RefusedSetting>) {
        let (mut found, mut refused) = (BTreeMap::new(), BTreeMap::<(PowerKnob, String), CpuSet>::new());
        for knob in wanted.keys() {
            for cpu in cpus.iter() {
                match self.setting(*knob, cpu, cpus) {
                    Ok(setting) => drop(found.insert(setting.path.clone(), setting)),
                    Err(reason) => refused.entry((*knob, reason)).or_default().extend([cpu]),
                }
            }
        }
        let refused = refused.into_iter().map(|((knob, reason), cpus)| RefusedSetting { knob, cpus, reason });
        (found.into_values().collect(), refused.collect())
    }

    /// The setting of one of the CPUs that are exclusive; why it is not possible.
    fn setting(&self, knob: PowerKnob, cpu: CpuId, exclusive: &CpuSet) -> Result<Setting, String> {
        let missing = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => format!("there is no {} for them", knob.file()),
            _ => format!("{} cannot be read: {error}", knob.file()),
        };
        // The directory of a policy has a link for each of its CPUs.
        let path = self.root.join(knob.path(cpu));
        let (dir, name) = (path.parent().unwrap_or(&path), path.file_name().unwrap_or_default());
        let path = dir.canonicalize().map_err(missing)?.join(name);
        let value = fs::read_to_string(&path).map_err(missing)?.trim().to_owned();
        let mut cpus = CpuSet::single(cpu);
        if knob != PowerKnob::WakeUpLatency
            && let Ok(text) = fs::read_to_string(path.with_file_name("affected_cpus"))
        {
            // With spaces in between.
            cpus.extend(text.split_whitespace().filter_map(|number| number.parse().ok()).map(CpuId));
        }
        let others = &cpus - exclusive;
        if !others.is_empty() {
            return Err(format!("it is also that of CPUs {others}, which are not exclusive"));
        }
        let root = self.root.canonicalize().map_err(missing)?;
        let path = path.strip_prefix(root).ok().and_then(Path::to_str).map(str::to_owned);
        let path = path.ok_or_else(|| format!("{} is not below the root of the host", knob.file()))?;
        Ok(Setting { path, knob, cpus, value })
    }

    /// What a file holds; none where there is none any more.
    pub fn read(&self, path: &str) -> io::Result<Option<String>> {
        match fs::read_to_string(self.root.join(path)) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes a setting, and reads it back.
    pub fn write(&self, write: &PowerWrite) -> Result<(), PowerError> {
        let path = self.root.join(&write.path);
        let file = OpenOptions::new().write(true).truncate(true).open(&path);
        if let Err(source) = file.and_then(|mut file| file.write_all(write.value.as_bytes())) {
            if Errno::from_io_error(&source) != Some(Errno::INVAL) {
                return Err(PowerError::Refused { path, source });
            }
            let known = write.knob.choices(&write.path);
            let known = known.and_then(|file| fs::read_to_string(self.root.join(file)).ok());
            return Err(PowerError::Unknown { path, value: write.value.clone(), known });
        }
        match fs::read_to_string(&path) {
            Ok(found) if found.trim() == write.value => Ok(()),
            Ok(found) => {
                let (wanted, found) = (write.value.clone(), found.trim().to_owned());
                Err(PowerError::Different { path, wanted, found })
            }
            Err(source) => Err(PowerError::Refused { path, source }),
        }
    }
}

/// Plans what is to be written so that all that was seen holds what is wanted, and all else what was found there. `held` is
/// what was written before, `now` what a file holds: none where there is none any more.
pub fn plan(
    seen: &[Setting],
    wanted: &PowerTargets,
    held: &PowerRecords,
    now: impl Fn(&str) -> io::Result<Option<String>>,
) -> PowerPlan {
    let mut plan = PowerPlan::default();
    for Setting { path, knob, cpus, value } in seen {
        let Some(target) = wanted.get(knob) else { continue };
        let known = held.get(path).filter(|known| known.knob == *knob);
        if let Some(known) = known.filter(|known| known.is_given_up) {
            plan.held.insert(path.clone(), known.clone());
            continue;
        }
        if let Some(known) = known.filter(|known| !known.is(value)) {
            plan.held.insert(path.clone(), PowerRecord { is_given_up: true, ..known.clone() });
            plan.foreign.push(Setting {
                path: path.clone(),
                knob: *knob,
                cpus: cpus.clone(),
                value: value.clone(),
            });
            continue;
        }
        let is_due = value != target;
        let record = PowerRecord {
            knob: *knob,
            cpus: cpus.clone(),
            found: known.map_or(value, |known| &known.found).clone(),
            written: target.clone(),
            before: is_due.then(|| value.clone()),
            is_given_up: false,
        };
        plan.held.insert(path.clone(), record);
        if is_due {
            let (path, cpus, value) = (path.clone(), cpus.clone(), target.clone());
            plan.writes.push(PowerWrite { path, knob: *knob, cpus, value, is_back: false });
        }
    }
    plan.writes.sort_by(|a, b| (a.knob, &a.path).cmp(&(b.knob, &b.path)));
    let mut back = Vec::new();
    for (path, known) in held {
        if plan.held.contains_key(path) {
            continue;
        }
        let PowerRecord { knob, cpus, found, is_given_up, .. } = known;
        match now(path) {
            Ok(Some(value)) if !is_given_up && value != *found => {
                let (path, cpus) = (path.clone(), cpus.clone());
                if known.is(&value) {
                    back.push((
                        PowerWrite { path, knob: *knob, cpus, value: found.clone(), is_back: true },
                        known,
                    ));
                } else {
                    plan.foreign.push(Setting { path, knob: *knob, cpus, value });
                }
            }
            Ok(_) => {}
            // It may be readable again.
            Err(_) => drop(plan.held.insert(path.clone(), known.clone())),
        }
    }
    for (write, known) in &back {
        plan.held.insert(write.path.clone(), (*known).clone());
    }
    // The governor before the preference.
    back.sort_by(|(a, _), (b, _)| {
        let of = |write: &PowerWrite| (write.knob != PowerKnob::Governor, write.knob);
        (of(a), &a.path).cmp(&(of(b), &b.path))
    });
    plan.writes.splice(0..0, back.into_iter().map(|(write, _)| write));
    plan
}

/// Takes note of settings whose CPUs are all offline: when they are back, they may hold what was found.
pub fn expect_reset(held: &mut PowerRecords, online: &CpuSet) {
    for of in held.values_mut().filter(|of| (&of.cpus & online).is_empty()) {
        of.before.get_or_insert_with(|| of.found.clone());
    }
}

impl PowerRecord {
    /// Whether this is what we left there.
    fn is(&self, value: &str) -> bool {
        self.written == value || self.before.as_deref() == Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host of files with four CPUs, of which 2 and 3 have one policy of cpufreq.
    struct Host {
        dir: tempfile::TempDir,
        held: PowerRecords,
    }

    impl Host {
        fn new() -> Self {
            let host = Self { dir: tempfile::tempdir().unwrap(), held: PowerRecords::new() };
            for (policy, cpus) in [(0, "0"), (1, "1"), (2, "2 3")] {
                let at = |file: &str| format!("cpufreq/policy{policy}/{file}");
                host.put(&at("affected_cpus"), cpus);
                host.put(&at("scaling_governor"), "schedutil");
                host.put(&at("scaling_available_governors"), "performance schedutil ");
                host.put(&at("energy_performance_preference"), "balance_performance");
            }
            for (cpu, policy) in [(0, 0), (1, 1), (2, 2), (3, 2)] {
                host.put(&format!("cpu{cpu}/power/pm_qos_resume_latency_us"), "0");
                let link = host.dir.path().join(format!("{CPUS}/cpu{cpu}/cpufreq"));
                std::os::unix::fs::symlink(format!("../cpufreq/policy{policy}"), link).unwrap();
            }
            host
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.dir.path().join(CPUS).join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn read(&self, path: &str) -> String {
            fs::read_to_string(self.dir.path().join(CPUS).join(path)).unwrap().trim().to_owned()
        }

        fn power(&self) -> Power {
            Power::new(self.dir.path())
        }

        fn plan(&self, wanted: &PowerTargets, cpus: &str) -> (PowerPlan, Vec<RefusedSetting>) {
            let (seen, refused) = self.power().read_settings(wanted, &cpus.parse().unwrap());
            (plan(&seen, wanted, &self.held, |path| self.power().read(path)), refused)
        }

        /// Does what is planned; what was written, and what others wrote.
        fn follow(&mut self, wanted: &PowerTargets, cpus: &str) -> (Vec<String>, Vec<String>) {
            let (plan, _) = self.plan(wanted, cpus);
            self.held = plan.held;
            let mut written = Vec::new();
            for write in plan.writes {
                self.power().write(&write).unwrap();
                written.push(format!("{} of {}: {}", write.knob, write.cpus, write.value));
                if write.is_back {
                    self.held.remove(&write.path);
                } else if let Some(held) = self.held.get_mut(&write.path) {
                    held.before = None;
                }
            }
            let foreign = |of: Setting| format!("{} of {}: {}", of.knob, of.cpus, of.value);
            (written, plan.foreign.into_iter().map(foreign).collect())
        }
    }

    fn wanted(of: &[(PowerKnob, &str)]) -> PowerTargets {
        of.iter().map(|(knob, value)| (*knob, (*value).to_owned())).collect()
    }

    const ALL: [(PowerKnob, &str); 3] = [
        (PowerKnob::EnergyPreference, "performance"),
        (PowerKnob::Governor, "performance"),
        (PowerKnob::WakeUpLatency, "n/a"),
    ];
    const PREFERENCE: &str = "cpufreq/policy1/energy_performance_preference";
    const GOVERNOR: &str = "cpufreq/policy1/scaling_governor";
    const LATENCY: &str = "cpu1/power/pm_qos_resume_latency_us";

    #[test]
    fn what_was_found_comes_back_the_governor_before_the_preference() {
        let mut host = Host::new();
        host.put(LATENCY, "150");
        let all = wanted(&ALL);
        let (written, foreign) = host.follow(&all, "1");
        let expected = [
            "energy preference of 1: performance",
            "governor of 1: performance",
            "wake-up latency of 1: n/a",
        ];
        assert_eq!((written, foreign), (expected.map(str::to_owned).into(), Vec::new()));
        assert_eq!(
            [PREFERENCE, GOVERNOR, LATENCY].map(|of| host.read(of)),
            ["performance", "performance", "n/a"]
        );
        assert_eq!(host.follow(&all, "1").0, [""; 0], "nothing is left to do");
        let text = serde_json::to_string(&host.held).unwrap();
        assert_eq!(serde_json::from_str::<PowerRecords>(&text).unwrap(), host.held);
        let expected = [
            "governor of 1: schedutil",
            "energy preference of 1: balance_performance",
            "wake-up latency of 1: 150",
        ];
        assert_eq!(host.follow(&all, "").0, expected);
        assert!(host.held.is_empty());
        assert_eq!(
            [PREFERENCE, GOVERNOR, LATENCY].map(|of| host.read(of)),
            ["balance_performance", "schedutil", "150"]
        );
    }

    #[test]
    fn what_somebody_else_wrote_stays() {
        let mut host = Host::new();
        let all = wanted(&ALL);
        host.follow(&all, "1");
        host.put(GOVERNOR, "powersave");
        host.put(LATENCY, "0");
        let given_up = ["wake-up latency of 1: 0", "governor of 1: powersave"];
        assert_eq!(
            host.follow(&all, "1"),
            (Vec::new(), given_up.map(str::to_owned).into()),
            "also as it was found"
        );
        assert_eq!(host.follow(&all, "1"), (Vec::new(), Vec::new()), "it is said once");
        // Even where it holds by now what was written.
        host.put(GOVERNOR, "performance");
        assert_eq!(host.follow(&all, "").0, ["energy preference of 1: balance_performance"]);
        assert_eq!((host.read(GOVERNOR), host.read(LATENCY)), ("performance".to_owned(), "0".to_owned()));
        assert!(host.held.is_empty());

        // Noticed at the end only.
        host.put(GOVERNOR, "schedutil");
        host.follow(&all, "1");
        host.put(GOVERNOR, "powersave");
        let (written, foreign) = host.follow(&all, "");
        assert_eq!(foreign, ["governor of 1: powersave"]);
        assert!(!written.iter().any(|written| written.contains("governor")), "{written:?}");
    }

    #[test]
    fn what_was_found_is_written_over_once_all_cpus_of_a_setting_were_offline() {
        let governor = wanted(&ALL[1..2]);
        for (online, is_reset) in [("0-1", true), ("0-2", false)] {
            let mut host = Host::new();
            host.follow(&governor, "2-3");
            let at = "cpufreq/policy2/scaling_governor";
            expect_reset(&mut host.held, &online.parse().unwrap());
            host.put(at, "schedutil");
            let (written, foreign) = host.follow(&governor, "2-3");
            assert_eq!((written.len(), foreign.len()), if is_reset { (1, 0) } else { (0, 1) }, "{online}");
        }
        // What another one writes stays; what was to be written already is no other's.
        let mut host = Host::new();
        host.follow(&governor, "1");
        expect_reset(&mut host.held, &CpuSet::new());
        host.put(GOVERNOR, "powersave");
        assert_eq!(host.follow(&governor, "1").1, ["governor of 1: powersave"]);
        let mut host = Host::new();
        host.follow(&governor, "1");
        host.held = host.plan(&wanted(&[(PowerKnob::Governor, "powersave")]), "1").0.held;
        expect_reset(&mut host.held, &CpuSet::new());
        assert_eq!(host.follow(&governor, "1"), (Vec::new(), Vec::new()));
    }

    #[test]
    fn a_crash_before_or_after_the_write_changes_nothing() {
        for is_written in [false, true] {
            let mut host = Host::new();
            let all = wanted(&ALL);
            // What was to be done is stored, and no more.
            let (plan, _) = host.plan(&all, "1");
            host.held = plan.held;
            if is_written {
                plan.writes.iter().for_each(|write| host.power().write(write).unwrap());
            }
            let (written, foreign) = host.follow(&all, "1");
            assert_eq!((written.len(), foreign.len()), (if is_written { 0 } else { 3 }, 0));
            assert!(host.held.values().all(|held| held.before.is_none()), "{:?}", host.held);
            host.follow(&all, "");
            assert_eq!(host.read(GOVERNOR), "schedutil");
        }
    }

    #[test]
    fn another_configuration_is_followed_and_the_first_value_comes_back() {
        let mut host = Host::new();
        host.follow(&wanted(&[(PowerKnob::WakeUpLatency, "n/a"), (PowerKnob::Governor, "performance")]), "1");
        let (written, foreign) = host.follow(&wanted(&[(PowerKnob::WakeUpLatency, "30")]), "1");
        assert_eq!(written, ["governor of 1: schedutil", "wake-up latency of 1: 30"]);
        assert!(foreign.is_empty());
        host.follow(&PowerTargets::new(), "1");
        assert_eq!((host.read(LATENCY), host.held.is_empty()), ("0".to_owned(), true));
    }

    #[test]
    fn a_policy_of_other_cpus_too_is_left_alone() {
        let mut host = Host::new();
        let governor = wanted(&ALL[1..2]);
        let (plan, refused) = host.plan(&governor, "1-2");
        assert_eq!(plan.writes.len(), 1);
        let reason = "it is also that of CPUs 3, which are not exclusive".to_owned();
        let cpus = CpuSet::single(CpuId(2));
        assert_eq!(refused, [RefusedSetting { knob: PowerKnob::Governor, cpus, reason }]);
        assert_eq!(host.follow(&governor, "2-3").0, ["governor of 2-3: performance"]);
        // One of them is free again.
        assert_eq!(host.follow(&governor, "2").0, ["governor of 2-3: schedutil"]);
    }

    #[test]
    fn what_is_not_there_is_said_and_what_went_is_forgotten() {
        let mut host = Host::new();
        let all = wanted(&ALL);
        host.follow(&all, "1");
        fs::remove_dir_all(host.dir.path().join(CPUS).join("cpufreq/policy1")).unwrap();
        let (plan, refused) = host.plan(&all, "1");
        let reasons: Vec<&str> = refused.iter().map(|of| of.reason.as_str()).collect();
        assert_eq!(
            reasons,
            [
                "there is no cpufreq/energy_performance_preference for them",
                "there is no cpufreq/scaling_governor for them"
            ]
        );
        assert_eq!(plan.held.len(), 1, "{:?}", plan.held);
    }

    #[test]
    fn what_the_kernel_refuses_is_an_error_with_what_it_takes() {
        let host = Host::new();
        let path = format!("{CPUS}/{GOVERNOR}");
        let write = |value: &str| {
            let (path, value) = (path.clone(), value.to_owned());
            PowerWrite {
                path,
                knob: PowerKnob::Governor,
                cpus: CpuSet::single(CpuId(1)),
                value,
                is_back: false,
            }
        };
        let known = host.read("cpufreq/policy1/scaling_available_governors");
        let error =
            PowerError::Unknown { path: "/f".into(), value: "turbo".to_owned(), known: Some(known + " \n") };
        assert_eq!(
            error.to_string(),
            "/f: the kernel takes no \"turbo\" there; it takes performance schedutil"
        );
        // A file that keeps what it holds.
        let full = Path::new("/dev/full");
        if full.exists() {
            fs::remove_file(host.dir.path().join(&path)).unwrap();
            std::os::unix::fs::symlink(full, host.dir.path().join(&path)).unwrap();
            let error = host.power().write(&write("performance")).unwrap_err();
            assert!(matches!(&error, PowerError::Refused { .. }) && !error.is_busy(), "{error}");
        }
        let source = Errno::BUSY.into();
        assert!(PowerError::Refused { path: "/f".into(), source }.is_busy());
        fs::remove_file(host.dir.path().join(&path)).unwrap();
        std::os::unix::fs::symlink("/dev/null", host.dir.path().join(&path)).unwrap();
        let error = host.power().write(&write("performance")).unwrap_err();
        assert!(error.to_string().ends_with("it holds \"\" after \"performance\" was written"), "{error}");
    }
}
