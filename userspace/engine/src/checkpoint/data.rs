//! The part `data` of the state files of Kubernetes 1.37: version 4 of the CPU Manager's, version 3 of the Memory Manager's.
//!
//! # Format
//! Beside the fields of the older version, which older kubelets read and which miss the resources of pods, the file has the whole
//! state as JSON text in `data`, and its checksum in `dataChecksum` (kubernetes/kubernetes#139102, #139626, KEP-5526).
//!
//! # Checksum
//! The pull requests do not fix the dump over which it is taken: the text alone, or with its type as in other dumps. Both are
//! accepted. A file with another checksum is read only if its older fields, which have a checksum of their own, agree with it.

use serde::Deserialize;

use super::{CheckpointError, dump::checksum};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    #[serde(default)]
    data: Option<String>,
    #[serde(default)]
    data_checksum: u64,
}

/// The text of `data`.
pub(super) struct Data {
    pub(super) text: String,
    checksum: u64,
}

impl Data {
    /// Reads the part of a file; `None` if the file has none.
    pub(super) fn read(file: &str) -> Option<Self> {
        let file: File = serde_json::from_str(file).ok()?;
        let text = file.data.filter(|text| !text.is_empty())?;
        Some(Self { text, checksum: file.data_checksum })
    }

    /// Fails if the text does not have its checksum.
    pub(super) fn verify(&self) -> Result<(), CheckpointError> {
        let (plain, typed) = (checksum(&self.text), checksum(&format!("(string){}", self.text)));
        if [plain, typed].contains(&self.checksum) {
            return Ok(());
        }
        Err(CheckpointError::DataChecksum { stored: self.checksum, computed: typed })
    }
}

/// Returns the fault of the checksum of `data` in a file that can be read nevertheless.
pub fn unverified_data(file: &str) -> Option<CheckpointError> {
    Data::read(file)?.verify().err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        checkpoint::{CpuCheckpoint, MemoryCheckpoint},
        policy_names::KubeletVersion,
    };

    const ENTRIES: &str = r#""entries":{"p1":{"main":"2-3","side-1":"4-5","side-2":"4-5"}}"#;

    /// A file with the older fields and this text as `data`.
    fn file(fields: &str, data: &str, checksum: u64) -> String {
        let fields = fields.strip_suffix('}').unwrap();
        format!("{fields},\"data\":{},\"dataChecksum\":{checksum}}}", serde_json::to_string(data).unwrap())
    }

    /// The state of the CPU Manager: the older fields, and all of it.
    fn cpus() -> (String, String) {
        let head = format!(r#"{{"policyName":"static","defaultCpuSet":"0-1,6-7",{ENTRIES}"#);
        let fields = CpuCheckpoint::read(&format!("{head},\"checksum\":0}}")).unwrap().write().unwrap();
        (fields, format!(r#"{head},"podEntries":{{"p1":{{"cpuSet":"2-5"}}}},"originals":{{}}}}"#))
    }

    #[test]
    fn data_has_the_cpus_of_pods() {
        let (fields, data) = cpus();
        for checksum in [checksum(&data), checksum(&format!("(string){data}"))] {
            let file = file(&fields, &data, checksum);
            let read = CpuCheckpoint::read(&file).unwrap();
            let cpus = "2-5".parse().unwrap();
            assert_eq!(read.pods, Some([("p1".into(), cpus)].into()));
            assert_eq!(unverified_data(&file), None);
        }
        // Without pods, it is the older state.
        let older = data.replace(r#","podEntries":{"p1":{"cpuSet":"2-5"}}"#, "");
        let read = CpuCheckpoint::read(&file(&fields, &older, checksum(&older)));
        assert_eq!(read, CpuCheckpoint::read(&fields));
    }

    #[test]
    fn unverified_data_must_agree_with_the_fields() {
        let (fields, data) = cpus();
        let damaged = file(&fields, &data, 1);
        assert!(CpuCheckpoint::read(&damaged).is_ok());
        let fault = unverified_data(&damaged).unwrap().to_string();
        assert!(fault.contains("its dataChecksum is 1"), "{fault}");
        let other = data.replace("\"2-3\"", "\"2\"");
        let read = CpuCheckpoint::read(&file(&fields, &other, 1));
        assert!(matches!(read, Err(CheckpointError::DataChecksum { stored: 1, .. })), "{read:?}");
        // With its checksum, the older fields do not count.
        assert!(CpuCheckpoint::read(&file(&fields, &other, checksum(&other))).is_ok());
        for data in ["{", "[]", r#"{"policyName":"static","defaultCpuSet":"x"}"#] {
            assert!(CpuCheckpoint::read(&file(&fields, data, checksum(data))).is_err(), "{data}");
        }
    }

    #[test]
    fn data_has_the_memory_of_pods() {
        let table = r#"{"memory":{"total":12,"systemReserved":2,"allocatable":10,"reserved":4,"free":6}}"#;
        let state =
            format!(r#""machineState":{{"0":{{"numberOfAssignments":1,"memoryMap":{table},"cells":[0]}}}}"#);
        let block = r#"[{"numaAffinity":[0],"type":"memory","size":4}]"#;
        let head = format!(r#"{{"policyName":"Static",{state},"entries":{{"p1":{{"main":{block}}}}}"#);
        let version = KubeletVersion::V1_36;
        let fields = MemoryCheckpoint::read(&format!("{head},\"checksum\":0}}"), version).unwrap();
        let fields = fields.write().unwrap();
        let data = format!(r#"{head},"podEntries":{{"p1":{{"memoryBlocks":{block}}}}}}}"#);
        let read = MemoryCheckpoint::read(&file(&fields, &data, checksum(&data)), version).unwrap();
        assert_eq!(read.pods.unwrap().len(), 1);
        assert!(MemoryCheckpoint::read(&file(&fields, &data, 1), version).is_ok());
        let other = data.replace("\"size\":4", "\"size\":3");
        let read = MemoryCheckpoint::read(&file(&fields, &other, 1), version);
        assert!(matches!(read, Err(CheckpointError::DataChecksum { .. })), "{read:?}");
    }
}
