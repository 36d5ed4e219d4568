//! Accesses of a workload to memory of other nodes, as far as they are known.
//!
//! The kernel samples accesses of some workloads and not of others. Where it samples none, that is shown instead of a
//! number: silence is no good news.

use numaward_api::{Activity, NodeAccesses, Workload};

use super::{list::percent, model::share};
use crate::table::{row, table};

/// What is known of the accesses of a workload.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Accesses<'a> {
    /// The share of the sampled ones that went to other nodes.
    Sampled(f64),
    /// An estimate of that share, where none are sampled.
    Estimated(f64),
    /// None are sampled, for this reason.
    Unknown(&'a str),
}

impl<'a> Accesses<'a> {
    /// Of this workload; nothing where no probe counts them, and until the first is sampled.
    pub(crate) fn of(workload: &'a Workload) -> Option<Self> {
        let activity = workload.activity.as_ref()?;
        match activity.sampling.as_deref()? {
            "on" => {
                let nodes = activity.accesses.as_ref()?;
                let sum = |pages: fn(&NodeAccesses) -> u64| nodes.iter().map(pages).sum::<u64>();
                let remote = sum(|of| of.remote_pages);
                share(remote, remote + sum(|of| of.local_pages)).map(Self::Sampled)
            }
            state => Some(match activity.estimated_remote_percent {
                Some(percent) => Self::Estimated(f64::from(percent) / 100.0),
                None => Self::Unknown(state),
            }),
        }
    }

    /// The share that goes to other nodes, if there is a number.
    pub(crate) fn remote_share(&self) -> Option<f64> {
        match self {
            Self::Sampled(share) | Self::Estimated(share) => Some(*share),
            Self::Unknown(_) => None,
        }
    }

    /// In a cell of a table.
    pub(crate) fn cell(&self) -> String {
        match self {
            Self::Sampled(share) => percent(*share),
            Self::Estimated(share) => format!("~{}", percent(*share)),
            Self::Unknown("skipped_cpuset") => "cpuset".to_owned(),
            Self::Unknown(state) => (*state).to_owned(),
        }
    }
}

/// In full: whether they are sampled, and from where to where they went.
pub(crate) fn in_full(activity: &Activity) -> Option<(String, String)> {
    let mut said = match activity.sampling.as_deref()? {
        "on" => "The kernel samples them.",
        "off" => "The kernel samples none: NUMA balancing is off, or there is one node.",
        "mode2" => "The kernel samples none: NUMA balancing serves tiering of memory only.",
        "skipped_cpuset" => "The kernel samples none, because it may use one node only.",
        "bound" => "The kernel hardly samples them, because of its memory policy.",
        _ => "Whether the kernel samples them is not known yet.",
    }
    .to_owned();
    if let Some(percent) = activity.estimated_remote_percent {
        said = format!(
            "{said}\nBy where its threads ran and its memory lies, an estimated {percent} % are remote."
        );
    }
    let seen: Vec<&NodeAccesses> =
        activity.accesses.iter().flatten().filter(|of| of.local_pages > 0 || of.remote_pages > 0).collect();
    if seen.is_empty() {
        return Some((said, String::new()));
    }
    let rows = seen.into_iter().map(|of| {
        let places: Vec<String> = of
            .remote
            .iter()
            .map(|to| match to.memory_node {
                Some(node) => format!("node {node}: {}", to.pages),
                None => format!("{} moved at once", to.pages),
            })
            .collect();
        row([
            &format!("node {}", of.node),
            &of.local_pages.to_string(),
            &of.remote_pages.to_string(),
            &places.join(", "),
        ])
    });
    Some((said, table(["FROM CPUS OF", "LOCAL PAGES", "REMOTE PAGES", "WHERE"], rows)))
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
    fn a_number_only_where_there_is_one() {
        let cell = |sampling, estimate, pages: &[(u64, u64)]| {
            Accesses::of(&workload(sampling, estimate, pages)).map(|accesses| accesses.cell())
        };
        assert_eq!(cell(Some("on"), None, &[(30, 10), (50, 10)]).unwrap(), "20 %");
        assert_eq!(cell(Some("on"), None, &[(30, 0)]).unwrap(), "0 %");
        assert_eq!(cell(Some("on"), None, &[(0, 0)]), None, "nothing is sampled yet");
        assert_eq!(cell(Some("skipped_cpuset"), None, &[(30, 10)]).unwrap(), "cpuset");
        assert_eq!(cell(Some("off"), None, &[]).unwrap(), "off");
        assert_eq!(cell(Some("bound"), Some(40), &[]).unwrap(), "~40 %");
        assert_eq!(cell(None, None, &[(1, 1)]), None);
        let none = Workload { activity: None, ..workload(None, None, &[]) };
        assert_eq!(Accesses::of(&none), None);
    }

    #[test]
    fn in_full_it_says_from_where_to_where() {
        let shown = |sampling, estimate, pages: &[(u64, u64)]| {
            in_full(&workload(sampling, estimate, pages).activity.unwrap())
        };
        assert_eq!(shown(None, None, &[(1, 1)]), None);
        let (said, table) = shown(Some("on"), None, &[(30, 10), (0, 0)]).unwrap();
        assert_eq!(said, "The kernel samples them.");
        assert_eq!(
            table,
            "FROM CPUS OF  LOCAL PAGES  REMOTE PAGES  WHERE\n\
             node 0        30           10            node 1: 5, 5 moved at once\n"
        );
        let (said, table) = shown(Some("skipped_cpuset"), Some(7), &[(0, 0)]).unwrap();
        assert!(said.contains("one node only") && said.contains("an estimated 7 % are remote"), "{said}");
        assert_eq!(table, "");
    }
}
