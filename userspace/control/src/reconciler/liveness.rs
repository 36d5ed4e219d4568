//! Workloads that are gone, and commands that ended.
//!
//! Problem: what a workload held becomes free for others as soon as it is gone. But to look at each of a thousand
//! cgroups several times a second costs more than the daemon may take.
//!
//! Terms: a guarantee is *in question* when the kernel reported something of its cgroup, or while a clock runs for it: a
//! unit without a cgroup may be restarting, a command may not have been started yet, a release that failed is tried
//! again. A unit is *stopped* when it has had no cgroup for longer than a restart takes, and systemd has it loaded.
//!
//! Algorithm: the kernel reports which cgroups come and go beside each that is held, and when a command's cgroup gets
//! its first process or loses its last one. Each turn looks at what is in question, and at a slice of the others: at all
//! of them within a minute, as watches end with their cgroups; within a second where nothing can be watched.
//!
//! Invariant: a command's cgroup that is empty is released if any process has ever run in it, as the kernel's account of
//! its CPU time shows also after a restart of the daemon; else its command is still to come.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::{Duration, Instant},
};

use numaward_cgroup::{self as cgroup, CgroupPath, Hierarchy, Notice, WatchSubject, read};

use numaward_api::EventKind;
use numaward_enforce::EnforceError;
use numaward_guarantee::{request::Target, state::Guarantee};
use numaward_model::{EventReport, Retry};

use super::{drift::Round, notices::Notices};
use crate::core::{Core, HeldChange};

/// All are looked at within this.
const SWEEP: Duration = Duration::from_mins(1);
/// Likewise, where nothing is reported.
const LOOK: Duration = Duration::from_secs(1);
/// An `exec` that nothing entered for so long was given up by the client that asked for it.
const ENTER_LIMIT: Duration = Duration::from_mins(1);
/// A unit that restarts has no cgroup meanwhile.
const RESTART_LIMIT: Duration = Duration::from_secs(30);
/// What is promised to a unit that was stopped is kept for so long.
const STOPPED_LIMIT: Duration = Duration::from_hours(24);
/// How often systemd is asked whether such a unit is still loaded.
const ASK_INTERVAL: Duration = Duration::from_mins(1);
/// What cannot be released now is tried again after so long at first.
const FIRST_RETRY: Duration = Duration::from_secs(5);
/// And after so long in the end.
const LONGEST_RETRY: Duration = Duration::from_mins(1);

/// What is remembered of guarantees, but not over a restart.
#[derive(Debug)]
pub(super) struct Liveness {
    notices: Notices,
    held: BTreeMap<String, Held>,
    names: BTreeMap<CgroupPath, String>,
    in_question: BTreeSet<String>,
    round: Round<String>,
    /// What could not be released.
    retries: BTreeMap<String, Retry>,
}

#[derive(Debug)]
struct Held {
    cgroup: CgroupPath,
    is_command: bool,
    since: Instant,
    absence: Option<Absence>,
}

/// A unit without a cgroup.
#[derive(Debug)]
struct Absence {
    since: Instant,
    /// When systemd was last asked.
    asked: Option<Instant>,
    /// Whether it had the unit loaded.
    is_stopped: bool,
}

/// What follows from an absence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AbsentUnit {
    /// It may be restarting, or systemd could not be asked.
    Waits,
    /// It is stopped from now on.
    Stops,
    /// It is gone, or was stopped for too long.
    Over(&'static str),
}

impl Absence {
    /// Judges the absence of a unit; `is_loaded` asks systemd.
    fn judge(&mut self, now: Instant, is_loaded: impl FnOnce() -> Result<bool, EnforceError>) -> AbsentUnit {
        let absent = now.duration_since(self.since);
        if absent >= STOPPED_LIMIT {
            return AbsentUnit::Over("its unit was stopped for a day");
        }
        let is_due = self.asked.is_none_or(|asked| now.duration_since(asked) >= ASK_INTERVAL);
        if absent < RESTART_LIMIT || !is_due {
            return AbsentUnit::Waits;
        }
        self.asked = Some(now);
        match is_loaded() {
            Ok(true) if self.is_stopped => AbsentUnit::Waits,
            Ok(true) => {
                self.is_stopped = true;
                AbsentUnit::Stops
            }
            Ok(false) => AbsentUnit::Over("its unit is gone"),
            Err(error) => {
                tracing::debug!(%error, "it is not known whether a unit is stopped or gone");
                AbsentUnit::Waits
            }
        }
    }
}

/// What was found of a guarantee in question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// It is there.
    There,
    /// A clock runs.
    Waits,
    /// It is a unit's, with another cgroup.
    Restarted,
    /// It is gone.
    Over(&'static str),
}

impl Held {
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
            round: Round::new(SWEEP),
            retries: BTreeMap::new(),
        }
    }

    /// Looks after this guarantee from now on.
    fn hold(&mut self, name: &str, guarantee: &Guarantee) {
        let held = Held {
            cgroup: guarantee.cgroup.clone(),
            is_command: guarantee.target == Target::Exec,
            since: Instant::now(),
            absence: None,
        };
        held.watch(&mut self.notices);
        // What happened before it was watched.
        self.in_question.insert(name.to_owned());
        self.names.insert(held.cgroup.clone(), name.to_owned());
        if self.held.insert(name.to_owned(), held).is_none() {
            self.round.items.insert(name.to_owned());
        }
    }

    /// Whether what is promised to a unit is kept although it does not run.
    pub(super) fn is_stopped(&self, name: &str) -> bool {
        let absence = self.held.get(name).and_then(|held| held.absence.as_ref());
        absence.is_some_and(|absence| absence.is_stopped)
    }

    /// It is released.
    fn let_go(&mut self, name: &str) {
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

    /// Something was reported of a cgroup; `true` if it is held.
    fn question(&mut self, path: &CgroupPath) -> bool {
        let name = self.names.get(path);
        self.in_question.extend(name.cloned());
        name.is_some()
    }

    /// A slice of all.
    fn turn(&mut self) {
        self.round.within = if self.notices.work() { SWEEP } else { LOOK };
        for name in self.round.turn() {
            if let Some(held) = self.held.get(&name) {
                held.watch(&mut self.notices);
            }
            self.in_question.insert(name);
        }
    }
}

impl Liveness {
    /// What a cgroup that went held becomes free for others.
    pub(super) fn question_removed(&mut self, core: &mut Core, events: &[cgroup::CgroupEvent]) {
        for event in events {
            if let cgroup::CgroupEvent::Removed(cgroup) = event {
                core.effects.gone |= self.question(&cgroup.path);
            }
        }
    }

    /// Follows who holds something.
    pub(super) fn follow_held(&mut self, core: &Core, change: &HeldChange) {
        match change {
            HeldChange::Given(name) => {
                if let Some(guarantee) = core.store.state.guarantees.get(name) {
                    self.hold(name, guarantee);
                }
            }
            HeldChange::Released { name, .. } => self.let_go(name),
            HeldChange::Rewritten(_) => {}
        }
    }

    /// Releases workloads that are gone and commands that ended, and goes on with what was begun. In a `turn`, also looks
    /// at a slice of those of which nothing was reported.
    pub(super) fn release_gone(&mut self, core: &mut Core, now: Instant, turn: bool) {
        for notice in self.notices.read() {
            match notice {
                Notice::ChildChanged(path) | Notice::Changed(path, _) => drop(self.question(&path)),
                Notice::Overflow => self.in_question.extend(self.held.keys().cloned()),
            }
        }
        if turn {
            self.turn();
        }
        let begun = core.store.state.releasing.iter();
        let mut over: Vec<_> = begun.map(|name| (name.clone(), "its release was begun")).collect();
        let mut restarted = false;
        for name in std::mem::take(&mut self.in_question) {
            let found = self.find(core, &name, now);
            if core.store.state.releasing.contains(&name) {
                if let Found::Over(_) = found {
                    // What was refused before may be done now.
                    self.retries.remove(&name);
                }
                continue;
            }
            match found {
                Found::There => {}
                Found::Waits => drop(self.in_question.insert(name)),
                Found::Restarted => restarted = true,
                Found::Over(reason) => over.push((name, reason)),
            }
        }
        if restarted {
            core.uphold();
            core.promises_changed();
        }
        for (name, reason) in over {
            let unit =
                core.store.state.guarantees.get(&name).filter(|held| matches!(held.target, Target::Unit(_)));
            if let Some(cgroup) = unit.map(|held| held.cgroup.clone())
                && !self.retries.contains_key(&name)
            {
                report(core, &cgroup, format!("What was promised to {name} is released: {reason}."));
            }
            let retry = self.retries.entry(name.clone());
            let retry = retry.or_insert_with(|| Retry::new(now, FIRST_RETRY, LONGEST_RETRY));
            if retry.is_due(now) {
                retry.postpone(now);
                tracing::info!(name, reason, "to be released");
                let Err(error) = core.release(&name) else {
                    self.retries.remove(&name);
                    continue;
                };
                tracing::error!(name, %error, "cannot be released; tried again");
            }
            if !core.store.state.releasing.contains(&name) {
                self.in_question.insert(name);
            }
        }
    }

    fn find(&mut self, core: &mut Core, name: &str, now: Instant) -> Found {
        let (Some(guarantee), Some(held)) =
            (core.store.state.guarantees.get(name).cloned(), self.held.get_mut(name))
        else {
            return Found::There;
        };
        // One that cannot be asked for is not known to be gone.
        let Ok(id) = core.hierarchy.id_of(&guarantee.cgroup) else { return Found::Waits };
        match &guarantee.target {
            Target::Unit(unit) if id.is_none() => {
                let absence =
                    held.absence.get_or_insert(Absence { since: now, asked: None, is_stopped: false });
                let found = absence.judge(now, || core.is_unit_loaded(unit));
                return absent_unit(core, (name, unit), &guarantee.cgroup, found);
            }
            Target::Unit(_) => {}
            _ if id != Some(guarantee.id) => return Found::Over("its cgroup is gone"),
            _ => {}
        }
        if held.absence.take().is_some_and(|absence| absence.is_stopped) {
            report(core, &guarantee.cgroup, format!("{name} runs again, with what was kept for it."));
        }
        if let Some(id) = id.filter(|id| *id != guarantee.id) {
            // A unit that was restarted has a new cgroup. systemd has pinned it, as it keeps the properties.
            if let Some(guarantee) = core.store.state.guarantees.get_mut(name) {
                guarantee.id = id;
            }
            return Found::Restarted;
        }
        if held.is_command {
            command(&core.hierarchy.dir(&held.cgroup), held.since, now)
        } else {
            Found::There
        }
    }
}

/// Reports what follows from the absence of a unit.
fn absent_unit(core: &mut Core, (name, unit): (&str, &str), cgroup: &CgroupPath, found: AbsentUnit) -> Found {
    match found {
        AbsentUnit::Waits => Found::Waits,
        // It was released while systemd was asked.
        _ if !core.store.state.guarantees.contains_key(name) => Found::There,
        AbsentUnit::Stops => {
            let message = format!(
                "{unit} does not run. What is promised to it is kept for a day, or until `numaward release {name}`."
            );
            report(core, cgroup, message);
            Found::Waits
        }
        AbsentUnit::Over(reason) => Found::Over(reason),
    }
}

fn report(core: &mut Core, cgroup: &CgroupPath, message: String) {
    core.report(Some(cgroup), EventReport::new(EventKind::UnitStopped, message));
    core.effects.view = true;
}

/// What became of the command whose cgroup this is.
fn command(dir: &Path, since: Instant, now: Instant) -> Found {
    // In this order: what ran before the cgroup was found empty has ended, what enters it in between has not.
    let has_run = read::cpu_time(dir).is_ok_and(|used| !used.is_zero());
    match read::populated(dir) {
        Ok(true) => Found::There,
        Ok(false) if has_run => Found::Over("its command ended"),
        Ok(false) if now.duration_since(since) >= ENTER_LIMIT => Found::Over("no command entered its cgroup"),
        _ => Found::Waits,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use numaward_api as api;
    use numaward_model::Settings;

    #[test]
    fn what_the_kernel_tells_of_is_in_question_and_nothing_else() {
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
            liveness.hold(name, &guarantee);
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

        liveness.let_go("a/x");
        fs::write(
            dir.path().join("a/x/cgroup.events"),
            "populated 1
",
        )
        .unwrap();
        fs::remove_dir_all(dir.path().join("a/y")).unwrap();
        assert_eq!(reported(&mut liveness), ["a/y"], "the directory above is watched for the other");
        liveness.let_go("a/y");
        fs::remove_dir_all(dir.path().join("a/x")).unwrap();
        assert_eq!(liveness.notices.read(), BTreeSet::new());
    }

    #[test]
    fn unit_that_is_stopped_and_loaded_is_kept_for_a_day() {
        let start = Instant::now();
        let mut absence = Absence { since: start, asked: None, is_stopped: false };
        let mut asked = 0;
        let mut judge = |seconds: u64, loaded: Option<bool>| {
            absence.judge(start + Duration::from_secs(seconds), || {
                asked += 1;
                loaded.ok_or_else(|| EnforceError::NoBus { message: "no".to_owned() })
            })
        };
        assert_eq!(judge(29, Some(false)), AbsentUnit::Waits, "it may be restarting");
        assert_eq!(judge(30, None), AbsentUnit::Waits, "not known to be gone");
        assert_eq!(judge(89, Some(false)), AbsentUnit::Waits, "not asked again so soon");
        assert_eq!(judge(90, Some(true)), AbsentUnit::Stops);
        assert_eq!(judge(150, Some(true)), AbsentUnit::Waits, "said once");
        assert_eq!(judge(210, Some(false)), AbsentUnit::Over("its unit is gone"));
        assert_eq!(judge(86_399, Some(true)), AbsentUnit::Waits);
        assert_eq!(judge(86_400, Some(true)), AbsentUnit::Over("its unit was stopped for a day"));
        assert_eq!(asked, 5);
    }

    #[test]
    fn an_empty_cgroup_is_over_once_something_ran_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let find = |events: &str, stat: &str, seconds: u64| {
            for (file, text) in [("cgroup.events", events), ("cpu.stat", stat)] {
                fs::write(dir.path().join(file), text).unwrap();
            }
            command(dir.path(), start, start + Duration::from_secs(seconds))
        };
        let (empty, full) = ("populated 0\nfrozen 0\n", "populated 1\nfrozen 0\n");
        let (idle, used) = ("usage_usec 0\n", "usage_usec 900\n");
        assert_eq!(find(empty, idle, 0), Found::Waits);
        assert_eq!(find(full, idle, 100), Found::There);
        assert_eq!(find(full, used, 100), Found::There);
        assert_eq!(find(empty, used, 0), Found::Over("its command ended"));
        assert_eq!(find(empty, "", 0), Found::Waits, "what cannot be known");
        assert_eq!(find("", used, 100), Found::Waits, "what cannot be known");
        assert_eq!(find(empty, idle, 59), Found::Waits);
        assert_eq!(find(empty, idle, 60), Found::Over("no command entered its cgroup"));
    }

    #[test]
    fn a_command_that_enters_while_its_cgroup_is_looked_at_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let (events, stat) = (dir.path().join("cgroup.events"), dir.path().join("cpu.stat"));
        fs::write(&events, "populated 0\n").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &stat, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
            .unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Opens once it is read.
                let mut reader = fs::OpenOptions::new().write(true).open(&stat).unwrap();
                fs::write(&events, "populated 1\n").unwrap();
                std::io::Write::write_all(&mut reader, b"usage_usec 900\n").unwrap();
            });
            let now = Instant::now();
            assert_eq!(command(dir.path(), now, now), Found::There);
        });
    }
}
