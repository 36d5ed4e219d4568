//! Names of policies, spelled as in a `KubeletConfiguration`.
//!
//! These enums are the only ones for policies: the configuration, the API, the command line and annotations use them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Error for an unknown name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what}: \"{name}\"")]
pub struct UnknownName {
    /// Kind of name, for example `policy` or `scope`.
    pub what: &'static str,
    pub name: String,
}

/// Defines an enum with named variants. The serde attributes must agree with the names, because schemas are
/// generated from the attributes.
macro_rules! named {
    (
        $(#[$attribute:meta])*
        $what:literal $type:ident { $($(#[$variant_attribute:meta])* $variant:ident = $name:literal,)+ }
    ) => {
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema, utoipa::ToSchema))]
        $(#[$attribute])*
        pub enum $type {
            $($(#[$variant_attribute])* $variant,)+
        }

        impl $type {
            /// All variants.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $type {
            type Err = UnknownName;

            fn from_str(name: &str) -> Result<Self, UnknownName> {
                let unknown = || UnknownName { what: $what, name: name.to_owned() };
                Self::ALL.iter().copied().find(|of| of.as_str() == name).ok_or_else(unknown)
            }
        }
    };
}

named!(
    /// The policy of the memory manager.
    "policy" MemoryManagerPolicy {
        /// Memory is not guaranteed.
        #[default]
        None = "None",
        /// Memory and huge pages are guaranteed on NUMA nodes.
        Static = "Static",
    }
);

named!(
    /// The policy of the CPU manager.
    #[serde(rename_all = "lowercase")]
    "policy" CpuManagerPolicy {
        /// No container gets exclusive CPUs.
        #[default]
        None = "none",
        /// Containers that request whole CPUs get them exclusively.
        Static = "static",
    }
);

named!(
    /// A version of the kubelet. Changes between the two versions came with one of the versions in between.
    "version of the kubelet (1.32 and 1.36 are known; the decisions of 1.37 were not recorded, and some differ from those of 1.36)" KubeletVersion {
        /// v1.32 and earlier.
        #[serde(rename = "1.32")]
        V1_32 = "1.32",
        /// v1.33 to v1.36, and later versions.
        #[default]
        #[serde(rename = "1.36")]
        V1_36 = "1.36",
    }
);

impl KubeletVersion {
    /// Returns the element for this version; `each` is in the order of the versions.
    pub(crate) const fn select<T: Copy>(self, each: [T; 2]) -> T {
        each[self as usize]
    }

    /// Returns the version that corresponds to the kubelet version of a Kubernetes node, such as `v1.34.2+k3s1`.
    pub fn from_node_version(reported: &str) -> Option<Self> {
        Some(if minor_version(reported)? < (1, 33) { Self::V1_32 } else { Self::V1_36 })
    }

    /// Returns true if a kubelet is newer than those with recorded decisions. Some decisions of 1.37 differ from those of 1.36
    /// (kubernetes/kubernetes#139430, #139778, #140730).
    pub fn is_newer_than_recorded(reported: &str) -> bool {
        minor_version(reported).is_some_and(|version| version > (1, 36))
    }
}

/// Returns the first two numbers of a version such as `v1.34.2+k3s1`.
fn minor_version(reported: &str) -> Option<(u32, u32)> {
    let mut numbers = reported.strip_prefix('v').unwrap_or(reported).split('.');
    let mut number = || numbers.next()?.parse::<u32>().ok();
    Some((number()?, number()?))
}

named!(
    /// The formula for the memory size at which a container is throttled, by version of Kubernetes.
    "formula (1.22 and 1.27 are known)" ThrottlingFormula {
        /// The factor times the limit; no throttling if that is no more than the request. Kubernetes v1.22 to v1.26.
        #[serde(rename = "1.22")]
        V1_22 = "1.22",
        /// The request plus the factor times the difference between limit and request. Since Kubernetes v1.27.
        #[default]
        #[serde(rename = "1.27")]
        V1_27 = "1.27",
    }
);

named!(
    /// The alignment of the NUMA nodes of several resources.
    #[serde(rename_all = "kebab-case")]
    "policy" TopologyManagerPolicy {
        /// Resources are placed independently.
        #[default]
        None = "none",
        /// All resources are on the same nodes if possible.
        BestEffort = "best-effort",
        /// All resources are on the same nodes, as few as could ever suffice; otherwise the request is refused.
        Restricted = "restricted",
        /// All resources are on one node; otherwise the request is refused.
        SingleNumaNode = "single-numa-node",
    }
);

named!(
    /// The unit of the alignment.
    #[serde(rename_all = "lowercase")]
    "scope" TopologyManagerScope {
        /// Each container by itself.
        #[default]
        Container = "container",
        /// All containers of a pod together.
        Pod = "pod",
    }
);

named!(
    /// The treatment of memory-only nodes if a topology policy demands few nodes.
    #[serde(rename_all = "lowercase")]
    "tiers" Tiers {
        /// They count together with their nearest nodes with CPUs.
        #[default]
        Attached = "attached",
        /// They count as separate nodes.
        Strict = "strict",
    }
);

named!(
    /// The type of memory of a node, according to the kernel's memory tiers.
    #[serde(rename_all = "lowercase")]
    "memory tier" MemoryTier {
        /// Ordinary memory.
        #[default]
        Dram = "dram",
        /// High-bandwidth memory.
        Hbm = "hbm",
        /// Memory behind a CXL link, and any other memory slower than ordinary memory.
        Cxl = "cxl",
    }
);

named!(
    /// A property of a CPU.
    #[serde(rename_all = "kebab-case")]
    "kind of CPU" CpuKind {
        /// The CPU belongs to one of the fastest cores of the machine.
        #[default]
        Performance = "performance",
        /// The CPU belongs to a core that is slower and consumes less power than the fastest ones.
        Efficiency = "efficiency",
        /// The CPU has the highest base frequency of the machine or, if all base frequencies are equal, the highest
        /// maximum frequency.
        HighFrequency = "high-frequency",
        /// The CPU is excluded from the scheduler's load balancing (`isolcpus=`).
        Isolated = "isolated",
        /// The CPU has no tick while a single task runs (`nohz_full=`).
        NohzFull = "nohz-full",
    }
);

named!(
    /// The method by which the kernel selects one of a workload's nodes for each new page, see
    /// `Documentation/admin-guide/mm/numa_memory_policy.rst`.
    #[serde(rename_all = "kebab-case")]
    "memory policy" MemoryPolicy {
        /// `MPOL_BIND`: the nearest node with a free page.
        #[default]
        Bind = "bind",
        /// `MPOL_PREFERRED_MANY`: the nearest node with a free page; any other node before memory is reclaimed.
        PreferredMany = "preferred-many",
        /// `MPOL_INTERLEAVE`: the nodes in turn.
        Interleave = "interleave",
        /// `MPOL_WEIGHTED_INTERLEAVE`: the nodes in turn, each for as many pages as its weight.
        WeightedInterleave = "weighted-interleave",
    }
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_agree_in_all_formats() {
        fn check<T>(all: &[T], names: &[&str])
        where
            T: Copy + fmt::Debug + fmt::Display + PartialEq + FromStr<Err = UnknownName> + Serialize,
            T: for<'de> Deserialize<'de>,
        {
            assert!(all.iter().map(ToString::to_string).eq(names.iter().copied()), "{all:?}");
            for (&of, &name) in all.iter().zip(names) {
                assert_eq!(name.parse(), Ok(of));
                assert_eq!(serde_json::to_value(of).unwrap(), name);
                assert_eq!(serde_json::from_value::<T>(name.into()).unwrap(), of);
            }
        }
        check(MemoryManagerPolicy::ALL, &["None", "Static"]);
        check(CpuManagerPolicy::ALL, &["none", "static"]);
        check(TopologyManagerPolicy::ALL, &["none", "best-effort", "restricted", "single-numa-node"]);
        check(TopologyManagerScope::ALL, &["container", "pod"]);
        check(KubeletVersion::ALL, &["1.32", "1.36"]);
        check(ThrottlingFormula::ALL, &["1.22", "1.27"]);
        check(MemoryPolicy::ALL, &["bind", "preferred-many", "interleave", "weighted-interleave"]);
    }

    #[test]
    fn refuses_names_in_kubelet_words() {
        let error = |result: Result<(), UnknownName>| result.unwrap_err().to_string();
        assert_eq!(error("static".parse::<MemoryManagerPolicy>().map(drop)), "unknown policy: \"static\"");
        assert_eq!(error("Static".parse::<CpuManagerPolicy>().map(drop)), "unknown policy: \"Static\"");
        assert_eq!(error("strict".parse::<TopologyManagerPolicy>().map(drop)), "unknown policy: \"strict\"");
        assert_eq!(error("node".parse::<TopologyManagerScope>().map(drop)), "unknown scope: \"node\"");
    }

    #[test]
    fn node_version_selects_a_version() {
        for (reported, version) in [
            ("v1.32.10", Some(KubeletVersion::V1_32)),
            ("v1.29.0-eks-1234", Some(KubeletVersion::V1_32)),
            ("v1.33.0", Some(KubeletVersion::V1_36)),
            ("1.36.2", Some(KubeletVersion::V1_36)),
            ("v1.40.1+k3s1", Some(KubeletVersion::V1_36)),
            ("v2.0.0", Some(KubeletVersion::V1_36)),
            ("", None),
            ("v1", None),
            ("latest", None),
        ] {
            assert_eq!(KubeletVersion::from_node_version(reported), version, "{reported}");
        }
        for (reported, is_newer) in
            [("v1.37.0", true), ("v2.0.0", true), ("v1.36.9+k3s1", false), ("x", false)]
        {
            assert_eq!(KubeletVersion::is_newer_than_recorded(reported), is_newer, "{reported}");
        }
    }
}
