//! Release of the guarantees of ended workloads.
//!
//! # Problem
//! The resources of a workload are free as soon as it has ended. Checking a thousand cgroups several times a second
//! would take too much CPU time.
//!
//! # Terms
//! - *in question*: a guarantee to be checked, because the kernel reported a change of its cgroup, or because a
//!   timeout is running: a unit without cgroup may be restarting, a command may not have started yet, or a failed
//!   release is retried.
//! - *stopped* unit: it has had no cgroup for longer than a restart takes, and systemd still has it loaded.
//!
//! # Algorithm
//! The kernel reports created and removed cgroups next to each cgroup with a guarantee, and the first and last
//! process of a command's cgroup. Each tick checks the guarantees in question and a part of all guarantees, because a
//! watch ends with its cgroup: all of them within a minute, or within a second if nothing can be watched.
//!
//! # Invariants
//! The empty cgroup of a command is released if a process has ever run in it. The kernel's CPU time of the cgroup
//! shows this also after a restart of the daemon. Otherwise the command is still expected to start.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::{Duration, Instant},
};

use numaward_api::EventKind;
use numaward_cgroup::{self as cgroup, CgroupPath, Hierarchy, Notice, WatchSubject, read};
use numaward_enforce::EnforceError;
use numaward_guarantee::{request::Target, state::Guarantee};
use numaward_model::{EventReport, Retry};

use super::{Controller, ControllerEvent, drift::Rotation, mode, notices::Notices, upkeep};
use crate::core::{Core, HeldChange, release, shared_pool};

/// Time within which all guarantees are checked.
const SWEEP_INTERVAL: Duration = Duration::from_mins(1);
/// The same if nothing can be watched.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which an `exec` without a process counts as abandoned by its client.
const ENTER_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum time without a cgroup during a restart of a unit.
const RESTART_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for which the guarantee of a stopped unit is kept.
const STOPPED_TIMEOUT: Duration = Duration::from_hours(24);
/// Interval for asking systemd whether a stopped unit is still loaded.
const ASK_INTERVAL: Duration = Duration::from_mins(1);
/// Delay before the first retry of a failed release.
const FIRST_RETRY: Duration = Duration::from_secs(5);
/// Maximum delay between retries.
const LONGEST_RETRY: Duration = Duration::from_mins(1);

/// State of the liveness checks. It is not stored.
#[derive(Debug)]
pub(super) struct Liveness {
    notices: Notices,
    held: BTreeMap<String, WatchedGuarantee>,
    names: BTreeMap<CgroupPath, String>,
    in_question: BTreeSet<String>,
    round: Rotation<String>,
    /// Releases that failed.
    retries: BTreeMap<String, Retry>,
}

#[derive(Debug)]
struct WatchedGuarantee {
    cgroup: CgroupPath,
    is_command: bool,
    since: Instant,
    absence: Option<Absence>,
}

/// Data of a unit without a cgroup.
#[derive(Debug)]
struct Absence {
    since: Instant,
    /// Time of the last query to systemd.
    last_query: Option<Instant>,
    /// True if systemd had the unit loaded.
    is_stopped: bool,
}

/// Result of checking a unit without a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AbsentUnit {
    /// The unit may be restarting, or systemd could not be asked.
    Pending,
    /// The unit is stopped from now on.
    Stopped,
    /// The unit was removed, or was stopped for too long. Has the reason.
    Gone(&'static str),
}

impl Absence {
    /// Checks the absence of a unit; `is_loaded` asks systemd.
    fn check(&mut self, now: Instant, is_loaded: impl FnOnce() -> Result<bool, EnforceError>) -> AbsentUnit {
        let absent = now.duration_since(self.since);
        if absent >= STOPPED_TIMEOUT {
            return AbsentUnit::Gone("its unit was stopped for a day");
        }
        let is_due = self.last_query.is_none_or(|last| now.duration_since(last) >= ASK_INTERVAL);
        if absent < RESTART_TIMEOUT || !is_due {
            return AbsentUnit::Pending;
        }
        self.last_query = Some(now);
        match is_loaded() {
            Ok(true) if self.is_stopped => AbsentUnit::Pending,
            Ok(true) => {
                self.is_stopped = true;
                AbsentUnit::Stopped
            }
            Ok(false) => AbsentUnit::Gone("its unit is gone"),
            Err(error) => {
                tracing::debug!(%error, "systemd cannot be asked whether the unit is stopped or removed");
                AbsentUnit::Pending
            }
        }
    }
}

/// Result of checking a guarantee in question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CheckResult {
    /// The workload runs.
    Alive,
    /// The check is repeated until a timeout.
    Pending,
    /// The unit has a new cgroup.
    Restarted,
    /// The workload has ended. Has the reason.
    Gone(&'static str),
}

impl WatchedGuarantee {
    fn watch(&self, notices: &mut Notices) {
        if let Some(parent) = self.cgroup.parent() {
            notices.watch(&parent, WatchSubject::Children);
        }
        if self.is_command {
            notices.watch(&self.cgroup, WatchSubject::Processes);
        }
    }
}

impl Liveness {
    pub(super) fn new(hierarchy: Hierarchy) -> Self {
        Self {
            notices: Notices::new(hierarchy),
            held: BTreeMap::new(),
            names: BTreeMap::new(),
            in_question: BTreeSet::new(),
            round: Rotation::new(SWEEP_INTERVAL),
            retries: BTreeMap::new(),
        }
    }

    /// Starts checking a guarantee.
    fn start_checking(&mut self, name: &str, guarantee: &Guarantee) {
        let held = WatchedGuarantee {
            cgroup: guarantee.cgroup.clone(),
            is_command: guarantee.target == Target::Exec,
            since: Instant::now(),
            absence: None,
        };
        held.watch(&mut self.notices);
        // The workload may have ended before its cgroup was watched.
        self.in_question.insert(name.to_owned());
        self.names.insert(held.cgroup.clone(), name.to_owned());
        if self.held.insert(name.to_owned(), held).is_none() {
            self.round.items.insert(name.to_owned());
        }
    }

    /// Returns true if the unit is stopped and its guarantee is kept.
    pub(super) fn is_stopped(&self, name: &str) -> bool {
        let absence = self.held.get(name).and_then(|held| held.absence.as_ref());
        absence.is_some_and(|absence| absence.is_stopped)
    }

    /// Stops checking a guarantee.
    fn stop_checking(&mut self, name: &str) {
        self.retries.remove(name);
        let Some(held) = self.held.remove(name) else { return };
        self.names.remove(&held.cgroup);
        self.in_question.remove(name);
        self.round.items.remove(name);
        if held.is_command {
            self.notices.unwatch(&held.cgroup, WatchSubject::Processes);
        }
        let Some(parent) = held.cgroup.parent() else { return };
        let mut below =
            self.names.range(&parent..).map(|(path, _)| path).take_while(|it| parent.contains(it));
        if !below.any(|path| parent.is_parent_of(path)) {
            self.notices.unwatch(&parent, WatchSubject::Children);
        }
    }

    /// Puts the guarantee of a cgroup in question. Returns true if there is one.
    fn question(&mut self, path: &CgroupPath) -> bool {
        let name = self.names.get(path);
        self.in_question.extend(name.cloned());
        name.is_some()
    }

    /// Puts the next part of all guarantees in question.
    fn question_next_batch(&mut self) {
        self.round.within = if self.notices.is_working() { SWEEP_INTERVAL } else { POLL_INTERVAL };
        for name in self.round.next_batch() {
            if let Some(held) = self.held.get(&name) {
                held.watch(&mut self.notices);
            }
            self.in_question.insert(name);
        }
    }
}

impl Controller for Liveness {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        match *event {
            ControllerEvent::Tick(now) => self.release_gone(core, now, true),
            ControllerEvent::Cgroups(events) => self.question_removed(core, events),
            ControllerEvent::SettingsChanged(change) => self.follow_held(core, change),
            ControllerEvent::WorkloadsGone(now) => self.release_gone(core, now, false),
            _ => {}
        }
    }
}

impl Liveness {
    /// Puts the guarantees of removed cgroups in question.
    pub(super) fn question_removed(&mut self, core: &mut Core, events: &[cgroup::CgroupEvent]) {
        for event in events {
            if let cgroup::CgroupEvent::Removed(cgroup) = event {
                core.effects.gone |= self.question(&cgroup.path);
            }
        }
    }

    /// Starts or stops checking a guarantee that was given or released.
    pub(super) fn follow_held(&mut self, core: &Core, change: &HeldChange) {
        match change {
            HeldChange::Given(name) => {
                if let Some(guarantee) = core.store.state.guarantees.get(name) {
                    self.start_checking(name, guarantee);
                }
            }
            HeldChange::Released { name, .. } => self.stop_checking(name),
            HeldChange::Rewritten(_) => {}
        }
    }

    /// Releases guarantees of ended workloads and continues releases that have begun. With `tick`, a part of all guarantees is
    /// checked too.
    pub(super) fn release_gone(&mut self, core: &mut Core, now: Instant, tick: bool) {
        for notice in self.notices.read() {
            match notice {
                Notice::ChildChanged(path) | Notice::Changed(path, _) => drop(self.question(&path)),
                Notice::Overflow => self.in_question.extend(self.held.keys().cloned()),
            }
        }
        if tick {
            self.question_next_batch();
        }
        let begun = core.store.state.releasing.iter();
        let mut ended: Vec<_> = begun.map(|name| (name.clone(), "its release was begun")).collect();
        let mut restarted = false;
        for name in std::mem::take(&mut self.in_question) {
            let found = self.check(core, &name, now);
            if core.store.state.releasing.contains(&name) {
                if let CheckResult::Gone(_) = found {
                    // The release may succeed now.
                    self.retries.remove(&name);
                }
                continue;
            }
            match found {
                CheckResult::Alive => {}
                CheckResult::Pending => drop(self.in_question.insert(name)),
                CheckResult::Restarted => restarted = true,
                CheckResult::Gone(reason) => ended.push((name, reason)),
            }
        }
        if restarted {
            upkeep::enforce_guarantees(core);
            mode::log_refused(&mode::enforce_again(core));
            shared_pool::note_restarted(core);
        }
        for (name, reason) in ended {
            let unit =
                core.store.state.guarantees.get(&name).filter(|held| matches!(held.target, Target::Unit(_)));
            if let Some(cgroup) = unit.map(|held| held.cgroup.clone())
                && !self.retries.contains_key(&name)
            {
                report(core, &cgroup, format!("The guarantee of {name} is released: {reason}."));
            }
            let retry = self.retries.entry(name.clone());
            let retry = retry.or_insert_with(|| Retry::new(now, FIRST_RETRY, LONGEST_RETRY));
            if retry.is_due(now) {
                retry.postpone(now);
                tracing::info!(name, reason, "the guarantee is released");
                let Err(error) = release::release(core, &name) else {
                    self.retries.remove(&name);
                    continue;
                };
                tracing::error!(name, %error, "the guarantee cannot be released; the release is retried");
            }
            if !core.store.state.releasing.contains(&name) {
                self.in_question.insert(name);
            }
        }
    }

    fn check(&mut self, core: &mut Core, name: &str, now: Instant) -> CheckResult {
        let (Some(guarantee), Some(held)) =
            (core.store.state.guarantees.get(name).cloned(), self.held.get_mut(name))
        else {
            return CheckResult::Alive;
        };
        // If the cgroup cannot be read, the workload is not known to have ended.
        let Ok(id) = core.hierarchy.id_of(&guarantee.cgroup) else { return CheckResult::Pending };
        match &guarantee.target {
            Target::Unit(unit) if id.is_none() => {
                let absence =
                    held.absence.get_or_insert(Absence { since: now, last_query: None, is_stopped: false });
                let found = absence.check(now, || core.is_unit_loaded(unit));
                return process_absent_unit(core, (name, unit), &guarantee.cgroup, found);
            }
            Target::Unit(_) => {}
            _ if id != Some(guarantee.id) => return CheckResult::Gone("its cgroup is gone"),
            _ => {}
        }
        if held.absence.take().is_some_and(|absence| absence.is_stopped) {
            report(core, &guarantee.cgroup, format!("{name} runs again and has its guarantee."));
        }
        if let Some(id) = id.filter(|id| *id != guarantee.id) {
            // A restarted unit has a new cgroup. systemd has applied the settings, because it stores the properties.
            if let Some(guarantee) = core.store.state.guarantees.get_mut(name) {
                guarantee.id = id;
            }
            return CheckResult::Restarted;
        }
        if held.is_command {
            check_command(&core.hierarchy.dir(&held.cgroup), held.since, now)
        } else {
            CheckResult::Alive
        }
    }
}

/// Reports the result of checking a unit without a cgroup.
fn process_absent_unit(
    core: &mut Core,
    (name, unit): (&str, &str),
    cgroup: &CgroupPath,
    found: AbsentUnit,
) -> CheckResult {
    match found {
        AbsentUnit::Pending => CheckResult::Pending,
        // The guarantee was released while systemd was asked.
        _ if !core.store.state.guarantees.contains_key(name) => CheckResult::Alive,
        AbsentUnit::Stopped => {
            let message = format!(
                "{unit} does not run. Its guarantee is kept for a day, or until `numaward release {name}`."
            );
            report(core, cgroup, message);
            CheckResult::Pending
        }
        AbsentUnit::Gone(reason) => CheckResult::Gone(reason),
    }
}

fn report(core: &mut Core, cgroup: &CgroupPath, message: String) {
    core.report(Some(cgroup), EventReport::new(EventKind::UnitStopped, message));
    core.effects.view = true;
}

/// Checks a command by its cgroup.
fn check_command(dir: &Path, since: Instant, now: Instant) -> CheckResult {
    // The order matters: a process that used CPU time before the cgroup was found empty has ended.
    let has_run = read::cpu_time(dir).is_ok_and(|used| !used.is_zero());
    match read::populated(dir) {
        Ok(true) => CheckResult::Alive,
        Ok(false) if has_run => CheckResult::Gone("its command ended"),
        Ok(false) if now.duration_since(since) >= ENTER_TIMEOUT => {
            CheckResult::Gone("no command entered its cgroup")
        }
        _ => CheckResult::Pending,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use numaward_api as api;
    use numaward_config::Config;
    use numaward_guarantee::request::Request;
    use numaward_model::Settings;

    use super::*;
    use crate::{
        reconciler::{ReconcilerLoop, controllers::Controllers, tests::reconciler_loop},
        testing::{self as fixture, TestHost},
    };

    #[test]
    fn only_reported_are_in_question() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy::at(dir.path());
        let mut liveness = Liveness::new(hierarchy.clone());
        for (name, target) in
            [("a/x", Target::Exec), ("a/y", Target::Exec), ("b/z", Target::Unit("z".to_owned()))]
        {
            let cgroup: CgroupPath = format!("/{name}").parse().unwrap();
            fs::create_dir_all(hierarchy.dir(&cgroup)).unwrap();
            fs::write(
                hierarchy.dir(&cgroup).join("cgroup.events"),
                "populated 1
",
            )
            .unwrap();
            let guarantee = Guarantee {
                target,
                id: hierarchy.id_of(&cgroup).unwrap().unwrap(),
                cgroup,
                settings: Settings::default(),
                declared: None,
                explanation: api::Explanation::default(),
            };
            liveness.start_checking(name, &guarantee);
        }
        let reported = |liveness: &mut Liveness| {
            for notice in liveness.notices.read() {
                match notice {
                    Notice::ChildChanged(path) | Notice::Changed(path, _) => drop(liveness.question(&path)),
                    Notice::Overflow => panic!("an overflow"),
                }
            }
            std::mem::take(&mut liveness.in_question).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(reported(&mut liveness), ["a/x", "a/y", "b/z"], "what happened before");
        assert_eq!(reported(&mut liveness), [] as [&str; 0]);
        fs::write(
            dir.path().join("a/x/cgroup.events"),
            "populated 0
",
        )
        .unwrap();
        fs::create_dir(dir.path().join("b/other")).unwrap();
        assert_eq!(reported(&mut liveness), ["a/x"]);
        fs::remove_dir_all(dir.path().join("b/z")).unwrap();
        assert_eq!(reported(&mut liveness), ["b/z"]);

        liveness.stop_checking("a/x");
        fs::write(
            dir.path().join("a/x/cgroup.events"),
            "populated 1
",
        )
        .unwrap();
        fs::remove_dir_all(dir.path().join("a/y")).unwrap();
        assert_eq!(reported(&mut liveness), ["a/y"], "the directory above is watched for the other");
        liveness.stop_checking("a/y");
        fs::remove_dir_all(dir.path().join("a/x")).unwrap();
        assert_eq!(liveness.notices.read(), BTreeSet::new());
    }

    #[test]
    fn stopped_unit_is_kept_for_a_day() {
        let start = Instant::now();
        let mut absence = Absence { since: start, last_query: None, is_stopped: false };
        let mut queries = 0;
        let mut check = |seconds: u64, loaded: Option<bool>| {
            absence.check(start + Duration::from_secs(seconds), || {
                queries += 1;
                loaded.ok_or_else(|| EnforceError::NoBus { message: "no".to_owned() })
            })
        };
        assert_eq!(check(29, Some(false)), AbsentUnit::Pending, "the unit may be restarting");
        assert_eq!(check(30, None), AbsentUnit::Pending, "systemd did not answer");
        assert_eq!(check(89, Some(false)), AbsentUnit::Pending, "the next query is not due");
        assert_eq!(check(90, Some(true)), AbsentUnit::Stopped);
        assert_eq!(check(150, Some(true)), AbsentUnit::Pending, "reported once");
        assert_eq!(check(210, Some(false)), AbsentUnit::Gone("its unit is gone"));
        assert_eq!(check(86_399, Some(true)), AbsentUnit::Pending);
        assert_eq!(check(86_400, Some(true)), AbsentUnit::Gone("its unit was stopped for a day"));
        assert_eq!(queries, 5);
    }

    /// Checks all guarantees, and returns whether each is shown as stopped.
    fn stopped_at(reconciler: &mut ReconcilerLoop, now: Instant) -> Vec<bool> {
        let ReconcilerLoop { controllers: Controllers { liveness, .. }, core, .. } = reconciler;
        liveness.in_question.extend(liveness.held.keys().cloned());
        liveness.release_gone(core, now, false);
        shown_as_stopped(reconciler)
    }

    fn shown_as_stopped(reconciler: &mut ReconcilerLoop) -> Vec<bool> {
        reconciler.process_effects();
        reconciler.view.read().allocations.iter().map(|of| of.stopped).collect()
    }

    #[test]
    fn stopped_unit_is_reported_and_shown() {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
        let root = dir.path().join("cgroup");
        let create = |path: &str| fixture::cgroup(&root.join(path), &host.machine.lock().unwrap());
        for path in ["", "system.slice", "system.slice/db.service"] {
            create(path);
        }
        let config = Config { state_directory: dir.path().join("state"), ..Config::default() };
        let mut reconciler = reconciler_loop(&config, &root, &host);
        let target = api::Target::Unit("db.service".to_owned());
        let request = Request::new(&api::AllocationRequest::new("db", target, "64Mi")).unwrap();
        assert!(reconciler.admit(&request, false).is_ok());
        let reported = || {
            let happened = host.happened.lock().unwrap();
            let of_units = happened.iter().filter(|(_, report)| report.kind == EventKind::UnitStopped);
            of_units.map(|(_, report)| report.message.clone()).collect::<Vec<_>>()
        };

        let start = Instant::now();
        fs::rename(root.join("system.slice/db.service"), dir.path().join("gone")).unwrap();
        assert_eq!(stopped_at(&mut reconciler, start), [false], "the unit may be restarting");
        assert_eq!(reported(), [""; 0]);
        // systemd has the unit loaded.
        let ReconcilerLoop { controllers: Controllers { liveness, .. }, core, .. } = &mut reconciler;
        let held = liveness.held.get_mut("db").unwrap();
        let found = held.absence.as_mut().unwrap().check(start + RESTART_TIMEOUT, || Ok(true));
        let checked = process_absent_unit(core, ("db", "db.service"), &held.cgroup, found);
        assert_eq!(checked, CheckResult::Pending);
        assert_eq!(shown_as_stopped(&mut reconciler), [true]);
        let stopped =
            "db.service does not run. Its guarantee is kept for a day, or until `numaward release db`.";
        assert_eq!(reported(), [stopped]);

        create("system.slice/db.service");
        assert_eq!(stopped_at(&mut reconciler, start + RESTART_TIMEOUT), [false]);
        let again = "db runs again and has its guarantee.";
        assert_eq!(reported(), [stopped, again]);

        // Without systemd, a unit that has no cgroup for longer than a restart takes is gone.
        fs::remove_dir_all(root.join("system.slice/db.service")).unwrap();
        let removed = start + 2 * RESTART_TIMEOUT;
        assert_eq!(stopped_at(&mut reconciler, removed), [false]);
        assert_eq!(stopped_at(&mut reconciler, removed + RESTART_TIMEOUT), [false; 0]);
        assert_eq!(reported(), [stopped, again, "The guarantee of db is released: its unit is gone."]);
    }

    #[test]
    fn restarted_unit_follows_shared_pool() {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
        let root = dir.path().join("cgroup");
        let create = |path: &str| fixture::cgroup(&root.join(path), &host.machine.lock().unwrap());
        for path in ["", "a", "system.slice", "system.slice/db.service"] {
            create(path);
        }
        let config = Config { state_directory: dir.path().join("state"), ..Config::default() };
        let mut reconciler = reconciler_loop(&config, &root, &host);
        let mut admit = |name: &str, target, cpus| {
            let request =
                api::AllocationRequest { cpus, ..api::AllocationRequest::new(name, target, "64Mi") };
            assert!(reconciler.admit(&Request::new(&request).unwrap(), false).is_ok());
        };
        admit("db", api::Target::Unit("db.service".to_owned()), None);
        let knob = |file: &str| fixture::line(&root.join("system.slice/db.service").join(file));
        assert_eq!(knob("cpuset.cpus"), "0-3");
        fs::rename(root.join("system.slice/db.service"), dir.path().join("gone")).unwrap();
        admit("a", api::Target::Cgroup("/a".to_owned()), Some(api::Cpus::whole(2)));
        create("system.slice/db.service");
        stopped_at(&mut reconciler, Instant::now());
        assert_eq!((knob("cpuset.cpus"), knob("memory.min")), ("0,3".to_owned(), (64 << 20).to_string()));
    }

    #[test]
    fn empty_cgroup_is_gone_after_use() {
        let dir = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let check = |events: &str, stat: &str, seconds: u64| {
            for (file, text) in [("cgroup.events", events), ("cpu.stat", stat)] {
                fs::write(dir.path().join(file), text).unwrap();
            }
            check_command(dir.path(), start, start + Duration::from_secs(seconds))
        };
        let (empty, full) = ("populated 0\nfrozen 0\n", "populated 1\nfrozen 0\n");
        let (idle, used) = ("usage_usec 0\n", "usage_usec 900\n");
        assert_eq!(check(empty, idle, 0), CheckResult::Pending);
        assert_eq!(check(full, idle, 100), CheckResult::Alive);
        assert_eq!(check(full, used, 100), CheckResult::Alive);
        assert_eq!(check(empty, used, 0), CheckResult::Gone("its command ended"));
        assert_eq!(check(empty, "", 0), CheckResult::Pending, "what cannot be known");
        assert_eq!(check("", used, 100), CheckResult::Pending, "what cannot be known");
        assert_eq!(check(empty, idle, 59), CheckResult::Pending);
        assert_eq!(check(empty, idle, 60), CheckResult::Gone("no command entered its cgroup"));
    }

    #[test]
    fn entering_command_is_alive() {
        let dir = tempfile::tempdir().unwrap();
        let (events, stat) = (dir.path().join("cgroup.events"), dir.path().join("cpu.stat"));
        fs::write(&events, "populated 0\n").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &stat, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
            .unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Opening the pipe waits until the check reads it.
                let mut reader = fs::OpenOptions::new().write(true).open(&stat).unwrap();
                fs::write(&events, "populated 1\n").unwrap();
                std::io::Write::write_all(&mut reader, b"usage_usec 900\n").unwrap();
            });
            let now = Instant::now();
            assert_eq!(check_command(dir.path(), now, now), CheckResult::Alive);
        });
    }
}
