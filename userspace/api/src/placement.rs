//! How a workload wants to be placed, amounts of CPUs, and what a guarantee is changed to.

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

/// Wishes and conditions of a workload beside its amounts and its policy. Only the strategy `native` knows all but
/// `preferredNodes`, `isolate`, `memoryPolicy` and `resctrlClass`.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "conditions of which each holds or not, whatever the others are"
)]
pub struct Placement {
    /// Nodes on which it should be if it can, as a list.
    #[schemars(with = "Option<String>", extend("examples" = ["0-1"]))]
    #[schema(value_type = Option<String>, examples("0-1"))]
    pub preferred_nodes: Option<NodeSet>,
    /// The only nodes on which it may be, as a list; absent: any. The request is refused if it does not fit there.
    #[schemars(with = "Option<String>", extend("examples" = ["0-1"]))]
    #[schema(value_type = Option<String>, examples("0-1"))]
    pub nodes: Option<NodeSet>,
    /// How memory-only nodes count; absent: as the configuration has it.
    pub tiers: Option<Tiers>,
    /// The only sorts of memory that it takes; none: any.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<MemoryTier>)]
    pub memory_tiers: BTreeSet<MemoryTier>,
    /// The kinds that each of its exclusive CPUs must be of; none: any CPU will do.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<CpuKind>)]
    pub cpu_kinds: BTreeSet<CpuKind>,
    /// Each of its exclusive CPUs is of a different core, and nobody may use the other threads of these cores.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub hide_siblings: bool,
    /// What others can name it by, besides its own name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Workloads on whose nodes it would like to be: by name (of a pod: `namespace/name`), or by a label as
    /// `key=value`.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub with: BTreeSet<String>,
    /// Workloads on whose nodes it would like not to be, named likewise.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub apart: BTreeSet<String>,
    /// Its CPUs are to share a last-level cache where possible.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub same_cache: bool,
    /// Others are kept off its exclusive CPUs, also where `enforcement.herding.mode` is not `on`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub isolate: bool,
    /// How the kernel chooses among its nodes for each new page; absent: as for any process. Of a command, or
    /// of a container by annotation; refused for what runs already.
    pub memory_policy: Option<MemoryPolicy>,
    /// Its class of L3 caches and memory bandwidth, of `resctrl.classes` in the configuration; absent: none.
    #[schemars(extend("examples" = ["batch"]))]
    #[schema(examples("batch"))]
    pub resctrl_class: Option<String>,
    /// It must stay where it is placed first.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub immovable: bool,
    /// Its memory is promised on a home node, which follows it, and is not bound to it: it may use more than is
    /// promised, up to its limit, on any node. Its CPUs are shared.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub burstable: bool,
}

impl Placement {
    /// Whether nothing is said.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Shows the terms on which something was admitted, with these preferred nodes.
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

/// An amount of CPUs: a number, or a quantity as Kubernetes writes it (`500m`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub struct Cpus(pub Quantity);

impl Cpus {
    /// So many whole CPUs.
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
    /// Whole CPUs as a number.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.whole_cpus() {
            // What is whole only when it is rounded stays as it is.
            Some(whole) if self.0 == Quantity::whole(whole) => serializer.serialize_u64(whole),
            _ => serializer.collect_str(self),
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
                // Printed, a floating-point number has the shortest digits that mean it: those that were written.
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

/// What a guarantee is to be changed to. What is absent stays.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Resize {
    /// CPUs: a whole number for a workload with exclusive ones, a part of a CPU for one that shares them.
    pub cpus: Option<Cpus>,
    /// Memory, as Kubernetes writes quantities.
    #[schema(examples("8Gi"))]
    pub memory: Option<String>,
    /// The most memory that the workload may use; absent: `memory`, where both were equal, else as it was.
    #[schema(examples("12Gi"))]
    pub memory_limit: Option<String>,
    /// Huge pages, in bytes by page size: of sizes that it holds.
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
    fn what_is_not_said_is_not_written() {
        assert_eq!(serde_json::to_string(&Placement::default()).unwrap(), "{}");
        let text = r#"{"preferredNodes":"0-1","nodes":"0-2","tiers":"strict","memoryTiers":["cxl"],"cpuKinds":["performance","nohz-full"],"hideSiblings":true,"labels":{"app":"db"},"with":["web"],"apart":["app=batch"],"sameCache":true,"isolate":true,"memoryPolicy":"interleave","resctrlClass":"batch","immovable":true,"burstable":true}"#;
        let placement: Placement = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&placement).unwrap(), text);
        assert!(serde_json::from_str::<Placement>(r#"{"tier":"strict"}"#).is_err());
    }
}
