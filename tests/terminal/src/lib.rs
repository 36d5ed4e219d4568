//! A pseudo-terminal for tests: runs a command in it, presses keys, reads the screen as a person sees it, and draws the
//! screen as an SVG image for the documentation.
//!
//! ```text
//! command ── pseudo-terminal ── reader (a thread) ── vt100: what each cell shows
//! ```

#![forbid(unsafe_code)]

mod svg;

use std::{
    ffi::OsStr,
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{fd::OwnedFd, unix::ffi::OsStrExt as _},
    process::{Child, Command, ExitStatus},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Termios, Winsize, tcgetattr, tcsetwinsize},
};
use vt100::Parser;
pub use vt100::{Color, Screen};

/// The interval of checks in a wait.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A command in a terminal. The command is killed on drop.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    /// The test's side of the pseudo-terminal.
    master: File,
    /// The command's side, from which the attributes can be read after the command has ended.
    slave: OwnedFd,
    shown: Arc<Mutex<ScreenState>>,
}

struct ScreenState {
    parser: Parser,
    /// Output of the command.
    raw: Vec<u8>,
}

impl std::fmt::Debug for ScreenState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.parser.screen().contents())
    }
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

impl Terminal {
    /// Starts a command in a terminal of this size. Requires `setsid` of util-linux, which makes it the controlling
    /// terminal.
    ///
    /// # Errors
    ///
    /// No pseudo-terminal is available, or the command cannot be started.
    pub fn start(command: &Command, rows: u16, columns: u16) -> io::Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        tcsetwinsize(&master, size(rows, columns))?;
        let path = ptsname(&master, Vec::new())?;
        let slave = OpenOptions::new().read(true).write(true).open(OsStr::from_bytes(path.as_bytes()))?;
        let mut in_session = Command::new("setsid");
        in_session.arg("--ctty").arg("--").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => in_session.env(name, value),
                None => in_session.env_remove(name),
            };
        }
        in_session.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave.try_clone()?);
        let child = in_session.spawn()?;
        let master = File::from(master);
        let shown =
            Arc::new(Mutex::new(ScreenState { parser: Parser::new(rows, columns, 0), raw: Vec::new() }));
        let mut reader = master.try_clone()?;
        let seen = shown.clone();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Fails when no process has the other side open any more.
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                let mut shown = seen.lock().unwrap_or_else(PoisonError::into_inner);
                shown.parser.process(&bytes[..count]);
                shown.raw.extend_from_slice(&bytes[..count]);
            }
        });
        Ok(Self { child, master, slave: slave.into(), shown })
    }

    fn shown(&self) -> MutexGuard<'_, ScreenState> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Presses keys, which are given as their bytes.
    ///
    /// # Errors
    ///
    /// The terminal is gone.
    pub fn press(&mut self, keys: &str) -> io::Result<()> {
        self.master.write_all(keys.as_bytes())
    }

    /// Changes the size of the terminal.
    ///
    /// # Errors
    ///
    /// The terminal is gone.
    pub fn resize(&self, rows: u16, columns: u16) -> io::Result<()> {
        self.shown().parser.screen_mut().set_size(rows, columns);
        Ok(tcsetwinsize(&self.master, size(rows, columns))?)
    }

    /// Returns the text on the screen.
    pub fn text(&self) -> String {
        self.shown().parser.screen().contents()
    }

    /// Returns the output of the command.
    pub fn raw(&self) -> Vec<u8> {
        self.shown().raw.clone()
    }

    /// Calls `read` with the screen.
    pub fn with_screen<T>(&self, read: impl FnOnce(&Screen) -> T) -> T {
        read(self.shown().parser.screen())
    }

    /// Waits until the screen satisfies the condition.
    ///
    /// # Errors
    ///
    /// It does not within the limit. The error is the text on the screen.
    pub fn wait_for(&self, limit: Duration, is_so: impl Fn(&Screen) -> bool) -> Result<(), String> {
        let start = Instant::now();
        while !self.with_screen(&is_so) {
            if start.elapsed() > limit {
                return Err(self.text());
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits until the command has ended; returns `None` if it does not within the limit.
    ///
    /// # Errors
    ///
    /// The process cannot be waited for.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            match self.child.try_wait()? {
                None if start.elapsed() <= limit => thread::sleep(POLL_INTERVAL),
                ended => return Ok(ended),
            }
        }
    }

    /// Returns the id of the command's process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the attributes of the terminal, such as echo.
    ///
    /// # Errors
    ///
    /// The terminal is gone.
    pub fn attributes(&self) -> io::Result<Termios> {
        Ok(tcgetattr(&self.slave)?)
    }

    /// Draws the screen as an SVG image.
    pub fn svg(&self, title: &str) -> String {
        self.with_screen(|screen| svg::draw(screen, title))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The command may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_mins(1);

    #[test]
    fn shows_output_and_sends_keys() {
        let script =
            "stty size; printf 'name? '; read name; printf '\\033[31mhello %s\\033[0m\\n' \"$name\"; exit 3";
        let mut terminal = Terminal::start(Command::new("sh").args(["-c", script]), 5, 40).unwrap();
        terminal.wait_for(LONG, |screen| screen.contents().contains("name?")).unwrap();
        assert!(terminal.text().starts_with("5 40"), "{}", terminal.text());
        terminal.press("you <&>\n").unwrap();
        terminal.wait_for(LONG, |screen| screen.contents().contains("hello you")).unwrap();
        assert_eq!(terminal.wait(LONG).unwrap().unwrap().code(), Some(3));
        assert!(terminal.raw().windows(5).any(|part| part == b"\x1b[31m"));
        let picture = terminal.svg("a \"title\"");
        assert!(picture.contains(">hello<") && picture.contains(">&lt;&amp;&gt;<"), "{picture}");
        assert!(picture.contains("a &quot;title&quot;"), "{picture}");
        assert!(terminal.wait_for(Duration::ZERO, |_| false).is_err());
    }
}
