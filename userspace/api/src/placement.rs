//! Placement conditions of a workload, amounts of CPUs, and changes of a guarantee.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

use numaward_engine::{
    Quantity, Terms,
    policy::{CpuKind, MemoryPolicy, MemoryTier, Tiers},
    quantity::QuantityError,
};
use numaward_topology::NodeSet;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_with_macros::skip_serializing_none;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        RefOr,
        schema::{ObjectBuilder, Schema, SchemaType, Type},
    },
};

/// Placement conditions of a workload, in addition to its amounts and its policy. Most need the strategy `native`;
/// `preferredNodes`, `isolate`, `memoryPolicy` and `resctrlClass` work with both strategies.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[expect(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub struct Placement {
    /// Nodes that are preferred for the workload, as a list.
    #[schemars(with = "Option<String>", extend("examples" = ["0-1"]))]
    #[schema(value_type = Option<String>, examples("0-1"))]
    pub preferred_nodes: Option<NodeSet>,
    /// The only allowed nodes, as a list; absent: all nodes. The request is refused if it does not fit on them.
    #[schemars(with = "Option<String>", extend("examples" = ["0-1"]))]
    #[schema(value_type = Option<String>, examples("0-1"))]
    pub nodes: Option<NodeSet>,
    /// Experimental: the use of memory-only nodes; absent: the configured one.
    pub tiers: Option<Tiers>,
    /// Experimental: the only allowed types of memory; empty: all types.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<MemoryTier>)]
    pub memory_tiers: BTreeSet<MemoryTier>,
    /// The kinds that each exclusive CPU must have; empty: any CPU.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<CpuKind>)]
    pub cpu_kinds: BTreeSet<CpuKind>,
    /// Places each exclusive CPU on a different core; no workload may use the other threads of these cores.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hide_siblings: bool,
    /// Labels by which other workloads can refer to this one, in addition to its name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Workloads to be near: their nodes are preferred. By name (of a pod: `namespace/name`), or by a label as `key=value`.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub with: BTreeSet<String>,
    /// Workloads to be apart from: their nodes are avoided. Same notation.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub apart: BTreeSet<String>,
    /// Prefers CPUs that share a last-level cache.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub same_cache: bool,
    /// Keeps other workloads off the exclusive CPUs, even if `enforcement.herding.mode` is not `on`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub isolate: bool,
    /// The memory policy: how the kernel chooses among the nodes for each new page; absent: the default policy. Only
    /// for a command, or for a container by annotation; refused for a running workload.
    pub memory_policy: Option<MemoryPolicy>,
    /// Experimental: the class of L3 caches and memory bandwidth (`resctrl.classes` in the configuration); absent: none.
    #[schemars(extend("examples" = ["batch"]))]
    #[schema(examples("batch"))]
    pub resctrl_class: Option<String>,
    /// Forbids moving the workload after its first placement.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub immovable: bool,
    /// Guarantees the memory on a preferred node, which follows the workload, without binding it there: the workload
    /// may use more memory, up to its limit, on any node. Its CPUs are shared.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub burstable: bool,
}

impl Placement {
    /// Returns true if no condition is set.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Converts the terms of an admitted request, with the given preferred nodes.
    pub fn from_terms(terms: &Terms, preferred_nodes: Option<NodeSet>) -> Self {
        Self {
            preferred_nodes,
            nodes: Some(terms.nodes.clone()).filter(|nodes| !nodes.is_empty()),
            tiers: terms.tiers,
            memory_tiers: terms.memory_tiers.clone(),
            cpu_kinds: terms.cpu_kinds.clone(),
            hide_siblings: terms.hide_siblings,
            labels: terms.labels.clone(),
            with: terms.with.clone(),
            apart: terms.apart.clone(),
            same_cache: terms.same_cache,
            isolate: terms.isolate,
            memory_policy: terms.memory_policy,
            resctrl_class: terms.resctrl_class.clone(),
            immovable: terms.immovable,
            burstable: terms.burstable,
        }
    }
}

/// An amount of CPUs: a number, or a Kubernetes quantity (`500m`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{}", _0.decimal())]
pub struct Cpus(pub Quantity);

impl Cpus {
    /// Returns an amount of whole CPUs.
    pub const fn whole(cpus: u32) -> Self {
        Self(Quantity::whole(cpus as u64))
    }
}

impl FromStr for Cpus {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        text.parse().map(Self)
    }
}

impl Serialize for Cpus {
    /// Writes whole CPUs as a number.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.whole_cpus() {
            // An amount that is whole only after rounding is written unchanged.
            Some(whole) if self.0 == Quantity::whole(whole) => serializer.serialize_u64(whole),
            _ => serializer.collect_str(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Cpus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Amount;
        impl de::Visitor<'_> for Amount {
            type Value = Cpus;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of CPUs such as 2, 1.5 or 500m")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Cpus, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_u64<E: de::Error>(self, cpus: u64) -> Result<Cpus, E> {
                Ok(Cpus(Quantity::whole(cpus)))
            }
            fn visit_f64<E: de::Error>(self, cpus: f64) -> Result<Cpus, E> {
                // `to_string` prints the shortest digits that give the same number, which are the written ones.
                self.visit_str(&cpus.to_string())
            }
        }
        deserializer.deserialize_any(Amount)
    }
}

impl JsonSchema for Cpus {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Cpus".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": ["number", "string"], "minimum": 0.001, "maximum": 65_536, "examples": [4, "500m"],
        })
    }
}

impl PartialSchema for Cpus {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(SchemaType::from_iter([Type::Number, Type::String]))
            .description(Some("An amount of CPUs: a number, or a quantity as Kubernetes writes it."))
            .examples(["4", "1.5", "500m"])
            .into()
    }
}

impl ToSchema for Cpus {}

/// The new amounts of a guarantee. Absent amounts stay unchanged.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Resize {
    /// CPUs: a whole number for a workload with exclusive CPUs, a fraction for a workload on the shared pool.
    pub cpus: Option<Cpus>,
    /// Memory, as a Kubernetes quantity.
    #[schema(examples("8Gi"))]
    pub memory: Option<String>,
    /// The maximum memory of the workload; absent: `memory` if both were equal, otherwise unchanged.
    #[schema(examples("12Gi"))]
    pub memory_limit: Option<String>,
    /// Hugepages in bytes, by page size; only sizes that the guarantee contains.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(examples(json!({"2Mi": "64Mi"})))]
    pub hugepages: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_numbers_or_quantities() {
        for (json, millis, back) in [
            ("2", 2000, "2"),
            ("1.5", 1500, "\"1500m\""),
            ("\"500m\"", 500, "\"500m\""),
            ("\"3\"", 3000, "3"),
            ("40.9999", 41_000, "\"40999900000n\""),
        ] {
            let cpus: Cpus = serde_json::from_str(json).unwrap();
            assert_eq!(cpus.0.millis(), Some(millis), "{json}");
            assert_eq!(serde_json::to_string(&cpus).unwrap(), back);
        }
        for wrong in ["-1", "\"two\"", "true", "\"-500m\"", "[1]"] {
            assert!(serde_json::from_str::<Cpus>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn default_fields_are_omitted() {
        assert_eq!(serde_json::to_string(&Placement::default()).unwrap(), "{}");
        let text = r#"{"preferredNodes":"0-1","nodes":"0-2","tiers":"strict","memoryTiers":["cxl"],"cpuKinds":["performance","nohz-full"],"hideSiblings":true,"labels":{"app":"db"},"with":["web"],"apart":["app=batch"],"sameCache":true,"isolate":true,"memoryPolicy":"interleave","resctrlClass":"batch","immovable":true,"burstable":true}"#;
        let placement: Placement = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&placement).unwrap(), text);
        assert!(serde_json::from_str::<Placement>(r#"{"tier":"strict"}"#).is_err());
    }
}
