//! Events of the API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

/// An event on this host.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// The id of the event. Ids always grow, even across restarts of the daemon.
    pub id: u64,
    /// The time at which the event was noticed, in RFC 3339.
    #[schema(examples("2026-11-21T07:00:00.000Z"))]
    pub time: String,
    /// The kind of event.
    pub kind: EventKind,
    /// The severity of the event.
    pub severity: Severity,
    /// The workload concerned, by the label of its metrics; absent if the event concerns the host.
    pub workload: Option<String>,
    /// The node concerned.
    pub node: Option<u32>,
    /// A description of the event for people.
    pub message: String,
    /// Details of the event for programs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, String>,
    /// The number of events of this kind and workload that were suppressed since the last reported one.
    pub suppressed: u64,
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[derive(strum::Display, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case", parse_err_ty = String, parse_err_fn = unknown_kind)]
pub enum EventKind {
    /// A workload was given memory outside the nodes of its guarantee.
    Miss,
    /// The OOM killer killed a process.
    OomKill,
    /// A knob no longer has the value that numaward wrote.
    Drift,
    /// A container started without the settings of its guarantee.
    UnpinnedStart,
    /// A workload waited long for memory.
    Stall,
    /// Nodes, CPUs or memory were added or removed.
    MachineChange,
    /// A task ran on CPUs that are exclusive to another workload.
    Intruder,
    /// A guarantee that is declared in the configuration was refused.
    GuaranteeRefused,
    /// A cgroup could not be confined to the shared pool.
    NotHerded,
    /// The guarantee of a Burstable workload followed its memory to another node.
    HomeMoved,
    /// Workloads are moved to make room for a request. The detail `step` is planned, started, moved, done, cancelled or
    /// failed.
    Rebalance,
    /// A workload has more memory on a node than its share there, or no longer has.
    BudgetExceeded,
    /// A node may soon not have the memory that is guaranteed on it, or has it again.
    HeadroomLow,
    /// The guard started or stopped keeping a workload off a node, or failed to; or it found no workload to keep off,
    /// so that pods may be evicted.
    Steered,
    /// The guard started or stopped dropping page cache of workloads without a guarantee to keep guaranteed memory
    /// free, or found no page cache to drop.
    Reclaimed,
    /// Automatic placement of a workload without a guarantee: placed on a preferred node, or would be; kept there,
    /// reverted, or not possible. See the detail `step`.
    Home,
    /// Interrupts or other kernel work were moved off exclusive CPUs or back, or could not be moved.
    InterruptsMoved,
    /// Power settings of exclusive CPUs were written or restored, were overwritten by another program, or could not be
    /// written.
    CpuPower,
    /// Node weights of the memory policy weighted-interleave were written or restored, were overwritten by another
    /// program, or could not be written.
    InterleaveWeights,
    /// Classes of L3 caches and memory bandwidth were created or removed, or could not be kept.
    Resctrl,
    /// A unit with a guarantee was stopped, runs again, or was stopped for so long that its guarantee ends.
    UnitStopped,
    /// In a dry run: the placement that a container would have got, or that it would have been refused.
    Decided,
}

impl EventKind {
    /// All kinds.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Returns the name in JSON and in the label `kind`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns the default severity of this kind.
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

    /// Returns the maximum number of events of one workload that are reported in a minute.
    pub const fn per_minute(self) -> u32 {
        match self {
            Self::Miss | Self::Intruder => 1,
            // A long reclaim must not hide that the workload makes no progress.
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
            // A conflict over a knob has ten repairs, and its end must be reported as well.
            Self::Drift | Self::HeadroomLow => 20,
            Self::MachineChange | Self::Rebalance | Self::Steered => 60,
        }
    }
}

fn unknown_kind(text: &str) -> String {
    let known: Vec<_> = EventKind::ALL.iter().map(|kind| kind.as_str()).collect();
    format!("{text:?} is not a kind of event; known kinds are {}", known.join(", "))
}

/// The severity of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// For information.
    Info,
    /// A guarantee does not hold.
    Warning,
    /// A guarantee did harm, or will soon.
    Critical,
}

/// A page of events, and the range of ids that the daemon keeps.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EventPage {
    /// The events, oldest first.
    pub events: Vec<Event>,
    /// The id of the oldest kept event; absent if none is kept. A client that asks for events since an older id has
    /// missed some.
    pub oldest: Option<u64>,
    /// The id of the latest event; absent if none is kept.
    pub latest: Option<u64>,
}

/// A filter for events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventFilter {
    /// The id after which events match.
    pub since: Option<u64>,
    /// The kind that matches; `None`: all kinds.
    pub kind: Option<EventKind>,
    /// The workload that matches; `None`: all workloads.
    pub workload: Option<String>,
    /// The maximum number of events.
    pub limit: usize,
}

impl EventFilter {
    /// Returns true if the event matches, regardless of the limit.
    pub fn matches(&self, event: &Event) -> bool {
        self.since.is_none_or(|since| event.id > since)
            && self.kind.is_none_or(|kind| event.kind == kind)
            && self.workload.as_ref().is_none_or(|name| event.workload.as_ref() == Some(name))
    }
}
