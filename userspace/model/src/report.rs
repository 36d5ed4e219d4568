//! An event, as who sees it reports it.

use std::{collections::BTreeMap, sync::Arc};

use numaward_api::{EventKind, Severity};

/// An event as it is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventReport {
    /// What sort of event it is.
    pub kind: EventKind,
    /// How bad it is.
    pub severity: Severity,
    /// The workload that it is about, by the label of its metrics.
    pub workload: Option<Arc<str>>,
    /// The node that it is about.
    pub node: Option<u32>,
    /// A sentence that stands by itself.
    pub message: String,
    /// What is known of it, for programs to read.
    pub details: BTreeMap<String, String>,
}

impl EventReport {
    /// An event of a kind, as a sentence that stands by itself.
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

    /// The workload that it is about, by the label of its metrics.
    #[must_use]
    pub fn workload(mut self, name: impl Into<Arc<str>>) -> Self {
        self.workload = Some(name.into());
        self
    }

    /// The node that it is about.
    #[must_use]
    pub fn node(mut self, node: numaward_topology::NodeId) -> Self {
        self.node = Some(node.0);
        self
    }

    /// Something that is known of it, for programs to read. Keys are camelCase.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "callers pass numbers and texts of their own")]
    pub fn detail(mut self, key: &str, value: impl ToString) -> Self {
        self.details.insert(key.to_owned(), value.to_string());
        self
    }

    /// How bad it is, where that is not what [`EventKind::severity`] says.
    #[must_use]
    pub fn severity(mut self, severity: Severity) -> Self {
        self.severity = severity;
        self
    }
}
