//! What the daemon may do: the list of system calls, which is one for Kubernetes and for systemd, and the score that systemd
//! gives the unit.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::command;

/// The list, as a profile that Kubernetes takes (OCI runtime specification, `linux.seccomp`). The unit repeats it.
const PROFILE: &str = "deploy/seccomp/numaward.json";
const UNIT: &str = "deploy/systemd/numaward.service";
/// How the comment of a group begins that the container runtime needs before it starts the daemon. systemd sets its filter last.
const OF_THE_RUNTIME: &str = "The container runtime";
/// Ten times the exposure that systemd 252 finds; no more is taken.
const MOST_EXPOSED: u8 = 32;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Profile {
    #[serde(rename = "comment")]
    _comment: String,
    default_action: String,
    default_errno_ret: u32,
    architectures: Vec<String>,
    syscalls: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Group {
    /// What they are needed for. Runtimes pass it over.
    comment: String,
    names: Vec<String>,
    action: String,
    errno_ret: Option<u32>,
    #[serde(default, rename = "args")]
    _args: Vec<Value>,
}

impl Profile {
    fn read(text: &str) -> Result<Self> {
        serde_json::from_str(text).with_context(|| format!("cannot read {PROFILE}"))
    }

    /// What the daemon calls, or what only the container runtime does.
    fn names(&self, of_runtime: bool) -> BTreeSet<&str> {
        let groups =
            self.syscalls.iter().filter(|group| group.comment.starts_with(OF_THE_RUNTIME) == of_runtime);
        groups.flat_map(|group| group.names.iter().map(String::as_str)).collect()
    }

    /// What is wrong with the profile itself.
    fn faults(&self) -> Vec<String> {
        const EPERM: u32 = 1;
        const ENOSYS: u32 = 38;
        let mut faults = Vec::new();
        let mut fault = |text: String| faults.push(format!("{PROFILE}: {text}"));
        if (self.default_action.as_str(), self.default_errno_ret) != ("SCMP_ACT_ERRNO", EPERM) {
            fault("all else is not refused with EPERM, as the unit has it".to_owned());
        }
        if self.architectures != ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"] {
            fault("it is for other architectures than the program".to_owned());
        }
        for group in &self.syscalls {
            let is_allowed = group.action == "SCMP_ACT_ALLOW" && group.errno_ret.is_none();
            // glibc falls back to clone(2), whose flags can be looked at.
            let is_clone3 = group.names == ["clone3"] && group.errno_ret == Some(ENOSYS);
            if !is_allowed && !is_clone3 {
                fault(format!("{}: action {}", group.names.join(" "), group.action));
            }
            if group.comment.is_empty() {
                fault(format!("{}: it does not say what for", group.names.join(" ")));
            }
        }
        faults
    }
}

/// The calls that a unit allows.
fn filter(unit: &str) -> BTreeSet<&str> {
    let lines = unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter="));
    lines.flat_map(str::split_whitespace).collect()
}

/// What one of both has and the other has not.
fn differences(profile: &BTreeSet<&str>, unit: &BTreeSet<&str>) -> Vec<String> {
    let missing = |what: Vec<&&str>, path: &str| {
        what.into_iter().map(|name| format!("{path} does not allow {name}")).collect::<Vec<_>>()
    };
    [missing(profile.difference(unit).collect(), UNIT), missing(unit.difference(profile).collect(), PROFILE)]
        .concat()
}

/// What is wrong with the lists. The unit's score is an error if it is too high.
pub(super) fn check() -> Result<Vec<String>> {
    let read = |path: &str| {
        fs::read_to_string(command::root().join(path)).with_context(|| format!("cannot read {path}"))
    };
    let (profile, unit) = (read(PROFILE)?, read(UNIT)?);
    let profile = Profile::read(&profile)?;
    let (daemon, runtime) = (profile.names(false), profile.names(true));
    println!(
        "{PROFILE}: {} system calls, and {} of the container runtime alone",
        daemon.len(),
        runtime.difference(&daemon).count()
    );
    let mut analyze = Command::new("systemd-analyze");
    analyze.args(["security", "--offline=true", "--no-pager"]).arg(format!("--threshold={MOST_EXPOSED}"));
    let said = command::read(analyze.arg(command::root().join(UNIT)))
        .context("the unit is more exposed than it was")?;
    println!("{UNIT}: {}", said.lines().last().unwrap_or_default().trim_start_matches('→').trim());
    Ok([profile.faults(), differences(&daemon, &filter(&unit))].concat())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_unit_allows_what_the_profile_does() {
        let read = |path: &str| fs::read_to_string(command::root().join(path)).unwrap();
        let (profile, unit) = (read(PROFILE), read(UNIT));
        let profile = Profile::read(&profile).unwrap();
        assert_eq!(profile.faults(), [""; 0]);
        assert_eq!(differences(&profile.names(false), &filter(&unit)), [""; 0]);
        // No group of systemd's, which has more than is needed.
        assert!(
            filter(&unit)
                .iter()
                .all(|name| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
        );
    }

    #[test]
    fn unit_is_restarted_however_often_it_ends() {
        let unit = fs::read_to_string(command::root().join(UNIT)).unwrap();
        for line in
            ["StartLimitIntervalSec=0", "Restart=on-failure", "RestartSteps=5", "RestartMaxDelaySec=10"]
        {
            assert!(unit.lines().any(|of| of == line), "{UNIT} does not say {line}");
        }
    }

    #[test]
    fn the_documents_have_the_number_of_system_calls() {
        let read = |path: &str| fs::read_to_string(command::root().join(path)).unwrap();
        let text = read(PROFILE);
        let profile = Profile::read(&text).unwrap();
        let of = |is_counted: &dyn Fn(&Group) -> bool| {
            let groups = profile.syscalls.iter().filter(|group| group.action == "SCMP_ACT_ALLOW");
            let groups =
                groups.filter(|group| !group.comment.starts_with(OF_THE_RUNTIME) && is_counted(group));
            groups.flat_map(|group| &group.names).collect::<BTreeSet<_>>().len()
        };
        let (all, of_arm) = (of(&|_| true), of(&|group| group.comment.contains("on Arm")));
        let security =
            format!("allows the daemon {all} system calls, {of_arm} of which only programs for Arm make");
        assert!(read("SECURITY.md").contains(&security), "SECURITY.md does not say that it {security}");
        let systemd = format!("it may make {all} system calls and no others");
        assert!(read("docs/systemd.md").contains(&systemd), "docs/systemd.md does not say: {systemd}");
    }

    #[test]
    fn what_is_allowed_in_one_place_only_is_a_fault() {
        let group = |comment: &str, names: &[&str], action: &str| json!({ "comment": comment, "names": names, "action": action });
        let profile = |groups: &[Value]| {
            let text = json!({
                "comment": "x", "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1,
                "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"], "syscalls": groups,
            });
            Profile::read(&text.to_string()).unwrap()
        };
        let allow = "SCMP_ACT_ALLOW";
        let sound = profile(&[
            group("reads", &["read", "close"], allow),
            group("The container runtime", &["execve"], allow),
        ]);
        assert_eq!(sound.faults(), [""; 0]);
        let differing = differences(
            &sound.names(false),
            &filter("[Service]\nSystemCallFilter=read\nSystemCallFilter=bpf\n"),
        );
        assert_eq!(
            differing,
            [format!("{UNIT} does not allow close"), format!("{PROFILE} does not allow bpf")]
        );
        for wrong in [group("", &["read"], allow), group("x", &["read"], "SCMP_ACT_LOG")] {
            assert_eq!(profile(&[wrong]).faults().len(), 1);
        }
    }
}
