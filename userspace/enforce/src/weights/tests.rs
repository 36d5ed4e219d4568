//! Tests of what is written to the files of weights, and when.

use super::*;

/// A host of files.
struct Host {
    dir: tempfile::TempDir,
    held: WeightRecords,
}

impl Host {
    /// Two nodes with memory, 0 and 2, and one without.
    fn new() -> Self {
        let host = Self { dir: tempfile::tempdir().unwrap(), held: WeightRecords::default() };
        host.put(&format!("{NODES}/has_memory"), "0,2");
        for node in 0..3 {
            host.set(node, 1);
        }
        host
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn set(&self, node: u32, weight: u8) {
        self.put(&format!("{WEIGHTS}/node{node}"), &weight.to_string());
    }

    fn auto(&self, is_on: bool) {
        self.put(&format!("{WEIGHTS}/auto"), &is_on.to_string());
    }

    fn bandwidth(&self, node: u32, read: u64, write: u64) {
        let at = format!("{NODES}/node{node}/access0/initiators");
        self.put(&format!("{at}/read_bandwidth"), &read.to_string());
        self.put(&format!("{at}/write_bandwidth"), &write.to_string());
    }

    fn weights(&self) -> Weights {
        Weights::new(self.dir.path())
    }

    fn all(&self) -> WeightSnapshot {
        self.weights().read_weights((0..3).map(NodeId))
    }

    fn now(&self) -> [u8; 3] {
        let seen = self.all();
        [0, 1, 2].map(|node| seen.weights[&NodeId(node)])
    }

    fn plan(&self, wanted: &[(u32, u8)]) -> WeightPlan {
        plan(&self.all(), Some(&of(wanted)), &self.held)
    }

    /// What is planned where all is to be as it was.
    fn plan_back(&self) -> WeightPlan {
        plan(&self.all(), None, &self.held)
    }

    fn remove(&self, node: u32) {
        fs::remove_file(self.dir.path().join(Weights::file(NodeId(node)))).unwrap();
    }

    /// Does what is planned, as the kernel would; what others wrote.
    fn follow(&mut self, wanted: &[(u32, u8)]) -> Vec<(u32, u8)> {
        self.perform(self.plan(wanted))
    }

    /// Gives all back; what others wrote.
    fn back(&mut self) -> Vec<(u32, u8)> {
        self.perform(self.plan_back())
    }

    fn perform(&mut self, plan: WeightPlan) -> Vec<(u32, u8)> {
        let before = std::mem::replace(&mut self.held, plan.held);
        for write in plan.writes {
            let result = self.weights().write(write);
            result.as_ref().unwrap();
            self.held.record_result(write, &result, &before);
            if write != WeightWrite::Auto && self.dir.path().join(WEIGHTS).join("auto").exists() {
                self.auto(false);
            }
        }
        plan.foreign.into_iter().map(|(node, weight)| (node.0, weight)).collect()
    }
}

fn of(weights: &[(u32, u8)]) -> NodeWeights {
    weights.iter().map(|(node, weight)| (NodeId(*node), *weight)).collect()
}

fn weight(node: u32, weight: u8) -> WeightWrite {
    WeightWrite::Weight { node: NodeId(node), weight, is_back: false }
}

#[test]
fn weights_are_in_the_ratio_of_bandwidths_and_small() {
    for (bandwidths, expected) in [
        (&[100_000, 30_000][..], &[25, 7][..]),
        (&[300, 100], &[3, 1]),
        (&[20_480, 5_120], &[13, 3]),
        (&[7, 7, 7, 7], &[1, 1, 1, 1]),
        (&[1_000_000, 1], &[32, 1]),
        (&[u64::MAX, u64::MAX], &[1, 1]),
        (&[5], &[1]),
        (&[], &[]),
    ] {
        let bandwidths = (0..).map(NodeId).zip(bandwidths.iter().copied()).collect();
        let weights: Vec<u8> = by_bandwidth(&bandwidths).into_values().collect();
        assert_eq!(weights, expected, "{bandwidths:?}");
    }
}

#[test]
fn a_bandwidth_is_the_lesser_of_both_and_all_or_none_are_known() {
    let host = Host::new();
    let nodes = host.weights().nodes().unwrap();
    assert_eq!(nodes.to_string(), "0,2");
    host.bandwidth(0, 100_000, 90_000);
    assert_eq!(host.weights().bandwidths(&nodes).unwrap_err().to_string(), "2");
    host.bandwidth(2, 30_000, 0);
    assert_eq!(host.weights().bandwidths(&nodes).unwrap_err().to_string(), "2");
    host.bandwidth(2, 30_000, 40_000);
    let expected = BTreeMap::from([(NodeId(0), 90_000), (NodeId(2), 30_000)]);
    assert_eq!(host.weights().bandwidths(&nodes).unwrap(), expected);
}

#[test]
fn what_was_found_comes_back_and_others_are_never_touched() {
    let mut host = Host::new();
    host.set(1, 9);
    assert!(host.follow(&[(0, 3), (2, 1)]).is_empty());
    assert_eq!(host.now(), [3, 9, 1]);
    assert!(host.plan(&[(0, 3), (2, 1)]).writes.is_empty(), "nothing is left to do");
    let text = serde_json::to_string(&host.held).unwrap();
    let expected = r#"{"nodes":{"0":{"found":1,"written":3},"2":{"found":1,"written":1}}}"#;
    assert_eq!(text, expected);
    assert_eq!(serde_json::from_str::<WeightRecords>(&text).unwrap(), host.held);
    // Another configuration: the first value comes back in the end.
    host.follow(&[(0, 5), (2, 2)]);
    assert_eq!(host.now(), [5, 9, 2]);
    host.follow(&[(0, 5)]);
    assert_eq!(host.now(), [5, 9, 1]);
    host.back();
    assert_eq!((host.now(), host.held.is_empty()), ([1, 9, 1], true));
}

#[test]
fn what_somebody_else_wrote_stays() {
    let mut host = Host::new();
    let wanted = [(0, 3), (2, 2)];
    host.follow(&wanted);
    host.set(2, 7);
    assert_eq!(host.follow(&wanted), [(2, 7)]);
    assert!(host.follow(&wanted).is_empty(), "it is said once");
    assert_eq!(host.held.current(&host.all()), of(&[(0, 3)]));
    // Even where it is by now what was written.
    host.set(2, 2);
    host.back();
    assert_eq!((host.now(), host.held.is_empty()), ([1, 1, 2], true));
    // Noticed at the end only.
    host.follow(&wanted);
    host.set(0, 9);
    assert_eq!(host.back(), [(0, 9)]);
    assert_eq!((host.now(), host.held.is_empty()), ([9, 1, 2], true));
}

#[test]
fn a_crash_before_or_after_any_write_changes_nothing() {
    for written in 0..=2 {
        for is_auto in [false, true] {
            let mut host = Host::new();
            let wanted = [(0, 3), (2, 2)];
            host.auto(is_auto);
            let plan = host.plan(&wanted);
            host.held = plan.held;
            for write in &plan.writes[..written] {
                host.weights().write(*write).unwrap();
                host.auto(false);
            }
            assert!(host.follow(&wanted).is_empty());
            assert_eq!((host.now(), host.held.auto.is_some()), ([3, 1, 2], is_auto));
            // And while it is given back.
            let plan = host.plan_back();
            host.held = plan.held;
            for write in &plan.writes[..written] {
                host.weights().write(*write).unwrap();
            }
            assert!(host.back().is_empty());
            assert_eq!((host.now(), host.held.is_empty()), ([1, 1, 1], true));
            assert_eq!(host.all().is_auto, is_auto);
        }
    }
}

#[test]
fn the_kernel_chooses_again_where_it_did_and_nothing_was_given_up() {
    let mut host = Host::new();
    host.auto(true);
    // Also where it has chosen the same: it may choose another one.
    host.follow(&[(0, 1), (2, 1)]);
    assert!(host.held.auto.is_some() && !host.all().is_auto);
    host.back();
    assert!(host.all().is_auto && host.held.is_empty());
    // A weight is somebody else's.
    host.follow(&[(0, 3), (2, 1)]);
    host.set(2, 5);
    host.follow(&[(0, 3), (2, 1)]);
    host.follow(&[(0, 3)]);
    host.back();
    assert_eq!((host.now(), host.all().is_auto, host.held.is_empty()), ([1, 1, 5], false, true));
}

#[test]
fn where_somebody_switches_auto_on_all_weights_are_theirs() {
    let mut host = Host::new();
    host.auto(false);
    host.follow(&[(0, 3)]);
    host.auto(true);
    assert_eq!(host.follow(&[(0, 3), (2, 1)]), [(0, 3)]);
    assert!(host.follow(&[(0, 3), (2, 1)]).is_empty());
    assert!(host.all().is_auto && host.held.current(&host.all()).is_empty());
    host.back();
    assert!(host.all().is_auto && host.held.is_empty());
    // At the end only.
    host.auto(false);
    host.follow(&[(0, 4)]);
    host.auto(true);
    assert_eq!(host.back(), [(0, 4)]);
    assert_eq!((host.now()[0], host.all().is_auto, host.held.is_empty()), (4, true, true));
}

#[test]
fn what_cannot_be_read_is_kept() {
    let mut host = Host::new();
    host.auto(true);
    host.follow(&[(0, 3), (2, 2)]);
    host.put(&format!("{WEIGHTS}/node0"), "?");
    let plan = host.plan_back();
    assert_eq!(plan.writes.len(), 1, "{plan:?}");
    assert!(plan.held.nodes.contains_key(&NodeId(0)) && plan.held.auto.is_some());
    assert!(host.held.current(&host.all()).into_keys().eq([NodeId(2)]), "node 0 is not known");
    host.remove(0);
    let refused = host.weights().write(weight(0, 1)).unwrap_err();
    assert!(refused.to_string().contains("node0 cannot be written: No such file"), "{refused}");
}

#[test]
fn a_file_that_keeps_what_it_holds_is_an_error() {
    let host = Host::new();
    let file = host.dir.path().join(Weights::file(NodeId(0)));
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("/dev/null", &file).unwrap();
    let error = host.weights().write(weight(0, 3)).unwrap_err();
    assert!(error.to_string().ends_with("it holds \"\" after \"3\" was written"), "{error}");
}

#[test]
fn a_node_that_comes_back_gets_what_was_found() {
    let mut host = Host::new();
    host.set(2, 4);
    host.follow(&[(0, 3), (2, 2)]);
    host.remove(2);
    // It has no memory now, so no weight is wanted for it.
    host.follow(&[(0, 3)]);
    assert_eq!(host.held.current(&host.all()), of(&[(0, 3)]), "what is absent is not there now");
    assert!(host.back().is_empty());
    let left = host.weights().unrestored(&host.held);
    let [(name, Some(reason))] = &left[..] else { panic!("{left:?}") };
    assert!(name.starts_with("weight of node 2 ") && reason.ends_with("it has 2, not 4"), "{left:?}");
    // The kernel has kept it.
    host.set(2, 2);
    host.follow(&[(0, 3), (2, 5)]);
    assert_eq!(host.now(), [3, 1, 5]);
    assert!(host.back().is_empty());
    assert_eq!((host.now(), host.held.is_empty()), ([1, 1, 4], true));
    // What it holds is what was found.
    host.follow(&[(2, 4)]);
    host.remove(2);
    assert!(host.back().is_empty() && host.held.is_empty());
}

#[test]
fn an_absent_node_stays_given_up_while_weights_are_set() {
    let mut host = Host::new();
    let wanted = [(0, 3), (2, 2)];
    host.follow(&wanted);
    host.set(2, 7);
    host.follow(&wanted);
    for is_wanted in [false, true] {
        host.remove(2);
        host.follow(if is_wanted { &wanted } else { &wanted[..1] });
        host.set(2, 7);
        assert!(host.follow(&wanted).is_empty());
        assert_eq!(host.now(), [3, 1, 7]);
    }
    host.remove(2);
    host.back();
    assert!(host.held.is_empty());
}

#[test]
fn the_kernel_chooses_for_absent_nodes_too() {
    let mut host = Host::new();
    host.auto(true);
    host.follow(&[(0, 3), (2, 2)]);
    host.remove(2);
    assert!(host.back().is_empty());
    assert!(host.all().is_auto && host.held.is_empty());
}

#[test]
fn the_kernel_does_not_choose_again_over_what_others_wrote_elsewhere() {
    let mut host = Host::new();
    host.auto(true);
    host.set(1, 4);
    host.follow(&[(0, 3)]);
    host.follow(&[(0, 5)]);
    let text = serde_json::to_string(&host.held.auto).unwrap();
    assert_eq!(text, r#"{"0":1,"1":4,"2":1}"#);
    host.set(2, 9);
    assert_eq!(host.back(), [(2, 9)]);
    assert_eq!((host.now(), host.all().is_auto, host.held.is_empty()), ([1, 4, 9], false, true));
    // A node that came since has what the kernel gives it.
    host.auto(true);
    host.follow(&[(0, 3)]);
    host.set(3, 1);
    assert!(host.back().is_empty() && host.all().is_auto);
    host.remove(3);
    host.follow(&[(0, 3)]);
    host.set(3, 2);
    assert_eq!(host.back(), [(3, 2)]);
    assert!(!host.all().is_auto);
}

#[test]
fn a_kernel_that_has_nothing_to_choose_from_is_not_asked_again() {
    let refuse = |number| {
        WeightError::refused(WeightWrite::Auto, WEIGHTS.into(), io::Error::from_raw_os_error(number))
    };
    for (number, is_pending) in [(libc::ENODEV, false), (libc::ENOMEM, true)] {
        let mut host = Host::new();
        host.auto(true);
        host.follow(&[(0, 3)]);
        let WeightPlan { writes, held, .. } = host.plan_back();
        let before = std::mem::replace(&mut host.held, held);
        let [first, WeightWrite::Auto] = writes[..] else { panic!("{writes:?}") };
        let result = host.weights().write(first);
        host.held.record_result(first, &result, &before);
        host.held.record_result(WeightWrite::Auto, &Err(refuse(number)), &before);
        assert_eq!(host.held.is_empty(), !is_pending);
        assert_eq!(host.weights().unrestored(&host.held).len(), usize::from(is_pending));
        // What is still to be done is tried only while all weights are as they were.
        assert_eq!(host.plan_back().writes.contains(&WeightWrite::Auto), is_pending);
        host.set(2, 9);
        assert_eq!(host.back().is_empty(), !is_pending);
        assert_eq!((host.now(), host.all().is_auto, host.held.is_empty()), ([1, 1, 9], false, true));
    }
    let other =
        WeightError::refused(weight(0, 1), WEIGHTS.into(), io::Error::from_raw_os_error(libc::ENODEV));
    assert!(matches!(other, WeightError::Refused { .. }));
}

#[test]
fn a_death_after_the_kernel_chooses_again_is_nobody_elses_write() {
    let mut host = Host::new();
    host.auto(true);
    host.follow(&[(0, 3)]);
    let plan = host.plan_back();
    for write in plan.writes {
        host.weights().write(write).unwrap();
    }
    assert!(host.back().is_empty() && host.held.is_empty());
}

#[test]
fn what_was_written_and_cannot_be_read_back_is_ours() {
    let mut host = Host::new();
    let WeightPlan { writes, held, .. } = host.plan(&[(0, 3)]);
    let before = std::mem::replace(&mut host.held, held);
    let unread = || WeightError::Unread {
        path: WEIGHTS.into(),
        wanted: "3".to_owned(),
        source: io::Error::from_raw_os_error(libc::EIO),
    };
    host.held.record_result(writes[0], &Err(unread()), &before);
    assert!(host.held.current(&host.all()).is_empty(), "it may hold it or not");
    host.set(0, 3);
    assert!(host.back().is_empty());
    assert_eq!((host.now(), host.held.is_empty()), ([1, 1, 1], true));
    // A refused one was not written.
    let WeightPlan { writes, held, .. } = host.plan(&[(0, 3)]);
    let before = std::mem::replace(&mut host.held, held);
    let refused = WeightError::refused(writes[0], WEIGHTS.into(), io::Error::from_raw_os_error(libc::EPERM));
    host.held.record_result(writes[0], &Err(refused), &before);
    assert!(host.held.is_empty());
}

#[test]
fn what_cannot_be_read_back_says_so() {
    let host = Host::new();
    let file = host.dir.path().join(Weights::file(NodeId(0)));
    fs::remove_file(&file).unwrap();
    // A file that takes what is written, and is no text.
    std::os::unix::fs::symlink("/proc/self/clear_refs", &file).unwrap();
    let error = host.weights().write(weight(0, 1)).unwrap_err();
    assert!(error.to_string().contains("node0 cannot be read after \"1\" was written: "), "{error}");
}
