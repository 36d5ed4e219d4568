//! This program as a workload with settings, or as another program that writes knobs.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

const PAGE_SIZE: usize = 4096;

pub(crate) fn main(words: &[&str]) -> Result<()> {
    match words {
        // Touches memory after it entered the cgroup, and holds it until standard input ends.
        ["hold", mib] => {
            say("started")?;
            io::stdin().lock().read_line(&mut String::new())?;
            let mut memory = vec![0u8; mib.parse::<usize>()? << 20];
            memory.iter_mut().step_by(PAGE_SIZE).for_each(|byte| *byte = 1);
            say("touched")?;
            io::stdin().lock().read_line(&mut String::new())?;
            std::hint::black_box(&memory);
            Ok(())
        }
        // Writes once when it is told to, and continues until standard input ends.
        ["write", file, value] => {
            say("started")?;
            io::stdin().lock().read_line(&mut String::new())?;
            std::fs::write(file, value)?;
            io::stdin().lock().read_line(&mut String::new())?;
            Ok(())
        }
        // Writes repeatedly.
        ["write", file, value, pause] => loop {
            std::fs::write(file, value)?;
            thread::sleep(Duration::from_millis(pause.parse()?));
        },
        _ => bail!("unknown: {words:?}"),
    }
}

fn say(word: &str) -> Result<()> {
    println!("{word}");
    Ok(io::stdout().flush()?)
}

/// A child process, which is killed on drop.
pub(crate) struct ChildProcess {
    pub(crate) child: Child,
    said: BufReader<ChildStdout>,
}

impl ChildProcess {
    pub(crate) fn start(words: &[&str]) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("child")
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let said = BufReader::new(child.stdout.take().context("no output")?);
        Ok(Self { child, said })
    }

    /// Starts a process in a cgroup with this amount of touched memory.
    pub(crate) fn holding(mib: u64, dir: &Path) -> Result<Self> {
        let mut this = Self::start(&["hold", &mib.to_string()])?;
        this.expect("started")?;
        std::fs::write(dir.join("cgroup.procs"), this.child.id().to_string())?;
        writeln!(this.child.stdin.as_mut().context("no input")?, "touch")?;
        this.expect("touched")?;
        Ok(this)
    }

    /// Starts a process that is ready to write a value into a file.
    pub(crate) fn writer(file: &Path, value: &str) -> Result<Self> {
        let mut this = Self::start(&["write", &file.display().to_string(), value])?;
        this.expect("started")?;
        Ok(this)
    }

    /// Has a writer write.
    pub(crate) fn write(&mut self) -> Result<()> {
        Ok(writeln!(self.child.stdin.as_mut().context("no input")?, "write")?)
    }

    fn expect(&mut self, word: &str) -> Result<()> {
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        if line.trim() != word {
            bail!("the child said {line:?}, not {word:?}");
        }
        Ok(())
    }

    /// Returns a line of the child's `/proc/PID/status`.
    pub(crate) fn status(&self, key: &str) -> Result<String> {
        let path = format!("/proc/{}/status", self.child.id());
        let text = std::fs::read_to_string(&path)?;
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        Ok(value.with_context(|| format!("{path} has no {key}"))?.trim().to_owned())
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // The child may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
