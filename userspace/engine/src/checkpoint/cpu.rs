//! `cpu_manager_state`, versions 1 and 2.

use std::collections::BTreeMap;

use numaward_topology::CpuSet;
use serde::{Deserialize, Serialize};

use super::{
    CheckpointError,
    dump::{Dump, checksum},
    go_json,
};
use crate::{
    ledger::Ledger,
    request::{ContainerName, OwnerId},
};

/// The state of the CPU Manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuCheckpoint {
    /// The policy that wrote it: `none` or `static`.
    pub policy: String,
    /// The shared pool.
    pub shared_pool: CpuSet,
    /// Exclusive CPUs by owner and container.
    pub entries: BTreeMap<OwnerId, BTreeMap<ContainerName, CpuSet>>,
}

/// The file, with CPU sets as text: the checksum is over their text.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File<E> {
    policy_name: String,
    default_cpu_set: String,
    #[serde(default = "BTreeMap::new", skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, E>,
    checksum: u64,
}

type FileV1 = File<String>;
type FileV2 = File<BTreeMap<String, String>>;

impl<E> File<E> {
    fn dump(&self, entries_type: &str, entries: impl FnOnce(&mut Dump, &BTreeMap<String, E>)) -> String {
        let mut dump = Dump::pointer_to("state.CPUManagerCheckpoint");
        dump.fields(|fields| {
            fields.field("PolicyName", "string", |dump| dump.value(&self.policy_name));
            fields.field("DefaultCPUSet", "string", |dump| dump.value(&self.default_cpu_set));
            fields.field("Entries", entries_type, |dump| entries(dump, &self.entries));
            fields.field("Checksum", "checksum.Checksum", |dump| dump.value(0));
        });
        dump.text()
    }

    /// A checksum of zero counts as none.
    fn check(&self, text: &str) -> Result<(), CheckpointError> {
        let (stored, computed) = (self.checksum, checksum(text));
        if stored == 0 || stored == computed {
            Ok(())
        } else {
            Err(CheckpointError::Checksum { stored, computed })
        }
    }
}

impl FileV1 {
    fn hash_input(&self) -> String {
        self.dump("map[string]string", |dump, entries| dump.map(entries, Dump::value))
    }
}

impl FileV2 {
    fn hash_input(&self) -> String {
        self.dump("map[string]map[string]string", |dump, entries| {
            dump.map(entries, |dump, containers| dump.map(containers, Dump::value));
        })
    }
}

fn cpus(text: &str, place: impl FnOnce() -> String) -> Result<CpuSet, CheckpointError> {
    text.parse().map_err(|problem| CheckpointError::Cpus(place(), problem))
}

impl CpuCheckpoint {
    /// The name of the file.
    pub const FILE: &str = "cpu_manager_state";

    /// The state of a ledger.
    pub fn of(policy: &str, ledger: &Ledger) -> Self {
        let mut entries: BTreeMap<OwnerId, BTreeMap<ContainerName, CpuSet>> = BTreeMap::new();
        for (owner, container, allocation) in ledger.allocations() {
            if let Some(cpus) = &allocation.cpus {
                entries.entry(owner.clone()).or_default().insert(container.clone(), cpus.clone());
            }
        }
        Self { policy: policy.to_owned(), shared_pool: ledger.shared_pool.clone(), entries }
    }

    fn file(&self) -> FileV2 {
        let containers = |containers: &BTreeMap<ContainerName, CpuSet>| {
            containers.iter().map(|(name, cpus)| (name.to_string(), cpus.to_string())).collect()
        };
        let mut file: FileV2 = File {
            policy_name: self.policy.clone(),
            default_cpu_set: self.shared_pool.to_string(),
            entries: self.entries.iter().map(|(owner, of)| (owner.to_string(), containers(of))).collect(),
            checksum: 0,
        };
        file.checksum = checksum(&file.hash_input());
        file
    }

    /// The text over which the checksum is taken.
    pub fn hash_input(&self) -> String {
        self.file().hash_input()
    }

    /// The content of the file.
    pub fn write(&self) -> Result<String, CheckpointError> {
        go_json(&self.file())
    }

    /// Reads the content of a file of either version: version 1 is tried first, as the kubelet does.
    pub fn read(text: &str) -> Result<Self, CheckpointError> {
        let v1 = serde_json::from_str(text).map_err(CheckpointError::from).and_then(Self::of_v1);
        let v1_problem = match v1 {
            Err(problem) if !matches!(problem, CheckpointError::UnknownContainer(_)) => problem,
            known => return known,
        };
        match serde_json::from_str(text) {
            Ok(file) => Self::of_v2(file),
            // A damaged file of version 1 does not become clearer by what version 2 expects.
            Err(_) if matches!(v1_problem, CheckpointError::Checksum { .. }) => Err(v1_problem),
            Err(error) => Err(error.into()),
        }
    }

    /// Version 1, up to Kubernetes 1.17, names containers by the runtime's ids. No file says whose these are, so
    /// that only a state without any can be used.
    fn of_v1(file: FileV1) -> Result<Self, CheckpointError> {
        file.check(&file.hash_input())?;
        for (container, text) in &file.entries {
            cpus(text, || format!("entries, {container}"))?;
        }
        let shared_pool = cpus(&file.default_cpu_set, || "defaultCpuSet".to_owned())?;
        match file.entries.into_keys().next() {
            Some(container) => Err(CheckpointError::UnknownContainer(container)),
            None => Ok(Self { policy: file.policy_name, shared_pool, entries: BTreeMap::new() }),
        }
    }

    fn of_v2(file: FileV2) -> Result<Self, CheckpointError> {
        file.check(&file.hash_input())?;
        let mut entries = BTreeMap::new();
        for (owner, containers) in file.entries {
            let mut of_owner = BTreeMap::new();
            for (container, text) in containers {
                let cpus = cpus(&text, || format!("entries, {owner}, {container}"))?;
                of_owner.insert(container.into(), cpus);
            }
            entries.insert(owner.into(), of_owner);
        }
        let shared_pool = cpus(&file.default_cpu_set, || "defaultCpuSet".to_owned())?;
        Ok(Self { policy: file.policy_name, shared_pool, entries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str =
        r#"{"policyName":"static","defaultCpuSet":"0,2-15","entries":{"p1":{"c0":"1"}},"checksum":"#;

    fn v1() -> FileV1 {
        let mut file: FileV1 = File {
            policy_name: "static".to_owned(),
            default_cpu_set: "0,2-15".to_owned(),
            entries: BTreeMap::from([("abc".to_owned(), "1".to_owned())]),
            checksum: 0,
        };
        file.checksum = checksum(&file.hash_input());
        file
    }

    #[test]
    fn what_is_written_reads_again() {
        let checkpoint = CpuCheckpoint {
            policy: "static".to_owned(),
            shared_pool: "0,2-15".parse().unwrap(),
            entries: BTreeMap::from([("p1".into(), BTreeMap::from([("c0".into(), "1".parse().unwrap())]))]),
        };
        let text = checkpoint.write().unwrap();
        assert!(text.starts_with(V2), "{text}");
        assert_eq!(CpuCheckpoint::read(&text).as_ref(), Ok(&checkpoint));
        assert_eq!(
            checkpoint.hash_input(),
            "(*state.CPUManagerCheckpoint){PolicyName:(string)static DefaultCPUSet:(string)0,2-15 \
             Entries:(map[string]map[string]string)map[p1:map[c0:1]] Checksum:(checksum.Checksum)0}"
        );
    }

    #[test]
    fn a_checksum_of_zero_is_taken() {
        assert!(CpuCheckpoint::read(&format!("{V2}0}}")).is_ok());
    }

    #[test]
    fn version_1_is_read_where_it_names_no_container() {
        let mut file = v1();
        assert_eq!(
            file.hash_input(),
            "(*state.CPUManagerCheckpoint){PolicyName:(string)static DefaultCPUSet:(string)0,2-15 \
             Entries:(map[string]string)map[abc:1] Checksum:(checksum.Checksum)0}"
        );
        assert_eq!(
            CpuCheckpoint::read(&go_json(&file).unwrap()).unwrap_err().to_string(),
            "containerID 'abc' not found in initial containers list"
        );
        file.entries.clear();
        file.checksum = checksum(&file.hash_input());
        let state = CpuCheckpoint::read(&go_json(&file).unwrap()).unwrap();
        assert_eq!((state.shared_pool.to_string(), state.entries.len()), ("0,2-15".to_owned(), 0));
    }

    #[test]
    fn corrupt_files_say_what_is_wrong() {
        let mut damaged = v1();
        damaged.checksum += 1;
        for (text, message) in [
            (String::new(), "no JSON of the expected form: EOF"),
            ("{}".to_owned(), "missing field `policyName`"),
            (format!("{V2}1}}"), "its checksum is 1, that of its data is"),
            (format!("{V2}-1}}"), "invalid value: integer `-1`"),
            (V2.to_owned(), "EOF while parsing a value (line 1, column"),
            (go_json(&damaged).unwrap(), "its checksum is"),
            (format!("{}0}}", V2.replace("0,2-15", "0,2-x")), "defaultCpuSet: \"0,2-x\" is not a CPU list"),
            (format!("{}0}}", V2.replace("\"1\"", "\"?\"")), "entries, p1, c0: \"?\" is not a CPU list"),
        ] {
            let error = CpuCheckpoint::read(&text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn names_are_escaped_as_go_does() {
        let mut checkpoint =
            CpuCheckpoint { policy: "none".to_owned(), shared_pool: CpuSet::new(), entries: BTreeMap::new() };
        checkpoint.entries.insert("a<b>&\"c\"\u{2028}".into(), BTreeMap::new());
        let text = checkpoint.write().unwrap();
        assert!(text.contains(r#""a\u003cb\u003e\u0026\"c\"\u2028":{}"#), "{text}");
        assert_eq!(CpuCheckpoint::read(&text), Ok(checkpoint));
    }
}
