//! A hundred pods that are made, and deleted, at the same time: pods that are promised CPUs have them, nobody else is on them, and
//! all is given back.
//!
//! The machine has far more to do than it can: each wait goes on as long as something happens.

use std::{
    collections::BTreeMap,
    env, thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    Cluster, MACHINE, NODES, PATIENCE, Place, SHARED, burstable, condition, container, guaranteed,
    is_installed, pod,
};
use crate::containerd::{nodes, numbers};

/// As many as there are CPUs to give, of which each wants one.
const ALONE: usize = 5;
/// How often it is looked whether something has happened.
const PACE: Duration = Duration::from_secs(10);

/// As many pods as `NUMAWARD_PODS` says, or a hundred.
#[test]
fn hundred_pods_come_and_go_at_once() {
    let count: usize = env::var("NUMAWARD_PODS").map_or(100, |count| count.parse().unwrap());
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    is_installed(&cluster);
    cluster.run(&[pod(SHARED, &[container("main", &burstable())])]);

    let names: Vec<_> = (0..count).map(|number| format!("pod-{number}")).collect();
    let (alone, others) = names.split_at(ALONE);
    let little = json!({ "requests": { "cpu": "5m", "memory": "16Mi" } });
    let alone_pods = alone.iter().map(|name| pod(name, &[container("main", &guaranteed(1, 32))]));
    let other_pods = others.iter().map(|name| pod(name, &[container("main", &little)]));
    let pods: Vec<_> = alone_pods.chain(other_pods).collect();
    cluster.kubectl.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": pods }));
    cluster.wait_while_it_changes("pods that are not ready", |cluster| {
        Ok(cluster.pods()?.iter().filter(|pod| !condition(pod, "Ready")).count())
    });
    cluster.step(&format!("{count} pods run"));

    let expected: Vec<_> = alone.iter().map(|name| (name.as_str(), "main", 1)).collect();
    cluster.wait_until_placed(&expected);
    cluster.wait_for("who has no CPU of its own is where the others are", || {
        let places = cluster.places()?;
        let left = places.get(SHARED).ok_or("it runs nowhere")?;
        let away = others.iter().find(|name| places.get(*name) != Some(left));
        away.map_or(Ok(()), |name| Err(format!("{name} has {:?}, not {left:?}", places.get(name))))
    });
    let (_, url) = cluster.daemon().unwrap();
    let held = cluster.ask(&url, "allocations").unwrap();
    assert_eq!(held["allocations"].as_array().map(Vec::len), Some(ALONE), "{held:#}");
    cluster.step(&format!("of {count} pods, {ALONE} have a CPU each, and nobody else is on it"));

    let names: Vec<_> = names.iter().map(String::as_str).collect();
    cluster.kubectl.must(&[&["delete", "pod", "--wait=false"], &names[..]].concat());
    cluster.wait_while_it_changes("pods that are not gone", |cluster| Ok(cluster.pods()?.len() - 1));
    cluster.wait_for("nothing is promised", || match cluster.ask(&url, "allocations")? {
        held if held["allocations"] == json!([]) => Ok(()),
        held => Err(held.to_string()),
    });
    cluster.wait_for("who shares has all CPUs again", || {
        let place = cluster.place(SHARED, "main")?;
        if place.cpus.len() == NODES.concat().len() { Ok(()) } else { Err(format!("{place:?}")) }
    });
    cluster.step(&format!("{count} pods are gone, and so is what they had"));
}

impl Cluster {
    fn pods(&self) -> Result<Vec<Value>, String> {
        let all = self.kubectl.json(&["get", "pods"])?;
        all["items"].as_array().cloned().ok_or_else(|| all.to_string())
    }

    /// Waits until a number is zero, which may take as long as it likes while the number changes.
    fn wait_while_it_changes(&self, what: &str, count: impl Fn(&Self) -> Result<usize, String>) {
        let (mut last, mut changed) = (usize::MAX, Instant::now());
        while last > 0 {
            if let Ok(now) = count(self)
                && now != last
            {
                (last, changed) = (now, Instant::now());
            }
            let ended = self.plane.ended().or(self.node.ended().then_some("the machine"));
            assert_eq!(ended, None, "{what}: a part of the cluster has ended");
            assert!(changed.elapsed() < PATIENCE, "{what}: still {last}, as {} s ago", PATIENCE.as_secs());
            thread::sleep(PACE);
        }
    }

    /// Where the first container of each pod may run, and where its memory may be, by the pod's name: of all at once, since the
    /// machine takes seconds to look through as many cgroups.
    fn places(&self) -> Result<BTreeMap<String, Place>, String> {
        let names = "-name cpuset.cpus.effective -o -name cpuset.mems.effective";
        let found =
            self.node.run(&format!("find /sys/fs/cgroup/kubepods \\( {names} \\) -exec grep -H . {{}} +"))?;
        let mut cgroups = BTreeMap::<&str, Place>::new();
        for line in found.lines() {
            let (path, value) = line.split_once(':').ok_or_else(|| line.to_owned())?;
            let (cgroup, file) = path.rsplit_once('/').ok_or_else(|| line.to_owned())?;
            let (_, cgroup) = cgroup.rsplit_once('/').ok_or_else(|| line.to_owned())?;
            let place = cgroups.entry(cgroup).or_insert_with(|| Place { cpus: [].into(), nodes: [].into() });
            let set = if file.starts_with("cpuset.cpus") { &mut place.cpus } else { &mut place.nodes };
            set.extend(numbers(value));
        }
        let place = |pod: &Value| {
            let id = pod["status"]["containerStatuses"][0]["containerID"].as_str()?;
            let place = cgroups.get(id.strip_prefix("containerd://")?)?;
            Some((pod["metadata"]["name"].as_str()?.to_owned(), place.clone()))
        };
        Ok(self.pods()?.iter().filter_map(place).collect())
    }
}
