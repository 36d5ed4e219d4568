//! A system bus without answers.
//!
//! The bus can be silent in two ways. Either systemd does not answer: the bus authenticates the client and gives it a
//! name, but no message follows. Or the bus does not answer: connections are accepted, as the kernel does for a bus
//! that hangs, but nothing follows.
//!
//! Source: the D-Bus specification, "Authentication Protocol" and "Message Protocol".

use std::{
    io::{BufRead as _, BufReader, Read, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::Result;

#[derive(Default)]
struct BusState {
    talks: AtomicBool,
    waiting: AtomicUsize,
}

pub(crate) struct Bus(Arc<BusState>);

impl Bus {
    pub(crate) fn start(socket: impl AsRef<Path>) -> Result<Self> {
        let listener = UnixListener::bind(socket)?;
        let state = Arc::<BusState>::default();
        let bus = Self(state.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = state.clone();
                // The thread ends when the client closes the connection.
                thread::spawn(move || drop(serve(stream, &state)));
            }
        });
        Ok(bus)
    }

    /// Sets whether the bus itself answers, from the next connection on.
    pub(crate) fn talks(&self, talks: bool) {
        self.0.talks.store(talks, Ordering::Relaxed);
    }

    /// Returns the number of calls without an answer.
    pub(crate) fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::Relaxed)
    }
}

fn serve(mut stream: UnixStream, state: &BusState) -> Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    if state.talks.load(Ordering::Relaxed) {
        reader.read_exact(&mut [0])?;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            match line.split_whitespace().next() {
                Some("AUTH" | "DATA") => stream.write_all(b"OK 0123456789abcdef0123456789abcdef\r\n")?,
                Some("BEGIN") => break,
                _ => stream.write_all(b"ERROR\r\n")?,
            }
        }
        let serial = message(&mut reader)?;
        stream.write_all(&name(serial))?;
    }
    let mut first = [0];
    reader.read_exact(&mut first)?;
    state.waiting.fetch_add(1, Ordering::Relaxed);
    while reader.read(&mut [0; 512])? > 0 {}
    Ok(())
}

/// Reads a message, and returns its serial number.
fn message(reader: &mut impl Read) -> Result<u32> {
    let mut head = [0; 16];
    reader.read_exact(&mut head)?;
    let number = |at: usize| {
        let bytes = [head[at], head[at + 1], head[at + 2], head[at + 3]];
        if head[0] == b'l' { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) }
    };
    let (body, serial, fields) = (number(4), number(8), number(12));
    let rest = u64::from(fields.next_multiple_of(8)) + u64::from(body);
    std::io::copy(&mut reader.take(rest), &mut std::io::sink())?;
    Ok(serial)
}

/// Formats the answer to `Hello`: a unique name.
fn name(serial: u32) -> Vec<u8> {
    let body = b"\x04\0\0\0:1.1\0";
    // REPLY_SERIAL, then SIGNATURE.
    let mut fields = b"\x05\x01u\0".to_vec();
    fields.extend(serial.to_le_bytes());
    fields.extend(b"\x08\x01g\0\x01s\0");
    // Little-endian, a method return, no reply expected, version 1.
    let mut message = b"l\x02\x01\x01".to_vec();
    for number in [body.len(), 1, fields.len()] {
        message.extend(u32::try_from(number).unwrap_or_default().to_le_bytes());
    }
    message.extend(fields);
    message.resize(message.len().next_multiple_of(8), 0);
    message.extend(body);
    message
}
