//! Changes of the kubelet's decisions between v1.32.10 and v1.36.2.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;

use numaward_engine::{
    KubeletStrategy, PolicyConfig, Quantity, Request, Resources, Strategy as _,
    policy::{CpuManagerPolicy, KubeletVersion, TopologyManagerPolicy},
};
use numaward_topology::{Bytes, Machine};

const ALPHA: &str = "CPUManagerPolicyAlphaOptions";
const BETA: &str = "CPUManagerPolicyBetaOptions";

/// Makes a node of eight cores with two threads each, in two caches: 0-3 and 8-11, 4-7 and 12-15.
fn machine() -> Machine {
    let machine = Machine::builder().nodes(1).cores_per_node(8).smt(2).caches_per_node(2);
    machine.memory(Bytes::gib(8)).build().unwrap()
}

fn config(version: KubeletVersion, options: &[&str]) -> PolicyConfig {
    PolicyConfig {
        cpu_manager_policy: CpuManagerPolicy::Static,
        cpu_manager_policy_options: options
            .iter()
            .map(|&name| (name.to_owned(), "true".to_owned()))
            .collect(),
        reserved_system_cpus: "0,8".parse().unwrap(),
        topology_manager_policy: TopologyManagerPolicy::BestEffort,
        kubelet_version: version,
        ..PolicyConfig::default()
    }
}

/// Returns the CPUs of the last of these workloads.
fn taken(version: KubeletVersion, asked: &[u64]) -> String {
    let kubelet =
        KubeletStrategy::new(&machine(), &config(version, &["prefer-align-cpus-by-uncorecache"])).unwrap();
    let mut ledger = kubelet.idle();
    let mut taken = String::new();
    for (number, &cpus) in asked.iter().enumerate() {
        let resources =
            Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(Quantity::whole(1 << 20));
        let decision = kubelet.admit(&ledger, &Request::workload(format!("w{number}"), resources));
        taken = decision.outcome.unwrap()[0].allocation.cpus.as_ref().unwrap().to_string();
        ledger = decision.ledger;
    }
    taken
}

/// The first cache has free cores. v1.32 looks for two whole cores, which are not five CPUs, and continues with cores
/// of any cache.
#[test]
fn v1_36_keeps_odd_requests_in_a_cache() {
    assert_eq!(taken(KubeletVersion::V1_32, &[2, 5]), "2-4,10-11");
    assert_eq!(taken(KubeletVersion::V1_36, &[2, 5]), "4-6,12-13");
    for version in [KubeletVersion::V1_32, KubeletVersion::V1_36] {
        assert_eq!(taken(version, &[2, 6]), "4-6,12-14", "{version}: an even one did before");
        assert_eq!(taken(version, &[2, 4]), "2-3,10-11", "{version}");
    }
}

/// Options that each version accepts with the gates of both levels off, and with the alpha gate off.
#[test]
fn option_levels_match_the_version() {
    let accepts = |version, options: &[&str], gates: &[&str]| {
        let gates: BTreeMap<_, _> = gates.iter().map(|&gate| (gate.to_owned(), false)).collect();
        let config = PolicyConfig { feature_gates: gates, ..config(version, options) };
        KubeletStrategy::new(&machine(), &config).map(drop).map_err(|error| error.to_string())
    };
    let refused = |level: &str, option: &str| {
        Err(format!(
            "new static policy error: CPU Manager Policy {level}-level Options not enabled, but option {option:?} provided"
        ))
    };
    for (option, old, new) in [
        ("strict-cpu-reservation", Some("Alpha"), None),
        ("prefer-align-cpus-by-uncorecache", Some("Alpha"), None),
        ("full-pcpus-only", Some("Beta"), None),
        ("distribute-cpus-across-numa", Some("Alpha"), Some("Beta")),
        ("align-by-socket", Some("Alpha"), Some("Alpha")),
        ("distribute-cpus-across-cores", Some("Alpha"), Some("Alpha")),
    ] {
        for (version, level) in [(KubeletVersion::V1_32, old), (KubeletVersion::V1_36, new)] {
            let expected = level.map_or(Ok(()), |level| refused(level, option));
            assert_eq!(accepts(version, &[option], &[ALPHA, BETA]), expected, "{version} {option}");
            assert_eq!(accepts(version, &[option], &[]), Ok(()), "{version} {option}");
            let is_alpha = level == Some("Alpha");
            assert_eq!(accepts(version, &[option], &[ALPHA]).is_err(), is_alpha, "{version} {option}");
        }
    }
}

#[test]
fn v1_36_allows_max_nodes_ungated() {
    let start = |version| {
        let config = PolicyConfig {
            topology_manager_policy_options: [("max-allowable-numa-nodes".to_owned(), "12".to_owned())]
                .into(),
            feature_gates: [("TopologyManagerPolicyBetaOptions".to_owned(), false)].into(),
            ..config(version, &[])
        };
        KubeletStrategy::new(&machine(), &config).map(drop).map_err(|error| error.to_string())
    };
    let refused = "Topology Manager Policy Beta-level Options not enabled, but option \"max-allowable-numa-nodes\" provided";
    assert_eq!(start(KubeletVersion::V1_32), Err(refused.to_owned()));
    assert_eq!(start(KubeletVersion::V1_36), Ok(()));
}
