//! Why each allocation was given, kept beside the ledger.
//!
//! Problem: what explains a decision is long, and the ledger is written anew at every change. Nothing depends on an
//! explanation: one that is lost is only not shown any more.
//!
//! Algorithm: each decision is a line of JSON, appended to `decisions.jsonl` without a sync. At the start the last line of
//! each workload counts. Then, and whenever most lines are of workloads that are gone, the file is written anew with
//! what is held. A line that cannot be read is skipped.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use numaward_api as api;
use numaward_cgroup::CgroupId;
use serde::{Deserialize, Serialize};

use crate::state::State;

const NAME: &str = "decisions.jsonl";
/// The file is written anew when it has more than twice as many lines as are needed, and these.
const SPARE: usize = 256;

/// The file.
#[derive(Debug)]
pub struct DecisionLog {
    path: PathBuf,
    /// Open to append; `None` after a failure: then it has to be written anew.
    file: Option<File>,
    lines: usize,
    /// A failure was reported.
    reported: bool,
}

#[derive(Serialize, Deserialize)]
struct Line<N, E> {
    /// The name of the workload, or of a pod in the ledger.
    name: N,
    /// Which cgroup it has; none for a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cgroup: Option<CgroupId>,
    explanation: E,
}

impl DecisionLog {
    /// Reads what explains what is held.
    pub fn open(dir: &Path, state: &mut State) -> Self {
        let path = dir.join(NAME);
        let text = fs::read(&path).unwrap_or_default();
        let lines = text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
        let mut known: HashMap<(String, Option<CgroupId>), api::Explanation> =
            lines.map(|line: Line<String, _>| ((line.name, line.cgroup), line.explanation)).collect();
        let held: Vec<_> =
            state.guarantees.iter().map(|(name, held)| (name.clone(), Some(held.id))).collect();
        for key in held {
            let explanation = known.remove(&key).unwrap_or_default();
            if let Some(held) = state.guarantees.get_mut(&key.0) {
                held.explanation = explanation;
            }
        }
        let owners: Vec<String> = state.pods.keys().cloned().collect();
        for owner in owners {
            let explanation = known.remove(&(owner.clone(), None)).unwrap_or_default();
            if let Some(admitted) = state.pods.get_mut(&owner) {
                admitted.explanation = explanation;
            }
        }
        let mut decisions = Self { path, file: None, lines: 0, reported: false };
        decisions.keep(|decisions| decisions.write_anew(state));
        decisions
    }

    /// A guarantee, or a pod, of this name was given, and is in the state.
    pub fn note(&mut self, name: &str, state: &State) {
        self.keep(|decisions| {
            let needed = state.guarantees.len() + state.pods.len();
            if decisions.file.is_none() || decisions.lines > 2 * needed + SPARE {
                return decisions.write_anew(state);
            }
            let of_name = all(state).filter(|line| line.name == name);
            let lines = of_name.map(|line| text(&line)).collect::<io::Result<Vec<_>>>()?;
            decisions.lines += lines.len();
            decisions.file.as_mut().map_or(Ok(()), |file| file.write_all(&lines.concat()))
        });
    }

    fn write_anew(&mut self, state: &State) -> io::Result<()> {
        let lines = all(state).map(|line| text(&line)).collect::<io::Result<Vec<_>>>()?;
        let new = self.path.with_extension("jsonl.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&lines.concat())?;
        fs::rename(&new, &self.path)?;
        (self.file, self.lines) = (Some(file), lines.len());
        Ok(())
    }

    fn keep(&mut self, write: impl FnOnce(&mut Self) -> io::Result<()>) {
        if let Err(error) = write(self) {
            self.file = None;
            if !std::mem::replace(&mut self.reported, true) {
                let path = self.path.display();
                tracing::warn!(%path, %error, "why allocations were given is not known any more after a restart");
            }
        }
    }
}

/// What explains all that is held.
fn all(state: &State) -> impl Iterator<Item = Line<&str, &api::Explanation>> {
    let guarantees = state.guarantees.iter().map(|(name, held)| Line {
        name: name.as_str(),
        cgroup: Some(held.id),
        explanation: &held.explanation,
    });
    let pods = state.pods.iter().map(|(owner, admitted)| Line {
        name: owner.as_str(),
        cgroup: None,
        explanation: &admitted.explanation,
    });
    guarantees.chain(pods)
}

fn text(line: &Line<&str, &api::Explanation>) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{request::Target, state::Guarantee};
    use numaward_model::Settings;

    fn state(names: &[(&str, u64)]) -> State {
        let guarantee = |name: &str, id| Guarantee {
            target: Target::Exec,
            cgroup: format!("/{name}").parse().unwrap(),
            id: CgroupId(id),
            settings: Settings::default(),
            declared: None,
            explanation: api::Explanation {
                notes: vec![format!("{name} {id}")],
                ..api::Explanation::default()
            },
        };
        let guarantees = names.iter().map(|(name, id)| ((*name).to_owned(), guarantee(name, *id)));
        State { guarantees: guarantees.collect(), ..State::default() }
    }

    /// What a start finds of this state, of which the ledger keeps no explanation.
    fn found(dir: &Path, state: &State) -> Vec<String> {
        let mut state: State = serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap();
        DecisionLog::open(dir, &mut state);
        state.guarantees.values().map(|held| held.explanation.notes.join(" ")).collect()
    }

    #[test]
    fn the_last_decision_on_what_is_held_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut decisions = DecisionLog::open(dir.path(), &mut State::default());
        for name in ["a", "b"] {
            decisions.note(name, &state(&[("a", 1), ("b", 2)]));
        }
        let now = state(&[("a", 3), ("b", 2)]);
        decisions.note("a", &now);
        let file = dir.path().join(NAME);
        assert_eq!(fs::read_to_string(&file).unwrap().lines().count(), 3);
        assert_eq!(found(dir.path(), &now), ["a 3", "b 2"]);
        assert_eq!(fs::read_to_string(&file).unwrap().lines().count(), 2, "written anew");
        assert_eq!(found(dir.path(), &state(&[("a", 9), ("b", 2)])), ["", "b 2"], "of another cgroup");

        // Half a line, and one that is none.
        decisions = DecisionLog::open(dir.path(), &mut now.clone());
        let mut text = fs::read_to_string(&file).unwrap();
        text.truncate(text.len() - 5);
        fs::write(&file, format!("nonsense\n{text}")).unwrap();
        assert_eq!(found(dir.path(), &now), ["", ""]);
        drop(decisions);
    }

    #[test]
    fn the_file_does_not_grow_for_ever_and_a_failure_is_made_good() {
        let dir = tempfile::tempdir().unwrap();
        let mut decisions = DecisionLog::open(dir.path(), &mut State::default());
        for id in 0..1000 {
            decisions.note("a", &state(&[("a", id)]));
        }
        let lines = || fs::read_to_string(dir.path().join(NAME)).unwrap().lines().count();
        assert!(lines() <= SPARE + 3, "{}", lines());

        // Where the file is to be written, there is a directory; later there is none.
        fs::create_dir(dir.path().join("decisions.jsonl.new")).unwrap();
        decisions.file = None;
        decisions.note("a", &state(&[("a", 1000)]));
        assert!(decisions.reported && decisions.file.is_none());
        fs::remove_dir(dir.path().join("decisions.jsonl.new")).unwrap();
        let now = state(&[("a", 1000), ("b", 1)]);
        decisions.note("b", &now);
        assert_eq!(found(dir.path(), &now), ["a 1000", "b 1"]);
    }
}
