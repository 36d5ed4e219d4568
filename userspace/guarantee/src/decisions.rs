//! Explanations of decisions, stored beside the ledger.
//!
//! # Problem
//! An explanation is long, and the ledger is rewritten at every change. Explanations are only shown, so losing one is harmless.
//!
//! # Algorithm
//! Each decision is one line of JSON, appended to `decisions.jsonl` without a sync. On start, the last line of each
//! workload is used. The file is then rewritten with the explanations of the present guarantees; also later, when
//! most of its lines are of guarantees that were released. A line that cannot be parsed is skipped.

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

const FILE_NAME: &str = "decisions.jsonl";
/// Number of surplus lines that the file may have in addition to twice the needed lines before it is rewritten.
const MAX_SURPLUS_LINES: usize = 256;

/// The file `decisions.jsonl`.
#[derive(Debug)]
pub struct DecisionLog {
    path: PathBuf,
    /// File opened for appending; `None` after a failure, so that the next write replaces the file.
    file: Option<File>,
    lines: usize,
    /// True if a write failure was logged; it is logged once.
    failure_logged: bool,
}

#[derive(Serialize, Deserialize)]
struct Line<N, E> {
    /// Name of the guarantee, or owner of a pod in the ledger.
    name: N,
    /// Cgroup of the guarantee; `None` for a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cgroup: Option<CgroupId>,
    explanation: E,
}

impl DecisionLog {
    /// Loads the stored explanations into the state and rewrites the file.
    pub fn open(dir: &Path, state: &mut State) -> Self {
        let path = dir.join(FILE_NAME);
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
        let mut decisions = Self { path, file: None, lines: 0, failure_logged: false };
        decisions.try_write(|decisions| decisions.rewrite(state));
        decisions
    }

    /// Stores the explanation of the guarantee or pod with this name, which must be in the state.
    pub fn note(&mut self, name: &str, state: &State) {
        self.try_write(|decisions| {
            let needed = state.guarantees.len() + state.pods.len();
            if decisions.file.is_none() || decisions.lines > 2 * needed + MAX_SURPLUS_LINES {
                return decisions.rewrite(state);
            }
            let of_name = all(state).filter(|line| line.name == name);
            let lines = of_name.map(|line| text(&line)).collect::<io::Result<Vec<_>>>()?;
            decisions.lines += lines.len();
            decisions.file.as_mut().map_or(Ok(()), |file| file.write_all(&lines.concat()))
        });
    }

    fn rewrite(&mut self, state: &State) -> io::Result<()> {
        let lines = all(state).map(|line| text(&line)).collect::<io::Result<Vec<_>>>()?;
        let new = self.path.with_extension("jsonl.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&lines.concat())?;
        fs::rename(&new, &self.path)?;
        (self.file, self.lines) = (Some(file), lines.len());
        Ok(())
    }

    fn try_write(&mut self, write: impl FnOnce(&mut Self) -> io::Result<()>) {
        if let Err(error) = write(self) {
            self.file = None;
            if !std::mem::replace(&mut self.failure_logged, true) {
                let path = self.path.display();
                tracing::warn!(%path, %error, "explanations of guarantees cannot be stored and will be missing after a restart");
            }
        }
    }
}

/// Returns a line for each guarantee and each pod.
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

    /// Returns the explanations that a start loads for this state.
    fn found(dir: &Path, state: &State) -> Vec<String> {
        let mut state: State = serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap();
        DecisionLog::open(dir, &mut state);
        state.guarantees.values().map(|held| held.explanation.notes.join(" ")).collect()
    }

    #[test]
    fn start_loads_last_explanations() {
        let dir = tempfile::tempdir().unwrap();
        let mut decisions = DecisionLog::open(dir.path(), &mut State::default());
        for name in ["a", "b"] {
            decisions.note(name, &state(&[("a", 1), ("b", 2)]));
        }
        let now = state(&[("a", 3), ("b", 2)]);
        decisions.note("a", &now);
        let file = dir.path().join(FILE_NAME);
        assert_eq!(fs::read_to_string(&file).unwrap().lines().count(), 3);
        assert_eq!(found(dir.path(), &now), ["a 3", "b 2"]);
        assert_eq!(fs::read_to_string(&file).unwrap().lines().count(), 2, "rewritten");
        assert_eq!(found(dir.path(), &state(&[("a", 9), ("b", 2)])), ["", "b 2"], "of another cgroup");

        // The last line is truncated, the first is no JSON.
        decisions = DecisionLog::open(dir.path(), &mut now.clone());
        let mut text = fs::read_to_string(&file).unwrap();
        text.truncate(text.len() - 5);
        fs::write(&file, format!("nonsense\n{text}")).unwrap();
        assert_eq!(found(dir.path(), &now), ["", ""]);
        drop(decisions);
    }

    #[test]
    fn file_size_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut decisions = DecisionLog::open(dir.path(), &mut State::default());
        for id in 0..1000 {
            decisions.note("a", &state(&[("a", id)]));
        }
        let lines = || fs::read_to_string(dir.path().join(FILE_NAME)).unwrap().lines().count();
        assert!(lines() <= MAX_SURPLUS_LINES + 3, "{}", lines());

        // A directory with the name of the new file makes writing fail; then it is removed.
        fs::create_dir(dir.path().join("decisions.jsonl.new")).unwrap();
        decisions.file = None;
        decisions.note("a", &state(&[("a", 1000)]));
        assert!(decisions.failure_logged && decisions.file.is_none());
        fs::remove_dir(dir.path().join("decisions.jsonl.new")).unwrap();
        let now = state(&[("a", 1000), ("b", 1)]);
        decisions.note("b", &now);
        assert_eq!(found(dir.path(), &now), ["a 1000", "b 1"]);
    }
}
