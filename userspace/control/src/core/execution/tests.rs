//! Tests of the requests that are answered during a blocking operation, and of those that are deferred.

use std::{collections::BTreeMap, path::PathBuf, time::Instant};

use numaward_config::Config;
use numaward_engine::{PodId, Quantity, Request, Resources, Terms};
use numaward_guarantee::pod::{ContainerPlacementRequest, MemoryClaim, PodClaim, PodPlacementRequest};
use numaward_model::{Settings, pod::GuaranteeSource, port::ObservedHost as _};
use numaward_topology::Bytes;
use tempfile::TempDir;
use tokio::sync::oneshot::{self, Receiver, error::TryRecvError};

use super::*;
use crate::{
    ControlMetrics, Ports,
    core::{
        admission,
        pods::{commands, synchronize},
        shared_pool,
    },
    reconciler::upkeep,
    testing::{self as fixture, TestHost},
};

/// Time that is longer than a command takes, also on a busy host.
const WAIT: Duration = Duration::from_secs(1);

pub(in crate::core) struct ExecutionBench {
    pub(in crate::core) core: Core,
    send: Sender<Message>,
    dir: TempDir,
}

impl ExecutionBench {
    /// Creates a host of two nodes with four CPUs each, one of which is reserved, and the parent cgroup of pods.
    pub(in crate::core) fn new() -> Self {
        Self::with(Config::default())
    }

    pub(in crate::core) fn with(config: Config) -> Self {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
        let root = dir.path().join("cgroup");
        for path in ["", "kubepods", "other"] {
            fixture::cgroup(&root.join(path), &host.machine());
        }
        let config = Config { state_directory: dir.path().join("state"), ..config };
        let enforcer = fixture::enforcer(&config, &root, &host.machine(), None);
        let hierarchy = numaward_cgroup::Hierarchy::at(&root);
        let core =
            Core::open(&config, hierarchy, enforcer, Ports::new(host.clone()), ControlMetrics::default());
        let (mut core, (send, queue)) = (core.unwrap(), mpsc::channel());
        let worker = EnforcementWorker::start(
            core.enforcer().clone(),
            send.clone(),
            &core.ports.heartbeats,
            &CancellationToken::new(),
        )
        .unwrap();
        core.serve(worker, Inbox::new(queue));
        Self { core, send, dir }
    }

    /// Sends a command.
    pub(in crate::core) fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> PodCommand,
    ) -> Receiver<T> {
        let (answer, result) = oneshot::channel();
        self.send.send(Message::Runtime(Box::new(command(answer)))).unwrap();
        result
    }

    pub(in crate::core) fn create(&self, ask: &ContainerPlacementRequest) -> Receiver<impl Sized + use<>> {
        self.ask(|answer| PodCommand::Create { ask: Box::new(ask.clone()), answer })
    }

    pub(in crate::core) fn bind(
        &self,
        ask: &ContainerPlacementRequest,
    ) -> Receiver<Option<numaward_guarantee::pod::UnpinnedReason>> {
        let dir = self.dir_of(ask);
        fixture::cgroup(dir.parent().unwrap(), &self.core.policy.machine);
        fixture::cgroup(&dir, &self.core.policy.machine);
        self.ask(|answer| PodCommand::Bind { id: ask.id.clone(), ask: None, answer })
    }

    pub(in crate::core) fn dir_of(&self, ask: &ContainerPlacementRequest) -> PathBuf {
        self.dir.path().join("cgroup").join(ask.cgroup.as_str().trim_start_matches('/'))
    }

    /// Handles the received commands in order.
    pub(in crate::core) fn handle(&mut self) {
        self.core.execution.inbox.as_mut().unwrap().receive(Duration::ZERO);
        while let Some(command) = self.core.execution.inbox.as_mut().unwrap().next_runtime_command() {
            if let Some(reply) = commands::pod_command(&mut self.core, command, false) {
                reply();
            }
        }
    }

    /// Keeps the thread for blocking operations busy.
    fn keep_busy(&self) {
        let work = &self.core.execution.worker.as_ref().unwrap().work;
        work.send(Box::new(|_| std::thread::sleep(WAIT))).unwrap();
    }

    /// Returns the `cpuset.cpus` of a cgroup.
    pub(in crate::core) fn cpus(&self, path: &str) -> String {
        fixture::line(&self.dir.path().join("cgroup").join(path).join("cpuset.cpus"))
    }

    /// Returns true if a knob of a cgroup has another value than was written.
    fn has_drifted(&self, path: &CgroupPath) -> bool {
        let drifts = self.core.enforcer().drift(&self.core.store.state.applied, path).unwrap();
        // A fake's effective CPUs and nodes never change.
        drifts.iter().any(|drift| drift.kind == numaward_enforce::DriftKind::Rewritten)
    }

    /// Admits a guarantee of memory and shared CPUs for a cgroup outside of pods.
    pub(in crate::core) fn share(&mut self, name: &str) {
        let target = numaward_api::Target::Cgroup(format!("/{name}"));
        let asked = numaward_api::AllocationRequest {
            cpus: Some("500m".parse().unwrap()),
            ..numaward_api::AllocationRequest::new(name, target, "64Mi")
        };
        drop(
            admission::admit(
                &mut self.core,
                &numaward_guarantee::request::Request::new(&asked).unwrap(),
                false,
            )
            .unwrap(),
        );
    }

    /// Executes a blocking operation that affects this cgroup.
    fn wait(&mut self, cgroup: &str) {
        let cgroups = BTreeSet::from([cgroup.parse().unwrap()]);
        self.core.wait_for(cgroups, |_| std::thread::sleep(WAIT)).unwrap();
    }
}

/// Returns the request of a pod with one container, of the class Guaranteed.
pub(in crate::core) fn container(name: &str, millicpus: u64) -> ContainerPlacementRequest {
    let resources = Resources::none().with_cpu(Quantity::milli(millicpus));
    let resources = resources.with_memory(Quantity::whole(Bytes::mib(64).0));
    let owner = format!("uid-{name}/c");
    let mut request = Request::workload(owner.as_str(), resources);
    request.containers[0].name = "c".into();
    ContainerPlacementRequest {
        pod: PodPlacementRequest {
            pod: PodId { namespace: "default".to_owned(), name: name.to_owned(), uid: format!("uid-{name}") },
            sandbox: format!("sandbox-{name}"),
            asked: PodClaim::Container(request),
            terms: Terms::default(),
            notes: Vec::new(),
        },
        id: name.to_owned(),
        name: "c".to_owned(),
        cgroup: format!("/kubepods/pod-{name}/{name}").parse().unwrap(),
        slice: GuaranteeSource::Own,
        memory: MemoryClaim::default(),
        keeps_pod_quota: false,
        has: Settings::default(),
        claims: numaward_guarantee::pod::ClaimUses::default(),
        is_placed_by_other_program: false,
    }
}

#[test]
fn runtime_waits_for_no_huge_pages() {
    let mut bench = ExecutionBench::new();
    let root = bench.dir.path().to_owned();
    let put = |file: &str, text: &str| {
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    };
    put("cgroup/other/cgroup.procs", "77\n");
    put("proc/77/maps", "7f0000000000-7f0001000000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n");
    put("proc/77/status", "HugetlbPages:\t 0 kB\n");
    bench.core.config.host_root.clone_from(&root);
    // The pools are larger than when the machine was read.
    for id in bench.core.policy.machine.nodes.keys() {
        let of = |file: &str| format!("sys/devices/system/node/node{id}/{file}");
        put(&of("meminfo"), "Node 0 MemTotal: 4194304 kB\nNode 0 MemFree: 1024 kB\n");
        for (file, pages) in [("nr_hugepages", "64"), ("free_hugepages", "0"), ("surplus_hugepages", "0")] {
            put(&of(&format!("hugepages/hugepages-2048kB/{file}")), pages);
        }
    }
    bench.keep_busy();
    let mut created = bench.create(&container("p", 1000));
    let target = numaward_api::Target::Cgroup("/other".to_owned());
    let asked = numaward_api::AllocationRequest::new("other", target, "64Mi");
    let asked = numaward_guarantee::request::Request::new(&asked).unwrap();
    let refused = admission::admit(&mut bench.core, &asked, false).unwrap_err().to_string();
    assert!(refused.contains("16Mi of huge pages"), "{refused}");
    assert!(created.try_recv().is_ok(), "answered before the refusal");
}

/// A process can hold the lock of its memory map for ever; a pipe that nothing writes hangs likewise.
#[test]
fn hung_process_delays_no_other_admission() {
    let mut bench = ExecutionBench::new();
    let root = bench.dir.path().to_owned();
    let put = |file: &str, text: &str| {
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    };
    put("cgroup/other/cgroup.procs", "77\n");
    std::fs::create_dir_all(root.join("proc/77")).unwrap();
    let maps = root.join("proc/77/maps");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &maps,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    bench.core.config.host_root.clone_from(&root);
    for id in bench.core.policy.machine.nodes.keys() {
        put(
            &format!("sys/devices/system/node/node{id}/meminfo"),
            "Node 0 MemTotal: 4194304 kB\nNode 0 MemFree: 1024 kB\n",
        );
        for (file, pages) in [("nr_hugepages", "64"), ("free_hugepages", "0"), ("surplus_hugepages", "0")] {
            put(&format!("sys/devices/system/node/node{id}/hugepages/hugepages-2048kB/{file}"), pages);
        }
    }
    bench.keep_busy();
    let start = Instant::now();
    let target = numaward_api::Target::Cgroup("/other".to_owned());
    let asked = numaward_api::AllocationRequest::new("other", target, "64Mi");
    let asked = numaward_guarantee::request::Request::new(&asked).unwrap();
    admission::admit(&mut bench.core, &asked, false).unwrap();
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    // The thread ends.
    drop(std::fs::File::options().write(true).open(maps).unwrap());
}

#[test]
fn deferred_commands_keep_their_order() {
    let mut bench = ExecutionBench::new();
    let (first, second) = (container("first", 4000), container("second", 4000));
    drop(bench.create(&first));
    bench.handle();

    // All these commands arrive during a blocking operation that affects a sibling cgroup. The end of the first container is deferred, so
    // that the second does not fit yet.
    let (uid, sandbox) = ("uid-first".to_owned(), "sandbox-first".to_owned());
    let mut over = bench.ask(|answer| PodCommand::PodStopped { uid, sandbox, answer });
    let mut created = bench.create(&second);
    let mut bound = bench.bind(&second);
    let mut ended = bench.ask(|answer| PodCommand::PodStopped {
        uid: "uid-none".to_owned(),
        sandbox: String::new(),
        answer,
    });
    bench.wait("/kubepods/busy");
    assert_eq!(over.try_recv(), Err(TryRecvError::Empty));
    assert!(matches!(created.try_recv(), Err(TryRecvError::Empty)), "it is tried again");
    assert_eq!(bound.try_recv(), Err(TryRecvError::Empty), "it is not bound before it is placed");
    assert_eq!(ended.try_recv(), Ok(()), "what has nothing to do with it is answered");

    bench.handle();
    assert_eq!(over.try_recv(), Ok(()));
    assert!(created.try_recv().is_ok());
    assert_eq!(bound.try_recv(), Ok(None));
    assert_eq!(bench.core.store.state.ledger.shared_pool().len(), 4);
    assert!(bench.core.store.state.guarantees.contains_key("default/second/c"));
}

#[test]
fn bind_that_moves_pages_is_deferred() {
    let mut bench = ExecutionBench::new();
    let ask = container("a", 2000);
    drop(bench.create(&ask));
    bench.handle();
    let mut bound = bench.bind(&ask);
    bench.wait("/other/busy");
    assert_eq!(bound.try_recv(), Err(TryRecvError::Empty));
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    assert!(bench.core.store.state.guarantees.contains_key("default/a/c"));
}

#[test]
fn shrunk_pool_is_no_drift() {
    let mut bench = ExecutionBench::new();
    let shares = container("shares", 500);
    drop(bench.create(&shares));
    let mut bound = bench.bind(&shares);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    let path = "kubepods/pod-shares/shares";
    assert_eq!(bench.cpus(path), "0-7");

    drop(bench.create(&container("takes", 2000)));
    bench.wait("/kubepods/busy");
    assert_eq!(bench.cpus(path), "0,3-7", "it left the CPUs before they were given");
    assert!(bench.has_drifted(&shares.cgroup), "the applied settings are behind");
    shared_pool::catch_up(&mut bench.core);
    assert!(!bench.has_drifted(&shares.cgroup));
    assert_eq!(bench.cpus(path), "0,3-7");
}

#[test]
fn bind_follows_a_shrunk_pool() {
    let mut bench = ExecutionBench::new();
    let shares = container("shares", 500);
    drop(bench.create(&shares));
    bench.handle();
    bench.keep_busy();
    let mut bound = bench.bind(&shares);
    let mut created = bench.create(&container("takes", 2000));
    bench.handle();
    assert!(bound.try_recv() == Ok(None) && created.try_recv().is_ok());
    assert_eq!(bench.cpus("kubepods/pod-shares/shares"), "0,3-7");
    assert!(!bench.has_drifted(&shares.cgroup));
}

#[test]
fn sharer_follows_changes_during_wait() {
    let mut bench = ExecutionBench::new();
    drop(bench.create(&container("first", 3000)));
    bench.handle();
    bench.share("other");
    assert_eq!(bench.cpus("other"), "0");
    let (uid, sandbox) = ("uid-first".to_owned(), "sandbox-first".to_owned());
    let mut over = bench.ask(|answer| PodCommand::PodStopped { uid, sandbox, answer });
    let mut created = bench.create(&container("second", 3000));
    bench.wait("/busy");
    assert!(over.try_recv() == Ok(()) && created.try_recv().is_ok());
    assert_eq!(bench.cpus("other"), "0");
}

#[test]
fn absent_cgroup_blocks_no_sharer() {
    let mut bench = ExecutionBench::new();
    let shares = container("shares", 500);
    drop(bench.create(&shares));
    let mut bound = bench.bind(&shares);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));
    bench.share("other");
    std::fs::remove_dir_all(bench.dir.path().join("cgroup/other")).unwrap();
    drop(bench.create(&container("takes", 2000)));
    bench.handle();
    assert_eq!(bench.cpus("kubepods/pod-shares/shares"), "0,3-7");
    assert!(!bench.has_drifted(&shares.cgroup), "what follows is noted");
}

#[test]
fn replaced_sharer_keeps_cpus() {
    let mut bench = ExecutionBench::new();
    bench.share("other");
    assert_eq!(bench.cpus("other"), "0-3");
    let other = bench.dir.path().join("cgroup/other");
    // The old directory is kept, so that its inode is not reused.
    std::fs::rename(&other, bench.dir.path().join("old")).unwrap();
    fixture::cgroup(&other, &bench.core.policy.machine);
    drop(bench.create(&container("takes", 2000)));
    bench.handle();
    assert_eq!(bench.cpus("other"), "");
}

#[test]
fn newer_pod_survives_synchronization() {
    let mut bench = ExecutionBench::new();
    let ask = container("gone", 2000);
    drop(bench.create(&ask));
    let mut bound = bench.bind(&ask);
    bench.handle();
    assert_eq!(bound.try_recv(), Ok(None));

    // The absent container is released on a busy thread; meanwhile a pod is admitted.
    bench.keep_busy();
    let new = container("new", 3000);
    let PodClaim::Container(request) = &new.pod.asked else { panic!("{new:?}") };
    let request = Request { owner: "uid-new".into(), ..request.clone() };
    let pod = PodPlacementRequest { asked: PodClaim::Pod(request), ..new.pod.clone() };
    let mut admitted = bench.ask(|answer| PodCommand::RunPod { ask: Box::new(pod), answer });
    synchronize::synchronize(&mut bench.core, &[], &BTreeMap::new(), true);
    assert!(admitted.try_recv().unwrap().is_ok());
    assert!(!bench.core.store.state.pods.contains_key("uid-gone/c"));
    assert!(bench.core.store.state.pods.contains_key("uid-new"), "the list is older");
}

#[test]
fn rollback_keeps_enabled_controllers() {
    let mut bench = ExecutionBench::new();
    let root = bench.dir.path().join("cgroup");
    let inner = root.join("other/inner");
    fixture::cgroup(&inner, &bench.core.policy.machine);
    std::fs::remove_file(inner.join("cpuset.cpus")).unwrap();
    std::fs::write(root.join("other/cgroup.subtree_control"), "memory").unwrap();
    let mut change = bench.core.begin();
    change.core().enable_above(&"/other/inner".parse().unwrap(), Knob::CpusetCpus).unwrap();
    drop(change);
    let enabled: Vec<_> = bench.core.store.state.enabled.iter().collect();
    assert_eq!(enabled.len(), 1);
    assert!(enabled[0].0.as_str() == "/other" && enabled[0].1.controllers.contains("cpuset"));
    assert_eq!(fixture::line(&root.join("other/cgroup.subtree_control")), "+cpuset");

    // Another program has disabled it; the list is as the kernel writes it.
    std::fs::write(root.join("other/cgroup.subtree_control"), "memory").unwrap();
    upkeep::refresh(&mut bench.core);
    assert!(bench.core.store.state.enabled.is_empty());
}
