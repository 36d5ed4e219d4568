//! NRI versions of runtimes, and the events that each version supports.
//!
//! The runtime disconnects a plugin that subscribes to an unknown event. NRI 0.12 and later report their version; earlier versions are
//! derived from the runtime's name and version.
//!
//! Source of the table: the NRI release in each runtime's module file (`pkg/api/version.go` of NRI has the same list).

use std::{num::ParseIntError, str::FromStr};

/// A version of NRI: major, minor and patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
#[display("{}.{}.{}", _0[0], _0[1], _0[2])]
pub struct NriVersion([u32; 3]);

impl NriVersion {
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self([major, minor, patch])
    }

    /// Returns the NRI version of a runtime, if known. The name is that of the handshake (`containerd`, `cri-o`).
    ///
    /// A runtime that is newer than the table gets the version of the newest entry.
    pub fn from_runtime(name: &str, version: &str) -> Option<Self> {
        // Runtime release → NRI version from that release on; ascending.
        let table: &[([u32; 3], [u32; 3])] = match name.to_ascii_lowercase().as_str() {
            "containerd" => &[
                ([1, 7, 0], [0, 3, 0]),
                ([1, 7, 7], [0, 4, 0]),
                ([1, 7, 14], [0, 6, 0]),
                ([1, 7, 16], [0, 6, 1]),
                ([1, 7, 26], [0, 8, 0]),
                ([2, 0, 0], [0, 8, 0]),
                ([2, 2, 0], [0, 10, 0]),
                ([2, 2, 1], [0, 11, 0]),
                ([2, 3, 0], [0, 12, 0]),
            ],
            "cri-o" | "crio" => &[
                ([1, 26, 0], [0, 2, 0]),
                ([1, 27, 0], [0, 3, 0]),
                ([1, 29, 0], [0, 5, 0]),
                ([1, 30, 0], [0, 6, 0]),
                ([1, 31, 0], [0, 6, 1]),
                ([1, 32, 0], [0, 9, 0]),
                ([1, 34, 0], [0, 10, 0]),
                ([1, 35, 0], [0, 11, 0]),
            ],
            _ => return None,
        };
        let Self(version) = version.parse().ok()?;
        table.iter().rev().find(|(since, _)| *since <= version).map(|&(_, nri)| Self(nri))
    }
}

/// A known fault of a container runtime that concerns NRI plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuntimeFault {
    /// The fault, with its issue and its consequence.
    pub finding: &'static str,
    /// The action that avoids the fault.
    pub fix: &'static str,
    /// True if a release of the runtime repairs the fault.
    pub is_repaired: bool,
}

/// containerd's issues 13355 and 13609.
const LEAKED_SANDBOX: RuntimeFault = RuntimeFault {
    finding: "a pod sandbox that an NRI plugin refuses leaves its process and its name behind, and the next start of containerd fails \
              (containerd/containerd#13355, #13609): numaward never refuses a sandbox, but another plugin may",
    fix: "update containerd to 2.2.6, 2.3.3 or newer",
    is_repaired: true,
};
/// containerd's issue 14083.
const LATE_REGISTRATION: RuntimeFault = RuntimeFault {
    finding: "while a container is being stopped, the registration of an NRI plugin waits for the end of its grace period, and no container \
              starts on this host meanwhile (containerd/containerd#14083)",
    fix: "update or restart numaward while no pod with a long grace period ends on this host",
    is_repaired: false,
};

impl RuntimeFault {
    /// Returns the known faults of a runtime. The name is that of the handshake.
    pub fn of_runtime(name: &str, version: &str) -> Vec<Self> {
        let (true, Ok(NriVersion(version))) = (name.eq_ignore_ascii_case("containerd"), version.parse())
        else {
            return Vec::new();
        };
        // The first affected release, and the first release without the fault.
        let leaks = [([2, 0, 0], [2, 2, 6]), ([2, 3, 0], [2, 3, 3])];
        let is_in = |(since, until): &([u32; 3], [u32; 3])| *since <= version && version < *until;
        let mut faults = Vec::new();
        if leaks.iter().any(is_in) {
            faults.push(LEAKED_SANDBOX);
        }
        // Reproduced up to 2.3; later releases are unknown.
        if is_in(&([1, 7, 0], [2, 4, 0])) {
            faults.push(LATE_REGISTRATION);
        }
        faults
    }
}

impl FromStr for NriVersion {
    type Err = ParseIntError;

    /// Parses `0.8.0`, also with a leading `v`. A suffix (`-rc.1`, `~ds1`, `+unknown`) is ignored, and a missing minor version or
    /// patch level is zero.
    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        let numbers = text.strip_prefix('v').unwrap_or(text);
        let end = numbers.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(numbers.len());
        let mut version = [0; 3];
        for (number, part) in version.iter_mut().zip(numbers[..end].split('.')) {
            *number = part.parse()?;
        }
        Ok(Self(version))
    }
}

/// The events of NRI with their numbers. Each name is the method that a runtime calls, unless it calls `StateChange`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumString, strum::FromRepr, strum::IntoStaticStr)]
#[repr(i32)]
pub(crate) enum EventKind {
    RunPodSandbox = 1,
    StopPodSandbox = 2,
    RemovePodSandbox = 3,
    CreateContainer = 4,
    PostCreateContainer = 5,
    StartContainer = 6,
    PostStartContainer = 7,
    UpdateContainer = 8,
    PostUpdateContainer = 9,
    StopContainer = 10,
    RemoveContainer = 11,
    UpdatePodSandbox = 12,
    PostUpdatePodSandbox = 13,
    ValidateContainerAdjustment = 14,
}

/// A set of events that a plugin subscribes to: bit `n - 1` for event `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{_0:#x}")]
pub struct EventMask(pub i32);

impl EventMask {
    /// Events that all NRI versions support.
    pub const BASIC: Self = Self(0x7ff);

    /// Returns the events to subscribe to. Without a version, those that all NRI versions support.
    ///
    /// The validation of other plugins' adjustments is not included: this plugin rejects no adjustments, and a late validator would
    /// make the creation fail.
    pub fn for_version(version: Option<NriVersion>) -> Self {
        match version {
            Some(version) if version >= NriVersion::new(0, 10, 0) => Self(0x1fff),
            _ => Self::BASIC,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_versions_with_suffixes() {
        for (text, version) in [
            ("0.8.0", (0, 8, 0)),
            ("v0.12.1", (0, 12, 1)),
            ("1.7.24~ds1", (1, 7, 24)),
            ("v2.1.9-rc.1", (2, 1, 9)),
            ("0.3.1-0.20230504231226-94185418e253", (0, 3, 1)),
            ("2.3", (2, 3, 0)),
            ("1.30.2+unknown", (1, 30, 2)),
        ] {
            let (major, minor, patch) = version;
            assert_eq!(text.parse(), Ok(NriVersion::new(major, minor, patch)), "{text}");
        }
        for text in ["", "v", "unknown", "(devel)", "1..2", "99999999999"] {
            assert!(text.parse::<NriVersion>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn derives_nri_version_from_runtime() {
        for (name, version, nri) in [
            ("containerd", "v1.7.24", Some("0.6.1")),
            ("containerd", "1.7.24~ds1", Some("0.6.1")),
            ("containerd", "v1.7.29", Some("0.8.0")),
            ("containerd", "2.1.9+ds1", Some("0.8.0")),
            ("containerd", "v2.2.0", Some("0.10.0")),
            ("containerd", "v2.9.0", Some("0.12.0")),
            ("cri-o", "1.31.4", Some("0.6.1")),
            ("cri-o", "1.34.0", Some("0.10.0")),
            ("containerd", "1.6.20", None),
            ("containerd", "devel", None),
            ("docker", "28.0.0", None),
        ] {
            let got = NriVersion::from_runtime(name, version).map(|version| version.to_string());
            assert_eq!(got.as_deref(), nri, "{name} {version}");
        }
    }

    #[test]
    fn names_faults_of_affected_versions() {
        for (name, version, leaks, is_late) in [
            ("containerd", "1.7.24~ds1", false, true),
            ("containerd", "v2.0.0", true, true),
            ("containerd", "2.1.9+ds1", true, true),
            ("containerd", "v2.2.5", true, true),
            ("containerd", "v2.2.6", false, true),
            ("containerd", "v2.3.2", true, true),
            ("containerd", "v2.3.3", false, true),
            ("containerd", "v2.4.0", false, false),
            ("containerd", "devel", false, false),
            ("cri-o", "2.1.0", false, false),
        ] {
            let faults = RuntimeFault::of_runtime(name, version);
            assert_eq!(faults.contains(&LEAKED_SANDBOX), leaks, "{name} {version}");
            assert_eq!(faults.contains(&LATE_REGISTRATION), is_late, "{name} {version}");
        }
    }

    /// The tables in docs/versions.md name the same releases and issues.
    #[test]
    fn docs_name_faults() {
        let page = include_str!("../../../../docs/versions.md");
        for words in ["A up to 2.2.5; B", "A up to 2.3.2; B", "#13355, #13609", "#14083", "2.2.6 and 2.3.3"] {
            assert!(page.contains(words), "{words}");
        }
    }

    #[test]
    fn subscribes_only_to_known_events() {
        for (version, mask) in [
            (None, 0x7ff),
            (Some("0.6.1"), 0x7ff),
            (Some("0.9.0"), 0x7ff),
            (Some("0.10.0"), 0x1fff),
            (Some("0.12.0"), 0x1fff),
            (Some("1.0.0"), 0x1fff),
        ] {
            let version = version.map(|text| text.parse().unwrap());
            assert_eq!(EventMask::for_version(version).0, mask, "{version:?}");
        }
    }

    #[test]
    fn events_match_numbers_and_methods() {
        for number in 1..=14 {
            let kind = EventKind::from_repr(number).unwrap();
            assert_eq!(kind as i32, number);
            assert_eq!(<&str>::from(kind).parse(), Ok(kind));
        }
        assert_eq!(EventKind::from_repr(0), None);
        assert_eq!(EventKind::from_repr(15), None);
    }
}
