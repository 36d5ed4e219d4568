//! Example values for tests of this and other crates.

#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "this is part of tests")]

use std::{sync::Arc, time::Duration};

use numaward_cgroup::CgroupId;
use numaward_topology::{Bytes, CpuSet, HugepageSize, NodeId, ZoneKind};

use crate::{
    WorkloadGuarantee,
    snapshot::{
        AllocatedFigures, AllocatedHugepages, CpuFigures, GuaranteeFigures, InterruptFigures, MapFigures,
        MigratedFigures, NodeMemoryFigures, OomKillFigures, PressureFigures, ProbeFigures, ResidentFigures,
        Snapshot, StallFigures, TieringFigures, UnattributedFigures, WorkloadActivity, WorkloadFigures,
    },
};

/// Returns a guarantee of the given memory for the cgroup with this path and id, without CPUs.
pub fn workload_guarantee(path: &str, id: u64, placed: &[(ZoneKind, u32, Bytes)]) -> WorkloadGuarantee {
    WorkloadGuarantee {
        cgroup: path.parse().unwrap(),
        id: CgroupId(id),
        owner: path.into(),
        container: None,
        nodes: placed.iter().map(|(_, node, _)| NodeId(*node)).collect(),
        cpus: CpuSet::new(),
        hidden_cpus: CpuSet::new(),
        is_burstable: false,
        blocks: Vec::new(),
        placed: placed.iter().map(|(kind, node, bytes)| (*kind, NodeId(*node), *bytes)).collect(),
        offline_cpus: CpuSet::new(),
        uncovered: Vec::new(),
    }
}

/// Returns moves with known and with unknown nodes.
fn migrated() -> Vec<MigratedFigures> {
    let nodes = Some((NodeId(0), NodeId(2)));
    vec![
        MigratedFigures { reason: "numa_misplaced", nodes, pages: 2 },
        MigratedFigures { reason: "syscall", nodes: None, pages: 1 },
    ]
}

/// Returns a snapshot with a value for each kind of figure.
pub fn snapshot() -> Snapshot {
    let workload = |name: &str| WorkloadFigures {
        name: name.into(),
        start: None,
        allocated: Some(vec![AllocatedFigures { local: Bytes(4096), remote: Bytes(8192), kernel: Bytes(0) }]),
        cpu: Some(vec![Duration::from_millis(2500)]),
        resident: Some(
            [ResidentFigures {
                anon: Bytes(1),
                file: Bytes(2),
                kernel: Bytes(3),
                mapped: Bytes(0),
                shmem: Bytes(0),
                droppable: Bytes(0),
            }]
            .into(),
        ),
        hugepages: Arc::new([(HugepageSize(Bytes::mib(2)), vec![Bytes::mib(2)])].into()),
        pressure: Some(PressureFigures { waiting: Duration::from_millis(1500), stalled: Duration::ZERO }),
        oom_kills: Some(0),
        tiering: Some(TieringFigures { demoted: Bytes(4), promoted: Bytes(5) }),
        activity: Some(WorkloadActivity {
            remote: Some(vec![7]),
            local: Some(14),
            moved: None,
            sampling: vec!["on"],
            estimated_remote_permille: Some(125),
            migrated: Some(migrated()),
            stalls: Some(StallFigures::default()),
            oom_kills: Some(
                [("none", 0), ("cpuset", 1), ("mempolicy", 0), ("memcg", 0)]
                    .map(|(constraint, count)| OomKillFigures::new(constraint, count)),
            ),
            hugepages: Some(
                [(
                    HugepageSize(Bytes::mib(2)),
                    vec![AllocatedHugepages { local: Bytes::mib(2), remote: Bytes(0) }],
                )]
                .into(),
            ),
            dram: Some(vec![(Some(11), 12)]),
        }),
    };
    let blind = WorkloadFigures {
        allocated: None,
        cpu: None,
        resident: None,
        hugepages: Arc::default(),
        pressure: None,
        oom_kills: Some(3),
        tiering: None,
        activity: None,
        ..workload("blind")
    };
    Snapshot {
        nodes: vec![NodeMemoryFigures {
            node: NodeId(2),
            kinds: vec![
                ("hugepages-2Mi".parse().unwrap(), Bytes::mib(4), Some(Bytes::mib(2))),
                (ZoneKind::Memory, Bytes::gib(1), None),
            ],
        }],
        workloads: vec![workload("a\\b\"c\nd.service"), blind],
        page_size: Bytes(4096),
        accesses: Some(vec![(NodeId(0), Some(NodeId(2)), 5), (NodeId(0), None, 2)]),
        exclusive_cpus: vec![(
            numaward_topology::CpuId(3),
            CpuFigures {
                intruders: [
                    ("kernel_thread", Duration::ZERO),
                    ("host", Duration::from_millis(1500)),
                    ("workload", Duration::ZERO),
                ],
                interrupts: Some(InterruptFigures {
                    hard: 5,
                    soft: 6,
                    hard_time: Duration::from_millis(250),
                    soft_time: Duration::ZERO,
                }),
            },
        )],
        unattributed: Some(vec![UnattributedFigures { atomic: Bytes(16384), reclaim: Bytes(4096) }]),
        coverage_permille: Some(990),
        unknown_node: Some(Bytes(0)),
        probes: vec![ProbeFigures {
            probe: "alloc".to_owned(),
            mode: "absent".to_owned(),
            reason: "btf",
            runtime: None,
            runs: Some(9),
            sampled_ratio: Some(0.25),
            events_lost: Some(0),
        }],
        maps: vec![MapFigures { map: "LEAF", entries: 3, capacity: 16 }],
        map_memory: vec![("alloc", 4096)],
        workloads_with_slot: 1,
        workloads_without_slot: 1,
        degraded: vec![("topology", true), ("cgroups", false)],
        guarantees: GuaranteeFigures::default(),
        process: None,
    }
}
