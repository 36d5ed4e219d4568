//! Interface of the observer to other parts of the daemon.

use std::{collections::HashSet, sync::Arc};

use numaward_cgroup::{CgroupPath, classify};
use numaward_model::{
    EventReport, Guarantees,
    accesses::WorkloadAccesses,
    headroom::Headroom,
    port::{CgroupListener, ObservedHost},
};
use numaward_topology::Machine;

use crate::{accesses, observer::Observer, part::DaemonPart};

impl ObservedHost for Observer {
    fn machine(&self) -> Arc<Machine> {
        self.registry.machine()
    }

    fn headroom(&self) -> Arc<Headroom> {
        self.latest.headroom.borrow().clone()
    }

    fn accesses(&self) -> Vec<WorkloadAccesses> {
        accesses::read(self)
    }

    fn report(&self, cgroup: Option<&CgroupPath>, report: EventReport) {
        let name =
            cgroup.map(|cgroup| self.registry.lock().name_of(&classify(cgroup, |path| path == cgroup)));
        self.events.report(match name {
            Some(name) => report.workload(name),
            None => report,
        });
    }

    fn subscribe(&self, listener: CgroupListener) {
        self.listeners.lock().push(listener);
    }

    /// Publishes the guarantees. On return, the probes know the guaranteed nodes of each workload and check its first page
    /// against them.
    fn publish_guarantees(&self, guarantees: Guarantees) {
        let unfit = guarantees.unfit.as_ref().map(|problems| {
            format!("the policy does not fit the machine ({problems}): guarantees are kept, and no new ones are given")
        });
        self.health.note(DaemonPart::Policy, unfit.map_or(Ok(()), Err));
        self.registry.assign(guarantees);
        self.leave_exclusive_cpus();
    }

    fn update_containers(&self, named: Vec<(String, String)>, all: bool) {
        let mut state = self.registry.lock();
        let known = &mut state.containers;
        let mut there = HashSet::new();
        for (id, name) in named {
            there.insert(id.clone());
            let is_known = known.get(&id).is_some_and(|had| **had == *name);
            if !is_known {
                known.insert(id, name.into());
            }
        }
        if all {
            known.retain(|id, _| there.contains(id));
        }
        // A container that is being created is not renamed, because it has no cgroup yet.
        if state.renamed().next().is_some() {
            drop(state);
            self.registry.lock_slots().rename();
        }
    }

    fn remove_container(&self, id: &str) {
        self.registry.lock().containers.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        fs::{self, File, OpenOptions},
        io,
        os::unix::fs::OpenOptionsExt,
        path::Path,
        sync::mpsc,
        thread,
        time::{Duration, Instant},
    };

    use numaward_cgroup::{Cgroup, CgroupEvent, CgroupId, ContainerIdentity, Hierarchy};
    use numaward_config::Config;
    use numaward_engine::Ledger;
    use numaward_model::{WorkloadGuarantee, snapshot::SnapshotSource, testing::workload_guarantee};
    use numaward_topology::{Bytes, CpuId, CpuSet, ZoneKind};
    use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::{exclusive::tests::slot, foreign::ForeignGuarantees, residency};

    /// Waits for a reader of this FIFO. The reader blocks until the returned file is dropped.
    fn reader_of(path: &Path) -> File {
        let deadline = Instant::now() + Duration::from_secs(10);
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap();
        loop {
            match OpenOptions::new().write(true).custom_flags(flags).open(path) {
                Ok(file) => return file,
                Err(error) if Instant::now() > deadline => {
                    panic!("{} has no reader: {error}", path.display())
                }
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Source of guarantees that guarantees memory to every container.
    #[derive(Debug)]
    struct UniformGuarantees(Ledger);

    impl ForeignGuarantees for UniformGuarantees {
        fn guarantee(
            &self,
            id: CgroupId,
            cgroup: &CgroupPath,
            _: &ContainerIdentity,
        ) -> Option<WorkloadGuarantee> {
            Some(workload_guarantee(&cgroup.to_string(), id.0, &[(ZoneKind::Memory, 0, Bytes::mib(2))]))
        }

        fn label(&self, _: &ContainerIdentity) -> Option<String> {
            thread::sleep(Duration::from_micros(100));
            None
        }

        fn ledger(&self) -> &Ledger {
            &self.0
        }

        fn free_cpus(&self) -> CpuSet {
            CpuSet::new()
        }
    }

    #[test]
    fn new_container_during_adoption() {
        let cgroup = |id: u64| Cgroup {
            id: CgroupId(id),
            path: format!("/kubepods/podu1/{id:064x}").parse().unwrap(),
        };
        let observer = Observer::new(&Config::default());
        for _ in 0..200 {
            observer.registry.lock_slots().handle(CgroupEvent::Added(cgroup(1)));
            let (holding, held) = mpsc::channel();
            thread::scope(|scope| {
                let observer = &observer;
                scope.spawn(move || {
                    holding.send(()).unwrap();
                    let foreign: Arc<dyn ForeignGuarantees> = Arc::new(UniformGuarantees(Ledger::default()));
                    observer.adopt_foreign_guarantees(&foreign);
                });
                held.recv().unwrap();
                thread::sleep(Duration::from_micros(50));
                for id in 2..20 {
                    observer.registry.lock_slots().handle(CgroupEvent::Added(cgroup(id)));
                }
            });
            let guarantees = observer.guarantees();
            let forgotten: Vec<_> = (1..20).filter(|id| !guarantees.has(CgroupId(*id))).collect();
            assert_eq!(forgotten, [0; 0]);
            for id in 1..20 {
                observer.registry.lock_slots().handle(CgroupEvent::Removed(cgroup(id)));
            }
        }
    }

    #[test]
    fn removed_workload_stays_removed() {
        let cgroup = |path: &str, id| Cgroup { id: CgroupId(id), path: path.parse().unwrap() };
        let of =
            |path: &str, id| Arc::new(workload_guarantee(path, id, &[(ZoneKind::Memory, 0, Bytes::mib(2))]));
        let observer = Observer::new(&Config::default());
        let (first, second) = (of("/a", 1), of("/b", 2));
        let assign = |held: &[&Arc<WorkloadGuarantee>]| {
            observer.publish_guarantees(Guarantees::new(
                held.iter().copied().cloned().collect(),
                Ledger::default(),
            ));
            observer.registry.lock().table.members().map(|(id, _)| id.0).collect::<Vec<_>>()
        };
        // A guarantee may be published before the cgroup is found.
        assert_eq!(assign(&[&first]), [1]);
        observer.registry.lock_slots().handle(CgroupEvent::Added(cgroup("/a", 1)));
        observer.registry.lock_slots().handle(CgroupEvent::Removed(cgroup("/a", 1)));
        assert_eq!(assign(&[&first, &second]), [2]);
        assert_eq!(assign(&[&second]), [2]);
    }

    #[test]
    fn slow_files_delay_no_assignment() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap())?;
            fs::write(&path, text)?;
            io::Result::Ok(path)
        };
        write("sys/devices/system/cpu/online", "0\n").unwrap();
        write("sys/devices/system/node/online", "0\n").unwrap();
        write("sys/devices/system/node/node0/cpulist", "0\n").unwrap();
        let meminfo = "Node 0 MemTotal: 1024 kB\nNode 0 MemFree: 512 kB\n";
        write("sys/devices/system/node/node0/meminfo", meminfo).unwrap();
        write("proc/softirqs", "CPU0\n").unwrap();
        write("proc/stat", "cpu 0\ncpu0 0 0 0 0 0 0 0\n").unwrap();
        let observer =
            Arc::new(Observer::new(&Config { host_root: root.path().into(), ..Config::default() }));
        let guarantees = Guarantees::new(
            vec![workload_guarantee("/a", 1, &[(ZoneKind::Memory, 0, Bytes::mib(2))]).into()],
            Ledger::default(),
        );
        observer.publish_guarantees(guarantees.clone());
        observer.registry.lock().hierarchy = Some(Hierarchy::at(root.path()));
        let scrape: fn(&Observer) = |observer| drop(observer.snapshot());
        let read_workloads: fn(&Observer) =
            |observer| residency::read_workloads(observer, &CancellationToken::new());
        for (file, read) in [
            ("sys/devices/system/node/node0/meminfo", scrape),
            ("proc/zoneinfo", scrape),
            ("a/memory.numa_stat", read_workloads),
            ("proc/interrupts", scrape),
            ("proc/sys/kernel/numa_balancing", residency::judge_sampling),
        ] {
            observer.registry.lock().exclusive.set_owners(BTreeMap::from([(CpuId(0), slot())]));
            let path = write(file, "").unwrap();
            fs::remove_file(&path).unwrap();
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            let reads = observer.clone();
            let reader = thread::spawn(move || read(&reads));
            let stuck = reader_of(&path);
            let (sender, done) = mpsc::channel();
            let (assigns, guarantees) = (observer.clone(), guarantees.clone());
            thread::spawn(move || {
                assigns.publish_guarantees(guarantees);
                sender.send(()).unwrap();
            });
            let taken = done.recv_timeout(Duration::from_secs(5));
            assert!(!reader.is_finished(), "{file} was not read to its end");
            fs::remove_file(&path).unwrap();
            drop(stuck);
            assert_eq!(taken, Ok(()), "{file} delays the assignment");
            reader.join().unwrap();
        }
    }
}
