//! Which NRI a runtime speaks, and which events it may be asked for.
//!
//! A plugin that subscribes to an event that the runtime does not know is disconnected. NRI 0.12 and later
//! tell their version; for earlier ones it follows from the runtime's name and version.
//!
//! Source of the table: the NRI release that each runtime's module file names (`pkg/api/version.go` of NRI
//! keeps the same list).

use std::{fmt, str::FromStr};

/// A version of NRI: major, minor and patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NriVersion {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Patch level.
    pub patch: u32,
}

impl NriVersion {
    /// Makes a version of its three numbers.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// The version that a runtime of this name and version contains, where it is known. The name is as the
    /// runtime gives it (`containerd`, `cri-o`).
    ///
    /// A runtime newer than the table is taken for the newest in it.
    pub fn of_runtime(name: &str, version: &str) -> Option<Self> {
        // Runtime release → first NRI version in that series; ascending.
        let table: &[(Self, Self)] = match name.to_ascii_lowercase().as_str() {
            "containerd" => &[
                (Self::new(1, 7, 0), Self::new(0, 3, 0)),
                (Self::new(1, 7, 7), Self::new(0, 4, 0)),
                (Self::new(1, 7, 14), Self::new(0, 6, 0)),
                (Self::new(1, 7, 16), Self::new(0, 6, 1)),
                (Self::new(1, 7, 26), Self::new(0, 8, 0)),
                (Self::new(2, 0, 0), Self::new(0, 8, 0)),
                (Self::new(2, 2, 0), Self::new(0, 10, 0)),
                (Self::new(2, 2, 1), Self::new(0, 11, 0)),
                (Self::new(2, 3, 0), Self::new(0, 12, 0)),
            ],
            "cri-o" | "crio" => &[
                (Self::new(1, 26, 0), Self::new(0, 2, 0)),
                (Self::new(1, 27, 0), Self::new(0, 3, 0)),
                (Self::new(1, 29, 0), Self::new(0, 5, 0)),
                (Self::new(1, 30, 0), Self::new(0, 6, 0)),
                (Self::new(1, 31, 0), Self::new(0, 6, 1)),
                (Self::new(1, 32, 0), Self::new(0, 9, 0)),
                (Self::new(1, 34, 0), Self::new(0, 10, 0)),
                (Self::new(1, 35, 0), Self::new(0, 11, 0)),
            ],
            _ => return None,
        };
        let version: Self = version.parse().ok()?;
        table.iter().rev().find(|(since, _)| *since <= version).map(|&(_, nri)| nri)
    }
}

impl fmt::Display for NriVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// A text is not a version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a version (expected numbers such as `0.8.0`)")]
pub struct VersionError(pub String);

impl FromStr for NriVersion {
    type Err = VersionError;

    /// Reads `0.8.0`, also with a leading `v`; what follows the numbers (`-rc.1`, `~ds1`, `+unknown`) is
    /// ignored, and a missing minor version or patch level is zero.
    fn from_str(text: &str) -> Result<Self, VersionError> {
        let error = || VersionError(text.to_owned());
        let numbers = text.strip_prefix('v').unwrap_or(text);
        let end = numbers.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(numbers.len());
        let mut parts = numbers[..end].split('.').map(|part| part.parse::<u32>().map_err(|_| error()));
        let major = parts.next().ok_or_else(error)??;
        let (minor, patch) = (parts.next().unwrap_or(Ok(0))?, parts.next().unwrap_or(Ok(0))?);
        Ok(Self { major, minor, patch })
    }
}

/// The events of NRI, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

impl EventKind {
    const ALL: [Self; 14] = [
        Self::RunPodSandbox,
        Self::StopPodSandbox,
        Self::RemovePodSandbox,
        Self::CreateContainer,
        Self::PostCreateContainer,
        Self::StartContainer,
        Self::PostStartContainer,
        Self::UpdateContainer,
        Self::PostUpdateContainer,
        Self::StopContainer,
        Self::RemoveContainer,
        Self::UpdatePodSandbox,
        Self::PostUpdatePodSandbox,
        Self::ValidateContainerAdjustment,
    ];

    /// The event of this number.
    pub(crate) fn of_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as i32 == number)
    }

    /// The method that a runtime calls for it, where it does not send a state change.
    pub(crate) fn method(self) -> &'static str {
        match self {
            Self::RunPodSandbox => "RunPodSandbox",
            Self::StopPodSandbox => "StopPodSandbox",
            Self::RemovePodSandbox => "RemovePodSandbox",
            Self::CreateContainer => "CreateContainer",
            Self::PostCreateContainer => "PostCreateContainer",
            Self::StartContainer => "StartContainer",
            Self::PostStartContainer => "PostStartContainer",
            Self::UpdateContainer => "UpdateContainer",
            Self::PostUpdateContainer => "PostUpdateContainer",
            Self::StopContainer => "StopContainer",
            Self::RemoveContainer => "RemoveContainer",
            Self::UpdatePodSandbox => "UpdatePodSandbox",
            Self::PostUpdatePodSandbox => "PostUpdatePodSandbox",
            Self::ValidateContainerAdjustment => "ValidateContainerAdjustment",
        }
    }

    /// The event whose method this is.
    pub(crate) fn of_method(method: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.method() == method)
    }
}

/// A set of events, as a plugin subscribes to them: bit `n - 1` for event `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventMask(pub i32);

impl EventMask {
    /// The events that every NRI knows.
    pub const BASIC: Self = Self(0x7ff);

    /// The events to subscribe to. Without a version, those that every NRI knows.
    ///
    /// The validation of other plugins' adjustments is never among them: nothing is vetoed here, and a
    /// validator that is late fails the creation.
    pub fn for_version(version: Option<NriVersion>) -> Self {
        match version {
            Some(version) if version >= NriVersion::new(0, 10, 0) => Self(0x1fff),
            _ => Self::BASIC,
        }
    }
}

impl fmt::Display for EventMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_with_what_runtimes_append() {
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
    fn a_runtimes_name_and_version_tell_its_nri() {
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
            let got = NriVersion::of_runtime(name, version).map(|version| version.to_string());
            assert_eq!(got.as_deref(), nri, "{name} {version}");
        }
    }

    #[test]
    fn unknown_events_are_not_asked_for() {
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
    fn events_have_their_numbers_and_methods() {
        for number in 1..=14 {
            let kind = EventKind::of_number(number).unwrap();
            assert_eq!(kind as i32, number);
            assert_eq!(EventKind::of_method(kind.method()), Some(kind));
        }
        assert_eq!(EventKind::of_number(0), None);
        assert_eq!(EventKind::of_number(15), None);
    }
}
