//! Pods of a fleet as objects of the API server.

use std::{collections::BTreeMap, fs, io::Read as _, path::Path};

use anyhow::{Context as _, Result, bail, ensure};
use numaward_engine::{
    claims::{
        allocator::{Alternatives, Amounts, Attribute, Claim, DeviceRequest, Relation, Selector},
        devices::{self, DRIVER, NODE},
    },
    quantity::Quantity,
    request::{ContainerRequest, Request, Resources},
};
use numaward_simulation::{
    fleet::{Fleet, FleetPod, Group, Member},
    trace::Trace,
};
use numaward_topology::ZoneKind;
use serde_json::{Map, Value, json};

/// Name of the device class.
pub(crate) const CLASS: &str = "numa-node";
/// Label of a Kubernetes node, and node selector of a pod: the number of the group.
pub(crate) const GROUP: &str = "numaward.io/group";
/// Label of all pods.
pub(crate) const LABEL: &str = "numaward.io/scale";
/// Name of a pod's claim in its specification.
pub(crate) const CLAIM: &str = "numa";

/// Maximum number of bytes of a file of traces, decompressed.
const MAX_TRACE_BYTES: u64 = 1 << 30;
/// Amounts of a pod, by the name of the resource: CPUs in thousandths, memory in bytes.
pub(crate) type Totals = BTreeMap<String, u64>;

/// Pods that have claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claiming {
    Nothing,
    /// All Guaranteed pods.
    All,
    /// Every second Guaranteed pod.
    Half,
}

/// A pod of the load.
#[derive(Clone, Debug)]
pub(crate) struct LoadPod {
    /// Position of its group in the fleet.
    pub(crate) group: usize,
    pub(crate) at: u64,
    pub(crate) retry_after: u64,
    pub(crate) life: u64,
    /// Memory in MiB, of Guaranteed pods only.
    pub(crate) counted_mib: u64,
    /// Its owner is the name of the pod.
    pub(crate) request: Request,
    pub(crate) totals: Totals,
    pub(crate) claim: Option<Claim>,
}

/// Reads the traces of a folder in the order of their files' names, as `numaward simulate` does.
pub(crate) fn read_traces(folder: &Path) -> Result<Vec<Trace>> {
    let unreadable = || format!("{} cannot be read", folder.display());
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut files: Vec<_> = entries.with_context(unreadable)?.into_iter().map(|entry| entry.path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(".json.gz"));
    files.sort();
    ensure!(!files.is_empty(), "{} has no files *.json.gz: name a folder of traces", folder.display());
    let mut traces = Vec::new();
    for file in files {
        let mut text = String::new();
        let read = fs::File::open(&file).and_then(|opened| {
            flate2::read::GzDecoder::new(opened).take(MAX_TRACE_BYTES).read_to_string(&mut text)
        });
        let bytes = read.with_context(|| format!("{} cannot be read", file.display()))?;
        ensure!((bytes as u64) < MAX_TRACE_BYTES, "{} is larger than 1 GiB", file.display());
        let of_file: Vec<Trace> = serde_json::from_str(&text)
            .with_context(|| format!("{}: expected traces as in tests/traces", file.display()))?;
        traces.extend(of_file);
    }
    Ok(traces)
}

/// Returns the fleet that `numaward simulate --hosts` has.
pub(crate) fn fleet(traces: &[Trace], hosts: usize, seed: u64) -> Result<Fleet<'_>> {
    let member = |trace| {
        let (machine, policy, requests) = Trace::parts(trace).map_err(anyhow::Error::msg)?;
        Ok(Member { trace, machine, policy, requests })
    };
    let members = traces.iter().map(member).collect::<Result<_>>()?;
    Ok(Fleet::new(members, hosts, seed)?)
}

/// Returns the pods in the order of their arrivals.
pub(crate) fn pods(groups: &[Group<'_>], claiming: Claiming) -> Result<Vec<LoadPod>> {
    let mut pods = Vec::new();
    for (group, of) in groups.iter().enumerate() {
        let arriving = of.pods().map_err(anyhow::Error::msg)?;
        pods.extend(arriving.into_iter().map(|pod| (group, pod)));
    }
    pods.sort_by_key(|(_, pod)| pod.at);
    let mut guaranteed = 0;
    let load_pod = |(number, (group, pod)): (usize, (usize, FleetPod<'_>))| {
        guaranteed += u64::from(pod.pod.guaranteed);
        let has_claim = match claiming {
            Claiming::Nothing => false,
            Claiming::All => true,
            Claiming::Half => guaranteed % 2 == 0,
        };
        let claim = pod.claim.filter(|_| has_claim);
        LoadPod {
            group,
            at: pod.at,
            retry_after: pod.retry_after,
            life: pod.pod.life,
            counted_mib: if pod.pod.guaranteed { pod.pod.held.memory_mib } else { 0 },
            request: Request { owner: format!("p{number}").into(), ..pod.request.clone() },
            totals: claim.iter().fold(totals(pod.request), covering),
            claim,
        }
    };
    Ok(pods.into_iter().enumerate().map(load_pod).collect())
}

/// Returns the amounts that the scheduler counts for a pod.
fn totals(request: &Request) -> Totals {
    let amounts = |resources: &Resources| -> Totals {
        let memory = resources.memory.iter();
        let memory = memory.map(|(kind, amount)| (resource_name(*kind), amount.units().unwrap_or(u64::MAX)));
        let cpu = resources.cpu.map(|cpu| ("cpu".to_owned(), cpu.millis().unwrap_or(u64::MAX)));
        cpu.into_iter().chain(memory).collect()
    };
    if let Some(pod) = &request.resources {
        return amounts(&pod.requests);
    }
    let names: std::collections::BTreeSet<String> =
        request.all_containers().flat_map(|container| amounts(&container.requests).into_keys()).collect();
    let sums = request.effective_amounts(names.len(), |container: &ContainerRequest| {
        let of_container = amounts(&container.requests);
        names.iter().map(|name| of_container.get(name).copied().unwrap_or(0)).collect()
    });
    names.into_iter().zip(sums).collect()
}

/// Returns the amounts that an alternative of a claim consumes, by capacity.
fn consumed(device: &DeviceRequest) -> Amounts {
    // Rounded up to the steps of the devices.
    let each = devices::claim_amounts(&devices::resources(&device.capacity)).unwrap_or_default();
    let times = |amount: Quantity| amount.units().unwrap_or(u64::MAX).saturating_mul(device.count as u64);
    each.into_iter().map(|(name, amount)| (name, Quantity::whole(times(amount)))).collect()
}

/// Raises the totals of a pod to the amounts of its claim: a host refuses a claim with more than the pod requests. The first unit of a claim
/// can have the amounts of an init container, which do not add to the amounts of app containers in the requests of a pod.
fn covering(mut totals: Totals, claim: &Claim) -> Totals {
    let mut all = Amounts::new();
    for request in &claim.requests {
        let devices = match &request.alternatives {
            Alternatives::Exactly(device) => vec![device],
            Alternatives::FirstAvailable(all) => all.iter().map(|(_, device)| device).collect(),
        };
        let mut most = Amounts::new();
        for (name, amount) in devices.into_iter().flat_map(consumed) {
            let known = most.entry(name).or_default();
            *known = (*known).max(amount);
        }
        for (name, amount) in most {
            let sum = all.entry(name).or_default();
            *sum = sum.checked_add(amount).unwrap_or(*sum);
        }
    }
    for (kind, amount) in devices::resources(&all).memory {
        let total = totals.entry(resource_name(kind)).or_default();
        *total = (*total).max(amount.units().unwrap_or(u64::MAX));
    }
    if let Some(cpus) = all.get(devices::CPU) {
        let total = totals.entry(devices::CPU.to_owned()).or_default();
        *total = (*total).max(cpus.millis().unwrap_or(u64::MAX));
    }
    totals
}

/// Returns the name of the resource in Kubernetes.
pub(crate) fn resource_name(kind: ZoneKind) -> String {
    kind.to_string()
}

fn resources_json(resources: &Resources) -> Value {
    let memory =
        resources.memory.iter().map(|(&kind, amount)| (resource_name(kind), json!(amount.to_string())));
    let cpu = resources.cpu.map(|cpu| ("cpu".to_owned(), json!(cpu.to_string())));
    cpu.into_iter().chain(memory).collect::<Map<_, _>>().into()
}

/// Returns the amounts as resources of a Kubernetes object.
pub(crate) fn totals_json(totals: &Totals) -> Value {
    let amount = |(name, &amount): (&String, &u64)| {
        let quantity = if name == "cpu" { Quantity::milli(amount) } else { Quantity::whole(amount) };
        (name.clone(), json!(quantity.to_string()))
    };
    totals.iter().map(amount).collect::<Map<_, _>>().into()
}

impl LoadPod {
    pub(crate) fn name(&self) -> &str {
        self.request.owner.as_str()
    }

    /// Returns true if the pod requests more than in the trace, because its claim has more.
    pub(crate) fn is_raised(&self) -> bool {
        self.totals != totals(&self.request)
    }

    /// Returns the requests of the pod by capacity: the limit of its claims.
    pub(crate) fn requests(&self) -> Amounts {
        let amount = |(name, &amount): (&String, &u64)| {
            if name == devices::CPU {
                return Some((devices::CPU.into(), Quantity::milli(amount)));
            }
            let capacity = devices::capacity_name(name.parse().ok()?)?;
            Some((capacity.into(), Quantity::whole(amount)))
        };
        self.totals.iter().filter_map(amount).collect()
    }

    /// Returns the pod as an object. A pod with a claim follows the recipe in docs/claims.md: `spec.resources` has the amounts of the claim
    /// and of the rest.
    pub(crate) fn object(&self, template: Option<&str>) -> Value {
        let mut spec = json!({
            "nodeSelector": { GROUP: self.group.to_string() },
            "tolerations": [{ "operator": "Exists" }],
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "restartPolicy": "Never",
        });
        if let Some(template) = template {
            let amounts = totals_json(&self.totals);
            spec["resources"] = json!({ "requests": amounts, "limits": amounts });
            spec["resourceClaims"] = json!([{ "name": CLAIM, "resourceClaimTemplateName": template }]);
            spec["containers"] =
                json!([{ "name": "main", "image": "none", "resources": { "claims": [{ "name": CLAIM }] } }]);
        } else {
            let container = |container: &ContainerRequest| {
                let mut object = json!({
                    "name": container.name.as_str(),
                    "image": "none",
                    "resources": {
                        "requests": resources_json(&container.requests),
                        "limits": resources_json(&container.limits),
                    },
                });
                if container.restartable {
                    object["restartPolicy"] = json!("Always");
                }
                object
            };
            spec["containers"] = self.request.containers.iter().map(container).collect();
            spec["initContainers"] = self.request.init_containers.iter().map(container).collect();
            if let Some(of_pod) = &self.request.resources {
                spec["resources"] = json!({
                    "requests": resources_json(&of_pod.requests),
                    "limits": resources_json(&of_pod.limits),
                });
            }
        }
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": self.name(), "labels": { LABEL: "" } },
            "spec": spec,
        })
    }
}

/// Returns the specification of a claim.
pub(crate) fn claim_json(claim: &Claim) -> Result<Value> {
    let request = |device: &DeviceRequest| -> Result<Value> {
        for selector in &device.selectors {
            let is_of_class = match selector {
                Selector::Driver(driver) => **driver == *DRIVER,
                Selector::Attribute { name, value } => {
                    **name == *format!("{DRIVER}/kind") && *value == Attribute::Text(NODE.into())
                }
            };
            ensure!(is_of_class, "the class {CLASS} does not contain the selector {selector:?}");
        }
        let amount =
            |(name, amount): (&std::sync::Arc<str>, &Quantity)| (name.to_string(), json!(amount.to_string()));
        let amounts: Map<_, _> = device.capacity.iter().map(amount).collect();
        Ok(json!({ "deviceClassName": CLASS, "count": device.count, "capacity": { "requests": amounts } }))
    };
    let mut requests = Vec::new();
    for of in &claim.requests {
        requests.push(match &of.alternatives {
            Alternatives::Exactly(device) => json!({ "name": &*of.name, "exactly": request(device)? }),
            Alternatives::FirstAvailable(all) => {
                let mut alternatives = Vec::new();
                for (name, device) in all {
                    let mut alternative = request(device)?;
                    alternative["name"] = json!(&**name);
                    alternatives.push(alternative);
                }
                json!({ "name": &*of.name, "firstAvailable": alternatives })
            }
        });
    }
    let mut constraints = Vec::new();
    for of in &claim.constraints {
        let Relation::MatchAttribute(name) = &of.relation else {
            bail!("a claim of the simulation has the constraint {of:?}, which is not written here");
        };
        let requests: Vec<&str> = of.requests.iter().map(|name| &**name).collect();
        constraints.push(json!({ "matchAttribute": &**name, "requests": requests }));
    }
    Ok(json!({ "devices": { "requests": requests, "constraints": constraints } }))
}

/// Templates of claims.
#[derive(Debug, Default)]
pub(crate) struct Templates {
    /// Names by the text of the specification.
    names: BTreeMap<String, String>,
}

impl Templates {
    /// Returns the name of the template of a claim. Equal claims have the same one.
    pub(crate) fn name(&mut self, claim: &Claim) -> Result<String> {
        let (text, number) = (claim_json(claim)?.to_string(), self.names.len());
        Ok(self.names.entry(text).or_insert_with(|| format!("claim-{number}")).clone())
    }

    /// Returns the templates as objects.
    pub(crate) fn objects(&self) -> Result<Vec<Value>> {
        let object = |(text, name): (&String, &String)| {
            let spec: Value = serde_json::from_str(text)?;
            Ok(json!({
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "metadata": { "name": name },
                "spec": { "spec": spec },
            }))
        };
        self.names.iter().map(object).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traces() -> Vec<Trace> {
        read_traces(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../traces")).unwrap()
    }

    #[test]
    fn fleet_has_pods_of_traces() {
        let traces = traces();
        let mut fleet = fleet(&traces, 36, 1).unwrap();
        let all = |claiming| pods(&fleet.groups, claiming).unwrap();
        let (plain, claiming, half) = (all(Claiming::Nothing), all(Claiming::All), all(Claiming::Half));
        // The sums are those of the simulation.
        let offered: u64 = fleet.groups.iter().map(|group| group.asked().memory_mib_ticks).sum();
        assert_eq!(plain.iter().map(|pod| pod.counted_mib * pod.life).sum::<u64>(), offered);
        assert!(plain.windows(2).all(|two| two[0].at <= two[1].at));
        let claims = |pods: &[LoadPod]| pods.iter().filter(|pod| pod.claim.is_some()).count();
        let (all, some) = (claims(&claiming), claims(&half));
        assert_eq!(claims(&plain), 0);
        assert!(all > 0 && some.abs_diff(all / 2) < all / 20, "{some} of {all}");
        // Only Guaranteed pods have claims.
        assert!(claiming.iter().all(|pod| pod.claim.is_none() || pod.counted_mib > 0));
        fleet.retain_before(3);
        let early = pods(&fleet.groups, Claiming::Nothing).unwrap();
        assert!(early.len() > 1 && early.len() == plain.iter().filter(|pod| pod.at < 3).count());
        let offered: u64 = fleet.groups.iter().map(|group| group.asked().memory_mib_ticks).sum();
        assert_eq!(early.iter().map(|pod| pod.counted_mib * pod.life).sum::<u64>(), offered);
    }

    #[test]
    fn claims_have_amounts_of_their_pods() {
        let traces = traces();
        let fleet = fleet(&traces, 18, 1).unwrap();
        let pods = pods(&fleet.groups, Claiming::All).unwrap();
        let mut templates = Templates::default();
        let (mut exact, mut alternatives, mut raised) = (0, 0, 0);
        for pod in &pods {
            let Some(claim) = &pod.claim else { continue };
            let spec = claim_json(claim).unwrap();
            let mut cpus = 0;
            for request in spec["devices"]["requests"].as_array().unwrap() {
                let is_exact = request.get("exactly").is_some();
                exact += usize::from(is_exact);
                alternatives += usize::from(!is_exact);
                let one = if is_exact { &request["exactly"] } else { &request["firstAvailable"][0] };
                let each = one["capacity"]["requests"]["cpu"].as_str();
                cpus += each.map_or(0, |cpus| cpus.parse().unwrap()) * one["count"].as_u64().unwrap();
            }
            let total = pod.totals["cpu"];
            assert!(cpus * 1000 <= total, "the pod requests less than its claim: {cpus} of {total}: {spec}");
            raised += usize::from(pod.is_raised());
            let object = pod.object(Some(&templates.name(claim).unwrap()));
            assert_eq!(object["spec"]["resources"]["limits"], totals_json(&pod.totals));
        }
        assert!(exact > 0 && alternatives > 0);
        assert!(raised > 0 && raised < pods.len() / 2, "{raised} of {}", pods.len());
        let objects = templates.objects().unwrap();
        assert!(objects.len() > 1 && objects.len() < pods.len());
    }

    #[test]
    fn totals_contain_sidecars() {
        let container = |name: &str, cpu: &str, restartable| ContainerRequest {
            restartable,
            ..ContainerRequest::guaranteed(name, Resources::none().with_cpu(cpu.parse().unwrap()))
        };
        let request = Request {
            owner: "p".into(),
            init_containers: vec![container("side", "500m", true), container("init", "3", false)],
            containers: vec![container("main", "1", false)],
            resources: None,
        };
        assert_eq!(totals(&request), [("cpu".to_owned(), 3500)].into());
        let json = totals_json(&totals(&request));
        assert_eq!(json, json!({"cpu": "3500m"}));
    }
}
