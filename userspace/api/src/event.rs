//! Events as they are served.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

/// Something that happened on this host.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// Its id. Ids only grow, also over restarts of the daemon.
    pub id: u64,
    /// When it was noticed, in RFC 3339.
    #[schema(examples("2026-11-21T07:00:00.000Z"))]
    pub time: String,
    /// What sort of event it is.
    pub kind: EventKind,
    /// How bad it is.
    pub severity: Severity,
    /// The workload that it is about, by the label of its metrics; absent where it is about the host.
    pub workload: Option<String>,
    /// The node that it is about.
    pub node: Option<u32>,
    /// What happened, for people.
    pub message: String,
    /// What is known of it, for programs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, String>,
    /// How many of this kind and workload came since the last one, and were not reported.
    pub suppressed: u64,
}

/// What sort of event it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[derive(strum::Display, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case", parse_err_ty = String, parse_err_fn = unknown_kind)]
pub enum EventKind {
    /// A workload got memory outside the nodes promised to it.
    Miss,
    /// The OOM killer took a process.
    OomKill,
    /// A knob no longer held what was written.
    Drift,
    /// A container started without the settings promised to it.
    UnpinnedStart,
    /// A workload waited long for memory.
    Stall,
    /// Nodes, CPUs or memory came or went.
    MachineChange,
    /// A task ran on CPUs that are exclusive to another workload.
    Intruder,
    /// A guarantee that is declared in the configuration cannot be given.
    GuaranteeRefused,
    /// A cgroup cannot be kept off exclusive CPUs.
    NotHerded,
    /// What is promised to a Burstable workload followed it to another node.
    HomeMoved,
    /// Workloads are moved to make room for a request: planned, started, moved, done, cancelled or failed, as the detail
    /// `step` says.
    Rebalance,
    /// A workload has more memory on a node than its share there, or no longer has.
    BudgetExceeded,
    /// A node may soon not have what is promised on it, or has it again.
    HeadroomLow,
    /// The guard keeps a workload off a node, no longer does, or cannot; or pods may be evicted, as nobody else can be kept off.
    Steered,
    /// Page cache of workloads without a guarantee is dropped on a node, so that what is promised there is free; or it is no
    /// longer, or nobody has any.
    Reclaimed,
    /// A workload without a guarantee was given a home, or would be; it keeps it, was put back, or cannot have one: as the
    /// detail `step` says.
    Home,
    /// Interrupts, or other work that the kernel does by itself, were moved off exclusive CPUs or back, or cannot be.
    InterruptsMoved,
    /// Power settings of exclusive CPUs were made or given back, are somebody else's now, or cannot be made.
    CpuPower,
    /// Weights of nodes for the memory policy weighted-interleave were set or given back, are somebody else's now, or cannot be
    /// set.
    InterleaveWeights,
    /// Classes of L3 caches and memory bandwidth were made for workloads or removed, or cannot be held.
    Resctrl,
    /// A unit with a guarantee was stopped, runs again, or was stopped for so long that its guarantee ends.
    UnitStopped,
    /// In a dry run: where a container would have been placed, or that it would have been refused.
    Decided,
}

impl EventKind {
    /// All kinds.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// The name: in JSON and as the label `kind`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// How bad such events are, unless one is known to be otherwise.
    pub const fn severity(self) -> Severity {
        match self {
            Self::MachineChange
            | Self::HomeMoved
            | Self::Rebalance
            | Self::Reclaimed
            | Self::Home
            | Self::InterruptsMoved
            | Self::CpuPower
            | Self::InterleaveWeights
            | Self::Resctrl
            | Self::UnitStopped
            | Self::Decided => Severity::Info,
            _ => Severity::Warning,
        }
    }

    /// How many events of one workload are reported in a minute.
    pub const fn per_minute(self) -> u32 {
        match self {
            Self::Miss | Self::Intruder => 1,
            // A long reclaim must not hide that the workload stands still.
            Self::Stall
            | Self::OomKill
            | Self::UnpinnedStart
            | Self::GuaranteeRefused
            | Self::NotHerded
            | Self::HomeMoved
            | Self::BudgetExceeded
            | Self::Reclaimed
            | Self::Home
            | Self::InterruptsMoved
            | Self::CpuPower
            | Self::InterleaveWeights
            | Self::Resctrl
            | Self::UnitStopped
            | Self::Decided => 10,
            // A conflict over a knob has ten repairs, and its end has to be reported.
            Self::Drift | Self::HeadroomLow => 20,
            Self::MachineChange | Self::Rebalance | Self::Steered => 60,
        }
    }
}

fn unknown_kind(text: &str) -> String {
    let known: Vec<_> = EventKind::ALL.iter().map(|kind| kind.as_str()).collect();
    format!("{text:?} is no kind of event; there are {}", known.join(", "))
}

/// How bad an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Good to know.
    Info,
    /// Something does not hold as promised.
    Warning,
    /// A promise did harm, or will soon.
    Critical,
}

/// Events, and how far back the history reaches.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EventPage {
    /// The events, oldest first.
    pub events: Vec<Event>,
    /// The id of the oldest event that is kept; absent where none is. A client that asks for events
    /// since an id further back has missed some.
    pub oldest: Option<u64>,
    /// The id of the latest event; absent where none is kept.
    pub latest: Option<u64>,
}

/// Which events are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventFilter {
    /// Only those with a greater id.
    pub since: Option<u64>,
    /// Only those of this kind.
    pub kind: Option<EventKind>,
    /// Only those about this workload.
    pub workload: Option<String>,
    /// At most so many.
    pub limit: usize,
}

impl EventFilter {
    /// Whether it asks for this event.
    pub fn matches(&self, event: &Event) -> bool {
        self.since.is_none_or(|since| event.id > since)
            && self.kind.is_none_or(|kind| event.kind == kind)
            && self.workload.as_ref().is_none_or(|name| event.workload.as_ref() == Some(name))
    }
}
