//! `cargo xtask screenshots`: the pictures of the book, of the demo's machine: the page in a browser, `numaward top` in
//! a terminal. On the way, what the page shows is held against `/metrics`, and the demo is gone through as
//! its user does: the page is red, one command is run, the page is green. How long that takes is printed.
//!
//! With `--newcomer`, this is done in a fresh clone and ends with the green page. Nothing is built in a clone; what cargo and
//! the virtual machines have fetched is there already.

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

/// Where the pictures are.
const FOLDER: &str = "docs/images";
/// For booting, and for a terminal to show something, on a busy host.
const PATIENCE: Duration = Duration::from_mins(5);
/// The machine ends by itself if we do not end it.
const LONGEST: u64 = 1200;

/// What a line begins with that says that a step is over.
const STEP: &str = "step: ";

#[derive(Args)]
pub(crate) struct Arguments {
    /// Makes no pictures: clones this checkout, as somebody new does, goes through the demo there, and prints how long each
    /// step took. What is not committed is not part of it
    #[arg(long)]
    newcomer: bool,
    /// Only goes through the demo; its pictures go to this folder
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
    let over = |step: &str| println!("{STEP}{step} ({} s)", begun.elapsed().as_secs());
    setup::ensure(&[Part::Browser])?;
    // A port that is free now, and most likely still is when the machine has booted.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port().min(u16::MAX - 1);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let words = ["demo".to_owned(), format!("--port={port}"), format!("--for={LONGEST}")];
    let demo = Demo::try_parse_from(words)?.arguments;
    let programs = demo::programs(&demo)?;
    let program = vm::daemon(&programs)?;
    over("the programs are built");
    let mut machine = demo::boot(&demo, &programs, address)?;
    let start = Instant::now();
    while !demo::is_ready(address) {
        if machine.ended()? || start.elapsed() > PATIENCE {
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
    // One page, which somebody has open all the time.
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

/// The way of somebody new, from the clone to the green page.
fn newcomer() -> Result<()> {
    let begun = Instant::now();
    let temporary = tempfile::tempdir().context("cannot make a temporary folder")?;
    let (clone, pictures) = (temporary.path().join("numaward"), temporary.path().join("pictures"));
    command::run(Command::new("git").args(["clone", "--quiet"]).arg(command::root()).arg(&clone))?;
    let mut steps = vec![("the checkout is cloned".to_owned(), begun.elapsed())];
    let mut demo = Command::new(command::cargo().get_program());
    demo.args(["xtask", "screenshots", "--only-demo"]).arg(&pictures).current_dir(&clone);
    // What was built here is not there for somebody new.
    demo.env_remove("CARGO_TARGET_DIR").env_remove("CARGO_BUILD_TARGET_DIR");
    let mut demo = demo.stdout(Stdio::piped()).spawn().context("cannot run cargo")?;
    let said = BufReader::new(demo.stdout.take().context("cargo says nothing")?);
    for line in said.lines().map_while(Result::ok) {
        println!("{line}");
        if let Some(step) = line.strip_prefix(STEP) {
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

/// The lists of `numaward top`, while one is wrong.
fn lists(program: &Path, address: SocketAddr, folder: &Path) -> Result<Terminal> {
    let mut top = Command::new(program);
    top.args(["top", "--server", &format!("http://{address}")])
        .env("TERM", "xterm-256color")
        .env("LC_ALL", "C.UTF-8")
        .env_remove("NO_COLOR");
    let terminal = Terminal::start(&top, 24, 100)?;
    // What is at work, and where its memory lies.
    let busy = |text: &str| {
        let shows = |name: &str| {
            text.lines().any(|line| line.contains(name) && line.contains("/s") && line.contains(" %"))
        };
        shows("database") && shows("guarded")
    };
    picture(&terminal, &folder.join("top.svg"), "numaward top: nodes, workloads and events", busy)?;
    Ok(terminal)
}

/// The workload with a guarantee, once there is as much history of its rates as there is room for.
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

/// Waits until there is something to be seen, and draws it.
fn picture(terminal: &Terminal, path: &Path, title: &str, is_so: impl Fn(&str) -> bool) -> Result<()> {
    if let Err(last) = terminal.wait_for(PATIENCE, |screen: &Screen| is_so(&screen.contents())) {
        bail!("{title}: that does not come; the last was:\n{last}");
    }
    fs::write(path, terminal.svg(title)).with_context(|| format!("cannot write {}", path.display()))
}
