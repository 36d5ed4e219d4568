//! The commands of `docs/start.md`, each run as it stands there, by systemd's side: what the first page says is so.
//!
//! Sizes are made smaller, as an emulated machine has no such memory; `./server` and `postgresql.service` are of the test.

use numaward_tests::{Bench, boot};
use numaward_vm::Machine;

const PAGE: &str = include_str!("../../docs/start.md");

/// The commands for this host: lines of the blocks for a shell.
fn commands() -> Vec<&'static str> {
    let mut commands = Vec::new();
    for block in PAGE.split("```").skip(1).step_by(2) {
        commands
            .extend(block.lines().filter(|line| line.starts_with("numaward ") || line.starts_with("curl ")));
    }
    commands
}

/// The script that runs one after the other.
fn script(commands: &[&str]) -> String {
    commands.iter().fold(include_str!("book.sh").to_owned(), |script, command| {
        let smaller = command.replace("Gi", "0Mi");
        format!("{script}\nsection \"{command}\"\n{smaller}\necho \"code $?\"\n")
    })
}

#[test]
fn the_first_page_is_true() {
    let Some(bench) = Bench::open() else { return };
    let commands = commands();
    assert!(commands.len() >= 10, "{commands:?}");
    let machine = Machine::parse(None, Some("8,2"), Some("1G,512M"), None).unwrap();
    let report = boot(&bench.vm_with_systemd(machine), &script(&commands));

    let mut wrong = Vec::new();
    for command in &commands {
        let section = report.section(command);
        let (said, code) = section.rsplit_once("code ").unwrap_or_else(|| panic!("{command}: {section}"));
        let mut shows = |words: &[&str]| {
            if code.trim() != "0" || words.iter().any(|word| !said.contains(word)) {
                wrong.push(format!("{command} does not say {words:?} and end with 0:\n{section}"));
            }
        };
        match command.split('#').next().unwrap_or_default().trim() {
            "numaward topology" => shows(&["0-7", "8-9", "ALLOCATABLE"]),
            "numaward status" => shows(&["PROBE", "alloc"]),
            "numaward doctor" => shows(&["ok"]),
            of if of.starts_with("curl") => shows(&["numaward_memory_allocated_bytes_total{"]),
            of if of.starts_with("numaward exec") => shows(&["served"]),
            of if of.starts_with("numaward explain") => shows(&["would"]),
            of if of.starts_with("numaward guarantee") => shows(&["postgresql.service", "80.0 MiB"]),
            of if of.starts_with("numaward resize") => shows(&["postgresql.service", "120.0 MiB"]),
            of if of.starts_with("numaward release") => shows(&[]),
            of => panic!("{of}: what is it to show?"),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
