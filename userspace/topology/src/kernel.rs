//! Kernel releases, and kernel features that not every supported release has.

/// A release of Linux. Distributions backport features to older releases: check for the feature itself if it is
/// visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, derive_more::Display)]
#[display("{major}.{minor}")]
pub struct KernelRelease {
    pub major: u32,
    pub minor: u32,
}

impl KernelRelease {
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// Parses the beginning of `uname -r`; `None` if it does not start with two numbers.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
        Some(Self { major: numbers.next()??, minor: numbers.next()?? })
    }
}

/// A kernel feature that the daemon uses if it is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelFeature {
    /// A short name, shown by `numaward doctor`.
    pub name: &'static str,
    /// The first release with the feature.
    pub since: KernelRelease,
    /// The behaviour without the feature, shown by `numaward doctor`.
    pub fallback: &'static str,
    /// True if the daemon does less without the feature.
    pub is_degraded: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_kernel_releases() {
        for (text, expected) in [
            ("5.10.0-32-cloud-amd64", Some(KernelRelease::new(5, 10))),
            ("5.14.0-427.13.1.el9_4.x86_64", Some(KernelRelease::new(5, 14))),
            ("5.15", Some(KernelRelease::new(5, 15))),
            ("7.2-rc1", Some(KernelRelease::new(7, 2))),
            ("6", None),
            ("unknown", None),
        ] {
            assert_eq!(KernelRelease::parse(text), expected, "{text}");
        }
        assert!(KernelRelease::new(5, 9) < KernelRelease::new(5, 10));
        assert_eq!(KernelRelease::new(5, 10).to_string(), "5.10");
    }
}
