//! The kubelet's `cpu_manager_state`, versions 1 to 4.
//!
//! A kubelet with the feature gate `PodLevelResourceManagers` writes version 3, even if no pod has pod-level CPUs.
//! Only the checksum distinguishes such a file from version 2.

use std::collections::BTreeMap;

use numaward_topology::CpuSet;
use serde::{Deserialize, Serialize};

use super::{
    CheckpointError,
    data::Data,
    dump::{Dump, checksum},
    go_json,
};
use crate::{
    ledger::Ledger,
    request::{ContainerName, OwnerId},
};

/// State of the CPU manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuCheckpoint {
    /// The policy that wrote the file: `none` or `static`.
    pub policy: String,
    /// CPUs that no container has exclusively.
    pub shared_pool: CpuSet,
    /// Exclusive CPUs by owner and container.
    pub entries: BTreeMap<OwnerId, BTreeMap<ContainerName, CpuSet>>,
    /// Pod-level CPUs by owner; `None` in version 1 and 2.
    pub pods: Option<BTreeMap<OwnerId, CpuSet>>,
}

/// The file. CPU sets are text because the checksum covers their text.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CheckpointFile<E> {
    policy_name: String,
    default_cpu_set: String,
    #[serde(default = "BTreeMap::new", skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, E>,
    #[serde(default = "BTreeMap::new", skip_serializing_if = "BTreeMap::is_empty")]
    pod_entries: BTreeMap<String, PodEntry>,
    #[serde(default)]
    checksum: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodEntry {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    cpu_set: String,
}

type FileV1 = CheckpointFile<String>;
type FileV2 = CheckpointFile<BTreeMap<String, String>>;

impl<E> CheckpointFile<E> {
    fn dump(
        &self,
        entries_type: &str,
        entries: impl FnOnce(&mut Dump, &BTreeMap<String, E>),
        pods: Option<&BTreeMap<OwnerId, CpuSet>>,
    ) -> String {
        let mut dump = Dump::pointer_to("state.CPUManagerCheckpoint");
        dump.fields(|fields| {
            fields.field("PolicyName", "string", |dump| dump.value(&self.policy_name));
            fields.field("DefaultCPUSet", "string", |dump| dump.value(&self.default_cpu_set));
            fields.field("Entries", entries_type, |dump| entries(dump, &self.entries));
            if let Some(pods) = pods {
                fields.field("PodEntries", "state.PodCPUAssignments", |dump| dump.map(pods, dump_pod));
            }
            fields.field("Checksum", "checksum.Checksum", |dump| dump.value(0));
        });
        dump.text()
    }

    /// Compares the checksum of the file with that of `text`. A stored checksum of zero is accepted.
    fn check(&self, text: &str) -> Result<(), CheckpointError> {
        let (stored, computed) = (self.checksum, checksum(text));
        if stored == 0 || stored == computed {
            Ok(())
        } else {
            Err(CheckpointError::Checksum { stored, computed })
        }
    }
}

/// Dumps a CPU set as the map of its elements; the Go type of pod entries is not text.
fn dump_pod(dump: &mut Dump, cpus: &CpuSet) {
    dump.fields(|fields| {
        fields.field("CPUSet", "cpuset.CPUSet", |dump| {
            dump.fields(|fields| {
                fields.field("elems", "map[int]struct {}", |dump| {
                    dump.map(cpus.iter().map(|cpu| (cpu, ())), |dump, ()| dump.value("{}"));
                });
            });
        });
    });
}

impl FileV1 {
    fn hash_input(&self) -> String {
        self.dump("map[string]string", |dump, entries| dump.map(entries, Dump::value), None)
    }
}

impl FileV2 {
    /// Returns the text for the checksum: that of version 3 if pod entries are given, else that of version 2.
    fn hash_input(&self, pods: Option<&BTreeMap<OwnerId, CpuSet>>) -> String {
        let entries = |dump: &mut Dump, entries: &BTreeMap<String, BTreeMap<String, String>>| {
            dump.map(entries, |dump, containers| dump.map(containers, Dump::value));
        };
        self.dump("map[string]map[string]string", entries, pods)
    }

    /// Returns the pod entries if the checksum is that of version 3.
    fn pods(&self) -> Option<BTreeMap<OwnerId, CpuSet>> {
        let cpus =
            |(owner, entry): (&String, &PodEntry)| Some((owner.as_str().into(), entry.cpu_set.parse().ok()?));
        let pods = self.pod_entries.iter().map(cpus).collect::<Option<BTreeMap<_, _>>>()?;
        (self.checksum == checksum(&self.hash_input(Some(&pods)))).then_some(pods)
    }
}

fn cpus(text: &str, place: impl FnOnce() -> String) -> Result<CpuSet, CheckpointError> {
    text.parse().map_err(|problem| CheckpointError::Cpus(place(), problem))
}

impl CpuCheckpoint {
    pub const FILE: &str = "cpu_manager_state";

    /// Takes the state from a ledger. `with_pods` adds the pod entries of version 3.
    pub fn from_ledger(policy: &str, ledger: &Ledger, with_pods: bool) -> Self {
        let mut entries: BTreeMap<OwnerId, BTreeMap<ContainerName, CpuSet>> = BTreeMap::new();
        for (owner, container, allocation) in ledger.allocations() {
            if let Some(cpus) = &allocation.cpus {
                entries.entry(owner.clone()).or_default().insert(container.clone(), cpus.clone());
            }
        }
        let wholes =
            ledger.owners().filter_map(|(owner, of)| Some((owner.clone(), of.pod_level.cpus.clone()?)));
        let pods = with_pods.then(|| wholes.collect());
        Self { policy: policy.to_owned(), shared_pool: ledger.shared_pool.clone(), entries, pods }
    }

    fn file(&self) -> FileV2 {
        let containers = |containers: &BTreeMap<ContainerName, CpuSet>| {
            containers.iter().map(|(name, cpus)| (name.to_string(), cpus.to_string())).collect()
        };
        let pods = self.pods.iter().flatten();
        CheckpointFile {
            policy_name: self.policy.clone(),
            default_cpu_set: self.shared_pool.to_string(),
            entries: self.entries.iter().map(|(owner, of)| (owner.to_string(), containers(of))).collect(),
            pod_entries: pods
                .map(|(owner, cpus)| (owner.to_string(), PodEntry { cpu_set: cpus.to_string() }))
                .collect(),
            checksum: 0,
        }
    }

    /// Returns the text that the checksum covers.
    pub fn hash_input(&self) -> String {
        self.file().hash_input(self.pods.as_ref())
    }

    /// Returns the content of the file, in version 2 or 3.
    pub fn write(&self) -> Result<String, CheckpointError> {
        let mut file = self.file();
        file.checksum = checksum(&self.hash_input());
        go_json(&file)
    }

    /// Parses the content of a file of any version.
    pub fn read(text: &str) -> Result<Self, CheckpointError> {
        let Some(data) = Data::read(text) else { return Self::read_fields(text) };
        let file: FileV2 = serde_json::from_str(&data.text)?;
        let pods = file.pod_entries.iter().map(|(owner, entry)| {
            let cpus = cpus(&entry.cpu_set, || format!("podEntries, {owner}"))?;
            Ok::<_, CheckpointError>((owner.as_str().into(), cpus))
        });
        let pods = pods.collect::<Result<BTreeMap<_, _>, _>>()?;
        let read = Self::from_v2(file, (!pods.is_empty()).then_some(pods))?;
        if let Err(fault) = data.verify() {
            let fields = Self::read_fields(text)?;
            if (&fields.policy, &fields.shared_pool, &fields.entries)
                != (&read.policy, &read.shared_pool, &read.entries)
            {
                return Err(fault);
            }
        }
        Ok(read)
    }

    /// Reads the fields of versions 1 to 3.
    fn read_fields(text: &str) -> Result<Self, CheckpointError> {
        if let Ok(file) = serde_json::from_str::<FileV2>(text)
            && let Some(pods) = file.pods()
        {
            return Self::from_v2(file, Some(pods));
        }
        let v1 = serde_json::from_str(text).map_err(CheckpointError::from).and_then(Self::from_v1);
        let v1_problem = match v1 {
            Err(problem) if !matches!(problem, CheckpointError::UnknownContainer(_)) => problem,
            known => return known,
        };
        match serde_json::from_str(text) {
            Ok(file) => {
                let file: FileV2 = file;
                file.check(&file.hash_input(None))?;
                Self::from_v2(file, None)
            }
            // The error of version 2 would only hide that a file of version 1 is damaged.
            Err(_) if matches!(v1_problem, CheckpointError::Checksum { .. }) => Err(v1_problem),
            Err(error) => Err(error.into()),
        }
    }

    /// Converts version 1, written up to Kubernetes 1.17. It identifies containers by the id of the container
    /// runtime, which cannot be mapped to pods, so only a file without containers is accepted.
    fn from_v1(file: FileV1) -> Result<Self, CheckpointError> {
        file.check(&file.hash_input())?;
        for (container, text) in &file.entries {
            cpus(text, || format!("entries, {container}"))?;
        }
        let shared_pool = cpus(&file.default_cpu_set, || "defaultCpuSet".to_owned())?;
        match file.entries.into_keys().next() {
            Some(container) => Err(CheckpointError::UnknownContainer(container)),
            None => Ok(Self { policy: file.policy_name, shared_pool, entries: BTreeMap::new(), pods: None }),
        }
    }

    fn from_v2(file: FileV2, pods: Option<BTreeMap<OwnerId, CpuSet>>) -> Result<Self, CheckpointError> {
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
        Ok(Self { policy: file.policy_name, shared_pool, entries, pods })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str =
        r#"{"policyName":"static","defaultCpuSet":"0,2-15","entries":{"p1":{"c0":"1"}},"checksum":"#;

    fn v1() -> FileV1 {
        let mut file: FileV1 = CheckpointFile {
            policy_name: "static".to_owned(),
            default_cpu_set: "0,2-15".to_owned(),
            entries: BTreeMap::from([("abc".to_owned(), "1".to_owned())]),
            pod_entries: BTreeMap::new(),
            checksum: 0,
        };
        file.checksum = checksum(&file.hash_input());
        file
    }

    #[test]
    fn round_trips() {
        let checkpoint = CpuCheckpoint {
            policy: "static".to_owned(),
            shared_pool: "0,2-15".parse().unwrap(),
            entries: BTreeMap::from([("p1".into(), BTreeMap::from([("c0".into(), "1".parse().unwrap())]))]),
            pods: None,
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
    fn version_3_has_pod_entries() {
        let cpus = |text: &str| text.parse::<CpuSet>().unwrap();
        let mut checkpoint = CpuCheckpoint {
            policy: "static".to_owned(),
            shared_pool: cpus("0,5-15"),
            entries: BTreeMap::from([("p1".into(), BTreeMap::from([("c0".into(), cpus("1"))]))]),
            pods: Some(BTreeMap::from([("p1".into(), cpus("1-2,10"))])),
        };
        let text = checkpoint.write().unwrap();
        assert!(text.contains(r#"},"podEntries":{"p1":{"cpuSet":"1-2,10"}},"checksum":"#), "{text}");
        let pods = "PodEntries:(state.PodCPUAssignments)map[p1:{CPUSet:(cpuset.CPUSet){elems:\
                    (map[int]struct {})map[1:{} 2:{} 10:{}]}}] Checksum:(checksum.Checksum)0}";
        assert!(checkpoint.hash_input().ends_with(pods), "{}", checkpoint.hash_input());
        assert_eq!(CpuCheckpoint::read(&text).as_ref(), Ok(&checkpoint));
        let damaged = text.replace("1-2,10", "1-2,11");
        assert!(matches!(CpuCheckpoint::read(&damaged), Err(CheckpointError::Checksum { .. })));
        // Without pod entries, only the checksum distinguishes the versions.
        checkpoint.pods = Some(BTreeMap::new());
        let text = checkpoint.write().unwrap();
        assert!(!text.contains("podEntries"), "{text}");
        assert_eq!(CpuCheckpoint::read(&text), Ok(checkpoint));
    }

    #[test]
    fn accepts_zero_checksum() {
        assert!(CpuCheckpoint::read(&format!("{V2}0}}")).is_ok());
    }

    #[test]
    fn reads_version_1_without_containers() {
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
    fn errors_name_the_corrupt_place() {
        let mut damaged = v1();
        damaged.checksum += 1;
        for (text, message) in [
            (String::new(), "not JSON of the expected form: EOF"),
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
    fn escapes_names_as_go_does() {
        let mut checkpoint = CpuCheckpoint {
            policy: "none".to_owned(),
            shared_pool: CpuSet::new(),
            entries: BTreeMap::new(),
            pods: None,
        };
        checkpoint.entries.insert("a<b>&\"c\"\u{2028}".into(), BTreeMap::new());
        let text = checkpoint.write().unwrap();
        assert!(text.contains(r#""a\u003cb\u003e\u0026\"c\"\u2028":{}"#), "{text}");
        assert_eq!(CpuCheckpoint::read(&text), Ok(checkpoint));
    }
}
