//! Tests of removed cgroups and ended commands, while the daemon is running and while it is stopped.

use std::os::fd::OwnedFd;

use super::*;

/// Creates the cgroup of a command that was started before the ledger was lost. Its knobs show the guarantee.
fn create_command(bench: &DaemonBench) {
    for cgroup in ["numaward", "numaward/job"] {
        bench.cgroup(cgroup);
    }
    for (file, text) in [
        ("cpuset.cpus", "4-5"),
        ("cpuset.mems", "1"),
        ("memory.min", "1073741824"),
        ("memory.max", "1073741824"),
        ("cpu.stat", "usage_usec 0"),
    ] {
        write_knob(bench, file, text);
    }
    fs::write(bench.dir.path().join("cgroup/numaward/memory.min"), "1073741824\n").unwrap();
}

fn write_knob(bench: &DaemonBench, file: &str, text: &str) {
    fs::write(bench.dir.path().join("cgroup/numaward/job").join(file), format!("{text}\n")).unwrap();
}

#[tokio::test]
async fn ended_command_is_released() {
    let bench = DaemonBench::new(&[]);
    create_command(&bench);
    let (reconciler, thread, stop) = bench.start();
    assert_eq!(held(&reconciler).len(), 1);
    write_knob(&bench, "cgroup.events", "populated 0");
    write_knob(&bench, "cpu.stat", "usage_usec 700");
    until("the guarantee is released", &|| held(&reconciler).is_empty());
    stop.cancel();
    thread.join().unwrap();

    for (stat, expected) in [("usage_usec 700", 0), ("usage_usec 0", 1)] {
        fs::remove_dir_all(bench.dir.path().join("state")).unwrap();
        create_command(&bench);
        let (reconciler, thread, stop) = bench.start();
        assert_eq!(held(&reconciler).len(), 1);
        stop.cancel();
        thread.join().unwrap();
        write_knob(&bench, "cgroup.events", "populated 0");
        write_knob(&bench, "cpu.stat", stat);
        let (reconciler, thread, stop) = bench.start();
        assert_eq!(
            held(&reconciler).len(),
            expected,
            "only an ended command is released at the start: {stat}"
        );
        stop.cancel();
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn recreated_cgroup_has_no_guarantee() {
    let bench = DaemonBench::new(&["a", "a/b"]);
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a/b", 1).await.unwrap();
    // The old directory is moved, not removed, so that the new one has another inode.
    fs::rename(bench.dir.path().join("cgroup/a/b"), bench.dir.path().join("elsewhere")).unwrap();
    bench.cgroup("a/b");
    until("the guarantee is released", &|| held(&reconciler).is_empty());
    assert_eq!(bench.knob("a/b/cpuset.cpus"), "");
    stop.cancel();
    thread.join().unwrap();
}

/// Makes a knob refuse writes.
fn refuse(bench: &DaemonBench, knob: &str) -> OwnedFd {
    fixture::refuse(&bench.dir.path().join("cgroup").join(knob))
}

/// Makes a knob accept writes again.
fn accept_writes(bench: &DaemonBench, knob: &str) {
    let knob = bench.dir.path().join("cgroup").join(knob);
    fs::remove_file(&knob).unwrap();
    fs::write(&knob, "1073741824\n").unwrap();
}

#[tokio::test]
async fn failed_release_keeps_resources() {
    let bench = DaemonBench::new(&["a", "b"]);
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a", 3).await.unwrap();
    admit(&reconciler, "b", 4).await.unwrap();
    let _sealed = refuse(&bench, "a/memory.min");
    let refused = reconciler.release("a".to_owned()).await.unwrap_err();
    assert!(matches!(refused, AdmissionError::Releasing(_)), "{refused}");
    let is_releasing = |reconciler: &ReconcilerHandle| {
        let held = reconciler.allocations();
        held.allocations.iter().find(|held| held.name == "a").map(|held| held.releasing)
    };
    assert_eq!(is_releasing(&reconciler), Some(true));
    // The restored knob is not written again as drift.
    assert_eq!(bench.knob("a/cpuset.cpus"), "");
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!(bench.knob("a/cpuset.cpus"), "");
    bench.cgroup("c");
    let refused = admit(&reconciler, "c", 1).await.unwrap_err();
    assert!(matches!(refused, AdmissionError::Rejected(..)), "{refused}");

    // The release continues after a restart.
    stop.cancel();
    thread.join().unwrap();
    let (reconciler, thread, stop) = bench.start();
    assert_eq!(is_releasing(&reconciler), Some(true));
    assert_eq!(bench.knob("a/cpuset.cpus"), "");
    accept_writes(&bench, "a/memory.min");
    reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!((is_releasing(&reconciler), bench.knob("a/memory.min").as_str()), (None, "0"));
    assert_eq!(admit(&reconciler, "c", 3).await.unwrap().cpus, "1-3");

    // The removal of the cgroup ends the release.
    let _sealed_too = refuse(&bench, "c/memory.min");
    reconciler.release("c".to_owned()).await.unwrap_err();
    fs::remove_dir_all(bench.dir.path().join("cgroup/c")).unwrap();
    until("the guarantee is released", &|| held(&reconciler).len() == 1);
    stop.cancel();
    thread.join().unwrap();
}
