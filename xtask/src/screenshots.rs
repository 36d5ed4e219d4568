//! `cargo xtask screenshots`: the pictures of the book, of the demo's machine: the page in a browser, `numaward top` in
//! a terminal. On the way, what the page shows is held against `/metrics`, and the demo is gone through as
//! its user does: the page is red, one command is run, the page is green. How long that takes is printed.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser as _;
use numaward_terminal::{Screen, Terminal};

use crate::setup::{self, Part};
use crate::{build, command, demo, test};

/// Where the pictures are.
const FOLDER: &str = "docs/images";
/// For booting, and for a terminal to show something, on a busy host.
const PATIENCE: Duration = Duration::from_mins(5);
/// The machine ends by itself if we do not end it.
const LONGEST: u64 = 1200;

#[derive(clap::Parser)]
struct Demo {
    #[command(flatten)]
    arguments: demo::Arguments,
}

pub(crate) fn main() -> Result<()> {
    let begun = Instant::now();
    setup::ensure(&[Part::Browser])?;
    // A port that is free now, and most likely still is when the machine has booted.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port().min(u16::MAX - 1);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let words = ["demo".to_owned(), format!("--port={port}"), format!("--for={LONGEST}")];
    let programs = build::programs(&["numaward"], "dev")?;
    let (_, program) = programs.first().context("cargo has built no program `numaward`")?;
    let mut machine = demo::boot(&Demo::try_parse_from(words)?.arguments, address)?;
    let start = Instant::now();
    while !demo::is_ready(address) {
        if machine.ended()? || start.elapsed() > PATIENCE {
            bail!("the demo's machine does not come up:\n{}", machine.console_tail());
        }
        sleep(Duration::from_millis(500));
    }
    let folder = command::root().join(FOLDER);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    println!("{} s from the start to a daemon that answers", begun.elapsed().as_secs());
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
    println!("{} s to a page that is red", begun.elapsed().as_secs());
    let top = lists(program, address, &folder)?;
    let mut fix = Command::new(program);
    command::run(fix.args(demo::FIX).args(demo::changing(address)).current_dir(command::root()))?;
    println!("{} s to the fix", begun.elapsed().as_secs());
    open.stdin.take().context("node takes no input")?.write_all(b"fixed\n")?;
    ensure!(open.wait()?.success(), "the page does not turn green: see above");
    println!("{} s to the same page, green", begun.elapsed().as_secs());
    workload(top, &folder)?;
    command::run(&mut shoot("book"))
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
