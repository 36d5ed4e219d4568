//! Figures about guarantees: accounts, misses, residency, headroom.

use std::{collections::BTreeMap, sync::Arc};

use numaward_cgroup::classify;
use numaward_engine::OwnerId;
use numaward_model::{
    WorkloadGuarantee,
    headroom::NodeHeadroom,
    snapshot::{
        BudgetExcess, GuaranteeFigures, GuaranteeResidency, KindFigures, MissFigures, MissingCapacityFigures,
    },
};
use numaward_probes::Pages;
use numaward_topology::{Bytes, NodeId, ZoneKind, sysfs};

use crate::{
    headroom::Claims,
    observer::Observer,
    reading::CounterReading,
    shares::{Holdings, shares},
};

/// Readings from which the figures are computed.
struct GuaranteeReading<'a> {
    observer: &'a Observer,
    read: &'a CounterReading,
    holdings: Holdings<'a>,
    memory: &'a [(NodeId, Option<sysfs::NodeMeminfo>)],
}

/// Returns all figures about guarantees.
pub(crate) fn figures(
    observer: &Observer,
    read: &CounterReading,
    memory: &[(NodeId, Option<sysfs::NodeMeminfo>)],
) -> GuaranteeFigures {
    if read.guarantees.ledger.nodes().is_empty() && read.guarantees.workloads().is_empty() {
        return GuaranteeFigures::default();
    }
    GuaranteeReading { observer, read, holdings: Holdings::new(read), memory }.figures()
}

impl GuaranteeReading<'_> {
    fn figures(&self) -> GuaranteeFigures {
        let read = self.read;
        let (guarantees, machine) = (&read.guarantees, &read.machine);
        let bytes = |pages| self.observer.page_size.bytes_of(pages);
        let missed = read.table.series().filter_map(|(name, series)| {
            let slots = &read.counted.as_ref()?.slots;
            let counters = series.counters(|slot| slots.get(slot))?;
            let can_miss = read.can_miss(series);
            // Misses of an ended guarantee stay counted.
            if !can_miss && counters.values().all(|counters| counters.user_outside.0 == 0) {
                return None;
            }
            let of = |node| bytes(counters.get(node).map_or(Pages(0), |of| of.user_outside));
            Some(MissFigures {
                workload: name.clone(),
                bytes: machine.nodes.keys().map(|&node| (node, of(node))).collect(),
            })
        });
        let missed = missed.collect();
        // A union, because several workloads can hold the same CPUs: init containers pass on theirs, and if container names are
        // unknown, each container holds the CPUs of its pod.
        let exclusive = guarantees.held_cpus();
        GuaranteeFigures {
            missed,
            missed_hugepages: read.missed_hugepages(),
            misplaced_hugepages: read.misplaced_hugepages(),
            kinds: guarantees
                .ledger
                .memory()
                .into_iter()
                .flat_map(|(node, kinds)| {
                    kinds.into_iter().map(move |(kind, account)| KindFigures {
                        node,
                        kind,
                        reserved: account.reserved,
                        allocatable: account.allocatable,
                        guaranteed: account.guaranteed,
                        free: account.free,
                    })
                })
                .collect(),
            exclusive_cpus: machine
                .nodes
                .iter()
                .map(|(&node, data)| (node, (&exclusive & &data.cpus).len() as u64))
                .collect(),
            missing: self.missing(),
            residency: self.residency(),
            headroom: self.headroom(),
            low: self.observer.latest.headroom.borrow().nodes.iter().map(|of| (of.node, of.is_low)).collect(),
            over_budget: self.over_budget(),
            shared_pool_cpus: Some(guarantees.ledger.shared_pool().len() as u64),
            free_cpus: guarantees.free_cpus.len() as u64,
        }
    }

    /// Returns the available memory of each kind on each node, less the guaranteed memory that is not used yet; negative if it
    /// does not suffice.
    fn headroom(&self) -> Vec<(NodeId, ZoneKind, i64)> {
        // The guard may be off, or may not have run yet.
        self.observer.node_memory.require_watermarks();
        let (mut claims, mut unused) = (Claims::default(), BTreeMap::<(NodeId, ZoneKind), u64>::new());
        for share in shares(&self.read.guarantees) {
            for (kind, placed) in &share.placed {
                let ZoneKind::Hugepages(size) = kind else {
                    claims.add(placed, &self.holdings.resident(&share.workloads));
                    continue;
                };
                let used = self.holdings.hugepages(&share.workloads, *size);
                for (node, bytes) in placed {
                    let used = used.get(node).map_or(0, |bytes| bytes.0);
                    *unused.entry((*node, *kind)).or_default() += bytes.0.saturating_sub(used);
                }
            }
        }
        let seen = self.observer.latest.headroom.borrow().clone();
        let mut headroom = Vec::new();
        for (node, memory) in self.memory {
            let Some(memory) = memory else { continue };
            for (size, pool) in &memory.hugepages {
                let (kind, free) = (ZoneKind::Hugepages(*size), pool.free.saturating_mul(size.0.0));
                let unused = unused.get(&(*node, kind)).copied().unwrap_or(0);
                headroom.push((*node, kind, free.cast_signed().saturating_sub_unsigned(unused)));
            }
            // The guard's readings are newer than the workloads' readings used here.
            let room = seen.node(*node).map_or_else(
                || {
                    let left = claims
                        .left(*node, self.observer.node_memory.obtainable(*node, memory))
                        .0
                        .cast_signed();
                    left.saturating_sub_unsigned(claims.unused(*node).0)
                },
                NodeHeadroom::headroom_bytes,
            );
            headroom.push((*node, ZoneKind::Memory, room));
        }
        headroom
    }

    /// Returns how much more memory than guaranteed the workloads use on each of their nodes. Empty unless the configuration
    /// enforces budgets per node. Only guarantees on several nodes are compared. All containers of an owner (a pod) count
    /// together, under the first of their names.
    fn over_budget(&self) -> Vec<BudgetExcess> {
        if !self.observer.config.holds_budgets() {
            return Vec::new();
        }
        let mut owners: BTreeMap<&OwnerId, Vec<&WorkloadGuarantee>> = BTreeMap::new();
        for guarantee in self.read.guarantees.workloads() {
            owners.entry(&guarantee.owner).or_default().push(guarantee);
        }
        let mut over: BTreeMap<&Arc<str>, BTreeMap<NodeId, Bytes>> = BTreeMap::new();
        for (owner, workloads) in owners {
            let Some(account) = self.read.guarantees.ledger.owner(owner) else { continue };
            let mut budget: BTreeMap<NodeId, u64> = BTreeMap::new();
            let held = account.containers.values().filter_map(|held| held.placed.get(&ZoneKind::Memory));
            for (node, bytes) in held.flatten() {
                *budget.entry(*node).or_default() += bytes.0;
            }
            let name = workloads.iter().filter_map(|of| self.read.table.name(of.id)).min();
            let (Some(name), true, 2..) = (name, self.holdings.are_known(&workloads), budget.len()) else {
                continue;
            };
            let has = self.holdings.resident(&workloads);
            for (node, budget) in budget {
                let user = has.get(&node).map_or(0, |of| of.user().0);
                let above = over.entry(name).or_default().entry(node).or_default();
                above.0 = above.0.saturating_add(user.saturating_sub(budget));
            }
        }
        over.into_iter()
            .map(|(name, bytes)| BudgetExcess { workload: name.clone(), bytes: bytes.into_iter().collect() })
            .collect()
    }

    /// Returns the guarantee of each workload by kind of memory, and how much of the memory of its cgroup and descendants is on
    /// and off the guaranteed nodes.
    fn residency(&self) -> Vec<GuaranteeResidency> {
        let mut found: BTreeMap<(&Arc<str>, ZoneKind), GuaranteeResidency> = BTreeMap::new();
        for guarantee in self.read.guarantees.workloads() {
            let Some(name) = self.read.table.name(guarantee.id).filter(|_| !guarantee.nodes.is_empty())
            else {
                continue;
            };
            let none = |kind| GuaranteeResidency {
                workload: name.clone(),
                kind,
                guaranteed: Vec::new(),
                resident: None,
                is_broken: false,
            };
            for (kind, node, bytes) in &guarantee.placed {
                found.entry((name, *kind)).or_insert_with(|| none(*kind)).add_guaranteed(*node, *bytes);
            }
            for (kind, split) in self.holdings.by_kind(guarantee) {
                found.entry((name, kind)).or_insert_with(|| none(kind)).add(split);
            }
        }
        found.into_values().collect()
    }

    /// Returns offline guaranteed CPUs and guaranteed memory that the machine no longer has, by the name of the workload.
    fn missing(&self) -> Vec<MissingCapacityFigures> {
        let guarantees = &self.read.guarantees;
        let workloads: Vec<_> = guarantees
            .workloads()
            .iter()
            .map(|guarantee| classify(&guarantee.cgroup, |path| *path == guarantee.cgroup))
            .collect();
        let names: Vec<String> = {
            let state = self.observer.registry.lock();
            workloads.iter().map(|workload| state.name_of(workload)).collect()
        };
        let mut missing: BTreeMap<String, MissingCapacityFigures> = BTreeMap::new();
        for (guarantee, name) in guarantees.workloads().iter().zip(names) {
            let of_name = missing.entry(name).or_insert_with_key(|name| MissingCapacityFigures {
                workload: name.as_str().into(),
                offline_cpus: 0,
                uncovered: Bytes(0),
            });
            of_name.offline_cpus += guarantee.offline_cpus.len() as u64;
            of_name.uncovered.0 += guarantee.uncovered.iter().map(|block| block.bytes.0).sum::<u64>();
        }
        missing.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use numaward_cgroup::{CgroupId, WorkloadKind};
    use numaward_config::{Config, policy::StrategyKind};
    use numaward_engine::{
        ContainerRequest, NativeOptions, NativeStrategy, PolicyConfig, Quantity, Request, Resources,
        Strategy as _,
        policy::{MemoryManagerPolicy, MemoryReservation},
    };
    use numaward_model::{
        Guarantees,
        snapshot::ResidentFigures,
        testing::workload_guarantee,
        verdict::{ResidencySplit, UserMemory},
    };
    use numaward_probes::SlotId;
    use numaward_topology::{HugepageSize, Machine};

    use super::*;
    use crate::{
        activity::{ActivityCounts, AttachedProbes},
        table::{Member, Readings, Table},
    };

    const MIB: u64 = 1 << 20;

    fn reading<'a>(observer: &'a Observer, read: &'a CounterReading) -> GuaranteeReading<'a> {
        GuaranteeReading { observer, read, holdings: Holdings::new(read), memory: &[] }
    }

    #[test]
    fn residency_splits_by_guaranteed_nodes() {
        let size = HugepageSize(Bytes::mib(2));
        let machine = Machine::builder().nodes(2).cores_per_node(1).memory(Bytes::gib(4));
        let machine = machine.hugepages(size, 8).build().unwrap();
        let mut table = Table::default();
        let mut add = |id, name, path: &str, mib: Option<[u64; 2]>, pages: [u64; 2]| {
            table.add(CgroupId(id), name, Member::new(path.parse().unwrap(), WorkloadKind::Unit, None));
            let of_node = |mib| ResidentFigures {
                anon: Bytes::mib(mib),
                kernel: Bytes::mib(1),
                ..ResidentFigures::default()
            };
            let hugepages = [(size, pages.map(Bytes::mib).to_vec())];
            let hugepages = Arc::new(hugepages.into_iter().filter(|_| pages != [0; 2]).collect());
            let resident = mib.map(|mib| mib.map(of_node).to_vec().into());
            table.store_readings(CgroupId(id), Readings { resident, hugepages, ..Readings::default() });
        };
        add(1, "burst", "/burst", Some([100, 40]), [4, 2]);
        add(2, "inner", "/burst/inner", Some([7, 5]), [0, 0]);
        add(3, "unread", "/unread", None, [0, 0]);
        add(4, "cpus", "/cpus", Some([1, 1]), [0, 0]);
        add(5, "none", "/none", Some([1, 1]), [2, 2]);
        add(6, "free", "/free", Some([1024, 40]), [0, 0]);
        add(7, "short", "/short", Some([1000, 40]), [0, 0]);
        let gib = Bytes::gib(1);
        let of_memory = |path, id| Arc::new(workload_guarantee(path, id, &[(ZoneKind::Memory, 0, gib)]));
        // Memory of Burstable workloads beyond the guarantee may be on any node.
        let of_burstable =
            |path, id| Arc::new(WorkloadGuarantee { is_burstable: true, ..(*of_memory(path, id)).clone() });
        let guarantees = vec![
            of_memory("/burst", 1),
            of_memory("/unread", 3),
            Arc::new(workload_guarantee("/cpus", 4, &[])),
            of_burstable("/free", 6),
            of_burstable("/short", 7),
        ];
        let read = CounterReading {
            machine: Arc::new(machine),
            table: Arc::new(table),
            guarantees: Guarantees::new(guarantees, numaward_engine::Ledger::default()).into(),
            counted: None,
            activity_counts: ActivityCounts::default(),
            attached: Arc::new(AttachedProbes::from_reports(&[])),
        };
        let of = |workload: &str, kind, guaranteed: &[(NodeId, Bytes)], resident: Option<(u64, u64)>| {
            let user = |mib| UserMemory { anon: Bytes::mib(mib), ..UserMemory::default() };
            let resident = resident.map(|(on, off)| ResidencySplit { on: user(on), off: user(off) });
            let is_broken = resident.is_some_and(|split| split.is_broken());
            GuaranteeResidency {
                workload: workload.into(),
                kind,
                guaranteed: guaranteed.to_vec(),
                resident,
                is_broken,
            }
        };
        let on_first = [(NodeId(0), gib)];
        let expected = [
            of("burst", ZoneKind::Hugepages(size), &[], Some((4, 2))),
            of("burst", ZoneKind::Memory, &on_first, Some((107, 45))),
            of("free", ZoneKind::Memory, &on_first, Some((1024, 0))),
            of("short", ZoneKind::Memory, &on_first, Some((1000, 24))),
            of("unread", ZoneKind::Memory, &on_first, None),
        ];
        let root = tempfile::tempdir().unwrap();
        let config = Config { host_root: root.path().into(), ..Config::default() };
        assert_eq!(reading(&Observer::new(&config), &read).residency(), expected);
    }

    /// Of a Burstable workload, only the part of the guarantee that is not on its nodes is off them, on each surface.
    #[test]
    fn burstable_memory_beyond_guarantee_is_no_miss_anywhere() {
        let size = HugepageSize(Bytes::mib(2));
        let machine = Machine::builder().nodes(2).cores_per_node(1).memory(Bytes::gib(4));
        let machine = machine.hugepages(size, 64).build().unwrap();
        for (is_burstable, on, off, expected_off, can_miss) in
            [(false, 1024, 100, 100, true), (true, 1024, 100, 0, false), (true, 1000, 100, 24, false)]
        {
            let mut table = Table::default();
            table.add(CgroupId(1), "db", Member::new("/db".parse().unwrap(), WorkloadKind::Unit, None));
            let anon = |mib| ResidentFigures { anon: Bytes::mib(mib), ..ResidentFigures::default() };
            let readings = Readings {
                resident: Some([on, off].map(anon).to_vec().into()),
                hugepages: Arc::new([(size, vec![Bytes(0), Bytes::mib(32)])].into()),
                ..Readings::default()
            };
            table.store_readings(CgroupId(1), readings);
            let guarantee = workload_guarantee("/db", 1, &[(ZoneKind::Memory, 0, Bytes::gib(1))]);
            let guarantees = vec![Arc::new(WorkloadGuarantee { is_burstable, ..guarantee })];
            let read = CounterReading {
                machine: Arc::new(machine.clone()),
                table: Arc::new(table),
                guarantees: Guarantees::new(guarantees, numaward_engine::Ledger::default()).into(),
                counted: None,
                activity_counts: ActivityCounts::default(),
                attached: Arc::new(AttachedProbes::from_reports(&[])),
            };
            let root = tempfile::tempdir().unwrap();
            let observer = Observer::new(&Config { host_root: root.path().into(), ..Config::default() });
            let case = format!("burstable: {is_burstable}, {on} MiB on, {off} off");

            let mask = read.guarantees.binding_nodes_of(CgroupId(1));
            assert_eq!(mask.is_some(), can_miss, "{case}: mask of the probe, and so its events");
            let figures = reading(&observer, &read).figures();
            let series = read.table.series().all(|(_, series)| read.can_miss(series));
            assert_eq!(
                series, can_miss,
                "{case}: numa_miss_bytes and its alert, missedBytes and so top and the page"
            );
            let misplaced = figures.misplaced_hugepages.iter().flat_map(|of| &of.bytes);
            assert_eq!(misplaced.map(|(_, bytes)| bytes.0).sum::<u64>() > 0, can_miss, "{case}: hugepages");
            let of_memory = |of: &&GuaranteeResidency| of.kind == ZoneKind::Memory;
            let exported = figures.residency.iter().find(of_memory).unwrap();
            let is_broken = expected_off > 16;
            assert_eq!(exported.resident.unwrap().off.total(), Bytes::mib(expected_off), "{case}: metric");
            assert_eq!(exported.is_broken, is_broken, "{case}: promise_broken, and so its alert");
            let workloads = observer.workloads_from(&read).workloads;
            let workload = workloads.iter().find(|of| of.workload == "db").unwrap();
            let api = workload.residency.iter().find(|of| of.kind == "memory").unwrap();
            assert_eq!((api.off.anon_bytes, api.broken), (expected_off * MIB, is_broken), "{case}: API");
        }
    }

    #[test]
    fn budget_covers_pod_and_descendants() {
        let machine = Machine::builder().nodes(2).cores_per_node(2).memory(Bytes::gib(1)).build().unwrap();
        let reserved = MemoryReservation {
            numa_node: NodeId(0),
            limits: [(ZoneKind::Memory, Quantity::whole(200 * MIB))].into(),
        };
        let policy = PolicyConfig {
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![reserved],
            ..PolicyConfig::default()
        };
        let native = NativeStrategy::new(&machine, &policy, &NativeOptions::default()).unwrap();
        let container = |(name, mib): (&str, u64)| {
            let resources = Resources::default().with_cpu(Quantity::whole(1));
            ContainerRequest::guaranteed(name, resources.with_memory(Quantity::whole(mib * MIB)))
        };
        let containers = [("a", 1400), ("b", 100)].map(container).to_vec();
        let request = Request { owner: "u".into(), init_containers: Vec::new(), containers, resources: None };
        let ledger = native.admit(&native.idle(), &request).ledger;
        let guaranteed =
            [0, 1].map(|node| ledger.memory()[&NodeId(node)][&ZoneKind::Memory].guaranteed.0 / MIB);
        assert_eq!(guaranteed.iter().sum::<u64>(), 1500);

        let mut table = Table::default();
        let user =
            |[a, b]: [u64; 2]| [(a, 0), (0, b)].map(|(anon, file)| (Bytes::mib(anon), Bytes::mib(file)));
        let resident =
            |mib| user(mib).map(|(anon, file)| ResidentFigures { anon, file, ..ResidentFigures::default() });
        for (id, path, mib) in [
            (1, "/p/a", [guaranteed[0], 0]),
            (2, "/p/a/inner", [20, guaranteed[1] - 5]),
            (3, "/p/b", [30, 5]),
            (4, "/p/c", [500, 500]),
        ] {
            let name = path.trim_start_matches('/');
            table.add(CgroupId(id), name, Member::new(path.parse().unwrap(), WorkloadKind::Unit, None));
            let resident = Some(resident(mib).into());
            table.store_readings(CgroupId(id), Readings { resident, ..Readings::default() });
        }
        let of_pod =
            |path, id| Arc::new(WorkloadGuarantee { owner: "u".into(), ..workload_guarantee(path, id, &[]) });
        let read = |table: &Table<SlotId>| CounterReading {
            machine: Arc::new(machine.clone()),
            table: Arc::new(table.clone()),
            guarantees: Guarantees::new(vec![of_pod("/p/a", 1), of_pod("/p/b", 3)], ledger.clone()).into(),
            counted: None,
            activity_counts: ActivityCounts::default(),
            attached: Arc::new(AttachedProbes::from_reports(&[])),
        };
        let root = tempfile::tempdir().unwrap();
        let over = |strategy, table: &Table<SlotId>| {
            let observer =
                Observer::new(&Config { host_root: root.path().into(), strategy, ..Config::default() });
            let read = read(table);
            reading(&observer, &read).over_budget()
        };
        let expected = BudgetExcess {
            workload: "p/a".into(),
            bytes: vec![(NodeId(0), Bytes::mib(50)), (NodeId(1), Bytes(0))],
        };
        assert_eq!(over(StrategyKind::Native, &table), [expected]);
        assert_eq!(over(StrategyKind::Kubelet, &table), []);
        table.store_readings(CgroupId(3), Readings::default());
        assert_eq!(over(StrategyKind::Native, &table), [], "half of a pod is no figure");
    }
}
