//! An event as a part of the daemon reports it, before it gets an id and a time.

use std::{collections::BTreeMap, sync::Arc};

use numaward_api::{EventKind, Severity};

/// An event to report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventReport {
    pub kind: EventKind,
    pub severity: Severity,
    /// The workload concerned, by the label of its metrics.
    pub workload: Option<Arc<str>>,
    /// The node concerned.
    pub node: Option<u32>,
    /// A complete sentence for people.
    pub message: String,
    /// Details for programs, with keys in camelCase.
    pub details: BTreeMap<String, String>,
}

impl EventReport {
    /// Creates an event with the default severity of its kind; `message` is a complete sentence.
    pub fn new(kind: EventKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            severity: kind.severity(),
            workload: None,
            node: None,
            message: message.into(),
            details: BTreeMap::new(),
        }
    }

    /// Sets the workload concerned, by the label of its metrics.
    #[must_use]
    pub fn workload(mut self, name: impl Into<Arc<str>>) -> Self {
        self.workload = Some(name.into());
        self
    }

    /// Sets the node concerned.
    #[must_use]
    pub fn node(mut self, node: numaward_topology::NodeId) -> Self {
        self.node = Some(node.0);
        self
    }

    /// Adds a detail for programs. Keys are camelCase.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "callers pass numbers and texts of their own")]
    pub fn detail(mut self, key: &str, value: impl ToString) -> Self {
        self.details.insert(key.to_owned(), value.to_string());
        self
    }

    /// Sets a severity other than [`EventKind::severity`].
    #[must_use]
    pub fn severity(mut self, severity: Severity) -> Self {
        self.severity = severity;
        self
    }
}
