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

    /// Returns the fields by which the kubelet's Memory `QoS` is on; `None` if it is off, or depends on the version.
    pub fn memory_qos(&self) -> Option<String> {
        let gates = &self.fields["featureGates"];
        let key = match (gates[MEMORY_QOS].as_bool(), gates["AllAlpha"].as_bool()) {
            (Some(true), _) => MEMORY_QOS,
            (None, Some(true)) => "AllAlpha",
            _ => return None,
        };
        let policy = self.fields["memoryReservationPolicy"].as_str();
        let policy = policy.map_or_else(String::new, |policy| format!(", memoryReservationPolicy: {policy}"));
        Some(format!("featureGates.{key}: true{policy} in {}", self.source))
    }

    /// Returns true if the gate of Memory `QoS` is set.
    pub fn sets_memory_qos(&self) -> bool {
        self.fields["featureGates"][MEMORY_QOS].is_boolean()
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
        let found =
            |fields: Value| KubeletConfiguration { fields, source: "/config.yaml".to_owned() }.memory_qos();
        assert_eq!(found(json!({})), None);
        assert_eq!(found(json!({"memoryThrottlingFactor": 0.9, "featureGates": {"MemoryQoS": false}})), None);
        let tiered =
            json!({"featureGates": {"MemoryQoS": true}, "memoryReservationPolicy": "TieredReservation"});
        let text = "featureGates.MemoryQoS: true, memoryReservationPolicy: TieredReservation in /config.yaml";
        assert_eq!(found(tiered).as_deref(), Some(text));
        let all = json!({"featureGates": {"AllAlpha": true}});
        assert_eq!(found(all).as_deref(), Some("featureGates.AllAlpha: true in /config.yaml"));
        assert_eq!(found(json!({"featureGates": {"AllAlpha": true, "MemoryQoS": false}})), None);
    }

    #[test]
    fn memory_qos_is_default_since_1_37() {
        let of = |version| has_memory_qos_by_default(version);
        assert!(of("v1.37.0") && of("1.38.1+k3s1") && of("v1.37.0-rc.1"));
        assert!(!of("v1.36.2") && !of("unknown") && !of("v2.0") && !of(""));
    }
}
