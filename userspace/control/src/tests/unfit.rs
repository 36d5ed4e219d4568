//! Tests of a policy that does not fit the machine.

use numaward_api::{EnforcementMode, EventKind};
use numaward_config::policy::{Amount, ReservedMemory};
use numaward_model::EventReport;

use super::*;

/// Returns a configuration for a machine with a node 7.
fn config_of_another_machine(strategy: StrategyKind) -> Config {
    let memory = [("memory".parse().unwrap(), Amount("1Gi".parse().unwrap()))];
    let reserved = ReservedMemory { numa_node: 7, limits: memory.into() };
    Config { strategy, reserved_memory: Some(vec![reserved]), ..Config::default() }
}

#[tokio::test]
async fn unfit_policy_keeps_guarantees() {
    for strategy in [StrategyKind::Native, StrategyKind::Kubelet] {
        let bench = DaemonBench::new(&["a", "b", "c"]);
        let (reconciler, thread, stop) = bench.start();
        admit(&reconciler, "a", 3).await.unwrap();
        admit(&reconciler, "b", 4).await.unwrap();
        assert_eq!(reconciler.allocations().shared_cpus, "0");
        stop.cancel();
        thread.join().unwrap();

        let (reconciler, thread, stop) = bench.start_with(config_of_another_machine(strategy));
        let unfit = bench.host.assigned.lock().unwrap().unfit.clone().unwrap();
        assert!(unfit.contains("NUMA node 7"), "{unfit}");
        let is_reported = |(_, report): &(_, EventReport)| {
            report.kind == EventKind::MachineChange && report.message.contains("NUMA node 7")
        };
        assert!(bench.host.happened.lock().unwrap().iter().any(is_reported));
        let held = reconciler.allocations();
        let held: Vec<_> = held.allocations.iter().map(|of| (of.name.as_str(), of.cpus.as_str())).collect();
        assert_eq!(held, [("a", "1-3"), ("b", "4-7")]);
        assert_eq!(bench.knob("b/cpuset.cpus"), "4-7");
        let refused = admit(&reconciler, "c", 1).await.unwrap_err();
        assert!(matches!(&refused, AdmissionError::Unfit(why) if why.contains("NUMA node 7")), "{refused}");
        reconciler.release("a".to_owned()).await.unwrap();
        assert_eq!((bench.knob("a/memory.min").as_str(), bench.knob("a/memory.max").as_str()), ("0", "max"));
        assert_eq!(reconciler.allocations().shared_cpus, "0-3");
        stop.cancel();
        thread.join().unwrap();

        let (reconciler, thread, stop) = bench.start();
        assert_eq!(bench.host.assigned.lock().unwrap().unfit, None);
        assert_eq!(admit(&reconciler, "c", 1).await.unwrap().cpus, "1");
        stop.cancel();
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn unfit_policy_restores_settings() {
    let bench = DaemonBench::new(&["a"]);
    let (reconciler, thread, stop) = bench.start();
    admit(&reconciler, "a", 3).await.unwrap();
    stop.cancel();
    thread.join().unwrap();

    let mut config = config_of_another_machine(StrategyKind::Kubelet);
    config.enforcement.mode = EnforcementMode::Off;
    let (reconciler, thread, stop) = bench.start_with(config);
    until("nothing is held", &|| restore::is_all_restored(&reconciler));
    assert_eq!((bench.knob("a/memory.min").as_str(), bench.knob("a/memory.max").as_str()), ("0", "max"));
    assert_ne!(bench.knob("a/cpuset.cpus"), "1-3");
    stop.cancel();
    thread.join().unwrap();
}
