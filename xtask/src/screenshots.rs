//! `cargo xtask screenshots`: makes the pictures of the documentation in the demo's machine: the page in a browser, and
//! `numaward top` in a terminal. It also compares the page with `/metrics`, and follows the demo like a user: the page
//! is red, one command is run, the page is green. The duration is printed.
//!
//! With `--newcomer`, this is done in a fresh clone and ends with the green page. The clone has no builds, but packages
//! of cargo and files of the virtual machines are cached.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Parser as _};
use numaward_terminal::{Screen, Terminal};

use crate::setup::{self, Part};
use crate::{command, demo, test, vm};

/// Folder of the pictures.
const FOLDER: &str = "docs/images";
/// The time limit of a boot, and of an update of a terminal, on a busy host.
const BOOT_TIMEOUT: Duration = Duration::from_mins(5);
/// The maximum duration in seconds, after which the machine ends by itself.
const MAX_SECONDS: u64 = 1200;

/// Beginning of the line that reports the end of a step.
const STEP_PREFIX: &str = "step: ";

#[derive(Args)]
pub(crate) struct Arguments {
    /// Makes no pictures: clones this checkout like a new user, follows the demo there, and prints the duration of each
    /// step. Uncommitted changes are not included
    #[arg(long)]
    newcomer: bool,
    /// Only follows the demo; its pictures go to this folder
    #[arg(long, value_name = "FOLDER", hide = true, conflicts_with = "newcomer")]
    only_demo: Option<PathBuf>,
}

#[derive(clap::Parser)]
struct Demo {
    #[command(flatten)]
    arguments: demo::Arguments,
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    if arguments.newcomer {
        return newcomer();
    }
    let begun = Instant::now();
    let over = |step: &str| println!("{STEP_PREFIX}{step} ({} s)", begun.elapsed().as_secs());
    setup::ensure(&[Part::Browser])?;
    // A port that is free now, and most likely still is after the boot.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port().min(u16::MAX - 1);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let words = ["demo".to_owned(), format!("--port={port}"), format!("--for={MAX_SECONDS}")];
    let demo = Demo::try_parse_from(words)?.arguments;
    let programs = demo::programs(&demo)?;
    let program = vm::daemon(&programs)?;
    over("the programs are built");
    let mut machine = demo::boot(&demo, &programs, address)?;
    let start = Instant::now();
    while !demo::is_ready(address) {
        if machine.ended()? || start.elapsed() > BOOT_TIMEOUT {
            bail!("the demo's machine does not come up:\n{}", machine.console_tail());
        }
        sleep(Duration::from_millis(500));
    }
    let folder = arguments.only_demo.clone().unwrap_or_else(|| command::root().join(FOLDER));
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    over("a daemon answers");
    let tests = test::page_tests()?;
    let shoot = |what: &str| {
        let mut shots = Command::new("node");
        shots.arg("screenshots.mjs").arg(what).arg(format!("http://{address}/")).arg(&folder);
        shots.current_dir(&tests);
        shots
    };
    // A page that stays open all the time.
    let mut open =
        shoot("fix").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot run node")?;
    let said = BufReader::new(open.stdout.take().context("node says nothing")?);
    let is_red = said.lines().map_while(Result::ok).any(|line| line == "red");
    ensure!(is_red, "the page does not turn red: see above");
    over("the page is red");
    let top = match arguments.only_demo {
        Some(_) => None,
        None => Some(lists(program, address, &folder)?),
    };
    let mut fix = Command::new(program);
    command::run(fix.args(demo::FIX).args(demo::changing(address)).current_dir(command::root()))?;
    over("the fix is made");
    open.stdin.take().context("node takes no input")?.write_all(b"fixed\n")?;
    ensure!(open.wait()?.success(), "the page does not turn green: see above");
    over("the same page is green");
    let Some(top) = top else { return Ok(()) };
    workload(top, &folder)?;
    command::run(&mut shoot("book"))
}

/// Follows the demo like a new user, from the clone to the green page.
fn newcomer() -> Result<()> {
    let begun = Instant::now();
    let temporary = tempfile::tempdir().context("cannot make a temporary folder")?;
    let (clone, pictures) = (temporary.path().join("numaward"), temporary.path().join("pictures"));
    command::run(Command::new("git").args(["clone", "--quiet"]).arg(command::root()).arg(&clone))?;
    let mut steps = vec![("the checkout is cloned".to_owned(), begun.elapsed())];
    let mut demo = Command::new(command::cargo().get_program());
    demo.args(["xtask", "screenshots", "--only-demo"]).arg(&pictures).current_dir(&clone);
    // A new user has no earlier builds.
    demo.env_remove("CARGO_TARGET_DIR").env_remove("CARGO_BUILD_TARGET_DIR");
    let mut demo = demo.stdout(Stdio::piped()).spawn().context("cannot run cargo")?;
    let said = BufReader::new(demo.stdout.take().context("cargo says nothing")?);
    for line in said.lines().map_while(Result::ok) {
        println!("{line}");
        if let Some(step) = line.strip_prefix(STEP_PREFIX) {
            let step = step.rsplit_once(" (").map_or(step, |(step, _)| step);
            steps.push((step.to_owned(), begun.elapsed()));
        }
    }
    ensure!(demo.wait()?.success(), "a newcomer does not get to the green page: see above");
    let mut before = Duration::ZERO;
    println!("{:<26} {:>7} {:>8}", "step", "took", "since");
    for (step, since) in steps {
        println!("{step:<26} {:>5} s {:>6} s", since.saturating_sub(before).as_secs(), since.as_secs());
        before = since;
    }
    Ok(())
}

/// Draws the lists of `numaward top` while a workload has misses.
fn lists(program: &Path, address: SocketAddr, folder: &Path) -> Result<Terminal> {
    let mut top = Command::new(program);
    top.args(["top", "--server", &format!("http://{address}")])
        .env("TERM", "xterm-256color")
        .env("LC_ALL", "C.UTF-8")
        .env_remove("NO_COLOR");
    let terminal = Terminal::start(&top, 24, 100)?;
    // Workloads with activity, and their memory.
    let busy = |text: &str| {
        let shows = |name: &str| {
            text.lines().any(|line| line.contains(name) && line.contains("/s") && line.contains(" %"))
        };
        shows("database") && shows("guarded")
    };
    picture(&terminal, &folder.join("top.svg"), "numaward top: nodes, workloads and events", busy)?;
    Ok(terminal)
}

/// Draws the workload with a guarantee, once the history of its rates is complete.
fn workload(mut terminal: Terminal, folder: &Path) -> Result<()> {
    terminal.resize(48, 100)?;
    terminal.press("/guarded\r\r")?;
    let decided = |text: &str| text.contains("PREFERRED") && text.contains("in the last 70 s");
    picture(
        &terminal,
        &folder.join("top-workload.svg"),
        "numaward top: a workload and its decision",
        decided,
    )?;
    terminal.press("\x03")?;
    Ok(())
}

/// Waits until the terminal satisfies the condition, and draws it.
fn picture(terminal: &Terminal, path: &Path, title: &str, is_so: impl Fn(&str) -> bool) -> Result<()> {
    if let Err(last) = terminal.wait_for(BOOT_TIMEOUT, |screen: &Screen| is_so(&screen.contents())) {
        bail!("{title}: that does not come; the last was:\n{last}");
    }
    fs::write(path, terminal.svg(title)).with_context(|| format!("cannot write {}", path.display()))
}
