//! Tests of the writes to files of weights.

use super::*;

/// A host made of files.
struct FakeHost {
    dir: tempfile::TempDir,
    held: WeightRecords,
}

impl FakeHost {
    /// Creates two nodes with memory, 0 and 2, and one without.
    fn new() -> Self {
        let host = Self { dir: tempfile::tempdir().unwrap(), held: WeightRecords::default() };
        host.write_file(&format!("{NODES}/has_memory"), "0,2");
        for node in 0..3 {
            host.set(node, 1);
        }
        host
    }

    fn write_file(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    fn set(&self, node: u32, weight: u8) {
        self.write_file(&format!("{WEIGHTS}/node{node}"), &weight.to_string());
    }

    fn auto(&self, is_on: bool) {
        self.write_file(&format!("{WEIGHTS}/auto"), &is_on.to_string());
    }

    fn bandwidth(&self, node: u32, read: u64, write: u64) {
        let at = format!("{NODES}/node{node}/access0/initiators");
        self.write_file(&format!("{at}/read_bandwidth"), &read.to_string());
        self.write_file(&format!("{at}/write_bandwidth"), &write.to_string());
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
        plan(&self.all(), Some(&node_weights(wanted)), &self.held)
    }

    /// Plans to restore everything.
    fn plan_back(&self) -> WeightPlan {
        plan(&self.all(), None, &self.held)
    }

    fn remove(&self, node: u32) {
        fs::remove_file(self.dir.path().join(Weights::file(NodeId(node)))).unwrap();
    }

    /// Makes the planned writes, as the kernel would. Returns the weights that other programs wrote.
    fn follow(&mut self, wanted: &[(u32, u8)]) -> Vec<(u32, u8)> {
        self.perform(self.plan(wanted))
    }

    /// Restores everything. Returns the weights that other programs wrote.
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

fn node_weights(weights: &[(u32, u8)]) -> NodeWeights {
    weights.iter().map(|(node, weight)| (NodeId(*node), *weight)).collect()
}

fn weight(node: u32, weight: u8) -> WeightWrite {
    WeightWrite::Weight { node: NodeId(node), weight, is_back: false }
}

#[test]
fn weights_follow_bandwidths() {
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
fn reads_lesser_bandwidth_of_all_nodes() {
    let host = FakeHost::new();
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
fn restores_original_weights() {
    let mut host = FakeHost::new();
    host.set(1, 9);
    assert!(host.follow(&[(0, 3), (2, 1)]).is_empty());
    assert_eq!(host.now(), [3, 9, 1]);
    assert!(host.plan(&[(0, 3), (2, 1)]).writes.is_empty(), "nothing is left to do");
    let text = serde_json::to_string(&host.held).unwrap();
    let expected = r#"{"nodes":{"0":{"found":1,"written":3},"2":{"found":1,"written":1}}}"#;
    assert_eq!(text, expected);
    assert_eq!(serde_json::from_str::<WeightRecords>(&text).unwrap(), host.held);
    // After a change of the configuration, the first value is restored in the end.
    host.follow(&[(0, 5), (2, 2)]);
    assert_eq!(host.now(), [5, 9, 2]);
    host.follow(&[(0, 5)]);
    assert_eq!(host.now(), [5, 9, 1]);
    host.back();
    assert_eq!((host.now(), host.held.is_empty()), ([1, 9, 1], true));
}

#[test]
fn keeps_weights_of_other_programs() {
    let mut host = FakeHost::new();
    let wanted = [(0, 3), (2, 2)];
    host.follow(&wanted);
    host.set(2, 7);
    assert_eq!(host.follow(&wanted), [(2, 7)]);
    assert!(host.follow(&wanted).is_empty(), "it is said once");
    assert_eq!(host.held.current(&host.all()), node_weights(&[(0, 3)]));
    // Even if it equals the written value by now.
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
fn survives_crash_at_any_write() {
    for written in 0..=2 {
        for is_auto in [false, true] {
            let mut host = FakeHost::new();
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
            // The same while everything is restored.
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
fn enables_auto_again() {
    let mut host = FakeHost::new();
    host.auto(true);
    // Also if the kernel has chosen the same weight, because it may choose another one later.
    host.follow(&[(0, 1), (2, 1)]);
    assert!(host.held.auto.is_some() && !host.all().is_auto);
    host.back();
    assert!(host.all().is_auto && host.held.is_empty());
    // Another program writes a weight.
    host.follow(&[(0, 3), (2, 1)]);
    host.set(2, 5);
    host.follow(&[(0, 3), (2, 1)]);
    host.follow(&[(0, 3)]);
    host.back();
    assert_eq!((host.now(), host.all().is_auto, host.held.is_empty()), ([1, 1, 5], false, true));
}

#[test]
fn auto_by_other_program_ends_all_weights() {
    let mut host = FakeHost::new();
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
fn keeps_records_of_unreadable_weights() {
    let mut host = FakeHost::new();
    host.auto(true);
    host.follow(&[(0, 3), (2, 2)]);
    host.write_file(&format!("{WEIGHTS}/node0"), "?");
    let plan = host.plan_back();
    assert_eq!(plan.writes.len(), 1, "{plan:?}");
    assert!(plan.held.nodes.contains_key(&NodeId(0)) && plan.held.auto.is_some());
    assert!(host.held.current(&host.all()).into_keys().eq([NodeId(2)]), "node 0 is not known");
    host.remove(0);
    let refused = host.weights().write(weight(0, 1)).unwrap_err();
    assert!(refused.to_string().contains("node0 cannot be written: No such file"), "{refused}");
}

#[test]
fn untaken_write_is_error() {
    let host = FakeHost::new();
    let file = host.dir.path().join(Weights::file(NodeId(0)));
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("/dev/null", &file).unwrap();
    let error = host.weights().write(weight(0, 3)).unwrap_err();
    assert!(error.to_string().ends_with("it holds \"\" after \"3\" was written"), "{error}");
}

#[test]
fn restores_weight_of_returned_node() {
    let mut host = FakeHost::new();
    host.set(2, 4);
    host.follow(&[(0, 3), (2, 2)]);
    host.remove(2);
    // The node has no memory now, so it gets no weight.
    host.follow(&[(0, 3)]);
    assert_eq!(host.held.current(&host.all()), node_weights(&[(0, 3)]), "what is absent is not there now");
    assert!(host.back().is_empty());
    let left = host.weights().unrestored(&host.held);
    let [(name, Some(reason))] = &left[..] else { panic!("{left:?}") };
    assert!(name.starts_with("weight of node 2 ") && reason.ends_with("it has 2, not 4"), "{left:?}");
    // The kernel has kept the weight.
    host.set(2, 2);
    host.follow(&[(0, 3), (2, 5)]);
    assert_eq!(host.now(), [3, 1, 5]);
    assert!(host.back().is_empty());
    assert_eq!((host.now(), host.held.is_empty()), ([1, 1, 4], true));
    // Its present weight is the original one.
    host.follow(&[(2, 4)]);
    host.remove(2);
    assert!(host.back().is_empty() && host.held.is_empty());
}

#[test]
fn absent_node_stays_given_up() {
    let mut host = FakeHost::new();
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
fn auto_covers_absent_nodes() {
    let mut host = FakeHost::new();
    host.auto(true);
    host.follow(&[(0, 3), (2, 2)]);
    host.remove(2);
    assert!(host.back().is_empty());
    assert!(host.all().is_auto && host.held.is_empty());
}

#[test]
fn auto_overwrites_no_other_program() {
    let mut host = FakeHost::new();
    host.auto(true);
    host.set(1, 4);
    host.follow(&[(0, 3)]);
    host.follow(&[(0, 5)]);
    let text = serde_json::to_string(&host.held.auto).unwrap();
    assert_eq!(text, r#"{"0":1,"1":4,"2":1}"#);
    host.set(2, 9);
    assert_eq!(host.back(), [(2, 9)]);
    assert_eq!((host.now(), host.all().is_auto, host.held.is_empty()), ([1, 4, 9], false, true));
    // A node that appeared since has the kernel's weight.
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
fn gives_up_auto_without_bandwidths() {
    let refuse = |number| {
        WeightError::refused(WeightWrite::Auto, WEIGHTS.into(), io::Error::from_raw_os_error(number))
    };
    for (number, is_pending) in [(libc::ENODEV, false), (libc::ENOMEM, true)] {
        let mut host = FakeHost::new();
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
        // The pending write is tried only while all weights are the original ones.
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
fn crash_after_auto_keeps_state() {
    let mut host = FakeHost::new();
    host.auto(true);
    host.follow(&[(0, 3)]);
    let plan = host.plan_back();
    for write in plan.writes {
        host.weights().write(write).unwrap();
    }
    assert!(host.back().is_empty() && host.held.is_empty());
}

#[test]
fn unread_write_is_recorded() {
    let mut host = FakeHost::new();
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
    // A refused weight was not written.
    let WeightPlan { writes, held, .. } = host.plan(&[(0, 3)]);
    let before = std::mem::replace(&mut host.held, held);
    let refused = WeightError::refused(writes[0], WEIGHTS.into(), io::Error::from_raw_os_error(libc::EPERM));
    host.held.record_result(writes[0], &Err(refused), &before);
    assert!(host.held.is_empty());
}

#[test]
fn reports_unreadable_weight() {
    let host = FakeHost::new();
    let file = host.dir.path().join(Weights::file(NodeId(0)));
    fs::remove_file(&file).unwrap();
    // A file that accepts writes, but is not text.
    std::os::unix::fs::symlink("/proc/self/clear_refs", &file).unwrap();
    let error = host.weights().write(weight(0, 1)).unwrap_err();
    assert!(error.to_string().contains("node0 cannot be read after \"1\" was written: "), "{error}");
}
