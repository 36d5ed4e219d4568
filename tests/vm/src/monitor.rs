//! Client of QEMU's monitor, which changes a running machine.
//!
//! The protocol QMP consists of lines of JSON. QEMU sends a greeting, expects `qmp_capabilities`, and then answers each
//! command with `return` or `error`; events may come in between. (QEMU, docs/interop/qmp-spec.)

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use serde_json::{Value, json};

use crate::Error;

/// The time limit of an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);

/// A connection to the monitor of one machine.
#[derive(Debug)]
pub struct Monitor {
    replies: BufReader<UnixStream>,
    /// Number of memory modules plugged in so far.
    plugged: u32,
}

impl Monitor {
    pub(crate) fn connect(socket: &Path) -> Result<Self, Error> {
        let stream = UnixStream::connect(socket)
            .and_then(|stream| stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map(|()| stream))
            .map_err(Error::io("connecting to", socket))?;
        let mut monitor = Self { replies: BufReader::new(stream), plugged: 0 };
        monitor.ask("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Plugs memory into a node. `/sys/devices/system/memory/auto_online_blocks` of the guest decides whether its
    /// kernel uses the memory automatically.
    pub fn plug_memory(&mut self, node: u32, mib: u64) -> Result<(), Error> {
        let (backend, module) = (format!("plugged{}", self.plugged), format!("module{}", self.plugged));
        self.plugged += 1;
        let size = mib << 20;
        self.ask("object-add", &json!({ "qom-type": "memory-backend-ram", "id": backend, "size": size }))?;
        self.ask("device_add", &json!({ "driver": "pc-dimm", "id": module, "memdev": backend, "node": node }))
    }

    fn ask(&mut self, command: &'static str, arguments: &Value) -> Result<(), Error> {
        let error = |reason: String| Error::Monitor { command, reason };
        let line = json!({ "execute": command, "arguments": arguments });
        writeln!(self.replies.get_mut(), "{line}").map_err(|source| error(source.to_string()))?;
        loop {
            let mut reply = String::new();
            let count = self.replies.read_line(&mut reply).map_err(|source| error(source.to_string()))?;
            if count == 0 {
                return Err(error("the machine has ended".to_owned()));
            }
            let reply: Value = serde_json::from_str(&reply).map_err(|source| error(source.to_string()))?;
            if reply.get("return").is_some() {
                return Ok(());
            }
            if let Some(refusal) = reply.get("error") {
                return Err(error(refusal["desc"].as_str().unwrap_or("no reason was given").to_owned()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// Starts a fake monitor that sends a group of these replies for each line that it receives.
    fn monitor(
        replies: &'static [&'static str],
    ) -> (Result<Monitor, Error>, thread::JoinHandle<Vec<String>>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("monitor");
        let listener = UnixListener::bind(&path).unwrap();
        let server = thread::spawn(move || {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            writeln!(stream.get_mut(), r#"{{"QMP": {{}}}}"#).unwrap();
            let mut asked = Vec::new();
            for reply in replies {
                let mut line = String::new();
                if stream.read_line(&mut line).unwrap() == 0 {
                    break;
                }
                asked.push(line);
                writeln!(stream.get_mut(), "{reply}").unwrap();
            }
            // The fake closes the connection after the next line.
            let _ended = stream.read_line(&mut String::new());
            asked
        });
        (Monitor::connect(&path), server)
    }

    const DONE: &str = r#"{"return": {}}"#;

    #[test]
    fn plugs_memory_into_node() {
        const EVENT_FIRST: &str = "{\"event\": \"ACPI_DEVICE_OST\"}\n{\"return\": {}}";
        let (monitor, server) = monitor(&[DONE, DONE, EVENT_FIRST]);
        monitor.unwrap().plug_memory(2, 128).unwrap();
        let asked: Vec<Value> =
            server.join().unwrap().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(asked[1]["arguments"]["size"], 128 << 20);
        assert_eq!(asked[2]["arguments"]["node"], 2);
        assert_eq!(asked[2]["arguments"]["memdev"], asked[1]["arguments"]["id"]);
    }

    #[test]
    fn error_names_command_and_reason() {
        let (monitor, _server) =
            monitor(&[DONE, DONE, r#"{"error": {"class": "GenericError", "desc": "no slots"}}"#]);
        let error = monitor.unwrap().plug_memory(0, 128).unwrap_err().to_string();
        assert_eq!(error, "QEMU's monitor: device_add: no slots");
        let (monitor, _server) = self::monitor(&[]);
        assert!(monitor.unwrap_err().to_string().contains("the machine has ended"));
    }
}
