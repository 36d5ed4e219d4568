//! The kubelet's configuration, from its own API or from its file.
//!
//! The file has what the kubelet was started with, without flags and files in a directory of additions (`--config-dir`). The API has the
//! configuration that counts.

use std::{path::Path, time::Duration};

use numaward_config::{Config, read_yaml};
use numaward_kube::api;
use serde_json::Value;
use tokio::time::timeout;

use super::{below, policies::read_text};

/// The kubelet's configuration file, in its directory.
pub(super) const CONFIG: &str = "config.yaml";
/// The maximum time of a request, for which the start of the daemon waits.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// The gate of the kubelet's Memory `QoS`.
const MEMORY_QOS: &str = "MemoryQoS";
/// The first minor version of Kubernetes 1 in which Memory `QoS` is on by default.
const MEMORY_QOS_DEFAULT: u64 = 37;

/// A `KubeletConfiguration` and its source.
#[derive(Clone, Debug, PartialEq)]
pub struct KubeletConfiguration {
    pub fields: Value,
    /// The file, as a path of the host, or the URL.
    pub source: String,
}

/// Memory `QoS` of a kubelet in which it is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubeletMemoryQos {
    /// The field or the version by which it is on.
    pub setting: String,
    /// True with `memoryReservationPolicy: TieredReservation`.
    pub reserves: bool,
}

impl KubeletMemoryQos {
    /// Describes what the kubelet writes, and what follows while numaward enforces.
    ///
    /// Source: `setMemoryQoS` in `pkg/kubelet/cm/qos_container_manager_linux.go` of Kubernetes 1.36.2, KEP-2570.
    pub const fn effect(&self) -> &'static str {
        if self.reserves {
            "the kubelet writes memory.min, memory.low and memory.high of pods as well: where it writes them again, its values are kept"
        } else {
            "from 1.36 on, the kubelet sets memory.min and memory.low of all pods together to 0 once a minute, which numaward undoes; \
             an older one writes values of its own, as it does for memory.high (memoryThrottlingFactor): where it writes these \
             again, they are kept"
        }
    }
}

impl KubeletConfiguration {
    /// Reads the file of the host with the file system at `root`; `None` if it does not exist. `directory` is that of the kubelet, as a
    /// path of the host.
    pub fn read_file(root: &Path, directory: &Path) -> Result<Option<Self>, Vec<String>> {
        let file = directory.join(CONFIG);
        let Some(text) = read_text(&below(root, &file), &file).map_err(|problem| vec![problem])? else {
            return Ok(None);
        };
        match read_yaml(&text, &file) {
            Ok(fields) => Ok(Some(Self { fields, source: file.display().to_string() })),
            Err(problems) => Err(problems.0.iter().map(ToString::to_string).collect()),
        }
    }

    /// Returns the kubelet's Memory `QoS`; `None` if it is off, or depends on the version.
    pub fn memory_qos(&self) -> Option<KubeletMemoryQos> {
        let gates = &self.fields["featureGates"];
        let reserves = self.reserves_memory();
        // A kubelet in which the gate is off does not start with `TieredReservation`.
        let setting = match (gates[MEMORY_QOS].as_bool(), gates["AllAlpha"].as_bool()) {
            (Some(true), _) => "featureGates.MemoryQoS: true",
            (None, Some(true)) => "featureGates.AllAlpha: true",
            (None, _) if reserves => "memoryReservationPolicy: TieredReservation",
            _ => return None,
        };
        Some(KubeletMemoryQos { setting: format!("{setting} in {}", self.source), reserves })
    }

    /// Returns true if Memory `QoS` does not depend on the version.
    pub fn sets_memory_qos(&self) -> bool {
        let gates = &self.fields["featureGates"];
        gates[MEMORY_QOS].is_boolean() || gates["AllBeta"] == false
    }

    /// Returns true if the kubelet protects the memory that pods request, once its Memory `QoS` is on.
    pub fn reserves_memory(&self) -> bool {
        self.fields["memoryReservationPolicy"] == "TieredReservation"
    }

    /// Reads the configuration from the kubelet's API; `None` if no address is configured.
    pub async fn from_api(config: &Config) -> Result<Option<Self>, String> {
        let Some(address) = config.kubernetes.kubelet.address else { return Ok(None) };
        let source = format!("https://{address}/configz");
        let request = async {
            let client = api::connect_to_kubelet(config.kubernetes.kubeconfig.as_deref(), address.0).await;
            api::kubelet_configuration(client.map_err(|error| error.to_string())?).await
        };
        let answer = timeout(REQUEST_TIMEOUT, request).await;
        match answer.unwrap_or_else(|_| Err(format!("no answer within {REQUEST_TIMEOUT:?}"))) {
            Ok(fields) => Ok(Some(Self { fields, source })),
            Err(error) => Err(format!("{source}: {error}")),
        }
    }
}

/// Returns true if Memory `QoS` is on by default in a kubelet of this version, such as `v1.37.0`.
pub fn has_memory_qos_by_default(version: &str) -> bool {
    let mut parts = version.trim_start_matches('v').split(['.', '+', '-']).map(str::parse::<u64>);
    matches!((parts.next(), parts.next()), (Some(Ok(1)), Some(Ok(minor))) if minor >= MEMORY_QOS_DEFAULT)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_fields_of_memory_qos() {
        let found = |fields: Value| {
            let file = KubeletConfiguration { fields, source: "/config.yaml".to_owned() };
            file.memory_qos().map(|found| (found.setting, found.reserves))
        };
        assert_eq!(found(json!({})), None);
        assert_eq!(found(json!({"memoryThrottlingFactor": 0.9, "featureGates": {"MemoryQoS": false}})), None);
        let on = |setting: &str, reserves| Some((format!("{setting} in /config.yaml"), reserves));
        let gate = json!({"featureGates": {"MemoryQoS": true}});
        assert_eq!(found(gate), on("featureGates.MemoryQoS: true", false));
        let tiered =
            json!({"featureGates": {"MemoryQoS": true}, "memoryReservationPolicy": "TieredReservation"});
        assert_eq!(found(tiered), on("featureGates.MemoryQoS: true", true));
        let policy = json!({"memoryReservationPolicy": "TieredReservation"});
        assert_eq!(found(policy), on("memoryReservationPolicy: TieredReservation", true));
        let all = json!({"featureGates": {"AllAlpha": true}});
        assert_eq!(found(all), on("featureGates.AllAlpha: true", false));
        assert_eq!(found(json!({"featureGates": {"AllAlpha": true, "MemoryQoS": false}})), None);
    }

    #[test]
    fn memory_qos_is_default_since_1_37() {
        let of = |version| has_memory_qos_by_default(version);
        assert!(of("v1.37.0") && of("1.38.1+k3s1") && of("v1.37.0-rc.1"));
        assert!(!of("v1.36.2") && !of("unknown") && !of("v2.0") && !of(""));
    }
}
