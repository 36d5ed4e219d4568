//! Builds the probes' eBPF objects from source, if the necessary toolchain is installed.
//!
//! It needs bpf-linker and a Rust toolchain with the sources of `core`, because the BPF target is not distributed as a
//! binary. Two Rust toolchains are supported: a rustup nightly with the component `rust-src`, and Debian's `rustc-web`
//! with `rust-web-src`. Both run with `RUSTC_BOOTSTRAP=1`, because `-Zbuild-std` and inline assembly for BPF are
//! unstable.
//!
//! Without a toolchain the library is built without probes, and loading them reports this. `NUMAWARD_EBPF=require`
//! makes it an error; `NUMAWARD_EBPF=skip` skips the search for a toolchain.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

type Result<T> = std::result::Result<T, String>;

fn main() -> ExitCode {
    println!("cargo::rustc-check-cfg=cfg(numaward_ebpf)");
    println!("cargo::rerun-if-env-changed=NUMAWARD_EBPF");
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("cargo::error={}", error.replace('\n', " | "));
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let root = variable("CARGO_MANIFEST_DIR").map(PathBuf::from)?;
    let root = root.ancestors().nth(2).ok_or("the crate is not in its workspace")?.to_owned();
    for path in ["ebpf/Cargo.toml", "ebpf/src", "ebpf/abi/Cargo.toml", "ebpf/abi/src", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    let wish = env::var("NUMAWARD_EBPF").unwrap_or_default();
    let toolchain = match wish.as_str() {
        "skip" => Err("NUMAWARD_EBPF=skip was set for its build".to_owned()),
        "" | "require" => Toolchain::find(),
        other => return Err(format!("NUMAWARD_EBPF={other:?}: expected `skip` or `require`")),
    };
    match toolchain {
        Ok(toolchain) => {
            let objects = toolchain.build(&root)?;
            println!("cargo::rustc-cfg=numaward_ebpf");
            println!("cargo::rustc-env=NUMAWARD_EBPF_DIR={}", objects.display());
        }
        Err(missing) if wish == "require" => return Err(format!("NUMAWARD_EBPF=require, but {missing}")),
        Err(missing) => {
            // A toolchain would be installed into one of these directories: watch them, so that the next build finds
            // it.
            for path in watched_paths().iter().filter(|path| path.exists()) {
                println!("cargo::rerun-if-changed={}", path.display());
            }
            println!("cargo::warning=no probes are built: {missing}");
            println!("cargo::rustc-env=NUMAWARD_EBPF_MISSING={missing}");
        }
    }
    Ok(())
}

struct Toolchain {
    cargo: PathBuf,
    rustc: PathBuf,
    linker: PathBuf,
}

impl Toolchain {
    fn find() -> Result<Self> {
        const FIX: &str = "`cargo xtask setup` installs what the probes need";
        let linker = find_linker().ok_or(format!("bpf-linker was not found; {FIX}"))?;
        let (cargo, rustc) = rustup_nightly().or_else(debian).ok_or(format!(
            "neither a rustup nightly with rust-src nor Debian's rustc-web with rust-web-src was found; {FIX}"
        ))?;
        for path in [&cargo, &rustc, &linker] {
            println!("cargo::rerun-if-changed={}", path.display());
        }
        Ok(Self { cargo, rustc, linker })
    }

    /// Builds the package `numaward-ebpf` and returns the folder with its objects.
    fn build(&self, root: &Path) -> Result<PathBuf> {
        let target = match variable("CARGO_CFG_TARGET_ENDIAN")?.to_str() {
            Some("little") => "bpfel-unknown-none",
            _ => "bpfeb-unknown-none",
        };
        let arch = variable("CARGO_CFG_TARGET_ARCH")?;
        let out = PathBuf::from(variable("OUT_DIR")?);
        // One folder for all profiles and targets, because the objects are the same.
        let caches = out.ancestors().filter(|folder| folder.join("CACHEDIR.TAG").is_file());
        let shared = caches.last().unwrap_or(&out);
        let shared = shared.join("ebpf").join(&arch);
        let mut flags = OsString::from("--cfg=bpf_target_arch=\"");
        flags.push(arch);
        // The linker creates BTF from debug information.
        flags.push("\"\x1f--check-cfg=cfg(bpf_target_arch,values(any()))\x1f-Cdebuginfo=2\x1f-Clink-arg=--btf\x1f-Clinker=");
        flags.push(&self.linker);
        // BTF contains the paths of the sources. They are remapped, so that they do not depend on the machine. The last
        // match counts.
        let places = [
            (output(Command::new(&self.rustc).arg("--print=sysroot")).map(PathBuf::from), "/rust"),
            (home("CARGO_HOME", ".cargo"), "/cargo"),
            (Some(root.to_owned()), "/numaward"),
            (Some(shared.clone()), "/target"),
        ];
        for (path, name) in places.into_iter().filter_map(|(path, name)| Some((path?, name))) {
            flags.push("\x1f--remap-path-prefix=");
            flags.push(path);
            flags.push("=");
            flags.push(name);
        }

        let mut command = Command::new(&self.cargo);
        command
            .current_dir(root)
            .args(["build", "--locked", "--profile=ebpf", "--package=numaward-ebpf", "--bins"])
            .args(["-Zbuild-std=core", "--target", target, "--target-dir"])
            .arg(&shared)
            .stdin(Stdio::null());
        // The settings of the outer build do not apply to the inner one.
        for (name, _) in env::vars_os().filter(|(name, _)| is_of_this_build(name)) {
            command.env_remove(name);
        }
        command.env("RUSTC", &self.rustc).env("RUSTC_BOOTSTRAP", "1").env("CARGO_ENCODED_RUSTFLAGS", flags);

        let output =
            command.output().map_err(|error| format!("cannot run {}: {error}", self.cargo.display()))?;
        if !output.status.success() {
            let messages = String::from_utf8_lossy(&output.stderr);
            return Err(format!("building the probes failed ({}): {messages}", output.status));
        }
        // Another build may replace the objects in the shared folder while this one is still running.
        let objects = out.join("ebpf");
        copy_objects(&shared.join(target).join("ebpf"), &objects)
            .map_err(|error| format!("cannot copy the probes' objects to {}: {error}", objects.display()))?;
        Ok(objects)
    }
}

/// Copies the files of a folder, without its subfolders. Debug information is removed from objects.
fn copy_objects(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            let content = fs::read(entry.path())?;
            let stripped = without_debug_information(&content).unwrap_or(content);
            fs::write(to.join(entry.file_name()), stripped)?;
        }
    }
    Ok(())
}

/// Returns an object without its debug information, which only the linker needs: it is nine tenths of the object and
/// would become part of the program. The sections stay as empty ones, so that nothing has to be renumbered. `None` if
/// the file is not such an object.
fn without_debug_information(object: &[u8]) -> Option<Vec<u8>> {
    fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<usize> {
        let mut number = [0; 8];
        number[..N].copy_from_slice(bytes.get(at..at + N)?);
        usize::try_from(u64::from_le_bytes(number)).ok()
    }
    const FILE_HEADER: usize = 0x40;
    const SECTION_HEADER: usize = 0x40;
    // elf(5): 64 bits, little endian.
    if !object.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, count, names) =
        (number::<8>(object, 0x28)?, number::<2>(object, 0x3c)?, number::<2>(object, 0x3e)?);
    let header = |index: usize| object.get(table + index * SECTION_HEADER..)?.get(..SECTION_HEADER);
    let content = |header: &[u8]| {
        let (at, size) = (number::<8>(header, 24)?, number::<8>(header, 32)?);
        object.get(at..at.checked_add(size)?)
    };
    let names = content(header(names)?)?;
    let mut stripped = object.get(..FILE_HEADER)?.to_vec();
    let mut headers = Vec::new();
    for index in 0..count {
        let mut header = header(index)?.to_vec();
        let name = names.get(number::<4>(&header, 0)?..)?;
        let is_debug = name.starts_with(b".debug_") || name.starts_with(b".rel.debug_");
        // SHT_NULL and SHT_NOBITS have no content.
        let content =
            if is_debug || [0, 8].contains(&number::<4>(&header, 4)?) { &[] } else { content(&header)? };
        stripped.resize(stripped.len().next_multiple_of(number::<8>(&header, 48)?.max(1)), 0);
        header[24..32].copy_from_slice(&(stripped.len() as u64).to_le_bytes());
        if is_debug {
            header[32..40].fill(0);
        }
        stripped.extend_from_slice(content);
        headers.extend(header);
    }
    stripped.resize(stripped.len().next_multiple_of(8), 0);
    let table = stripped.len() as u64;
    stripped[0x28..0x30].copy_from_slice(&table.to_le_bytes());
    stripped.extend(headers);
    Some(stripped)
}

/// Returns true if cargo or rustup set this variable for the outer build, or if it controls that build.
fn is_of_this_build(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    // With CARGO_MAKEFLAGS, both builds share one job server and so the number of jobs.
    let kept = ["CARGO_HOME", "CARGO_MAKEFLAGS", "RUSTUP_HOME", "RUST_BACKTRACE"].contains(&name)
        || ["CARGO_NET_", "CARGO_HTTP_", "CARGO_REGISTR", "CARGO_SOURCE_"]
            .iter()
            .any(|kind| name.starts_with(kind));
    (name.starts_with("CARGO") || name.starts_with("RUST")) && !kept
}

/// Returns cargo and rustc of the rustup toolchain `nightly` if it has the component `rust-src`.
fn rustup_nightly() -> Option<(PathBuf, PathBuf)> {
    let rustc = output(Command::new("rustup").args(["which", "--toolchain=nightly", "rustc"]))?;
    with_sources(Path::new(&rustc).parent()?)
}

/// Returns cargo and rustc of Debian's packages cargo-web and rustc-web if the sources of rust-web-src are installed.
fn debian() -> Option<(PathBuf, PathBuf)> {
    with_sources(Path::new("/usr/bin"))
}

/// Returns cargo and rustc in a folder if the sources of `core` are installed for them.
fn with_sources(bin: &Path) -> Option<(PathBuf, PathBuf)> {
    let (cargo, rustc) = (bin.join("cargo"), bin.join("rustc"));
    let sysroot = output(Command::new(&rustc).arg("--print=sysroot"))?;
    let core = Path::new(&sysroot).join("lib/rustlib/src/rust/library/core/Cargo.toml");
    (cargo.is_file() && core.is_file()).then_some((cargo, rustc))
}

fn find_linker() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(home("CARGO_HOME", ".cargo").map(|home| home.join("bin")));
    folders.map(|folder| folder.join("bpf-linker")).find(|file| file.is_file())
}

/// Returns folders and files that change when a toolchain or a linker is installed.
fn watched_paths() -> Vec<PathBuf> {
    let linker = home("CARGO_HOME", ".cargo").map(|home| home.join("bin"));
    let toolchains = home("RUSTUP_HOME", ".rustup").map(|home| home.join("update-hashes"));
    let rustc = output(Command::new("rustup").args(["which", "--toolchain=nightly", "rustc"]));
    let sysroot = rustc.and_then(|rustc| Some(Path::new(&rustc).parent()?.parent()?.to_owned()));
    let components = sysroot.map(|sysroot| sysroot.join("lib/rustlib/components"));
    [linker, toolchains, components, Some("/usr/bin".into())].into_iter().flatten().collect()
}

fn home(variable: &str, folder: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).or_else(|| Some(env::home_dir()?.join(folder)))
}

/// Returns the output of a command if it succeeds.
fn output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn variable(name: &str) -> Result<OsString> {
    env::var_os(name).ok_or(format!("{name} is not set; run this through cargo"))
}
