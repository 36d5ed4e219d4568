//! Support for the end-to-end tests: boots virtual machines, and parses the report of the script that runs inside.
//!
//! # Problem
//! A boot takes seconds, so one boot should serve many checks. A check should be made in Rust, where its failure can be
//! explained, and not in the shell script.
//!
//! # Algorithm
//! The script measures and prints in sections (`section NAME` of `guest.sh`, which precedes every script). The test
//! reads the sections as text or JSON and makes assertions.
//!
//! To add a test, write a script `e2e/NAME.sh` that prints sections, and a function in `e2e/` that boots with it.
//! Several functions may use the report of one boot.
//!
//! # Invariants
//! - A test that cannot run fails in continuous integration; elsewhere it prints that it was skipped, with the reason.
//! - A script begins with `set -eu`: the first command that fails ends it, unless the script handles the failure (`with_code`,
//!   `must_fail`, `|| true`).
//! - A test fails if a program panics, or if the daemon logs an error that the script does not declare with `expect_error`.
//! - The section `left over` lists everything that a script leaves on the machine. If the script begins with
//!   `leaves_nothing`, this must be nothing.

#![forbid(unsafe_code)]
#![expect(clippy::panic, reason = "a library of tests")]

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    env, fmt,
    io::{self, Write},
    path::PathBuf,
    time::Instant,
};

use numaward_vm::{Arch, Cache, Debian, Error, GuestTopology, Kernel, Monitor, TOOLS, Vm, find_tool};

/// Name of the variable with the name of the kernel.
pub const KERNEL: &str = "NUMAWARD_VM_KERNEL";
/// Name of the variable with the processor of machines.
pub const ARCH: &str = "NUMAWARD_VM_ARCH";
/// Name of the variable with the folder of the static programs.
pub const PROGRAMS: &str = "NUMAWARD_VM_PROGRAMS";
/// Name of the variable that is `true` if slow tests run in full.
pub const SLOW: &str = "NUMAWARD_VM_SLOW";

/// Name of the variable with the seed of tests that make random requests.
pub const SEED: &str = "NUMAWARD_SEED";

/// Programs that are copied into each machine.
const NAMES: [&str; 2] = ["numaward", "numaward-load"];
/// Programs that are copied if the script names them.
const HELPERS: [&str; 6] = [
    "numaward-answers-check",
    "numaward-capabilities",
    "numaward-crash-check",
    "numaward-cri",
    "numaward-enforce-check",
    "numaward-harm-check",
];
/// Shell functions that precede every script.
const PRELUDE: &str = include_str!("guest.sh");

/// A kernel and the programs under test.
#[derive(Debug, Clone)]
pub struct TestEnvironment {
    kernel: Kernel,
    programs: PathBuf,
}

impl TestEnvironment {
    /// Returns the environment that `cargo xtask vm test` has prepared. If there is none, prints the reason and returns
    /// `None`.
    ///
    /// # Panics
    ///
    /// If there is none and `CI=true`.
    pub fn open() -> Option<Self> {
        match Self::find() {
            Ok(bench) => Some(bench),
            Err(reason) => {
                assert!(!numaward_tests_support::is_ci(), "this test cannot run: {reason}");
                eprintln!("skipped: {reason}");
                None
            }
        }
    }

    fn find() -> Result<Self, String> {
        let variable =
            |name: &str| env::var(name).map_err(|_| format!("{name} is not set; run `cargo xtask vm test`"));
        let (kernel, programs) = (variable(KERNEL)?, PathBuf::from(variable(PROGRAMS)?));
        let arch: Arch = variable(ARCH)?.parse()?;
        let mut tools = [arch.emulator()].into_iter().chain(TOOLS.iter().copied());
        if let Some((tool, package)) = tools.find(|(tool, _)| find_tool(tool).is_none()) {
            return Err(format!("{tool} (Debian package {package}) is missing"));
        }
        let kernel = Cache::locate().and_then(|cache| Kernel::find(&cache, arch, &kernel));
        Ok(Self { kernel: kernel.map_err(|error| error.to_string())?, programs })
    }

    /// Returns whether slow tests run in full.
    pub fn is_slow(&self) -> bool {
        env::var(SLOW).as_deref() == Ok("true")
    }

    /// Returns the kernel that machines boot.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Returns the path of a program that only some tests need.
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }

    /// Returns the path of a file that `cargo xtask dist` makes, here of the programs under test.
    pub fn made(&self, name: &str) -> PathBuf {
        self.programs.join("dist").join(name)
    }

    /// Creates a machine with the programs on its PATH, which can be changed before it is booted.
    pub fn vm(&self, machine: GuestTopology) -> Vm {
        let program = |name: &str| (self.programs.join(name), format!("/bin/{name}"));
        let vm = Vm::new(self.kernel.clone(), machine);
        let vm = NAMES.iter().map(|name| program(name)).fold(vm, |vm, (path, guest)| vm.file(path, guest));
        let helpers = HELPERS.iter().map(|name| program(name)).filter(|(path, _)| path.is_file());
        helpers.fold(vm, |vm, (path, guest)| vm.offer(path, guest))
    }

    /// Like [`TestEnvironment::vm`], with systemd as the first process.
    ///
    /// # Panics
    ///
    /// If the root file system for it is not in the cache; `cargo xtask vm test` creates it.
    pub fn vm_with_systemd(&self, machine: GuestTopology) -> Vm {
        match Cache::locate().and_then(|cache| Debian::find(&cache, self.kernel.arch())) {
            Ok(debian) => self.vm(machine).systemd(debian),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Returns the seed of random requests: that of the environment, or 1.
///
/// # Panics
///
/// If the variable is not a number.
pub fn seed() -> u64 {
    env::var(SEED).map_or(1, |text| text.parse().unwrap_or_else(|error| panic!("{SEED}={text}: {error}")))
}

/// Boots, runs the script and returns its sections.
///
/// # Panics
///
/// If the machine fails or the script's exit code is not 0.
pub fn boot(vm: &Vm, script: &str) -> ScriptReport {
    let mut output = TimedOutput::new();
    let result = vm.run(&with_prelude(script), &mut output);
    eprintln!("{output}");
    report(result, &output.bytes)
}

/// Number of sections in the list of the slowest ones.
const MAX_SLOW_SECTIONS: usize = 8;

/// Output of a script, with the host's time at the begin of each section.
struct TimedOutput {
    bytes: Vec<u8>,
    /// Number of bytes that were searched for the begin of a section.
    searched: usize,
    sections: Vec<(String, Instant)>,
}

impl TimedOutput {
    fn new() -> Self {
        let boot = ("(boot)".to_owned(), Instant::now());
        Self { bytes: Vec::new(), searched: 0, sections: vec![boot] }
    }
}

impl Write for TimedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        while let Some(length) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') {
            let line = &self.bytes[self.searched..self.searched + length];
            if let Some(name) = line.strip_prefix(b"=== ") {
                self.sections.push((String::from_utf8_lossy(name).into_owned(), Instant::now()));
            }
            self.searched += length + 1;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Display for TimedOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends = self.sections.iter().skip(1).map(|(_, begin)| *begin).chain([Instant::now()]);
        let mut times: Vec<_> = self
            .sections
            .iter()
            .zip(ends)
            .map(|((name, begin), end)| (end.duration_since(*begin), name))
            .collect();
        times.sort_by_key(|(time, _)| Reverse(*time));
        f.write_str("slowest sections on the host:")?;
        for (time, name) in times.iter().take(MAX_SLOW_SECTIONS) {
            write!(f, "\n{:6.1} s  {name}", time.as_secs_f64())?;
        }
        Ok(())
    }
}

/// Returns a script with the shell functions that precede every script.
pub fn with_prelude(script: &str) -> String {
    format!("{PRELUDE}\n{script}")
}

/// Like [`boot`], for a machine with room for more memory: when the script begins the section `at`, `change` is called
/// with the machine's monitor.
///
/// # Panics
///
/// Like [`boot`], and if the monitor refuses or the script never begins `at`.
pub fn boot_and_change(
    vm: &Vm,
    script: &str,
    at: &str,
    change: impl FnOnce(&mut Monitor) -> Result<(), Error>,
) -> ScriptReport {
    let running = vm.start(&with_prelude(script)).unwrap_or_else(|error| panic!("{error}"));
    let monitor = running.monitor().unwrap_or_else(|error| panic!("{error}"));
    let at = format!("=== {at}\n");
    let mut changer = Changer { output: Vec::new(), at, change: Some((monitor, change)) };
    let result = running.finish(&mut changer);
    let report = report(result, &changer.output);
    assert!(changer.change.is_none(), "the script never printed {:?}:\n{report}", changer.at);
    report
}

/// Keeps the output, and makes a change once the output contains `at`.
struct Changer<F> {
    output: Vec<u8>,
    at: String,
    change: Option<(Monitor, F)>,
}

impl<F: FnOnce(&mut Monitor) -> Result<(), Error>> Write for Changer<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.output.extend_from_slice(bytes);
        if String::from_utf8_lossy(&self.output).contains(&self.at)
            && let Some((mut monitor, change)) = self.change.take()
        {
            change(&mut monitor).map_err(io::Error::other)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the sections of a script, by its result and its output.
///
/// # Panics
///
/// Like [`boot`].
pub fn report(result: Result<u8, Error>, output: &[u8]) -> ScriptReport {
    let report = ScriptReport { text: String::from_utf8_lossy(output).into_owned() };
    match result {
        Ok(0) => {
            report.assert_sound();
            report
        }
        Ok(code) => panic!("the script ended with {code}; it printed:\n{report}"),
        Err(error) => panic!("{error}\nThe script printed:\n{report}"),
    }
}

/// Output of a script.
#[derive(Debug)]
pub struct ScriptReport {
    text: String,
}

impl fmt::Display for ScriptReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl ScriptReport {
    /// Asserts that no program panicked, that the daemon logged exactly the errors that the script declares with
    /// `expect_error`, and that nothing is left over if the script declares this with `leaves_nothing`.
    fn assert_sound(&self) {
        for text in ["panicked at", "are not written to the kernel"] {
            assert!(!self.text.contains(text), "{text:?} in:\n{self}");
        }
        for section in ["unchecked errors", "left over"] {
            match self.find(section) {
                None | Some("") => {}
                Some(found) => eprintln!("{section}:\n{found}"),
            }
        }
        self.section("left over");
        for section in ["unexpected errors", "errors that did not occur", "left over, but declared clean"] {
            let found = self.find(section).unwrap_or_default();
            assert_eq!(found, "", "{section} at the end of:\n{self}");
        }
    }

    /// Returns the text of a section, without the last line feed.
    ///
    /// # Panics
    ///
    /// If the script has printed no such section.
    pub fn section(&self, name: &str) -> &str {
        self.find(name).unwrap_or_else(|| panic!("no section {name:?} in:\n{self}"))
    }

    /// Parses the section as JSON.
    ///
    /// # Panics
    ///
    /// If it is missing or not JSON.
    pub fn json(&self, name: &str) -> serde_json::Value {
        let text = self.section(name);
        serde_json::from_str(text).unwrap_or_else(|error| panic!("section {name:?}: {error}:\n{text}"))
    }

    /// Returns the samples of a metric family in the section, by their labels without braces.
    ///
    /// # Panics
    ///
    /// If there are none, for example because the metric has another name.
    pub fn samples<'a>(&'a self, section: &str, family: &str) -> BTreeMap<&'a str, f64> {
        let sample = |line: &'a str| {
            let (labels, value) = line.strip_prefix(family)?.rsplit_once(' ')?;
            let labels =
                if labels.is_empty() { labels } else { labels.strip_prefix('{')?.strip_suffix('}')? };
            Some((
                labels,
                value.parse().unwrap_or_else(|_| panic!("section {section:?}: cannot read {line:?}")),
            ))
        };
        let samples: BTreeMap<_, _> = self.section(section).lines().filter_map(sample).collect();
        assert!(!samples.is_empty(), "section {section:?}: no samples of {family}:\n{self}");
        samples
    }

    /// Asserts that the daemon has written no knob, by its metrics in the section.
    ///
    /// # Panics
    ///
    /// If it has, or if the section does not have these metrics.
    pub fn assert_no_writes(&self, section: &str) {
        let writes = self.samples(section, "numaward_enforcement_writes_total");
        let ok: Vec<_> = writes.iter().filter(|(labels, _)| labels.contains("result=\"ok\"")).collect();
        assert!(
            ok.len() >= 3 && ok.iter().all(|(_, count)| **count == 0.0),
            "section {section:?}: {writes:#?}"
        );
    }

    /// Parses the section as a file of cgroup v2 with a number per node, such as `memory.numa_stat`: `anon N0=1 N1=2`.
    ///
    /// # Panics
    ///
    /// If it is missing or has another format.
    pub fn numa_stat(&self, name: &str) -> BTreeMap<String, BTreeMap<u32, u64>> {
        let line = |line: &str| {
            let (key, values) = line.split_once(' ')?;
            let values = values.split(' ').map(|value| {
                let (node, number) = value.strip_prefix('N')?.split_once('=')?;
                Some((node.parse().ok()?, number.parse().ok()?))
            });
            Some((key.to_owned(), values.collect::<Option<_>>()?))
        };
        let lines = self.section(name).lines();
        lines
            .map(|text| line(text).unwrap_or_else(|| panic!("section {name:?}: cannot read {text:?}")))
            .collect()
    }

    fn find(&self, name: &str) -> Option<&str> {
        let start = format!("=== {name}\n");
        let begin =
            if self.text.starts_with(&start) { 0 } else { self.text.find(&format!("\n{start}"))? + 1 };
        let section = &self.text[begin + start.len()..];
        let end =
            if section.starts_with("=== ") { 0 } else { section.find("\n=== ").unwrap_or(section.len()) };
        Some(section[..end].trim_end_matches('\n'))
    }
}

/// Asserts that two numbers of pages or bytes agree within `percent` of `scale`.
///
/// # Panics
///
/// If they do not.
pub fn assert_near(what: &str, found: u64, expected: u64, scale: u64, percent: u64) {
    let off = found.abs_diff(expected);
    assert!(
        off.saturating_mul(100) <= scale.saturating_mul(percent),
        "{what}: found {found}, expected {expected} within {percent} % of {scale}: off by {off}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_sections() {
        let text =
            "noise\n=== a\n1\n\n=== empty\n=== a b\n{\"x\": [1]}\n=== stat\nanon N0=1 N1=20\nfile N0=3\n";
        let report = ScriptReport { text: text.to_owned() };
        assert_eq!(report.section("a"), "1");
        assert_eq!(report.section("empty"), "");
        assert_eq!(report.json("a b")["x"][0], 1);
        let stat = report.numa_stat("stat");
        assert_eq!((stat["anon"][&1], stat["file"][&0]), (20, 3));
        assert_eq!(report.find("b"), None);
        let first = ScriptReport { text: "=== a\n1".to_owned() };
        assert_eq!(first.section("a"), "1");
    }

    #[test]
    fn returns_samples_of_family() {
        let text = "=== m\na_total{knob=\"x\",result=\"ok\"} 0\na_total_more{knob=\"x\"} 2\nb 1.5\n";
        let report = ScriptReport { text: text.to_owned() };
        assert_eq!(report.samples("m", "a_total"), BTreeMap::from([("knob=\"x\",result=\"ok\"", 0.0)]));
        assert_eq!(report.samples("m", "b"), BTreeMap::from([("", 1.5)]));
        std::panic::catch_unwind(|| report.samples("m", "a").len()).unwrap_err();
    }

    #[test]
    fn finds_panics_and_errors() {
        let sound = |text: &str| {
            let report = ScriptReport { text: format!("=== a\n1\n{text}") };
            std::panic::catch_unwind(|| report.assert_sound()).is_ok()
        };
        let end = "=== unexpected errors\n\n=== errors that did not occur\n\n=== left over\nleft: x\n";
        assert!(sound(end));
        for text in [
            String::new(),
            format!("thread 'main' panicked at src/main.rs:1:1:\n{end}"),
            end.replace("errors\n", "errors\n2026-11-28T00:00:00Z ERROR lost\n"),
            end.replace("occur\n", "occur\nlost\n"),
            format!("{end}=== left over, but declared clean\nleft: y\n"),
        ] {
            assert!(!sound(&text), "{text}");
        }
    }

    /// Scripts without `set -eu`: parts of scripts that have it, scripts that need software which most hosts do not
    /// have, and scripts that only start another program.
    const NOT_STRICT: [&str; 13] = [
        "calls.sh",
        "cluster/disk.sh",
        "cluster/node.sh",
        "cpu_power_unit.sh",
        "guides/common.sh",
        "guides/dpdk.sh",
        "guides/jvm.sh",
        "guides/libvirt.sh",
        "guides/llama.sh",
        "guides/postgresql.sh",
        "guides/qemu.sh",
        "guides/redis.sh",
        "interrupts_unit.sh",
    ];

    #[test]
    fn scripts_end_at_the_first_failure() {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("e2e");
        let (mut folders, mut lax, mut count) = (vec![root.clone()], Vec::new(), 0);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "sh") {
                    count += 1;
                    let text = std::fs::read_to_string(&path).unwrap();
                    if !text.lines().any(|line| line.starts_with("set -eu")) {
                        lax.push(path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned());
                    }
                }
            }
        }
        lax.sort();
        assert_eq!(lax, NOT_STRICT, "of {count} scripts");
    }

    #[test]
    fn near_is_relative_to_scale() {
        assert_near("x", 101, 100, 100, 1);
        assert_near("x", 0, 1, 100, 1);
        let far = std::panic::catch_unwind(|| assert_near("x", 102, 100, 100, 1));
        assert!(far.is_err());
    }
}
