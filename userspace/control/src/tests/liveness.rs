//! Workloads that go, and commands that end, while the daemon runs and while it does not.

use std::os::fd::OwnedFd;

use super::*;

/// A command that was started before the ledger was lost: its cgroup has the knobs that show what it was promised.
fn command(bench: &Bench) {
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
        put(bench, file, text);
    }
    fs::write(bench.dir.path().join("cgroup/numaward/memory.min"), "1073741824\n").unwrap();
}

fn put(bench: &Bench, file: &str, text: &str) {
    fs::write(bench.dir.path().join("cgroup/numaward/job").join(file), format!("{text}\n")).unwrap();
}

#[tokio::test]
async fn a_command_that_ended_is_released_also_if_nobody_was_there_to_see_it() {
    let bench = Bench::new(&[]);
    command(&bench);
    let (reconciler, thread, stop) = bench.start();
    assert_eq!(held(&reconciler).len(), 1);
    put(&bench, "cgroup.events", "populated 0");
    put(&bench, "cpu.stat", "usage_usec 700");
    until("it is released", &|| held(&reconciler).is_empty());
    stop.cancel();
    thread.join().unwrap();

    for (stat, expected) in [("usage_usec 700", 0), ("usage_usec 0", 1)] {
        fs::remove_dir_all(bench.dir.path().join("state")).unwrap();
        command(&bench);
        let (reconciler, thread, stop) = bench.start();
        assert_eq!(held(&reconciler).len(), 1);
        stop.cancel();
        thread.join().unwrap();
        put(&bench, "cgroup.events", "populated 0");
        put(&bench, "cpu.stat", stat);
        let (reconciler, thread, stop) = bench.start();
        assert_eq!(held(&reconciler).len(), expected, "at the start, and only what ended: {stat}");
        stop.cancel();
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn of_two_at_the_same_path_the_second_holds_nothing() {
    let bench = Bench::new(&["a", "a/b"]);
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a/b", 1).await.unwrap();
    // The directory stays in use, so that the other one has another inode.
    fs::rename(bench.dir.path().join("cgroup/a/b"), bench.dir.path().join("elsewhere")).unwrap();
    bench.cgroup("a/b");
    until("it is released", &|| held(&reconciler).is_empty());
    assert_eq!(bench.knob("a/b/cpuset.cpus"), "");
    stop.cancel();
    thread.join().unwrap();
}

/// Makes a knob refuse what is written.
fn refuse(bench: &Bench, knob: &str) -> OwnedFd {
    fixture::refuse(&bench.dir.path().join("cgroup").join(knob))
}

/// Lets it take what is written again.
fn take_again(bench: &Bench, knob: &str) {
    let knob = bench.dir.path().join("cgroup").join(knob);
    fs::remove_file(&knob).unwrap();
    fs::write(&knob, "1073741824\n").unwrap();
}

#[tokio::test]
async fn what_cannot_be_given_back_is_not_promised_again() {
    let bench = Bench::new(&["a", "b"]);
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
    // What was given back already is left alone, whatever the drift of it looks like.
    assert_eq!(bench.knob("a/cpuset.cpus"), "");
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!(bench.knob("a/cpuset.cpus"), "");
    bench.cgroup("c");
    let refused = admit(&reconciler, "c", 1).await.unwrap_err();
    assert!(matches!(refused, AdmissionError::Rejected(..)), "{refused}");

    // A restart goes on with it.
    stop.cancel();
    thread.join().unwrap();
    let (reconciler, thread, stop) = bench.start();
    assert_eq!(is_releasing(&reconciler), Some(true));
    assert_eq!(bench.knob("a/cpuset.cpus"), "");
    take_again(&bench, "a/memory.min");
    reconciler.release("a".to_owned()).await.unwrap();
    assert_eq!((is_releasing(&reconciler), bench.knob("a/memory.min").as_str()), (None, "0"));
    assert_eq!(admit(&reconciler, "c", 3).await.unwrap().cpus, "1-3");

    // Where the cgroup is gone, nothing is left to give back.
    let _sealed_too = refuse(&bench, "c/memory.min");
    reconciler.release("c".to_owned()).await.unwrap_err();
    fs::remove_dir_all(bench.dir.path().join("cgroup/c")).unwrap();
    until("it is released", &|| held(&reconciler).len() == 1);
    stop.cancel();
    thread.join().unwrap();
}
