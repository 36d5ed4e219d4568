//! The first hour of a new user, on Debian with a downloaded release: runs the commands of the book as written there, from the
//! verification of the download to the guarantee of a service.

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::GuestTopology;

use super::{SHARED, machine};
use crate::book::{BookCommand, CommandExpectation, HOST, RUNS, RunMode, commands, run};

/// Pages and headings in the order in which they are followed, each with the number of commands that are run.
const SECTIONS: [(&str, &str, usize); 5] = [
    ("start.md", "Verify a download", 4),
    ("systemd.md", "Install", 5),
    ("start.md", "On your host", 10),
    ("start.md", "The apt repository", 3),
    ("start.md", "Install", 1),
];

const PACKAGE: &str = concat!("apt install ./dist/numaward_", env!("CARGO_PKG_VERSION"), "_amd64.deb");

/// Commands that need the files of a release. The other commands are those of [`RUNS`].
const OF_RELEASE: &[CommandExpectation] = &[
    run(PACKAGE, RunMode::Ends, &["Setting up numaward"])
        .after("systemctl is-enabled numaward || systemctl is-active numaward", "disabled\ninactive"),
    run("apt update && apt install numaward", RunMode::Ends, &["numaward is already the newest version"])
        .after("apt-cache policy numaward", "file:/srv/now/apt stable/main amd64 Packages"),
    run("cp numaward.asc", RunMode::Ends, &[]).after("ls /etc/apt/keyrings", "numaward.asc"),
    run("gpg --import", RunMode::Ends, &["imported: 1"]),
    run("gpg --show-keys", RunMode::Ends, &["ed25519"]),
    run("gpg --verify", RunMode::Ends, &["Good signature from \"numaward"]),
    run("sed 's#^URIs: ADDRESS#", RunMode::Ends, &[])
        .after("cat /etc/apt/sources.list.d/numaward.sources", "URIs: file:/srv/now/apt"),
    run("sha256sum --check", RunMode::Ends, &[".deb: OK"]),
];

/// Commands that are not run, by their first words, with the reason.
const NOT_HERE: [(&str, &str); 3] = [
    ("cargo ", "the release was downloaded"),
    ("alias ", "the package installs the program on the `PATH`"),
    ("dnf ", "Debian has no dnf"),
];

#[test]
fn newcomer_gets_what_the_pages_say() {
    let Some(bench) = TestEnvironment::open() else { return };
    let rows = || RUNS.iter().chain(OF_RELEASE);
    let mut script = [SHARED, HOST, include_str!("newcomer.sh")].concat();
    let mut followed: Vec<(BookCommand, &CommandExpectation)> = Vec::new();
    for (page, heading, count) in SECTIONS {
        let begun = followed.len();
        for command in commands(page).into_iter().filter(|command| command.heading == heading) {
            if NOT_HERE.iter().any(|(begins, _)| command.begins_with(begins)) {
                continue;
            }
            let row = command.find_row(rows()).unwrap_or_else(|| panic!("{page}: {}", command.text));
            script += &command.script(row);
            followed.push((command, row));
        }
        assert_eq!(followed.len() - begun, count, "{page}, {heading}");
    }
    let topology = GuestTopology::parse(None, Some("8,2"), Some("1536M,768M"), None).unwrap();
    let archives = tempfile::tempdir().unwrap();
    let report = boot(&machine(&bench, topology, &archives), &script);
    let faults: Vec<_> = followed.iter().filter_map(|(command, row)| command.fault(row, &report)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}
