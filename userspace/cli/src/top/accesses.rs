//! Accesses of a workload to memory of other nodes, as far as they are known.
//!
//! The kernel samples the accesses of some workloads only. If it does not, the reason is shown instead of a number, so
//! that an unknown share is not taken for a share of zero.

use numaward_api::{Activity, NodeAccesses, Workload};

use super::{list::percent, model::share};
use crate::table::{row, table};

/// Share of a workload's accesses that go to other nodes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Accesses<'a> {
    /// Share of the sampled accesses.
    Sampled(f64),
    /// Estimate of the share, as no accesses are sampled.
    Estimated(f64),
    /// Reason why no accesses are sampled.
    Unknown(&'a str),
}

impl<'a> Accesses<'a> {
    /// Returns the accesses of a workload; `None` if no probe counts them, and until the first sample.
    pub(crate) fn from_workload(workload: &'a Workload) -> Option<Self> {
        let activity = workload.activity.as_ref()?;
        match activity.sampling.as_deref()? {
            "on" => {
                let nodes = activity.accesses.as_ref()?;
                let sum = |pages: fn(&NodeAccesses) -> u64| nodes.iter().map(pages).sum::<u64>();
                let remote = sum(|node| node.remote_pages);
                share(remote, remote + sum(|node| node.local_pages)).map(Self::Sampled)
            }
            state => Some(match activity.estimated_remote_percent {
                Some(percent) => Self::Estimated(f64::from(percent) / 100.0),
                None => Self::Unknown(state),
            }),
        }
    }

    /// Returns the share of accesses to other nodes, if it is known.
    pub(crate) fn remote_share(&self) -> Option<f64> {
        match self {
            Self::Sampled(share) | Self::Estimated(share) => Some(*share),
            Self::Unknown(_) => None,
        }
    }

    /// Returns the text of a table cell.
    pub(crate) fn cell(&self) -> String {
        match self {
            Self::Sampled(share) => percent(*share),
            Self::Estimated(share) => format!("~{}", percent(*share)),
            Self::Unknown("skipped_cpuset") => "cpuset".to_owned(),
            Self::Unknown(state) => (*state).to_owned(),
        }
    }
}

/// Describes the sampling of a workload's accesses, with a table of the nodes that they come from and go to.
pub(crate) fn describe(activity: &Activity) -> Option<(String, String)> {
    let mut text = match activity.sampling.as_deref()? {
        "on" => "Pages touched, by scan: a page counts about once per scan.",
        "off" => "The kernel does not scan its memory: NUMA balancing is off, or there is one node.",
        "mode2" => "The kernel does not scan its memory: NUMA balancing serves tiering of memory only.",
        "skipped_cpuset" => "The kernel does not scan its memory, because it may use one node only.",
        "bound" => "The kernel hardly scans its memory, because of its memory policy.",
        _ => "It is not known yet whether the kernel scans its memory.",
    }
    .to_owned();
    if let Some(percent) = activity.estimated_remote_percent {
        text = format!(
            "{text}\nEstimate from the CPUs of its threads and the nodes of its memory: {percent} % of its accesses are remote."
        );
    }
    let counted: Vec<&NodeAccesses> = activity
        .accesses
        .iter()
        .flatten()
        .filter(|node| node.local_pages > 0 || node.remote_pages > 0)
        .collect();
    if counted.is_empty() {
        return Some((text, String::new()));
    }
    let rows = counted.into_iter().map(|node| {
        let places: Vec<String> = node
            .remote
            .iter()
            .map(|target| match target.memory_node {
                Some(node) => format!("node {node}: {}", target.pages),
                None => format!("{} moved at once", target.pages),
            })
            .collect();
        row([
            &format!("node {}", node.node),
            &node.local_pages.to_string(),
            &node.remote_pages.to_string(),
            &places.join(", "),
        ])
    });
    Some((text, table(["FROM CPUS OF", "LOCAL PAGES", "REMOTE PAGES", "WHERE"], rows)))
}

#[cfg(test)]
mod tests {
    use numaward_api::{Counters, RemoteAccesses};

    use super::*;

    fn workload(sampling: Option<&str>, estimate: Option<u32>, pages: &[(u64, u64)]) -> Workload {
        let accesses = pages.iter().zip(0..).map(|(&(local_pages, remote_pages), node)| NodeAccesses {
            node,
            local_pages,
            remote_pages,
            remote: vec![
                RemoteAccesses { memory_node: Some(node + 1), pages: remote_pages / 2 },
                RemoteAccesses { memory_node: None, pages: remote_pages - remote_pages / 2 },
            ],
        });
        Workload {
            workload: "w".to_owned(),
            kind: "unit".to_owned(),
            cgroup: None,
            container: None,
            counters: Counters::Own,
            nodes: Vec::new(),
            residency: Vec::new(),
            intruded_cpus: None,
            pressure: None,
            oom_kills: None,
            tiering: None,
            activity: Some(Activity {
                sampling: sampling.map(str::to_owned),
                estimated_remote_percent: estimate,
                accesses: Some(accesses.collect()),
                ..Activity::default()
            }),
        }
    }

    #[test]
    fn cell_has_number_only_if_known() {
        let cell = |sampling, estimate, pages: &[(u64, u64)]| {
            Accesses::from_workload(&workload(sampling, estimate, pages)).map(|accesses| accesses.cell())
        };
        assert_eq!(cell(Some("on"), None, &[(30, 10), (50, 10)]).unwrap(), "20 %");
        assert_eq!(cell(Some("on"), None, &[(30, 0)]).unwrap(), "0 %");
        assert_eq!(cell(Some("on"), None, &[(0, 0)]), None, "nothing is sampled yet");
        assert_eq!(cell(Some("skipped_cpuset"), None, &[(30, 10)]).unwrap(), "cpuset");
        assert_eq!(cell(Some("off"), None, &[]).unwrap(), "off");
        assert_eq!(cell(Some("bound"), Some(40), &[]).unwrap(), "~40 %");
        assert_eq!(cell(None, None, &[(1, 1)]), None);
        let none = Workload { activity: None, ..workload(None, None, &[]) };
        assert_eq!(Accesses::from_workload(&none), None);
    }

    #[test]
    fn describes_source_and_target_nodes() {
        let description = |sampling, estimate, pages: &[(u64, u64)]| {
            describe(&workload(sampling, estimate, pages).activity.unwrap())
        };
        assert_eq!(description(None, None, &[(1, 1)]), None);
        let (text, table) = description(Some("on"), None, &[(30, 10), (0, 0)]).unwrap();
        assert_eq!(text, "Pages touched, by scan: a page counts about once per scan.");
        assert_eq!(
            table,
            "FROM CPUS OF  LOCAL PAGES  REMOTE PAGES  WHERE\n\
             node 0        30           10            node 1: 5, 5 moved at once\n"
        );
        let (text, table) = description(Some("skipped_cpuset"), Some(7), &[(0, 0)]).unwrap();
        assert!(text.contains("one node only") && text.contains("7 % of its accesses are remote"), "{text}");
        assert_eq!(table, "");
    }
}
