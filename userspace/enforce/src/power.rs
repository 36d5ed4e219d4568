//! Power settings of exclusive CPUs: the frequency governor, the energy preference, the wake-up latency.
//!
//! # Problem
//! A CPU that sleeps deeply or runs slowly to save energy responds late. A workload with exclusive CPUs may prefer
//! speed on these.
//!
//! # Terms
//! - A *setting* is a file with one of the three and its value. Governor and preference belong to a *policy* of
//!   cpufreq, which may cover several CPUs.
//! - [`PowerRecord`] has the original and the written value of a setting.
//! - A setting is *given up* if another program wrote it since.
//!
//! # Algorithm
//! [`Power::read_settings`] reads the files, [`plan`] decides, and [`Power::write`] writes and reads back. The
//! preference is written before the governor and restored after it: some drivers refuse a preference while the governor
//! is `performance`, which implies one.
//!
//! A CPU that was offline may have other settings when it comes back, because the kernel initializes some of them
//! again. [`expect_reset`] records this while the CPU is offline, so that the original value counts as the kernel's and
//! is overwritten.
//!
//! # Invariants
//! - A value that is neither the written one nor the one before the write belongs to another program, and is not
//!   written any more, neither set nor restored. If the daemon did not see that a CPU was offline, even the original
//!   value counts as another program's.
//! - A policy that also covers a CPU which is not exclusive is not changed.
//! - A missing file is no error: drivers differ.
//!
//! Sources: Documentation/admin-guide/pm/cpufreq.rst, Documentation/admin-guide/pm/intel_pstate.rst,
//! Documentation/admin-guide/pm/amd-pstate.rst, Documentation/ABI/testing/sysfs-devices-power,
//! `drivers/base/power/sysfs.c`, `drivers/cpuidle/governor.c`.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use numaward_topology::{CpuId, CpuSet};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::records::{WrittenValue, overwrite};

const CPUS: &str = "sys/devices/system/cpu";

/// Kinds of settings, in the order of their writes.
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
    /// `pm_qos_resume_latency_us` of the CPU: the maximum time to wake up, in µs. `0` sets no maximum, `n/a` forbids
    /// any latency.
    #[display("wake-up latency")]
    WakeUpLatency,
}

impl PowerKnob {
    /// Returns the path of the file from the directory of a CPU.
    fn file(self) -> &'static str {
        match self {
            Self::EnergyPreference => "cpufreq/energy_performance_preference",
            Self::Governor => "cpufreq/scaling_governor",
            Self::WakeUpLatency => "power/pm_qos_resume_latency_us",
        }
    }

    /// Returns the path of the file with the accepted values, which is beside the setting's own file at `path`; `None`
    /// if there is none.
    pub fn choices(self, path: &str) -> Option<String> {
        let name = match self {
            Self::EnergyPreference => "energy_performance_available_preferences",
            Self::Governor => "scaling_available_governors",
            Self::WakeUpLatency => return None,
        };
        Some(format!("{}/{name}", path.rsplit_once('/')?.0))
    }

    /// Returns the path of a CPU's file from the host's root.
    pub fn path(self, cpu: CpuId) -> String {
        format!("{CPUS}/cpu{cpu}/{}", self.file())
    }
}

/// Values to set, in the kernel's notation.
pub type PowerTargets = BTreeMap<PowerKnob, String>;

/// A file with a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Path of the file from the host's root, without symbolic links.
    pub path: String,
    pub knob: PowerKnob,
    /// CPUs that the setting applies to.
    pub cpus: CpuSet,
    /// Present value.
    pub value: String,
}

/// A setting that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedSetting {
    pub knob: PowerKnob,
    /// CPUs that the setting would apply to.
    pub cpus: CpuSet,
    pub reason: String,
}

/// Original and written value of a setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PowerRecord {
    pub knob: PowerKnob,
    /// CPUs that the setting applies to.
    pub cpus: CpuSet,
    #[serde(flatten)]
    pub value: WrittenValue<String>,
}

/// Records by file.
pub type PowerRecords = BTreeMap<String, PowerRecord>;

/// A write of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PowerWrite {
    /// Path of the file from the host's root.
    pub path: String,
    pub knob: PowerKnob,
    /// CPUs that the setting applies to.
    pub cpus: CpuSet,
    pub value: String,
    /// True if this is the original value.
    pub is_back: bool,
}

/// Writes that make and restore settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PowerPlan {
    /// Writes, in this order.
    pub writes: Vec<PowerWrite>,
    /// Records to store before the writes.
    pub held: PowerRecords,
    /// Settings that another program wrote, with its values.
    pub foreign: Vec<Setting>,
}

/// Error of a write of a setting.
#[derive(Debug, thiserror::Error)]
pub enum PowerError {
    /// The kernel does not know the value.
    #[error("{path}: the kernel takes no {value:?} there{}", choices(.known.as_deref()))]
    Unknown {
        path: PathBuf,
        /// Value to write.
        value: String,
        /// Accepted values, if the kernel lists them.
        known: Option<String>,
    },
    /// The kernel refuses, or the daemon has no permission.
    #[error("{path}: {source}")]
    Refused { path: PathBuf, source: io::Error },
    /// The kernel took another value.
    #[error("{path}: it holds {found:?} after {wanted:?} was written")]
    Different { path: PathBuf, wanted: String, found: String },
}

fn choices(known: Option<&str>) -> String {
    known.map(|known| format!("; it takes {}", known.trim())).unwrap_or_default()
}

impl PowerError {
    /// Returns whether the write may succeed after the other settings are written.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if Errno::from_io_error(source) == Some(Errno::BUSY))
    }
}

/// Access to the power settings of a host.
#[derive(Clone, Debug)]
pub struct Power {
    root: PathBuf,
}

impl Power {
    /// Creates the access to the host with this root directory.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Reads the wanted settings of these CPUs. Returns those that exist, and those that cannot be made.
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

    /// Reads the setting of one of the exclusive CPUs. The error is the reason why the setting cannot be made.
    fn setting(&self, knob: PowerKnob, cpu: CpuId, exclusive: &CpuSet) -> Result<Setting, String> {
        let missing = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => format!("there is no {} for them", knob.file()),
            _ => format!("{} cannot be read: {error}", knob.file()),
        };
        // Each CPU of a policy has a link to the policy's directory.
        let path = self.root.join(knob.path(cpu));
        let (dir, name) = (path.parent().unwrap_or(&path), path.file_name().unwrap_or_default());
        let path = dir.canonicalize().map_err(missing)?.join(name);
        let value = fs::read_to_string(&path).map_err(missing)?.trim().to_owned();
        let mut cpus = CpuSet::single(cpu);
        if knob != PowerKnob::WakeUpLatency
            && let Ok(text) = fs::read_to_string(path.with_file_name("affected_cpus"))
        {
            // The numbers are separated by spaces.
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

    /// Reads a file; `None` if it does not exist any more.
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
        if let Err(source) = overwrite(&path, &write.value) {
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

/// Plans the writes after which all settings in `seen` have their wanted values, and all other settings their original values.
/// `held` has the records of earlier writes; `now` reads a file and returns `None` if it does not exist any more.
pub fn plan(
    seen: &[Setting],
    wanted: &PowerTargets,
    held: &PowerRecords,
    now: impl Fn(&str) -> io::Result<Option<String>>,
) -> PowerPlan {
    let mut plan = PowerPlan::default();
    for setting in seen {
        let Setting { path, knob, cpus, value } = setting;
        let Some(target) = wanted.get(knob) else { continue };
        let known = held.get(path).filter(|known| known.knob == *knob);
        if let Some(known) = known.filter(|known| known.value.is_given_up) {
            plan.held.insert(path.clone(), known.clone());
            continue;
        }
        if let Some(known) = known.filter(|known| !known.value.holds(value)) {
            let given_up = WrittenValue { is_given_up: true, ..known.value.clone() };
            plan.held.insert(path.clone(), PowerRecord { value: given_up, ..known.clone() });
            plan.foreign.push(setting.clone());
            continue;
        }
        let is_due = value != target;
        let record = PowerRecord {
            knob: *knob,
            cpus: cpus.clone(),
            value: WrittenValue {
                found: known.map_or(value, |known| &known.value.found).clone(),
                written: target.clone(),
                before: is_due.then(|| value.clone()),
                is_given_up: false,
            },
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
        let PowerRecord { knob, cpus, value: WrittenValue { found, is_given_up, .. } } = known;
        match now(path) {
            Ok(Some(value)) if !is_given_up && value != *found => {
                let (path, cpus) = (path.clone(), cpus.clone());
                if known.value.holds(&value) {
                    back.push((
                        PowerWrite { path, knob: *knob, cpus, value: found.clone(), is_back: true },
                        known,
                    ));
                } else {
                    plan.foreign.push(Setting { path, knob: *knob, cpus, value });
                }
            }
            Ok(_) => {}
            // The file may become readable again.
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

/// Records that the settings of CPUs which are all offline may have their original values when the CPUs come back.
pub fn expect_reset(held: &mut PowerRecords, online: &CpuSet) {
    for of in held.values_mut().filter(|of| (&of.cpus & online).is_empty()) {
        of.value.before.get_or_insert_with(|| of.value.found.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host made of files with four CPUs, of which 2 and 3 share one policy of cpufreq.
    struct FakeHost {
        dir: tempfile::TempDir,
        held: PowerRecords,
    }

    impl FakeHost {
        fn new() -> Self {
            let host = Self { dir: tempfile::tempdir().unwrap(), held: PowerRecords::new() };
            for (policy, cpus) in [(0, "0"), (1, "1"), (2, "2 3")] {
                let at = |file: &str| format!("cpufreq/policy{policy}/{file}");
                host.write_file(&at("affected_cpus"), cpus);
                host.write_file(&at("scaling_governor"), "schedutil");
                host.write_file(&at("scaling_available_governors"), "performance schedutil ");
                host.write_file(&at("energy_performance_preference"), "balance_performance");
            }
            for (cpu, policy) in [(0, 0), (1, 1), (2, 2), (3, 2)] {
                host.write_file(&format!("cpu{cpu}/power/pm_qos_resume_latency_us"), "0");
                let link = host.dir.path().join(format!("{CPUS}/cpu{cpu}/cpufreq"));
                std::os::unix::fs::symlink(format!("../cpufreq/policy{policy}"), link).unwrap();
            }
            host
        }

        fn write_file(&self, path: &str, text: &str) {
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

        /// Makes the planned writes. Returns them and the values that other programs wrote.
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
                    held.value.before = None;
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
    fn restores_governor_before_preference() {
        let mut host = FakeHost::new();
        host.write_file(LATENCY, "150");
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
    fn keeps_values_of_other_programs() {
        let mut host = FakeHost::new();
        let all = wanted(&ALL);
        host.follow(&all, "1");
        host.write_file(GOVERNOR, "powersave");
        host.write_file(LATENCY, "0");
        let given_up = ["wake-up latency of 1: 0", "governor of 1: powersave"];
        assert_eq!(
            host.follow(&all, "1"),
            (Vec::new(), given_up.map(str::to_owned).into()),
            "also as it was found"
        );
        assert_eq!(host.follow(&all, "1"), (Vec::new(), Vec::new()), "it is said once");
        // Even if it equals the written value by now.
        host.write_file(GOVERNOR, "performance");
        assert_eq!(host.follow(&all, "").0, ["energy preference of 1: balance_performance"]);
        assert_eq!((host.read(GOVERNOR), host.read(LATENCY)), ("performance".to_owned(), "0".to_owned()));
        assert!(host.held.is_empty());

        // Noticed at the end only.
        host.write_file(GOVERNOR, "schedutil");
        host.follow(&all, "1");
        host.write_file(GOVERNOR, "powersave");
        let (written, foreign) = host.follow(&all, "");
        assert_eq!(foreign, ["governor of 1: powersave"]);
        assert!(!written.iter().any(|written| written.contains("governor")), "{written:?}");
    }

    #[test]
    fn overwrites_value_reset_while_offline() {
        let governor = wanted(&ALL[1..2]);
        for (online, is_reset) in [("0-1", true), ("0-2", false)] {
            let mut host = FakeHost::new();
            host.follow(&governor, "2-3");
            let at = "cpufreq/policy2/scaling_governor";
            expect_reset(&mut host.held, &online.parse().unwrap());
            host.write_file(at, "schedutil");
            let (written, foreign) = host.follow(&governor, "2-3");
            assert_eq!((written.len(), foreign.len()), if is_reset { (1, 0) } else { (0, 1) }, "{online}");
        }
        // A value of another program stays; one that equals the wanted value is not taken for another program's.
        let mut host = FakeHost::new();
        host.follow(&governor, "1");
        expect_reset(&mut host.held, &CpuSet::new());
        host.write_file(GOVERNOR, "powersave");
        assert_eq!(host.follow(&governor, "1").1, ["governor of 1: powersave"]);
        let mut host = FakeHost::new();
        host.follow(&governor, "1");
        host.held = host.plan(&wanted(&[(PowerKnob::Governor, "powersave")]), "1").0.held;
        expect_reset(&mut host.held, &CpuSet::new());
        assert_eq!(host.follow(&governor, "1"), (Vec::new(), Vec::new()));
    }

    #[test]
    fn survives_crash_around_write() {
        for is_written in [false, true] {
            let mut host = FakeHost::new();
            let all = wanted(&ALL);
            // The plan is stored, but nothing is written.
            let (plan, _) = host.plan(&all, "1");
            host.held = plan.held;
            if is_written {
                plan.writes.iter().for_each(|write| host.power().write(write).unwrap());
            }
            let (written, foreign) = host.follow(&all, "1");
            assert_eq!((written.len(), foreign.len()), (if is_written { 0 } else { 3 }, 0));
            assert!(host.held.values().all(|held| held.value.before.is_none()), "{:?}", host.held);
            host.follow(&all, "");
            assert_eq!(host.read(GOVERNOR), "schedutil");
        }
    }

    #[test]
    fn new_configuration_keeps_original() {
        let mut host = FakeHost::new();
        host.follow(&wanted(&[(PowerKnob::WakeUpLatency, "n/a"), (PowerKnob::Governor, "performance")]), "1");
        let (written, foreign) = host.follow(&wanted(&[(PowerKnob::WakeUpLatency, "30")]), "1");
        assert_eq!(written, ["governor of 1: schedutil", "wake-up latency of 1: 30"]);
        assert!(foreign.is_empty());
        host.follow(&PowerTargets::new(), "1");
        assert_eq!((host.read(LATENCY), host.held.is_empty()), ("0".to_owned(), true));
    }

    #[test]
    fn refuses_policy_with_shared_cpus() {
        let mut host = FakeHost::new();
        let governor = wanted(&ALL[1..2]);
        let (plan, refused) = host.plan(&governor, "1-2");
        assert_eq!(plan.writes.len(), 1);
        let reason = "it is also that of CPUs 3, which are not exclusive".to_owned();
        let cpus = CpuSet::single(CpuId(2));
        assert_eq!(refused, [RefusedSetting { knob: PowerKnob::Governor, cpus, reason }]);
        assert_eq!(host.follow(&governor, "2-3").0, ["governor of 2-3: performance"]);
        // One of the CPUs is not exclusive any more.
        assert_eq!(host.follow(&governor, "2").0, ["governor of 2-3: schedutil"]);
    }

    #[test]
    fn reports_missing_settings() {
        let mut host = FakeHost::new();
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
    fn refusal_lists_accepted_values() {
        let host = FakeHost::new();
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
        // A file that refuses all writes.
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
