//! Quantities with the unit in their types.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Returns `count` KiB, at most `u64::MAX` bytes.
    pub const fn kib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 10))
    }

    /// Returns `count` MiB, at most `u64::MAX` bytes.
    pub const fn mib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 20))
    }

    /// Returns `count` GiB, at most `u64::MAX` bytes.
    pub const fn gib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 30))
    }

    /// Formats the number with one decimal in the largest possible unit: `23.5 GiB`.
    pub fn rounded(self) -> String {
        let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        match units.into_iter().find(|(shift, _)| self.0 >> shift > 0) {
            Some((shift, unit)) => {
                // In tenths, rounded. The 128 bits are enough for ten times any size.
                let tenths = (u128::from(self.0) * 10 + (1 << (shift - 1))) >> shift;
                format!("{}.{} {unit}", tenths / 10, tenths % 10)
            }
            None => format!("{} B", self.0),
        }
    }
}

impl fmt::Display for Bytes {
    /// Writes the number in the largest binary unit that divides it: `1536Mi`, `2Gi`, `4097`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(60, "Ei"), (50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")] {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

/// The size of a huge page. It is displayed as in the resource names of Kubernetes: `2Mi`, `1Gi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
pub struct HugepageSize(pub Bytes);

/// A kind of memory: base pages or huge pages of one size.
///
/// It is displayed as the Kubernetes resource: `memory`, `hugepages-2Mi`, `hugepages-1Gi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
pub enum ZoneKind {
    /// Huge pages of one size, from the node's pool. Sorted before `Memory`, like the names.
    #[display("hugepages-{_0}")]
    Hugepages(HugepageSize),
    /// Base pages.
    #[display("memory")]
    Memory,
}

/// An error in the text of a kind of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a kind of memory (expected `memory` or `hugepages-SIZE`, such as `hugepages-2Mi`)")]
pub struct ZoneKindError(pub String);

impl FromStr for ZoneKind {
    type Err = ZoneKindError;

    fn from_str(text: &str) -> Result<Self, ZoneKindError> {
        if text == "memory" {
            return Ok(Self::Memory);
        }
        let size = || {
            let size = text.strip_prefix("hugepages-")?;
            let digits = size.find(|c: char| !c.is_ascii_digit())?;
            let (count, unit) = size.split_at(digits);
            let shift = match unit {
                "Ki" => 10,
                "Mi" => 20,
                "Gi" => 30,
                _ => return None,
            };
            let count: u64 = count.parse().ok().filter(|&count| count > 0)?;
            Some(HugepageSize(Bytes(count.checked_mul(1 << shift)?)))
        };
        size().map(Self::Hugepages).ok_or_else(|| ZoneKindError(text.to_owned()))
    }
}

crate::serde_as_text!(ZoneKind);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1_572_864, "1.5 MiB"),
            (25_199_882_240, "23.5 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(Bytes(bytes).rounded(), text);
        }
    }

    #[test]
    fn kinds_parse_and_print() {
        for text in ["memory", "hugepages-2Mi", "hugepages-1Gi", "hugepages-64Ki"] {
            assert_eq!(text.parse::<ZoneKind>().unwrap().to_string(), text);
        }
        assert_eq!("hugepages-1024Mi".parse::<ZoneKind>().unwrap().to_string(), "hugepages-1Gi");
        for text in [
            "",
            "cpu",
            "hugepages-",
            "hugepages-2",
            "hugepages-0Mi",
            "hugepages-2M",
            "hugepages-99999999999999999Gi",
        ] {
            assert!(text.parse::<ZoneKind>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn bytes_print_in_largest_exact_unit() {
        assert_eq!(Bytes(0).to_string(), "0");
        assert_eq!(Bytes(4097).to_string(), "4097");
        assert_eq!(Bytes::mib(1536).to_string(), "1536Mi");
        assert_eq!(Bytes::gib(2).to_string(), "2Gi");
    }
}
