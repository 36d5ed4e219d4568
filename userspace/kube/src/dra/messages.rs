//! Messages between the kubelet and a driver.
//!
//! Source: `pluginregistration/v1/api.proto`, `dra/v1/api.proto`, `dra/v1beta1/api.proto` and `dra-health/v1alpha1/api.proto` in
//! `k8s.io/kubelet/pkg/apis`. The messages of `v1` and `v1beta1` are the same. The number of [`Device::share_id`] is that of the kubelet of 1.36.2.

use std::collections::BTreeMap;

use prost::Message;

/// Description of a plugin, for the kubelet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PluginInfo {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(string, tag = "2")]
    pub name: String,
    /// Path of the socket of the plugin's service.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// Result of a registration.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegistrationStatus {
    #[prost(bool, tag = "1")]
    pub is_registered: bool,
    #[prost(string, tag = "2")]
    pub error: String,
}

/// Request to prepare or to unprepare claims.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ClaimsRequest {
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<ClaimId>,
}

/// Identity of a claim.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Message)]
pub struct ClaimId {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub name: String,
}

/// Results by UID of the claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrepareResponse {
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, PreparedDevices>,
}

/// Devices of a prepared claim, or the reason why it is not prepared.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PreparedDevices {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
    /// Empty if the claim is prepared.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A device of a prepared claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Device {
    /// The requests of the claim that the device serves.
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    #[prost(string, tag = "2")]
    pub pool_name: String,
    #[prost(string, tag = "3")]
    pub device_name: String,
    /// Names by the Container Device Interface, for the container runtime.
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
    /// The share of a device of which several claims have parts.
    #[prost(string, optional, tag = "5")]
    pub share_id: Option<String>,
}

/// Results by UID of the claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct UnprepareResponse {
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, UnprepareResult>,
}

/// Result for a claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct UnprepareResult {
    /// Empty if the claim is unprepared.
    #[prost(string, tag = "1")]
    pub error: String,
}

/// The health of all devices.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HealthList {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<DeviceHealth>,
}

/// The health of a device.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeviceHealth {
    #[prost(message, optional, tag = "1")]
    pub device: Option<DeviceId>,
    #[prost(enumeration = "HealthStatus", tag = "2")]
    pub health: i32,
    /// Unix time in seconds.
    #[prost(int64, tag = "3")]
    pub last_updated_time: i64,
    /// Time in seconds after which the kubelet takes the health as unknown; 0 for its default.
    #[prost(int64, tag = "4")]
    pub health_check_timeout_seconds: i64,
    /// Up to 1024 characters.
    #[prost(string, tag = "5")]
    pub message: String,
}

/// Identity of a device.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeviceId {
    #[prost(string, tag = "1")]
    pub pool_name: String,
    #[prost(string, tag = "2")]
    pub device_name: String,
}

/// Values of [`DeviceHealth::health`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum HealthStatus {
    Unknown = 0,
    Healthy = 1,
    Unhealthy = 2,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are those of the kubelet's own descriptors.
    #[test]
    fn messages_have_published_numbers() {
        let text = |text: &str| text.to_owned();
        let claim = ClaimId { namespace: text("s"), uid: text("u"), name: text("n") };
        assert_eq!(claim.encode_to_vec(), b"\x0a\x01s\x12\x01u\x1a\x01n");
        let device = Device {
            request_names: vec![text("r")],
            pool_name: text("p"),
            device_name: text("d"),
            cdi_device_ids: vec![text("c")],
            share_id: Some(text("i")),
        };
        assert_eq!(device.encode_to_vec(), b"\x0a\x01r\x12\x01p\x1a\x01d\x22\x01c\x2a\x01i");
        let info = PluginInfo {
            kind: text("k"),
            name: text("n"),
            endpoint: text("e"),
            supported_versions: vec![text("v")],
        };
        assert_eq!(info.encode_to_vec(), b"\x0a\x01k\x12\x01n\x1a\x01e\x22\x01v");
        let failed = PreparedDevices { error: text("e"), ..PreparedDevices::default() };
        let response = PrepareResponse { claims: [(text("u"), failed)].into() };
        assert_eq!(response.encode_to_vec(), b"\x0a\x08\x0a\x01u\x12\x03\x12\x01e");
        let health = DeviceHealth {
            device: Some(DeviceId { pool_name: text("p"), device_name: text("d") }),
            health: HealthStatus::Unhealthy as i32,
            last_updated_time: 7,
            health_check_timeout_seconds: 9,
            message: text("m"),
        };
        let list = HealthList { devices: vec![health] };
        let expected = b"\x0a\x11\x0a\x06\x0a\x01p\x12\x01d\x10\x02\x18\x07\x20\x09\x2a\x01m";
        assert_eq!(list.encode_to_vec(), expected);
    }
}
