//! A hundred pods are created and deleted at the same time: Guaranteed pods have exclusive CPUs, and all guarantees are released.
//!
//! The machine is overloaded, so each wait continues as long as there is progress.

use std::{collections::BTreeMap, env, thread, time::Duration};

use serde_json::{Value, json};

use super::{
    Cluster, ContainerPlace, MACHINE, NODES, SHARED, Wait, burstable, condition, container, guaranteed,
    is_installed, pod,
};
use crate::containerd::{nodes, numbers};

/// Number of pods with an exclusive CPU: as many as there are such CPUs.
const ALONE: usize = 5;
/// Interval between two checks for progress.
const PACE: Duration = Duration::from_secs(10);

/// `NUMAWARD_PODS` sets another number of pods.
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
    cluster.wait_for("there are no guarantees", || match cluster.ask(&url, "allocations")? {
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

    /// Waits until a count is zero, without a time limit as long as the count changes.
    fn wait_while_it_changes(&self, what: &str, count: impl Fn(&Self) -> Result<usize, String>) {
        let (mut last, mut wait) = (usize::MAX, Wait::new(&self.node));
        while last > 0 {
            if let Ok(now) = count(self)
                && now != last
            {
                (last, wait) = (now, Wait::new(&self.node));
            }
            let ended = self.plane.ended().or(self.node.ended().then_some("the machine"));
            assert_eq!(ended, None, "{what}: a part of the cluster has ended");
            wait.assert_goes_on(|| format!("{what}: still {last}"));
            thread::sleep(PACE);
        }
    }

    /// Returns the effective CPUs and nodes of the first container of each pod, by pod name. Reads all cgroups with one command,
    /// because this takes seconds in the machine.
    fn places(&self) -> Result<BTreeMap<String, ContainerPlace>, String> {
        let names = "-name cpuset.cpus.effective -o -name cpuset.mems.effective";
        let found =
            self.node.run(&format!("find /sys/fs/cgroup/kubepods \\( {names} \\) -exec grep -H . {{}} +"))?;
        let mut cgroups = BTreeMap::<&str, ContainerPlace>::new();
        for line in found.lines() {
            let (path, value) = line.split_once(':').ok_or_else(|| line.to_owned())?;
            let (cgroup, file) = path.rsplit_once('/').ok_or_else(|| line.to_owned())?;
            let (_, cgroup) = cgroup.rsplit_once('/').ok_or_else(|| line.to_owned())?;
            let place =
                cgroups.entry(cgroup).or_insert_with(|| ContainerPlace { cpus: [].into(), nodes: [].into() });
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
