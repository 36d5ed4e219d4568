//! Names of workloads: that of the guarantee, of the unit, and the path of the cgroup.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::anyhow;
use numaward_api::{Allocation, Target, Workload, Workloads};

use crate::client::{ClientError, Server};

/// Path of the workloads in the API.
pub(crate) const WORKLOADS_PATH: &str = "/api/v1/workloads";

/// Returns true if a guarantee has this name: its own, that of its unit, or the path of its cgroup.
pub(crate) fn is_named(allocation: &Allocation, name: &str) -> bool {
    allocation.name == name
        || allocation.cgroup.trim_start_matches('/') == name
        || matches!(&allocation.target, Target::Unit(unit) if unit == name)
}

/// Returns true if a workload or its guarantee has this name.
pub(crate) fn is_workload_named(workload: &Workload, held: &[Arc<Allocation>], name: &str) -> bool {
    workload.workload == name
        || workload.cgroup.as_ref().is_some_and(|cgroup| cgroup.trim_start_matches('/') == name)
        || allocation_of(workload, held).is_some_and(|allocation| is_named(allocation, name))
}

/// Fetches these names and all other names of their workloads and guarantees.
pub(crate) async fn fetch_event_names(
    server: &Server,
    names: &[String],
) -> Result<BTreeSet<String>, ClientError> {
    if names.is_empty() {
        return Ok(BTreeSet::new());
    }
    let Workloads { workloads } = server.get(WORKLOADS_PATH).await?;
    // A daemon that only observes has no guarantees.
    let held = server.allocations().await.unwrap_or_default().allocations;
    Ok(event_names(names, &workloads, &held))
}

/// Returns these names and the others of their workloads and guarantees: an event has one of them.
pub(crate) fn event_names(
    names: &[String],
    workloads: &[Workload],
    held: &[Arc<Allocation>],
) -> BTreeSet<String> {
    let mut all: BTreeSet<String> = names.iter().cloned().collect();
    for name in names {
        all.extend(held.iter().filter(|held| is_named(held, name)).map(|held| held.name.clone()));
        for workload in workloads.iter().filter(|workload| is_workload_named(workload, held, name)) {
            all.insert(workload.workload.clone());
            all.extend(allocation_of(workload, held).map(|allocation| allocation.name.clone()));
        }
    }
    all
}

/// Returns the guarantee of a workload.
pub(crate) fn allocation_of<'a>(
    workload: &Workload,
    held: &'a [Arc<Allocation>],
) -> Option<&'a Arc<Allocation>> {
    let cgroup = workload.cgroup.as_deref()?;
    held.iter().find(|allocation| allocation.cgroup == cgroup)
}

/// Fetches the key of the workload with this name.
pub(crate) async fn workload_key(server: &Server, name: &str) -> anyhow::Result<String> {
    let Workloads { workloads } = server.get(WORKLOADS_PATH).await?;
    let held = server.allocations().await.unwrap_or_default().allocations;
    let found = workloads.iter().find(|workload| is_workload_named(workload, &held, name));
    let key = found.map(|workload| workload.key().to_owned());
    // The daemon may not have seen the cgroup of a new guarantee yet.
    let key = key.or_else(|| Some(held.iter().find(|held| is_named(held, name))?.cgroup.clone()));
    key.ok_or_else(|| unknown_workload(name))
}

/// Returns the error for a name without a workload.
pub(crate) fn unknown_workload(name: &str) -> anyhow::Error {
    anyhow!("there is no workload named {name:?}; `numaward get workloads` lists all")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workload_has_names_of_its_guarantee_unit_and_cgroup() {
        let held = Allocation {
            name: "db".to_owned(),
            cgroup: "/a/db.service".to_owned(),
            target: Target::Unit("db.service".to_owned()),
            ..Allocation::default()
        };
        let workload = serde_json::json!({
            "workload": "postgres", "kind": "cgroup", "cgroup": held.cgroup, "counters": "none", "nodes": []
        });
        let workload: Workload = serde_json::from_value(workload).unwrap();
        let (workloads, held) = ([workload], [Arc::new(held)]);
        for name in ["db", "db.service", "a/db.service", "postgres"] {
            assert!(is_workload_named(&workloads[0], &held, name), "{name}");
            let names = event_names(&[name.to_owned()], &workloads, &held);
            assert!(names.contains("db") && names.contains("postgres"), "{name}: {names:?}");
        }
        assert_eq!(event_names(&["other".to_owned()], &workloads, &held), ["other".to_owned()].into());
    }
}
