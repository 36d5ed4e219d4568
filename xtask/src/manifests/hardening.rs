//! Checks of the daemon's privileges: the list of system calls, which must be the same for Kubernetes and for systemd,
//! and systemd's score of the unit.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::command;

/// Profile in the format of Kubernetes (OCI runtime specification, `linux.seccomp`). The unit repeats it.
const PROFILE: &str = "deploy/seccomp/numaward.json";
const UNIT: &str = "deploy/systemd/numaward.service";
/// Beginning of the comment of a group that only the container runtime needs before it starts the daemon. systemd sets
/// its filter last.
const RUNTIME_COMMENT: &str = "The container runtime";
/// Maximum exposure, as ten times the score of systemd 252.
const MAX_EXPOSURE: u8 = 32;

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
    /// Purpose of the calls. Runtimes ignore it.
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

    /// Returns the calls of the daemon, or those that only the container runtime makes.
    fn names(&self, of_runtime: bool) -> BTreeSet<&str> {
        let groups =
            self.syscalls.iter().filter(|group| group.comment.starts_with(RUNTIME_COMMENT) == of_runtime);
        groups.flat_map(|group| group.names.iter().map(String::as_str)).collect()
    }

    /// Returns the errors in the profile.
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
            // glibc falls back to clone(2), which has flags that can be filtered.
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

/// Returns the calls that a unit allows.
fn filter(unit: &str) -> BTreeSet<&str> {
    let lines = unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter="));
    lines.flat_map(str::split_whitespace).collect()
}

/// Returns the calls that only one of both allows.
fn differences(profile: &BTreeSet<&str>, unit: &BTreeSet<&str>) -> Vec<String> {
    let missing = |what: Vec<&&str>, path: &str| {
        what.into_iter().map(|name| format!("{path} does not allow {name}")).collect::<Vec<_>>()
    };
    [missing(profile.difference(unit).collect(), UNIT), missing(unit.difference(profile).collect(), PROFILE)]
        .concat()
}

/// Returns the errors in the lists. A score that is too high fails.
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
    analyze.args(["security", "--offline=true", "--no-pager"]).arg(format!("--threshold={MAX_EXPOSURE}"));
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
    fn unit_and_profile_allow_same_calls() {
        let read = |path: &str| fs::read_to_string(command::root().join(path)).unwrap();
        let (profile, unit) = (read(PROFILE), read(UNIT));
        let profile = Profile::read(&profile).unwrap();
        assert_eq!(profile.faults(), [""; 0]);
        assert_eq!(differences(&profile.names(false), &filter(&unit)), [""; 0]);
        // No group of systemd's, because these have more calls than necessary.
        assert!(
            filter(&unit)
                .iter()
                .all(|name| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
        );
    }

    #[test]
    fn unit_restarts_without_limit() {
        let unit = fs::read_to_string(command::root().join(UNIT)).unwrap();
        for line in
            ["StartLimitIntervalSec=0", "Restart=on-failure", "RestartSteps=5", "RestartMaxDelaySec=10"]
        {
            assert!(unit.lines().any(|of| of == line), "{UNIT} does not say {line}");
        }
    }

    #[test]
    fn socket_has_the_default_address() {
        let read = |path: &str| fs::read_to_string(command::root().join(path)).unwrap();
        let socket = read("deploy/systemd/numaward.socket");
        let address = socket.lines().find_map(|line| line.strip_prefix("ListenStream=")).unwrap();
        let keys = read("docs/configuration.md");
        let listen = keys.lines().find(|line| line.starts_with("| `listen`<br>")).unwrap();
        assert!(listen.contains(&format!("| `{address}` |")), "{address}: {listen}");
    }

    #[test]
    fn documented_number_of_calls_is_right() {
        let read = |path: &str| fs::read_to_string(command::root().join(path)).unwrap();
        let text = read(PROFILE);
        let profile = Profile::read(&text).unwrap();
        let of = |is_counted: &dyn Fn(&Group) -> bool| {
            let groups = profile.syscalls.iter().filter(|group| group.action == "SCMP_ACT_ALLOW");
            let groups =
                groups.filter(|group| !group.comment.starts_with(RUNTIME_COMMENT) && is_counted(group));
            groups.flat_map(|group| &group.names).collect::<BTreeSet<_>>().len()
        };
        let (all, of_arm) = (of(&|_| true), of(&|group| group.comment.contains("on Arm")));
        let security =
            format!("allows the daemon {all} system calls, {of_arm} of which only programs for Arm make");
        assert!(read("SECURITY.md").contains(&security), "SECURITY.md does not say that it {security}");
        let systemd = format!("it may make only {all} system calls");
        assert!(read("docs/systemd.md").contains(&systemd), "docs/systemd.md does not say: {systemd}");
    }

    #[test]
    fn finds_calls_allowed_once() {
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
