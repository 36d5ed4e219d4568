//! Import of the guarantees in a kubelet's state files.
//!
//! # Problem
//! A host on which a kubelet has placed containers with its static policies is to be managed by numaward, without
//! disturbing the containers.
//!
//! # Algorithm
//! The state files are checked as the kubelet does on start: checksums, policies, machine, reserved memory. Then each
//! pod is admitted again with a request for exactly its present CPUs and memory, as the kubelet admits its pods after
//! a restart. The result becomes the ledger, with pod UIDs as owners. When the runtime reports a running pod, it gets
//! the guarantee of its UID.
//!
//! # Invariants
//! - A ledger that has a guarantee is never replaced.
//! - The kubelet's files are only read.
//! - No daemon runs during the import: the ledger is locked.

use std::{
    borrow::Cow,
    fs, io,
    path::{Path, PathBuf},
};

use numaward_api::import::{Container, ImportReport, Pod};
use numaward_cgroup::{Hierarchy, read_text};
use numaward_config::Config;
use numaward_engine::{
    ContainerRequest, KubeletStrategy, Ledger, Quantity, Request, Resources, StartError, Strategy,
    checkpoint,
    kubelet::{Checkpoints, SharedCpus},
    policy::{
        KubeletVersion,
        gates::{POD_LEVEL_MANAGERS, POD_LEVEL_RESOURCES},
    },
};
use numaward_store::{Store, StoreError};
use numaward_topology::Machine;

use crate::{
    error::describe_rejection,
    explain,
    policy::{self, PolicyError},
    rebuild,
    state::{State, boot_id},
    xattr_backup,
};

/// File names of the kubelet's CPU Manager and Memory Manager state.
const CPU_STATE: &str = "cpu_manager_state";
const MEMORY_STATE: &str = "memory_manager_state";
/// Maximum size of a state file. 100,000 containers need half of it.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Reason why the import failed. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("{path}: cannot be read: {source}", path = .path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The directory has neither state file.
    #[error(
        "{path}: there is neither {CPU_STATE} nor {MEMORY_STATE}; the kubelet's directory is usually \
         /var/lib/kubelet",
        path = .0.display()
    )]
    Nothing(PathBuf),
    /// The configuration does not fit the machine.
    #[error("the policy cannot be applied:{}", super::error::list_problems(.0))]
    Policy(Vec<PolicyError>),
    /// A kubelet with this configuration would not start with these files.
    #[error(
        "{CPU_STATE} or {MEMORY_STATE}: {0}; numaward's policies and reserved memory must be the kubelet's for this"
    )]
    Unfit(#[from] StartError),
    #[error("{0}: only one of them can have it; delete one of the pods, then import again")]
    Shared(#[from] SharedCpus),
    /// The engine does not admit a pod with its present CPUs and memory.
    #[error("pod {pod}: its CPUs and memory cannot be guaranteed here: {problem}")]
    Refused {
        /// UID of the pod.
        pod: String,
        /// Message of the engine.
        problem: String,
    },
    /// The ledger already has guarantees.
    #[error(
        "{directory}: the ledger there holds {allocations} allocations already; release them first, or import into \
         another stateDirectory",
        directory = .directory.display()
    )]
    NotEmpty {
        /// Directory of the ledger.
        directory: PathBuf,
        /// Number of guarantees in the ledger.
        allocations: usize,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Imports the state files in `directory` into the ledger of the configuration. A dry run only returns the report. If
/// the ledger is missing or damaged, the marks on the cgroups of `hierarchy` are used instead of it.
pub fn import(
    config: &Config,
    machine: &Machine,
    hierarchy: Option<&Hierarchy>,
    directory: &Path,
    dry_run: bool,
) -> Result<ImportReport, ImportError> {
    let (cpus, memory) = (read(&directory.join(CPU_STATE))?, read(&directory.join(MEMORY_STATE))?);
    if cpus.is_none() && memory.is_none() {
        return Err(ImportError::Nothing(directory.to_owned()));
    }
    let place = directory.display().to_string();
    let version = config.kubelet_version.unwrap_or_default();
    let mut checkpoints = Checkpoints::read(cpus.as_deref(), memory.as_deref(), &place, version)?;
    checkpoints.share_within_pods()?;
    let files = [(CPU_STATE, &cpus), (MEMORY_STATE, &memory)];
    let unverified = files.into_iter().filter_map(|(file, text)| {
        let fault = checkpoint::unverified_data(text.as_deref()?)?;
        Some(format!("{file}: {fault}; it agrees with the older fields of the file, so it is read"))
    });
    let warnings = unverified.collect();
    let mut as_written = Cow::Borrowed(config);
    if checkpoints.has_pod_entries() {
        let config = as_written.to_mut();
        config.kubelet_version = Some(KubeletVersion::V1_36);
        let gates = [POD_LEVEL_RESOURCES, POD_LEVEL_MANAGERS];
        config.feature_gates.extend(gates.map(|gate| (gate.to_owned(), true)));
    }
    let strategy = policy::kubelet(&as_written, machine).map_err(ImportError::Policy)?;
    let ledger = admit_again(&strategy, &strategy.restore(checkpoints, &place).ledger?)?;
    let imported = ImportReport { warnings, ..describe(&ledger) };
    if !dry_run {
        let (mut store, loaded) = Store::<State>::open(&config.state_directory)?;
        let held = match hierarchy {
            Some(hierarchy) => {
                let (found, boot) = (xattr_backup::read(hierarchy), boot_id(&config.host_root));
                rebuild::take_over_ledger(loaded, &found, hierarchy, boot).0
            }
            None => loaded.ledger().unwrap_or_default(),
        };
        let allocations = held.ledger.allocations().count().max(held.guarantees.len());
        if allocations > 0 {
            return Err(ImportError::NotEmpty { directory: config.state_directory.clone(), allocations });
        }
        // The pending restores of cgroups and of the host are kept.
        store.save(&State { ledger, ..held })?;
        store.write_out()?;
    }
    Ok(imported)
}

fn read(path: &Path) -> Result<Option<String>, ImportError> {
    let fail = |source| ImportError::Read { path: path.to_owned(), source };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(fail(error)),
        Ok(found) if !found.is_file() => Err(fail(io::Error::other("it is not a regular file"))),
        Ok(_) => read_text(path, MAX_FILE_BYTES).map(Some).map_err(fail),
    }
}

/// Admits each pod for its present CPUs and memory, so that no entry counts as stale.
fn admit_again(strategy: &KubeletStrategy, restored: &Ledger) -> Result<Ledger, ImportError> {
    let mut ledger = restored.clone();
    for (owner, account) in restored.owners() {
        let containers = account.containers.iter().map(|(name, held)| {
            // A container without exclusive CPUs requested a fraction of a CPU; the file does not record which.
            let cpus = held.cpus.as_ref().and_then(|cpus| u64::try_from(cpus.len()).ok());
            let cpus = cpus.map_or(Quantity::milli(1), Quantity::whole);
            let mut resources = Resources::none().with_cpu(cpus);
            for block in &held.blocks {
                let before = resources.memory.get(&block.kind).and_then(|held| held.units()).unwrap_or(0);
                resources.memory.insert(block.kind, Quantity::whole(before + block.bytes.0));
            }
            ContainerRequest::guaranteed(name.clone(), resources)
        });
        let request = Request {
            owner: owner.clone(),
            init_containers: Vec::new(),
            containers: containers.collect(),
            resources: None,
        };
        if !account.pod_level.is_empty() {
            ledger.set_active(request);
            continue;
        }
        let decision = strategy.admit(&ledger, &request);
        if let Err(rejection) = decision.outcome {
            let problem = describe_rejection(&explain::rejection(&rejection));
            return Err(ImportError::Refused { pod: owner.to_string(), problem });
        }
        ledger = decision.ledger;
    }
    Ok(strategy.finish_restore(&ledger))
}

fn describe(ledger: &Ledger) -> ImportReport {
    let containers = ledger.allocations().map(|(owner, container, allocation)| Container {
        pod_uid: owner.to_string(),
        container: container.to_string(),
        cpus: allocation.cpus.clone().unwrap_or_default().to_string(),
        memory: allocation.blocks.iter().map(Into::into).collect(),
    });
    let pods_with_share = ledger.owners().filter(|(_, account)| !account.pod_level.is_empty());
    let pods = pods_with_share.map(|(owner, account)| Pod {
        uid: owner.to_string(),
        cpus: account.pod_level.cpus.clone().unwrap_or_default().to_string(),
        memory: account.pod_level.blocks.iter().map(Into::into).collect(),
    });
    ImportReport {
        containers: containers.collect(),
        shared_cpus: ledger.shared_pool().to_string(),
        pods: pods.collect(),
        warnings: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use numaward_cgroup::{CgroupId, knob::Knob};
    use numaward_config::policy::StrategyKind;
    use numaward_enforce::{Owner, Record};
    use numaward_engine::{
        PodResources,
        policy::{TopologyManagerPolicy, TopologyManagerScope},
    };
    use numaward_store::LoadedLedger;
    use numaward_topology::{Bytes, NodeId};

    use super::*;
    use crate::narrowing::PreferredNode;

    fn machine() -> Machine {
        Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4)).build().unwrap()
    }

    /// Writes the state files of a kubelet with one container that has two CPUs and 1 GiB.
    fn state_files(dir: &Path) {
        let strategy = policy::kubelet(&Config::default(), &machine()).unwrap();
        let ledger = strategy.idle();
        let resources =
            Resources::none().with_cpu(Quantity::whole(2)).with_memory(Quantity::whole(Bytes::gib(1).0));
        let decision = strategy.admit(&ledger, &Request::workload("pod-1", resources));
        decision.outcome.unwrap();
        let checkpoints = strategy.checkpoints(&decision.ledger);
        fs::write(dir.join(CPU_STATE), checkpoints.cpus.unwrap().write().unwrap()).unwrap();
        fs::write(dir.join(MEMORY_STATE), checkpoints.memory.unwrap().write().unwrap()).unwrap();
    }

    fn config(dir: &Path) -> Config {
        Config { state_directory: dir.join("state"), ..Config::default() }
    }

    #[test]
    fn imports_containers_of_kubelet() {
        let dir = tempfile::tempdir().unwrap();
        state_files(dir.path());
        let config = config(dir.path());
        let dry = import(&config, &machine(), None, dir.path(), true).unwrap();
        assert!(!config.state_directory.exists());
        let imported = import(&config, &machine(), None, dir.path(), false).unwrap();
        assert_eq!(imported, dry);
        let [container] = &imported.containers[..] else { panic!("{imported:?}") };
        assert_eq!((&*container.pod_uid, &*container.cpus), ("pod-1", "1-2"));
        let [block] = &container.memory[..] else { panic!("{imported:?}") };
        assert_eq!((&*block.kind, &*block.nodes, block.bytes), ("memory", "0", Bytes::gib(1).0));
        assert_eq!(imported.shared_cpus, "0,3-7");

        let (_store, loaded) = Store::<State>::open(&config.state_directory).unwrap();
        let LoadedLedger::Current { ledger: state, .. } = loaded else { panic!("{loaded:?}") };
        assert_eq!(describe(&state.ledger), imported);
        // The next admission does not change the imported guarantee.
        let strategy = policy::strategy(&config, &machine()).unwrap();
        let resources =
            Resources::none().with_cpu(Quantity::whole(1)).with_memory(Quantity::whole(Bytes::gib(1).0));
        let next = strategy.admit(&state.ledger, &Request::workload("new", resources)).ledger;
        assert_eq!(describe(&next).containers[1..], imported.containers);
    }

    /// Returns the configuration of a kubelet with resources of pods as a whole.
    fn gated(dir: &Path) -> Config {
        Config {
            strategy: StrategyKind::Kubelet,
            topology_manager_policy: Some(TopologyManagerPolicy::Restricted),
            topology_manager_scope: Some(TopologyManagerScope::Pod),
            feature_gates: [(POD_LEVEL_MANAGERS.to_owned(), true)].into(),
            ..config(dir)
        }
    }

    /// Writes the state files of a kubelet with one pod, which has three CPUs and 2 GiB as a whole.
    fn pod_level_state_files(dir: &Path) {
        let strategy = policy::kubelet(&gated(dir), &machine()).unwrap();
        let gib = |cpus, gib| {
            Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(Quantity::whole(Bytes::gib(gib).0))
        };
        let request = Request {
            owner: "pod-1".into(),
            init_containers: Vec::new(),
            containers: vec![
                ContainerRequest::guaranteed("db", gib(1, 1)),
                ContainerRequest::guaranteed("log", Resources::none()),
                ContainerRequest::guaranteed("web", Resources::none()),
            ],
            resources: Some(PodResources { requests: gib(3, 2), limits: gib(3, 2) }),
        };
        let decision = strategy.admit(&strategy.idle(), &request);
        decision.outcome.unwrap();
        let checkpoints = strategy.checkpoints(&decision.ledger);
        fs::write(dir.join(CPU_STATE), checkpoints.cpus.unwrap().write().unwrap()).unwrap();
        fs::write(dir.join(MEMORY_STATE), checkpoints.memory.unwrap().write().unwrap()).unwrap();
    }

    /// The files were written with a feature gate that is off in the importing configuration.
    #[test]
    fn imports_pod_level_resources() {
        let dir = tempfile::tempdir().unwrap();
        pod_level_state_files(dir.path());
        let strategy = policy::kubelet(&gated(dir.path()), &machine()).unwrap();
        let config = Config { feature_gates: BTreeMap::new(), ..gated(dir.path()) };
        let imported = import(&config, &machine(), None, dir.path(), false).unwrap();
        let cpus: Vec<_> = imported.containers.iter().map(|of| (&*of.container, &*of.cpus)).collect();
        assert_eq!(cpus, [("db", "1"), ("log", "2-3"), ("web", "2-3")]);
        assert_eq!(imported.shared_cpus, "0,4-7");
        let (_store, loaded) = Store::<State>::open(&config.state_directory).unwrap();
        let LoadedLedger::Current { ledger: state, .. } = loaded else { panic!("{loaded:?}") };
        let whole = &state.ledger.owner(&"pod-1".into()).unwrap().pod_level;
        assert_eq!(whole.cpus.as_ref().unwrap().to_string(), "1-3");
        assert_eq!(strategy.rebase(&state.ledger).0.shared_pool().to_string(), "0,4-7");
    }

    /// Rewrites a state file in the form of Kubernetes 1.37. Its checksum of `data` is wrong by `damage`.
    fn rewrite_as_1_37(file: &Path, has_pods_in_fields: bool, damage: u32) {
        let mut fields: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        fields.remove("checksum");
        let data = serde_json::to_string(&fields).unwrap();
        if !has_pods_in_fields {
            fields.remove("podEntries");
        }
        let fnv_1a = |sum: u32, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        let checksum = data.bytes().fold(0x811c_9dc5, fnv_1a);
        fields.insert("checksum".to_owned(), 0.into());
        fields.insert("dataChecksum".to_owned(), checksum.wrapping_add(damage).into());
        fields.insert("data".to_owned(), data.into());
        fs::write(file, serde_json::to_string(&fields).unwrap()).unwrap();
    }

    #[test]
    fn files_of_1_37_are_imported_like_those_of_1_36() {
        let write_files: [fn(&Path); 2] = [state_files, pod_level_state_files];
        for write_files in write_files {
            for files in [&[CPU_STATE][..], &[CPU_STATE, MEMORY_STATE]] {
                for has_pods_in_fields in [true, false] {
                    let dir = tempfile::tempdir().unwrap();
                    write_files(dir.path());
                    if !files.contains(&MEMORY_STATE) {
                        fs::remove_file(dir.path().join(MEMORY_STATE)).unwrap();
                    }
                    let config = Config { feature_gates: BTreeMap::new(), ..gated(dir.path()) };
                    let imported = || import(&config, &machine(), None, dir.path(), true);
                    let expected = imported().unwrap();
                    assert!(!expected.containers.is_empty() && expected.warnings.is_empty());
                    for file in files {
                        rewrite_as_1_37(&dir.path().join(file), has_pods_in_fields, 0);
                    }
                    assert_eq!(imported().unwrap(), expected);
                }
            }
        }
    }

    #[test]
    fn damaged_file_of_1_37_is_imported_with_a_warning_or_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (config, file) = (config(dir.path()), dir.path().join(CPU_STATE));
        state_files(dir.path());
        let expected = import(&config, &machine(), None, dir.path(), true).unwrap();
        rewrite_as_1_37(&file, true, 1);
        let imported = import(&config, &machine(), None, dir.path(), true).unwrap();
        let [warning] = &imported.warnings[..] else { panic!("{imported:?}") };
        assert!(warning.starts_with("cpu_manager_state: the checkpoint is damaged"), "{warning}");
        assert_eq!(ImportReport { warnings: Vec::new(), ..imported }, expected);

        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replacen("1-2", "3-4", 1)).unwrap();
        let error = import(&config, &machine(), None, dir.path(), true).unwrap_err().to_string();
        assert!(error.contains("checkpoint is corrupted"), "{error}");
    }

    /// Writes a CPU Manager state file.
    fn cpu_state(dir: &Path, shared: &str, entries: &str) {
        let text = format!(
            r#"{{"policyName":"static","defaultCpuSet":"{shared}","entries":{entries},"checksum":0}}"#
        );
        fs::write(dir.join(CPU_STATE), text).unwrap();
    }

    #[test]
    fn refuses_cpu_of_two_pods() {
        let dir = tempfile::tempdir().unwrap();
        cpu_state(dir.path(), "0,4-7", r#"{"p1":{"a":"1-2"},"p2":{"b":"2-3"}}"#);
        let error = import(&config(dir.path()), &machine(), None, dir.path(), false).unwrap_err().to_string();
        assert!(error.contains("CPU 2 is exclusive to containers of pod p1 and of pod p2"), "{error}");
        assert!(!dir.path().join("state").exists());
    }

    #[test]
    fn containers_of_a_pod_share_cpus() {
        let dir = tempfile::tempdir().unwrap();
        cpu_state(dir.path(), "0,5-7", r#"{"p1":{"a":"1-2","b":"3-4","c":"3-4"}}"#);
        let config = config(dir.path());
        let imported = import(&config, &machine(), None, dir.path(), false).unwrap();
        let cpus: Vec<_> = imported.containers.iter().map(|of| (&*of.container, &*of.cpus)).collect();
        assert_eq!(cpus, [("a", "1-2"), ("b", "3-4"), ("c", "3-4")]);
        assert_eq!(imported.pods.iter().map(|pod| &*pod.cpus).collect::<Vec<_>>(), ["1-4"]);
        let (_store, loaded) = Store::<State>::open(&config.state_directory).unwrap();
        let state = loaded.ledger().unwrap();
        let whole = &state.ledger.owner(&"p1".into()).unwrap().pod_level;
        assert_eq!(whole.cpus, Some("1-4".parse().unwrap()));
    }

    #[test]
    fn failed_import_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        let fails = |config: &Config, machine: &Machine, words: &str| {
            let error = import(config, machine, None, dir.path(), false).unwrap_err().to_string();
            assert!(error.contains(words), "{words}: {error}");
        };
        fails(&config, &machine(), "neither cpu_manager_state nor memory_manager_state");
        state_files(dir.path());
        // State files of another machine, of another policy, and damaged ones.
        let other = Machine::builder().nodes(1).cores_per_node(2).memory(Bytes::gib(4)).build().unwrap();
        fails(&config, &other, CPU_STATE);
        let none = Config { cpu_manager_policy: Some(policy_none()), ..config.clone() };
        fails(&none, &machine(), CPU_STATE);
        let text = fs::read_to_string(dir.path().join(MEMORY_STATE)).unwrap();
        fs::write(dir.path().join(MEMORY_STATE), text.replace("1073741824", "1073741825")).unwrap();
        fails(&config, &machine(), MEMORY_STATE);
        fs::write(dir.path().join(MEMORY_STATE), "{").unwrap();
        fails(&config, &machine(), MEMORY_STATE);
        fs::remove_file(dir.path().join(MEMORY_STATE)).unwrap();
        fs::create_dir(dir.path().join(MEMORY_STATE)).unwrap();
        fails(&config, &machine(), "it is not a regular file");
        fs::remove_dir(dir.path().join(MEMORY_STATE)).unwrap();
        assert!(!config.state_directory.exists());

        // A ledger that a daemon has open, and one with a guarantee.
        state_files(dir.path());
        let (store, _) = Store::<State>::open(&config.state_directory).unwrap();
        fails(&config, &machine(), "has the ledger open");
        drop(store);
        import(&config, &machine(), None, dir.path(), false).unwrap();
        fails(&config, &machine(), "holds 1 allocations already");
    }

    #[test]
    fn import_keeps_what_is_restored_later() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path());
        state_files(dir.path());
        let weights = serde_json::json!({"nodes": {"0": {"found": 1, "written": 3}}});
        let enabled = serde_json::json!({"/a": {"id": 7, "controllers": ["cpuset"]}});
        let mut before = State {
            boot: Some("one".to_owned()),
            weights: serde_json::from_value(weights).unwrap(),
            enabled: serde_json::from_value(enabled).unwrap(),
            ..State::default()
        };
        before.interrupts.banned = Some("3".parse().unwrap());
        before.isolated.insert("/isolated".parse().unwrap());
        before.steered.insert("/steered".parse().unwrap(), "1".parse().unwrap());
        before.homes.insert("/home".parse().unwrap(), PreferredNode::new(NodeId(1), 500));
        // A restore is pending if a record has written values and no settings.
        let knob = Knob::CpusetMems;
        for path in ["/isolated", "/steered", "/home", "/pending"] {
            let mut record = Record::new(CgroupId(7), Owner::Cgroupfs);
            record.written.0.insert(knob, knob.parse("1").unwrap());
            record.found.0.insert(knob, knob.parse("0-1").unwrap());
            before.applied.insert(path.parse().unwrap(), record.into());
        }
        let (mut store, _) = Store::<State>::open(&config.state_directory).unwrap();
        store.save(&before).unwrap();
        drop(store);
        import(&config, &machine(), None, dir.path(), false).unwrap();
        let (_store, loaded) = Store::<State>::open(&config.state_directory).unwrap();
        let LoadedLedger::Current { ledger: state, .. } = loaded else { panic!("{loaded:?}") };
        assert_eq!(state.ledger.allocations().count(), 1);
        assert_eq!(state, State { ledger: state.ledger.clone(), ..before });
    }

    #[test]
    fn import_uses_marks_without_ledger() {
        let dir = tempfile::tempdir().unwrap();
        state_files(dir.path());
        let (config, hierarchy) = (config(dir.path()), Hierarchy::at(&dir.path().join("cgroup")));
        let path: numaward_cgroup::CgroupPath = "/a".parse().unwrap();
        fs::create_dir_all(hierarchy.dir(&path)).unwrap();
        let id = hierarchy.id_of(&path).unwrap().unwrap();
        let mut record = Record::new(id, Owner::Cgroupfs);
        record.settings.cpus = Some("1".parse().unwrap());
        let mut before = State::default();
        before.applied.insert(path.clone(), record.into());
        let marks = xattr_backup::read(&hierarchy);
        drop(xattr_backup::XattrBackup::new(hierarchy.clone(), marks, &before));
        import(&config, &machine(), Some(&hierarchy), dir.path(), false).unwrap();
        let (_store, loaded) = Store::<State>::open(&config.state_directory).unwrap();
        let LoadedLedger::Current { ledger: state, .. } = loaded else { panic!("{loaded:?}") };
        assert_eq!((state.applied, state.ledger.allocations().count()), (before.applied, 1));
    }

    fn policy_none() -> numaward_config::policy::CpuManagerPolicy {
        serde_json::from_str("\"none\"").unwrap()
    }
}
