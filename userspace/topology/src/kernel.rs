//! Releases of Linux, and what is used of a kernel where it has it.

/// A release of Linux, as far as features go. Distributions take features of later releases into older ones: look for the
/// feature where it can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, derive_more::Display)]
#[display("{major}.{minor}")]
pub struct KernelRelease {
    /// The first number.
    pub major: u32,
    /// The second one.
    pub minor: u32,
}

impl KernelRelease {
    /// By its two numbers.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// What `uname -r` begins with; `None` where these are no numbers.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
        Some(Self { major: numbers.next()??, minor: numbers.next()?? })
    }
}

/// Something that is used of a kernel, and that not every supported one has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelFeature {
    /// What it is, in a few words.
    pub name: &'static str,
    /// The first release that has it.
    pub since: KernelRelease,
    /// What takes its place in older ones, and what is lost.
    pub fallback: &'static str,
    /// Whether anything is lost.
    pub is_degraded: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_numbers() {
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
