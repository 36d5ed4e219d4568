//! What stands in the way of holding promises: a hierarchy that cannot be written, and others who write it.

use std::{collections::BTreeSet, fs};

use super::{Check, Host};

/// `AllowedCPUs=` and `AllowedMemoryNodes=` came with this version of systemd.
const SYSTEMD_WITH_CPUSETS: u32 = 244;

/// A program that may work against promises, by the name that the kernel shows (15 bytes of it).
struct Other {
    name: &'static str,
    does: &'static str,
    mend: &'static str,
}

const CGROUP_MANAGER: &str = "let only one of them bind workloads to CPUs and nodes: stop it, or switch its CPU and memory policies off";

const OTHERS: &[Other] = &[
    Other {
        name: "irqbalance",
        does: "it moves interrupts to exclusive CPUs as well",
        mend: "list the CPUs that workloads may get in IRQBALANCE_BANNED_CPULIST, or stop it",
    },
    Other {
        name: "numad",
        does: "it binds processes to nodes itself, also those that hold guarantees",
        mend: "systemctl disable --now numad",
    },
    Other {
        name: "tuned",
        does: "profiles such as cpu-partitioning move processes and interrupts between CPUs",
        mend: "tuned-adm profile throughput-performance, or another one that leaves affinities alone",
    },
    Other {
        name: "cgrulesengd",
        does: "it moves processes to other cgroups, out of those that hold guarantees",
        mend: "leave workloads that hold guarantees out of cgrules.conf",
    },
    Other { name: "koordlet", does: "it writes cpusets and memory protection itself", mend: CGROUP_MANAGER },
    Other {
        name: "katalyst-agent",
        does: "it writes cpusets and memory protection itself",
        mend: CGROUP_MANAGER,
    },
    Other { name: "cri-resmgr", does: "it writes cpusets itself", mend: CGROUP_MANAGER },
    Other { name: "nri-resource-po", does: "it writes cpusets itself", mend: CGROUP_MANAGER },
];

/// A process, as far as it is of interest.
struct Process {
    id: u32,
    name: String,
    arguments: Vec<String>,
}

impl Host<'_> {
    pub(super) fn enforcement(&self) -> Vec<Check> {
        let processes = self.processes();
        let mut checks = vec![self.writable(), self.systemd(), self.fanotify(), daemons(&processes)];
        checks.extend(self.kubelet_state());
        checks.extend(kubelet_flags(&processes));
        checks.push(others(&processes));
        checks
    }

    fn processes(&self) -> Vec<Process> {
        let Ok(entries) = fs::read_dir(self.root.join("proc")) else { return Vec::new() };
        let id = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let ids: BTreeSet<u32> = entries.flatten().filter_map(id).collect();
        ids.into_iter()
            .filter_map(|id| {
                // One that ended meanwhile has neither.
                let name = self.read(&format!("proc/{id}/comm")).ok()?;
                let arguments = self.read(&format!("proc/{id}/cmdline")).unwrap_or_default();
                let arguments = arguments.split('\0').map(str::to_owned).collect();
                Some(Process { id, name, arguments })
            })
            .collect()
    }

    /// `proc_pid_mountinfo(5)`: the sixth field has the options of the mount.
    fn writable(&self) -> Check {
        let check = "cgroup writes";
        let table = self.read("proc/self/mountinfo").unwrap_or_default();
        let mount = table.lines().find(|line| line.contains(" - cgroup2 "));
        let options = mount.and_then(|line| line.split(' ').nth(5)).unwrap_or_default();
        match mount {
            None => Check::warn(check, "no cgroup v2: nothing can be enforced", "see the check cgroup v2"),
            Some(_) if options.split(',').any(|option| option == "ro") => Check::warn(
                check,
                "the hierarchy is mounted read-only: workloads are observed, and nothing is enforced",
                "mount -o remount,rw /sys/fs/cgroup; for a container, mount the host's hierarchy read-write into it",
            ),
            Some(_) => Check::ok(check, "the hierarchy is mounted read-write"),
        }
    }

    fn systemd(&self) -> Check {
        let check = "systemd";
        if !self.exists("run/systemd/system") {
            return Check::ok(check, "not the init here: every cgroup is written directly");
        }
        if !self.exists("run/dbus/system_bus_socket") {
            return Check::warn(
                check,
                "its system bus is not found: units cannot be given guarantees",
                "start dbus; for a container, mount /run/dbus/system_bus_socket into it",
            );
        }
        match self.systemd_version() {
            Some(version) if version < SYSTEMD_WITH_CPUSETS => Check::warn(
                check,
                format!("version {version} cannot bind units to CPUs and nodes"),
                format!("use systemd {SYSTEMD_WITH_CPUSETS} or newer, or name cgroups outside of its slices"),
            ),
            Some(version) => Check::ok(check, format!("version {version}; units are bound through it")),
            None => Check::ok(check, "units are bound through it"),
        }
    }

    /// By the name of its private library, which is all that files tell.
    fn systemd_version(&self) -> Option<u32> {
        let places = ["usr/lib/systemd", "usr/lib64/systemd", "usr/lib/x86_64-linux-gnu/systemd"];
        let entries = places.iter().filter_map(|place| fs::read_dir(self.root.join(place)).ok()).flatten();
        entries.flatten().find_map(|entry| {
            let name = entry.file_name();
            let version = name.to_str()?.strip_prefix("libsystemd-shared-")?;
            let digits = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
            version[..digits].parse().ok()
        })
    }

    fn fanotify(&self) -> Check {
        let check = "fanotify";
        if self.exists("proc/sys/fs/fanotify") {
            Check::ok(check, "available: who rewrites a knob is seen at once")
        } else {
            Check::warn(
                check,
                "not in this kernel: knobs are looked at every second instead, and who wrote them stays unknown",
                "use a kernel with CONFIG_FANOTIFY=y, 5.13 or newer",
            )
        }
    }

    /// The state files say what the kubelet really does, whatever its configuration says.
    fn kubelet_state(&self) -> Vec<Check> {
        let states = [("cpu_manager_state", "static"), ("memory_manager_state", "Static")];
        states
            .into_iter()
            .filter_map(|(file, policy)| {
                let path = format!("var/lib/kubelet/{file}");
                let text = self.read(&path).ok()?;
                let check = format!("kubelet {file}");
                let Ok(state) = serde_json::from_str::<serde_json::Value>(&text) else {
                    let mend = format!("rm /{path} and restart the kubelet, which refuses to start with it");
                    return Some(Check::warn(&check, format!("/{path} is no JSON"), mend));
                };
                let name = state["policyName"].as_str().unwrap_or_default();
                Some(if name.eq_ignore_ascii_case(policy) {
                    Check::warn(
                        &check,
                        format!("policy {name}: the kubelet binds containers itself, or did until its policy changed"),
                        format!(
                            "`numaward import-kubelet-state /var/lib/kubelet` takes over what is promised; then set \
                             the policy to none, rm /{path} and restart the kubelet"
                        ),
                    )
                } else {
                    Check::ok(&check, format!("policy {name}"))
                })
            })
            .collect()
    }
}

fn list(processes: &[&Process]) -> String {
    let ids: Vec<String> = processes.iter().map(|process| process.id.to_string()).collect();
    ids.join(", ")
}

fn daemons(processes: &[Process]) -> Check {
    let is_daemon = |process: &&Process| {
        process.name == "numaward" && process.arguments.get(1).is_some_and(|argument| argument == "run")
    };
    let running: Vec<&Process> = processes.iter().filter(is_daemon).collect();
    let check = "daemon";
    match running.len() {
        0 => Check::ok(check, "none runs"),
        1 => Check::ok(check, format!("runs as process {}", list(&running))),
        _ => Check::warn(
            check,
            format!(
                "several run, as processes {}: each would bind the workloads of the others",
                list(&running)
            ),
            "stop all but one; a container and a service may each run one",
        ),
    }
}

/// Policies that were given on the command line do not show in the kubelet's file.
fn kubelet_flags(processes: &[Process]) -> Option<Check> {
    const POLICIES: [&str; 3] =
        ["--cpu-manager-policy", "--memory-manager-policy", "--topology-manager-policy"];
    let kubelet = processes.iter().find(|process| process.name == "kubelet")?;
    let mut own = Vec::new();
    for (index, argument) in kubelet.arguments.iter().enumerate() {
        let (flag, value) = match argument.split_once('=') {
            Some((flag, value)) => (flag, value),
            None => (argument.as_str(), kubelet.arguments.get(index + 1).map_or("", String::as_str)),
        };
        if POLICIES.contains(&flag) && !value.eq_ignore_ascii_case("none") {
            own.push(format!("{flag}={value}"));
        }
    }
    let check = "kubelet flags";
    Some(if own.is_empty() {
        Check::ok(check, format!("process {} has none that would fight", kubelet.id))
    } else {
        Check::warn(
            check,
            format!("{}: the kubelet places workloads itself; numaward only watches", own.join(" ")),
            "take these flags off the kubelet before numaward is to place workloads",
        )
    })
}

fn others(processes: &[Process]) -> Check {
    let check = "other writers";
    let found: Vec<(&Other, &Process)> = OTHERS
        .iter()
        .filter_map(|other| Some((other, processes.iter().find(|process| process.name == other.name)?)))
        .collect();
    if found.is_empty() {
        return Check::ok(check, "no program is known that would fight over CPUs and nodes");
    }
    let findings: Vec<String> = found
        .iter()
        .map(|(other, process)| format!("{} runs (process {}): {}", other.name, process.id, other.does))
        .collect();
    let mut mends: Vec<String> =
        found.iter().map(|(other, _)| format!("{}: {}", other.name, other.mend)).collect();
    mends.dedup();
    Check::warn(check, findings.join("; "), mends.join("; "))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Verdict,
            tests::{GOOD, tree},
        },
        *,
    };

    fn check(files: &[(&str, &str)], name: &str) -> Option<Check> {
        let all: Vec<_> = GOOD.iter().chain(files).copied().collect();
        let dir = tree(&all);
        let checks = Host { root: dir.path() }.enforcement();
        checks.into_iter().find(|check| check.check == name)
    }

    /// Files beside those of a good host (the last of a path counts); a check, its verdict and what is said.
    #[test]
    fn what_stands_in_the_way_is_found() {
        use Verdict::{Ok, Warn};
        type Row<'a> = (&'a [(&'a str, &'a str)], &'a str, Verdict, &'a str);
        const READ_ONLY: &str = "30 23 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup2 rw\n";
        const STATIC: &str = r#"{"policyName":"static","defaultCpuSet":"0-3","checksum":1}"#;
        let systemd = ("run/systemd/system/.keep", "");
        let bus = ("run/dbus/system_bus_socket", "");
        let table: &[Row<'_>] = &[
            (&[], "cgroup writes", Ok, "read-write"),
            (&[("proc/self/mountinfo", READ_ONLY)], "cgroup writes", Warn, "read-only"),
            (&[("proc/self/mountinfo", "")], "cgroup writes", Warn, "no cgroup v2"),
            (&[], "systemd", Ok, "not the init"),
            (&[systemd], "systemd", Warn, "system bus is not found"),
            (&[systemd, bus], "systemd", Ok, "bound through it"),
            (
                &[systemd, bus, ("usr/lib/systemd/libsystemd-shared-239.so", "")],
                "systemd",
                Warn,
                "version 239",
            ),
            (
                &[systemd, bus, ("usr/lib/x86_64-linux-gnu/systemd/libsystemd-shared-252.so", "")],
                "systemd",
                Ok,
                "version 252",
            ),
            (&[], "fanotify", Ok, "available"),
            (&[], "daemon", Ok, "none runs"),
            (
                &[("proc/7/comm", "numaward\n"), ("proc/7/cmdline", "numaward\0doctor\0")],
                "daemon",
                Ok,
                "none runs",
            ),
            (
                &[("proc/7/comm", "numaward\n"), ("proc/7/cmdline", "numaward\0run\0")],
                "daemon",
                Ok,
                "process 7",
            ),
            (
                &[
                    ("proc/7/comm", "numaward\n"),
                    ("proc/7/cmdline", "numaward\0run\0"),
                    ("proc/12/comm", "numaward\n"),
                    ("proc/12/cmdline", "/usr/bin/numaward\0run\0"),
                ],
                "daemon",
                Warn,
                "processes 7, 12",
            ),
            (
                &[("var/lib/kubelet/cpu_manager_state", STATIC)],
                "kubelet cpu_manager_state",
                Warn,
                "policy static",
            ),
            (
                &[("var/lib/kubelet/memory_manager_state", r#"{"policyName":"None"}"#)],
                "kubelet memory_manager_state",
                Ok,
                "policy None",
            ),
            (&[("var/lib/kubelet/cpu_manager_state", "{")], "kubelet cpu_manager_state", Warn, "no JSON"),
            (
                &[
                    ("proc/9/comm", "kubelet\n"),
                    (
                        "proc/9/cmdline",
                        "kubelet\0--cpu-manager-policy=static\0--memory-manager-policy\0Static\0",
                    ),
                ],
                "kubelet flags",
                Warn,
                "--cpu-manager-policy=static --memory-manager-policy=Static",
            ),
            (
                &[("proc/9/comm", "kubelet\n"), ("proc/9/cmdline", "kubelet\0--cpu-manager-policy=none\0")],
                "kubelet flags",
                Ok,
                "process 9",
            ),
            (&[], "other writers", Ok, "no program"),
            (
                &[("proc/3/comm", "irqbalance\n"), ("proc/4/comm", "numad\n"), ("proc/5/comm", "numademo\n")],
                "other writers",
                Warn,
                "irqbalance runs (process 3): it moves interrupts to exclusive CPUs as well; numad runs (process 4)",
            ),
        ];
        for (files, name, verdict, said) in table {
            let check = check(files, name).unwrap();
            assert_eq!(check.verdict, *verdict, "{files:?}: {check:?}");
            assert!(check.finding.contains(said), "{files:?}: {check:?}");
            assert_eq!(check.mend.is_some(), *verdict != Ok, "{check:?}");
        }
        for absent in ["kubelet flags", "kubelet cpu_manager_state"] {
            assert_eq!(check(&[], absent), None);
        }
    }
}
