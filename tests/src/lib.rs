//! What the end-to-end tests share: a bench that boots machines, and the report that a script inside gives.
//!
//! The problem: a boot takes seconds, so one boot should serve many checks; and a check should be made where its
//! failure can be explained, which is here and not in a shell script.
//!
//! Algorithm: the script measures and prints, in sections (`section NAME` of `guest.sh`, which every script is
//! preceded by); the test reads the sections as text or JSON and asserts.
//!
//! To add a test: a script `e2e/NAME.sh` that prints sections, and a function in `e2e/` that boots with it. Several
//! functions may share the report of one boot.
//!
//! Invariant: a test that cannot run fails where `CI=true`; elsewhere it says that it was skipped, and why.

#![forbid(unsafe_code)]
#![expect(clippy::panic, reason = "a library of tests")]

use std::{
    collections::BTreeMap,
    env, fmt,
    io::{self, Write},
    path::PathBuf,
};

use numaward_vm::{Arch, Cache, Debian, Error, Kernel, Machine, Monitor, TOOLS, Vm, find_tool};

/// The variable that names the kernel.
pub const KERNEL: &str = "NUMAWARD_VM_KERNEL";
/// The variable that names the processor of machines.
pub const ARCH: &str = "NUMAWARD_VM_ARCH";
/// The variable that names the folder of the static programs.
pub const PROGRAMS: &str = "NUMAWARD_VM_PROGRAMS";
/// The variable that is `true` where slow tests are to run in full.
pub const SLOW: &str = "NUMAWARD_VM_SLOW";

/// The programs that are copied into each machine if they have been built.
const NAMES: [&str; 7] = [
    "numaward",
    "numaward-load",
    "numaward-answers-check",
    "numaward-capabilities",
    "numaward-crash-check",
    "numaward-cri",
    "numaward-enforce-check",
];
/// What every script is preceded by.
const PRELUDE: &str = include_str!("guest.sh");

/// A kernel and the programs under test.
#[derive(Debug, Clone)]
pub struct Bench {
    kernel: Kernel,
    programs: PathBuf,
}

impl Bench {
    /// The bench that `cargo xtask vm test` has prepared; none, after saying why, where there is none.
    ///
    /// # Panics
    ///
    /// Where `CI=true`, instead of returning none.
    pub fn open() -> Option<Self> {
        match Self::find() {
            Ok(bench) => Some(bench),
            Err(reason) => {
                assert!(env::var("CI").as_deref() != Ok("true"), "this test cannot run: {reason}");
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

    /// Whether what takes minutes is to run in full.
    pub fn is_slow(&self) -> bool {
        env::var(SLOW).as_deref() == Ok("true")
    }

    /// The kernel that machines boot.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// A program that only some tests need, by its name.
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }

    /// A file of those that `cargo xtask dist` makes, here of the programs under test.
    pub fn made(&self, name: &str) -> PathBuf {
        self.programs.join("dist").join(name)
    }

    /// A machine with the programs on its PATH, to be changed as needed and then booted.
    pub fn vm(&self, machine: Machine) -> Vm {
        let programs = NAMES.iter().map(|name| (self.programs.join(name), format!("/bin/{name}")));
        programs
            .filter(|(path, _)| path.is_file())
            .fold(Vm::new(self.kernel.clone(), machine), |vm, (path, guest)| vm.file(path, guest))
    }

    /// The same with systemd as its first process.
    ///
    /// # Panics
    ///
    /// If setup has not made the root file system for it, as `cargo xtask vm test` sees to.
    pub fn vm_with_systemd(&self, machine: Machine) -> Vm {
        match Cache::locate().and_then(|cache| Debian::find(&cache, self.kernel.arch())) {
            Ok(debian) => self.vm(machine).systemd(debian),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Boots, runs the script and returns its sections.
///
/// # Panics
///
/// If the machine fails or the script's exit code is not 0.
pub fn boot(vm: &Vm, script: &str) -> Report {
    let mut output = Vec::new();
    let result = vm.run(&with_prelude(script), &mut output);
    report(result, &output)
}

/// A script after what every script is preceded by.
pub fn with_prelude(script: &str) -> String {
    format!("{PRELUDE}\n{script}")
}

/// As [`boot`], for a machine with room for more memory: when the script begins the section `at`, `change` is called with
/// the machine's monitor.
///
/// # Panics
///
/// As [`boot`], and if the monitor refuses or the script never comes to `at`.
pub fn boot_and_change(
    vm: &Vm,
    script: &str,
    at: &str,
    change: impl FnOnce(&mut Monitor) -> Result<(), Error>,
) -> Report {
    let running = vm.start(&with_prelude(script)).unwrap_or_else(|error| panic!("{error}"));
    let monitor = running.monitor().unwrap_or_else(|error| panic!("{error}"));
    let at = format!("=== {at}\n");
    let mut changer = Changer { output: Vec::new(), at, change: Some((monitor, change)) };
    let result = running.finish(&mut changer);
    let report = report(result, &changer.output);
    assert!(changer.change.is_none(), "the script never printed {:?}:\n{report}", changer.at);
    report
}

/// Keeps what is written, and makes a change once `at` was.
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

fn report(result: Result<u8, Error>, output: &[u8]) -> Report {
    let report = Report::new(&String::from_utf8_lossy(output));
    match result {
        Ok(0) => report,
        Ok(code) => panic!("the script ended with {code}; it printed:\n{report}"),
        Err(error) => panic!("{error}\nThe script printed:\n{report}"),
    }
}

/// What a script printed.
#[derive(Debug)]
pub struct Report {
    text: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Report {
    /// What was printed, without the line in which `exec` and `guarantee` say how exclusive CPUs are: what the script prints
    /// is one stream, and most sections are about something else.
    fn new(printed: &str) -> Self {
        let remarks = [
            "other processes on CPUs ",
            "are not written to the kernel: ",
            "processes of the root cgroup may still run on",
        ];
        // It may follow what another program wrote without an end of the line.
        let kept = |line: &'_ str| {
            let start = remarks.iter().find_map(|remark| line[..line.find(remark)?].rfind("numaward: "));
            match start {
                None => line.to_owned(),
                Some(0) => String::new(),
                Some(start) => format!("{}\n", &line[..start]),
            }
        };
        Self { text: printed.split_inclusive('\n').map(kept).collect() }
    }

    /// The text of a section, without the end of its last line.
    ///
    /// # Panics
    ///
    /// If the script has printed no such section.
    pub fn section(&self, name: &str) -> &str {
        self.find(name).unwrap_or_else(|| panic!("no section {name:?} in:\n{self}"))
    }

    /// The section read as JSON.
    ///
    /// # Panics
    ///
    /// If it is missing or not JSON.
    pub fn json(&self, name: &str) -> serde_json::Value {
        let text = self.section(name);
        serde_json::from_str(text).unwrap_or_else(|error| panic!("section {name:?}: {error}:\n{text}"))
    }

    /// The section read as a file of cgroup v2 with a number per node, such as `memory.numa_stat`: `anon N0=1 N1=2`.
    ///
    /// # Panics
    ///
    /// If it is missing or looks otherwise.
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

/// Whether two numbers of pages or bytes agree within `percent` of `scale`.
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
    fn sections_are_told_apart() {
        let text =
            "noise\n=== a\n1\n\n=== empty\n=== a b\n{\"x\": [1]}\n=== stat\nanon N0=1 N1=20\nfile N0=3\n";
        let report = Report { text: text.to_owned() };
        assert_eq!(report.section("a"), "1");
        assert_eq!(report.section("empty"), "");
        assert_eq!(report.json("a b")["x"][0], 1);
        let stat = report.numa_stat("stat");
        assert_eq!((stat["anon"][&1], stat["file"][&0]), (20, 3));
        assert_eq!(report.find("b"), None);
        let first = Report { text: "=== a\n1".to_owned() };
        assert_eq!(first.section("a"), "1");
    }

    #[test]
    fn remarks_on_exclusive_cpus_are_no_result() {
        let remark =
            "numaward: 0 cgroups and 5 processes of the root cgroup may still run on CPUs 1: they stay\n";
        let text = format!("=== a\n{remark}numaward: first\n=== b\n{{}}{remark}\n=== c\n1\n");
        let report = Report::new(&text);
        assert_eq!(report.section("a"), "numaward: first");
        assert_eq!(report.section("b"), "{}");
        assert_eq!(report.section("c"), "1");
    }

    #[test]
    fn nearness_is_relative_to_the_scale() {
        assert_near("x", 101, 100, 100, 1);
        assert_near("x", 0, 1, 100, 1);
        let far = std::panic::catch_unwind(|| assert_near("x", 102, 100, 100, 1));
        assert!(far.is_err());
    }
}
