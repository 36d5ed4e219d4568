//! The policies by name, as a `KubeletConfiguration` spells them.
//!
//! These are the only enums of policies: configuration, API, command line and annotations read and write them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Nothing has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what}: \"{name}\"")]
pub struct UnknownName {
    /// `policy` or `scope`.
    pub what: &'static str,
    /// The name.
    pub name: String,
}

/// An enum whose variants have names. Serde's attributes must say the same: descriptions are made of them.
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
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The name.
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
        /// Memory is not promised.
        #[default]
        None = "None",
        /// Memory and huge pages are promised on nodes.
        Static = "Static",
    }
);

named!(
    /// The policy of the CPU manager.
    #[serde(rename_all = "lowercase")]
    "policy" CpuManagerPolicy {
        /// No CPU is exclusive.
        #[default]
        None = "none",
        /// Whole CPUs are exclusive.
        Static = "static",
    }
);

named!(
    /// A version of the kubelet. What changed in between came with one of the versions after the earlier one.
    "version of the kubelet (1.32 and 1.36 are known)" KubeletVersion {
        /// v1.32 and before.
        #[serde(rename = "1.32")]
        V1_32 = "1.32",
        /// v1.33 to v1.36, and what comes after it.
        #[default]
        #[serde(rename = "1.36")]
        V1_36 = "1.36",
    }
);

impl KubeletVersion {
    /// What holds for this one of what holds for each, in their order.
    pub(crate) const fn select<T: Copy>(self, each: [T; 2]) -> T {
        each[self as usize]
    }

    /// The version that stands for what a Kubernetes node says about its kubelet, such as `v1.34.2+k3s1`.
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
    /// By which formula it is said where a container is slowed down: that of a version of Kubernetes.
    "formula (1.22 and 1.27 are known)" ThrottlingFormula {
        /// At the factor times the limit; nowhere if that is no more than the request. Kubernetes v1.22 to v1.26.
        #[serde(rename = "1.22")]
        V1_22 = "1.22",
        /// At the request plus the factor times what is between it and the limit. Since Kubernetes v1.27.
        #[default]
        #[serde(rename = "1.27")]
        V1_27 = "1.27",
    }
);

named!(
    /// How the nodes of several resources have to agree.
    #[serde(rename_all = "kebab-case")]
    "policy" TopologyManagerPolicy {
        /// No rule ties them.
        #[default]
        None = "none",
        /// The same nodes if possible.
        BestEffort = "best-effort",
        /// The same nodes, as few as could ever be enough, or the request is refused.
        Restricted = "restricted",
        /// One node, or the request is refused.
        SingleNumaNode = "single-numa-node",
    }
);

named!(
    /// For what the nodes have to agree.
    #[serde(rename_all = "lowercase")]
    "scope" TopologyManagerScope {
        /// For each container.
        #[default]
        Container = "container",
        /// For all containers of a pod together.
        Pod = "pod",
    }
);

named!(
    /// How memory-only nodes count where a topology policy wants few nodes.
    #[serde(rename_all = "lowercase")]
    "tiers" Tiers {
        /// Together with the nodes with CPUs that they are nearest to.
        #[default]
        Attached = "attached",
        /// As nodes of their own.
        Strict = "strict",
    }
);

named!(
    /// What sort of memory a node has, by the kernel's memory tiers.
    #[serde(rename_all = "lowercase")]
    "memory tier" MemoryTier {
        /// Ordinary memory.
        #[default]
        Dram = "dram",
        /// High-bandwidth memory.
        Hbm = "hbm",
        /// Memory behind a CXL link, and whatever is slower than ordinary memory.
        Cxl = "cxl",
    }
);

named!(
    /// What a CPU is like.
    #[serde(rename_all = "kebab-case")]
    "kind of CPU" CpuKind {
        /// Of a core as fast as any of the machine.
        #[default]
        Performance = "performance",
        /// Of a core that is slower than others of the machine, and takes less power.
        Efficiency = "efficiency",
        /// Of the highest base frequency of the machine; where all have the same, of the highest maximum frequency.
        HighFrequency = "high-frequency",
        /// Kept from the scheduler's load balancing (`isolcpus=`).
        Isolated = "isolated",
        /// Without a tick while one task runs (`nohz_full=`).
        NohzFull = "nohz-full",
    }
);

named!(
    /// How the kernel chooses among the nodes of a workload for each new page: a policy of
    /// `Documentation/admin-guide/mm/numa_memory_policy.rst`.
    #[serde(rename_all = "kebab-case")]
    "memory policy" MemoryPolicy {
        /// `MPOL_BIND`: the nearest of them that has a free page.
        #[default]
        Bind = "bind",
        /// `MPOL_PREFERRED_MANY`: the same, and any other node before memory is reclaimed.
        PreferredMany = "preferred-many",
        /// `MPOL_INTERLEAVE`: one after the other.
        Interleave = "interleave",
        /// `MPOL_WEIGHTED_INTERLEAVE`: one after the other, each as many pages as its weight says.
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
