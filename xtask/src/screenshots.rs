//! `cargo xtask screenshots`: the pictures of the book, of the demo's machine: the page in a browser, `numaward top` in
//! a terminal. On the way, what the page shows is held against `/metrics`.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
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
    setup::ensure(&[Part::Browser])?;
    // A port that is free now, and most likely still is when the machine has booted.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let words = ["demo".to_owned(), format!("--port={port}"), format!("--for={LONGEST}")];
    let programs = build::programs(&["numaward"], "dev", false)?;
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
    terminal(program, address, &folder)?;
    page(address, &folder)
}

/// `numaward top`: the lists, and a workload with a guarantee.
fn terminal(program: &Path, address: SocketAddr, folder: &Path) -> Result<()> {
    let mut top = Command::new(program);
    top.args(["top", "--server", &format!("http://{address}")])
        .env("TERM", "xterm-256color")
        .env("LC_ALL", "C.UTF-8")
        .env_remove("NO_COLOR");
    let mut terminal = Terminal::start(&top, 24, 100)?;
    // What is at work, and where its memory lies.
    let busy = |text: &str| {
        let shows = |name: &str| {
            text.lines().any(|line| line.contains(name) && line.contains("/s") && line.contains(" %"))
        };
        shows("database") && shows("guarded")
    };
    picture(&terminal, &folder.join("top.svg"), "numaward top: nodes, workloads and events", busy)?;
    // The workload with a guarantee, once there is as much history of its rates as there is room for.
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

/// The page, in both themes.
fn page(address: SocketAddr, folder: &Path) -> Result<()> {
    let tests = test::page_tests()?;
    let mut shots = Command::new("node");
    shots.arg("screenshots.mjs").arg(format!("http://{address}/")).arg(folder).current_dir(tests);
    command::run(&mut shots)
}
