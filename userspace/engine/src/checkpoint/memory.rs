//! The kubelet's `memory_manager_state`, versions 1 to 3.
//!
//! A kubelet with the feature gate `PodLevelResourceManagers` writes version 2, even if no pod has pod-level memory.
//! Only the checksum distinguishes such a file from version 1.
//!
//! Older files and documents call the group of a node `nodes` instead of `cells`. Both names are read; the checksum
//! covers the name in the file.

use std::collections::BTreeMap;

use numaward_topology::{Bytes, NodeId, NodeSet, ZoneKind, set::MAX_ID};
use serde::{Deserialize, Serialize};

use super::{
    CheckpointError,
    data::Data,
    dump::{Dump, checksum},
    go_json,
};
use crate::{
    ledger::{KindAccount, Ledger, MemoryBlock, NodeAccount},
    policy_names::KubeletVersion,
    request::{ContainerName, OwnerId},
};

/// Go type that the checksum of a written file covers.
const TYPE: &str = "state.MemoryManagerCheckpoint";
/// Name of the same Go type since version 2 exists. A kubelet v1.36 reads checksums with either name and writes the
/// older one.
const TYPE_V1: &str = "state.MemoryManagerCheckpointV1";

/// State of the memory manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryCheckpoint {
    /// The policy that wrote the file: `None` or `Static`.
    pub policy: String,
    /// Accounts of the NUMA nodes.
    pub nodes: BTreeMap<NodeId, NodeAccount>,
    /// Memory blocks by owner and container.
    pub entries: BTreeMap<OwnerId, BTreeMap<ContainerName, Vec<MemoryBlock>>>,
    /// Pod-level memory blocks by owner; `None` in version 1.
    pub pods: Option<BTreeMap<OwnerId, Vec<MemoryBlock>>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CheckpointFile {
    policy_name: String,
    /// Accounts by node id. The file sorts the ids as text.
    machine_state: BTreeMap<String, FileNode>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, BTreeMap<String, Vec<FileBlock>>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pod_entries: BTreeMap<String, PodEntry>,
    #[serde(default)]
    checksum: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodEntry {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    memory_blocks: Vec<FileBlock>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileNode {
    number_of_assignments: u64,
    memory_map: BTreeMap<String, FileTable>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cells: Option<Vec<u32>>,
    /// Older name of `cells`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nodes: Option<Vec<u32>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileTable {
    total: u64,
    system_reserved: u64,
    allocatable: u64,
    reserved: u64,
    free: u64,
}

#[derive(Serialize, Deserialize)]
struct FileBlock {
    #[serde(rename = "numaAffinity")]
    affinity: Vec<u32>,
    #[serde(rename = "type")]
    kind: String,
    size: u64,
}

fn dump_table(dump: &mut Dump, table: &FileTable) {
    dump.inner_pointer();
    dump.fields(|fields| {
        for (name, value) in [
            ("TotalMemSize", table.total),
            ("SystemReserved", table.system_reserved),
            ("Allocatable", table.allocatable),
            ("Reserved", table.reserved),
            ("Free", table.free),
        ] {
            fields.field(name, "uint64", |dump| dump.value(value));
        }
    });
}

fn dump_node(dump: &mut Dump, node: &FileNode) {
    dump.inner_pointer();
    dump.fields(|fields| {
        fields.field("NumberOfAssignments", "int", |dump| dump.value(node.number_of_assignments));
        fields.field("MemoryMap", "map[v1.ResourceName]*state.MemoryTable", |dump| {
            dump.map(&node.memory_map, dump_table);
        });
        let (name, group) = match (&node.cells, &node.nodes) {
            (None, Some(nodes)) => ("Nodes", nodes.as_slice()),
            (cells, _) => ("Cells", cells.as_deref().unwrap_or_default()),
        };
        fields.field(name, "[]int", |dump| dump.list(group, Dump::value));
    });
}

fn dump_block(dump: &mut Dump, block: &FileBlock) {
    dump.fields(|fields| {
        fields.field("NUMAAffinity", "[]int", |dump| dump.list(&block.affinity, Dump::value));
        fields.field("Type", "v1.ResourceName", |dump| dump.value(&block.kind));
        fields.field("Size", "uint64", |dump| dump.value(block.size));
    });
}

impl CheckpointFile {
    /// Returns the nodes in numerical order of their ids, which is the order in the dump.
    fn nodes(&self) -> Result<BTreeMap<u32, &FileNode>, CheckpointError> {
        let id = |text: &String| {
            let id = text.parse().ok().filter(|id: &u32| *id <= MAX_ID && *text == id.to_string());
            id.ok_or_else(|| CheckpointError::Node("machineState".to_owned(), text.clone()))
        };
        self.machine_state.iter().map(|(text, node)| Ok((id(text)?, node))).collect()
    }

    /// Returns the text for the checksum. `with_pods` adds the pod entries of version 2.
    fn hash_input(&self, name: &str, with_pods: bool) -> Result<String, CheckpointError> {
        let nodes = self.nodes()?;
        let mut dump = Dump::pointer_to(name);
        dump.fields(|fields| {
            fields.field("PolicyName", "string", |dump| dump.value(&self.policy_name));
            fields.field("MachineState", "state.NUMANodeMap", |dump| dump.map(nodes, dump_node));
            fields.field("Entries", "state.ContainerMemoryAssignments", |dump| {
                dump.map(&self.entries, |dump, containers| {
                    dump.map(containers, |dump, blocks| dump.list(blocks, dump_block));
                });
            });
            if with_pods {
                fields.field("PodEntries", "state.PodMemoryAssignments", |dump| {
                    dump.map(&self.pod_entries, |dump, entry| {
                        dump.fields(|fields| {
                            fields.field("MemoryBlocks", "[]state.Block", |dump| {
                                dump.list(&entry.memory_blocks, dump_block);
                            });
                        });
                    });
                });
            }
            fields.field("Checksum", "checksum.Checksum", |dump| dump.value(0));
        });
        Ok(dump.text())
    }
}

fn kind(text: &str, place: impl FnOnce() -> String) -> Result<ZoneKind, CheckpointError> {
    text.parse().map_err(|_| CheckpointError::Kind(place(), text.to_owned()))
}

fn node_set(ids: &[u32], place: impl Fn() -> String) -> Result<NodeSet, CheckpointError> {
    let node = |&id: &u32| {
        if id > MAX_ID {
            return Err(CheckpointError::Node(place(), id.to_string()));
        }
        Ok(NodeId(id))
    };
    ids.iter().map(node).collect()
}

fn blocks(blocks: &[FileBlock], place: impl Fn() -> String) -> Result<Vec<MemoryBlock>, CheckpointError> {
    let block = |block: &FileBlock| {
        Ok(MemoryBlock {
            kind: kind(&block.kind, &place)?,
            affinity: node_set(&block.affinity, &place)?,
            bytes: Bytes(block.size),
        })
    };
    blocks.iter().map(block).collect()
}

fn ids(nodes: &NodeSet) -> Vec<u32> {
    nodes.iter().map(|node| node.0).collect()
}

fn account(node: u32, kind: &str, table: &FileTable) -> Result<KindAccount, CheckpointError> {
    let &FileTable { total, system_reserved, allocatable, reserved, free } = table;
    if reserved.checked_add(free) != Some(allocatable) {
        return Err(CheckpointError::Account { node, kind: kind.to_owned(), reserved, free, allocatable });
    }
    Ok(KindAccount {
        total: Bytes(total),
        reserved: Bytes(system_reserved),
        allocatable: Bytes(allocatable),
        guaranteed: Bytes(reserved),
        free: Bytes(free),
    })
}

impl MemoryCheckpoint {
    pub const FILE: &str = "memory_manager_state";

    /// Takes the state from a ledger. `with_pods` adds the pod entries of version 2.
    pub fn from_ledger(policy: &str, ledger: &Ledger, with_pods: bool) -> Self {
        let sorted = |blocks: &Vec<MemoryBlock>| {
            let mut blocks = blocks.clone();
            blocks.sort();
            blocks
        };
        let mut entries: BTreeMap<OwnerId, BTreeMap<ContainerName, Vec<MemoryBlock>>> = BTreeMap::new();
        for (owner, container, allocation) in ledger.allocations() {
            if !allocation.blocks.is_empty() || allocation.without_memory {
                let blocks = sorted(&allocation.blocks);
                entries.entry(owner.clone()).or_default().insert(container.clone(), blocks);
            }
        }
        let wholes = ledger.owners().filter(|(_, of)| !of.pod_level.blocks.is_empty());
        let pods = wholes.map(|(owner, of)| (owner.clone(), sorted(&of.pod_level.blocks)));
        let pods = with_pods.then(|| pods.collect());
        Self { policy: policy.to_owned(), nodes: ledger.nodes.clone(), entries, pods }
    }

    fn file(&self) -> Result<CheckpointFile, CheckpointError> {
        let table = |account: &KindAccount| FileTable {
            total: account.total.0,
            system_reserved: account.reserved.0,
            allocatable: account.allocatable.0,
            reserved: account.guaranteed.0,
            free: account.free.0,
        };
        let node = |account: &NodeAccount| FileNode {
            number_of_assignments: account.assignments,
            memory_map: account.kinds.iter().map(|(kind, of)| (kind.to_string(), table(of))).collect(),
            cells: Some(ids(&account.group)),
            nodes: None,
        };
        let block = |block: &MemoryBlock| FileBlock {
            affinity: ids(&block.affinity),
            kind: block.kind.to_string(),
            size: block.bytes.0,
        };
        let blocks = |blocks: &Vec<MemoryBlock>| blocks.iter().map(block).collect();
        let containers = |containers: &BTreeMap<ContainerName, Vec<MemoryBlock>>| {
            containers.iter().map(|(name, of)| (name.to_string(), blocks(of))).collect()
        };
        let pods = self.pods.iter().flatten();
        let mut file = CheckpointFile {
            policy_name: self.policy.clone(),
            machine_state: self.nodes.iter().map(|(id, account)| (id.to_string(), node(account))).collect(),
            entries: self.entries.iter().map(|(owner, of)| (owner.to_string(), containers(of))).collect(),
            pod_entries: pods
                .map(|(owner, of)| (owner.to_string(), PodEntry { memory_blocks: blocks(of) }))
                .collect(),
            checksum: 0,
        };
        file.checksum = checksum(&file.hash_input(TYPE, self.pods.is_some())?);
        Ok(file)
    }

    /// Returns the text that the checksum covers.
    pub fn hash_input(&self) -> Result<String, CheckpointError> {
        self.file()?.hash_input(TYPE, self.pods.is_some())
    }

    /// Returns the content of the file.
    pub fn write(&self) -> Result<String, CheckpointError> {
        go_json(&self.file()?)
    }

    /// Parses the content of a file as a kubelet of this version does. A kubelet v1.36 also accepts a checksum of
    /// zero and a checksum with the newer type name. Version 2 of the file is accepted in either case.
    pub fn read(text: &str, version: KubeletVersion) -> Result<Self, CheckpointError> {
        let Some(data) = Data::read(text) else { return Self::read_fields(text, version) };
        let file: CheckpointFile = serde_json::from_str(&data.text)?;
        let has_pods = !file.pod_entries.is_empty();
        let read = Self::of_file(file, has_pods)?;
        if let Err(fault) = data.verify() {
            let fields = Self::read_fields(text, version)?;
            if (&fields.policy, &fields.nodes, &fields.entries) != (&read.policy, &read.nodes, &read.entries)
            {
                return Err(fault);
            }
        }
        Ok(read)
    }

    /// Reads the fields of versions 1 and 2.
    fn read_fields(text: &str, version: KubeletVersion) -> Result<Self, CheckpointError> {
        let file: CheckpointFile = serde_json::from_str(text)?;
        let stored = file.checksum;
        let has_pods = stored == checksum(&file.hash_input(TYPE, true)?);
        let computed = checksum(&file.hash_input(TYPE, false)?);
        let is_newer = version >= KubeletVersion::V1_36
            && (stored == 0 || stored == checksum(&file.hash_input(TYPE_V1, false)?));
        if stored != computed && !is_newer && !has_pods {
            return Err(CheckpointError::Checksum { stored, computed });
        }
        Self::of_file(file, has_pods)
    }

    fn of_file(file: CheckpointFile, has_pods: bool) -> Result<Self, CheckpointError> {
        let mut nodes = BTreeMap::new();
        for (id, node) in file.nodes()? {
            let mut kinds = BTreeMap::new();
            for (name, table) in &node.memory_map {
                let kind = kind(name, || format!("machineState, {id}"))?;
                kinds.insert(kind, account(id, name, table)?);
            }
            let group = node.cells.as_ref().or(node.nodes.as_ref()).map_or(&[][..], Vec::as_slice);
            let group = node_set(group, || format!("machineState, {id}, cells"))?;
            nodes.insert(NodeId(id), NodeAccount { assignments: node.number_of_assignments, group, kinds });
        }
        let mut entries = BTreeMap::new();
        for (owner, containers) in file.entries {
            let mut of_owner = BTreeMap::new();
            for (container, blocks) in containers {
                let blocks = self::blocks(&blocks, || format!("entries, {owner}, {container}"))?;
                of_owner.insert(container.as_str().into(), blocks);
            }
            entries.insert(owner.as_str().into(), of_owner);
        }
        let pods = file.pod_entries.iter().map(|(owner, entry)| {
            let blocks = blocks(&entry.memory_blocks, || format!("podEntries, {owner}"))?;
            Ok::<_, CheckpointError>((owner.as_str().into(), blocks))
        });
        let pods = if has_pods { Some(pods.collect::<Result<_, _>>()?) } else { None };
        Ok(Self { policy: file.policy_name, nodes, entries, pods })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint() -> MemoryCheckpoint {
        let account = KindAccount {
            total: Bytes(12),
            reserved: Bytes(2),
            allocatable: Bytes(10),
            guaranteed: Bytes(4),
            free: Bytes(6),
        };
        let node = NodeAccount {
            assignments: 1,
            group: "0,10".parse().unwrap(),
            kinds: BTreeMap::from([(ZoneKind::Memory, account)]),
        };
        let block =
            MemoryBlock { kind: ZoneKind::Memory, affinity: "0,10".parse().unwrap(), bytes: Bytes(8) };
        MemoryCheckpoint {
            policy: "Static".to_owned(),
            nodes: [0, 2, 10].map(|id| (NodeId(id), node.clone())).into(),
            entries: BTreeMap::from([("p1".into(), BTreeMap::from([("c0".into(), vec![block])]))]),
            pods: None,
        }
    }

    /// Returns the content with a text replaced and the checksum recomputed.
    fn edited(from: &str, to: &str) -> String {
        let text = checkpoint().write().unwrap().replace(from, to);
        let mut file: CheckpointFile = serde_json::from_str(&text).unwrap();
        file.checksum = checksum(&file.hash_input(TYPE, false).unwrap());
        go_json(&file).unwrap()
    }

    #[test]
    fn round_trips() {
        let text = checkpoint().write().unwrap();
        assert_eq!(MemoryCheckpoint::read(&text, KubeletVersion::V1_32), Ok(checkpoint()));
        // The file sorts keys as text, the checksum sorts them as numbers.
        assert!(text.find("\"10\":") < text.find("\"2\":"), "{text}");
        let input = checkpoint().hash_input().unwrap();
        assert!(input.find(" 2:<*>") < input.find(" 10:<*>"), "{input}");
    }

    #[test]
    fn reads_older_name_of_cells() {
        let text = edited("\"cells\"", "\"nodes\"");
        assert!(text.contains("\"nodes\":[0,10]") && !text.contains("cells"), "{text}");
        assert_eq!(MemoryCheckpoint::read(&text, KubeletVersion::V1_32), Ok(checkpoint()));
        assert_ne!(checkpoint().write().unwrap().split("checksum").last(), text.split("checksum").last());
    }

    #[test]
    fn errors_name_the_corrupt_place() {
        let good = checkpoint().write().unwrap();
        for (text, message) in [
            (String::new(), "not JSON of the expected form: EOF"),
            (good[..40].to_owned(), "(line 1, column 40)"),
            (good.replace("\"size\":8", "\"size\":9"), "corrupted: its checksum is"),
            (good.replace("\"size\":8", "\"size\":-8"), "invalid value: integer `-8`"),
            (good.replace("\"10\":", "\"010\":"), "machineState: \"010\" is not the id of a NUMA node"),
            (good.replace("\"10\":", "\"70000\":"), "\"70000\" is not the id of a NUMA node"),
            (edited("\"cells\":[0,10]", "\"cells\":[0,70000]"), "cells: \"70000\" is not the id"),
            (edited("\"type\":\"memory\"", "\"type\":\"disk\""), "entries, p1, c0: \"disk\" is not a kind"),
            (edited("\"memory\":{", "\"disk\":{"), "machineState, 0: \"disk\" is not a kind"),
            (edited("\"free\":6", "\"free\":7"), "4 bytes guaranteed and 7 free do not add up to 10"),
        ] {
            let error = MemoryCheckpoint::read(&text, KubeletVersion::V1_32).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn zero_checksum_is_accepted_by_1_36() {
        let text = checkpoint().write().unwrap();
        let (head, _) = text.rsplit_once(':').unwrap();
        let text = format!("{head}:0}}");
        let error = MemoryCheckpoint::read(&text, KubeletVersion::V1_32).unwrap_err();
        assert!(matches!(error, CheckpointError::Checksum { stored: 0, .. }), "{error}");
        assert_eq!(MemoryCheckpoint::read(&text, KubeletVersion::V1_36), Ok(checkpoint()));
    }

    #[test]
    fn version_2_has_pod_entries() {
        let block =
            MemoryBlock { kind: ZoneKind::Memory, affinity: "0,10".parse().unwrap(), bytes: Bytes(9) };
        let whole = MemoryCheckpoint { pods: Some([("p1".into(), vec![block])].into()), ..checkpoint() };
        let text = whole.write().unwrap();
        let json =
            r#","podEntries":{"p1":{"memoryBlocks":[{"numaAffinity":[0,10],"type":"memory","size":9}]}},"#;
        assert!(text.contains(json), "{text}");
        let input = whole.hash_input().unwrap();
        let pods = "PodEntries:(state.PodMemoryAssignments)map[p1:{MemoryBlocks:([]state.Block)[{NUMAAffinity:([]int)[0 10] \
                    Type:(v1.ResourceName)memory Size:(uint64)9}]}] Checksum:(checksum.Checksum)0}";
        assert!(input.ends_with(pods), "{input}");
        for version in [KubeletVersion::V1_32, KubeletVersion::V1_36] {
            assert_eq!(MemoryCheckpoint::read(&text, version).as_ref(), Ok(&whole));
        }
        let damaged = text.replace("\"size\":9", "\"size\":8");
        let error = MemoryCheckpoint::read(&damaged, KubeletVersion::V1_36).unwrap_err();
        assert!(matches!(error, CheckpointError::Checksum { .. }), "{error}");
        // Without pod entries, only the checksum distinguishes the versions.
        let mut none = checkpoint();
        none.pods = Some(BTreeMap::new());
        let text = none.write().unwrap();
        assert!(!text.contains("podEntries"), "{text}");
        assert_eq!(MemoryCheckpoint::read(&text, KubeletVersion::V1_36), Ok(none));
    }

    /// v1.36 writes the same file as v1.32 and refuses a damaged file of version 2.
    #[test]
    fn v1_36_reads_both_type_names() {
        let text = checkpoint().write().unwrap();
        assert_eq!(MemoryCheckpoint::read(&text, KubeletVersion::V1_36), Ok(checkpoint()));
        let mut file: CheckpointFile = serde_json::from_str(&text).unwrap();
        file.checksum = checksum(&file.hash_input(TYPE_V1, false).unwrap());
        let renamed = go_json(&file).unwrap();
        assert_eq!(MemoryCheckpoint::read(&renamed, KubeletVersion::V1_36), Ok(checkpoint()));
        let second = text.replace("\"checksum\":", "\"podEntries\":{\"p1\":{}},\"checksum\":1");
        for (text, version) in [
            (renamed, KubeletVersion::V1_32),
            (second.clone(), KubeletVersion::V1_32),
            (second, KubeletVersion::V1_36),
        ] {
            let error = MemoryCheckpoint::read(&text, version).unwrap_err();
            assert!(matches!(error, CheckpointError::Checksum { .. }), "{version}: {error}");
        }
    }
}
