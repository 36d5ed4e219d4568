//! The device allocator of the Kubernetes scheduler: the devices that it gives to the claims of a pod on one host.
//!
//! # Algorithm
//! Claims, their requests, and the devices of a request are served one after the other, each by the first device that is free, is
//! selected, has enough capacity and satisfies the constraints. If a later one cannot be served, the search returns to the earlier
//! ones and tries their next devices; within a request, only in ascending order. The first complete solution is the result. Of the
//! alternatives of a request (`firstAvailable`), the first one with a solution for everything after it is taken.
//!
//! Devices are tried in the order of [`sort_slices`]. An amount is rounded up by the request policy of the capacity; a capacity that
//! is not requested takes the default of its policy, or all of it if there is none.
//!
//! # Limits
//! Not contained: the allocation mode `All`, admin access, taints, shared counters and CEL. A selector compares the driver or an
//! attribute. A search that takes more than [`MAX_STEPS`] steps ends without a solution; the scheduler stops after a time.
//!
//! A test compares it with allocations that a scheduler made (`tests/claims`).
//!
//! Source: `structured/internal/incubating` in `k8s.io/dynamic-resource-allocation` of Kubernetes 1.36.

use std::{collections::BTreeMap, sync::Arc};

use serde::Deserialize;

use crate::quantity::Quantity;

/// Most devices of a claim.
const MAX_RESULTS: usize = 32;

/// Most devices that a search tries.
const MAX_STEPS: usize = 200_000;

/// Value of a device's attribute.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, derive_more::From)]
#[serde(untagged)]
pub enum Attribute {
    Bool(bool),
    Int(i64),
    Text(Arc<str>),
}

/// Rule for the amounts that requests can have of a capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestPolicy {
    /// Amount of a request that does not name the capacity.
    pub default: Quantity,
    pub valid_range: Option<ValidRange>,
}

/// Permitted amounts of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct ValidRange {
    pub min: Quantity,
    pub max: Option<Quantity>,
    /// Whole units between permitted amounts; any amount if absent.
    pub step: Option<Quantity>,
}

/// A capacity of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    pub value: Quantity,
    pub request_policy: Option<RequestPolicy>,
}

/// Amounts by the name of the capacity.
pub type Amounts = BTreeMap<Arc<str>, Quantity>;

/// A device, and its use by allocated claims.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    pub name: Arc<str>,
    /// Attributes by qualified name; a name without a domain is one of the driver.
    #[serde(default)]
    pub attributes: BTreeMap<Arc<str>, Attribute>,
    #[serde(default)]
    pub capacity: BTreeMap<Arc<str>, Capacity>,
    #[serde(default)]
    pub allow_multiple_allocations: bool,
    /// True if the scheduler waits for the driver before it binds a pod with this device.
    #[serde(default)]
    pub has_binding_conditions: bool,
    /// Amounts that allocated claims consume.
    #[serde(default)]
    pub consumed: Amounts,
    /// True if a claim has the device, and no other one can.
    #[serde(default)]
    pub is_taken: bool,
}

/// Devices of a host that a driver publishes in one object.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Slice {
    pub name: Arc<str>,
    pub driver: Arc<str>,
    pub pool: Arc<str>,
    pub devices: Vec<Device>,
}

/// Condition for the devices of a request.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Selector {
    Driver(Arc<str>),
    Attribute { name: Arc<str>, value: Attribute },
}

/// Devices that a request, or one of its alternatives, asks for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct DeviceRequest {
    #[serde(default)]
    pub selectors: Vec<Selector>,
    #[serde(default = "one")]
    pub count: usize,
    /// Amounts of each device.
    #[serde(default)]
    pub capacity: Amounts,
}

const fn one() -> usize {
    1
}

/// Alternatives of a request.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Alternatives {
    Exactly(DeviceRequest),
    /// Named alternatives in the order of preference.
    FirstAvailable(Vec<(Arc<str>, DeviceRequest)>),
}

/// A request of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ClaimRequest {
    pub name: Arc<str>,
    #[serde(flatten)]
    pub alternatives: Alternatives,
}

/// Relation between the devices of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Constraint {
    #[serde(flatten)]
    pub relation: Relation,
    /// Requests, or alternatives as `request/alternative`, to which it applies; all if empty.
    #[serde(default)]
    pub requests: Vec<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Relation {
    /// Qualified name of an attribute whose value is the same.
    MatchAttribute(Arc<str>),
    /// Qualified name of an attribute whose values differ.
    DistinctAttribute(Arc<str>),
}

/// A claim without an allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Claim {
    pub requests: Vec<ClaimRequest>,
    #[serde(default)]
    pub constraints: Vec<Constraint>,
}

/// A device that a claim gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedDevice {
    /// Position of the request in the claim.
    pub request: usize,
    /// Position of the alternative, if the request has several.
    pub alternative: Option<usize>,
    /// Positions of the slice, and of the device in it.
    pub device: (usize, usize),
    /// Consumed amounts; empty if the device has a single user.
    pub consumed: Amounts,
}

/// Sorts slices in the order of the scheduler: pools with binding conditions last, then by driver, pool and name.
pub fn sort_slices(slices: &mut [Slice]) {
    let waits: Vec<_> = slices
        .iter()
        .filter(|slice| slice.devices.iter().any(|device| device.has_binding_conditions))
        .map(|slice| (Arc::clone(&slice.driver), Arc::clone(&slice.pool)))
        .collect();
    slices.sort_by(|a, b| {
        let key = |of: &Slice| {
            let waits = waits.iter().any(|(driver, pool)| *driver == of.driver && *pool == of.pool);
            (waits, Arc::clone(&of.driver), Arc::clone(&of.pool), Arc::clone(&of.name))
        };
        key(a).cmp(&key(b))
    });
}

/// Returns the devices for each claim of a pod; `None` if the host does not have them. The slices are sorted.
pub fn allocate(slices: &[Slice], claims: &[Claim]) -> Option<Vec<Vec<AllocatedDevice>>> {
    let places = slices.iter().enumerate().flat_map(|(slice, of)| {
        of.devices.iter().enumerate().map(move |(number, device)| ((slice, number), &*of.driver, device))
    });
    let devices: Vec<_> = places.map(|(at, driver, device)| Candidate::new(at, driver, device)).collect();
    let constraints = |claim: &Claim| vec![ConstraintState::default(); claim.constraints.len()];
    let mut search = Search {
        devices,
        claims,
        constraints: claims.iter().map(constraints).collect(),
        results: vec![Vec::new(); claims.len()],
        steps: 0,
    };
    (search.claim(0) == Outcome::Found).then_some(search.results)
}

/// Adds the devices of a claim to those in use.
pub fn consume(slices: &mut [Slice], allocated: &[AllocatedDevice]) {
    for AllocatedDevice { device: (slice, number), consumed, .. } in allocated {
        let Some(device) = slices.get_mut(*slice).and_then(|slice| slice.devices.get_mut(*number)) else {
            continue;
        };
        device.is_taken |= !device.allow_multiple_allocations;
        for (name, &amount) in consumed {
            let sum = device.consumed.entry(Arc::clone(name)).or_default();
            *sum = sum.checked_add(amount).unwrap_or(*sum);
        }
    }
}

/// Removes the devices of a claim from those in use.
pub fn release(slices: &mut [Slice], allocated: &[AllocatedDevice]) {
    for AllocatedDevice { device: (slice, number), consumed, .. } in allocated {
        let Some(device) = slices.get_mut(*slice).and_then(|slice| slice.devices.get_mut(*number)) else {
            continue;
        };
        device.is_taken &= device.allow_multiple_allocations;
        for (name, &amount) in consumed {
            if let Some(sum) = device.consumed.get_mut(name) {
                *sum = sum.saturating_sub(amount);
            }
        }
    }
}

/// Returns the amount that a request consumes of a capacity; `None` if the policy of the capacity forbids it.
fn consumed(asked: Option<Quantity>, capacity: &Capacity) -> Option<Quantity> {
    let Some(policy) = &capacity.request_policy else { return Some(asked.unwrap_or(capacity.value)) };
    let Some(asked) = asked else { return Some(policy.default) };
    let Some(ValidRange { min, max, step }) = policy.valid_range else { return Some(asked) };
    let rounded = match step {
        _ if asked < min => min,
        None => asked,
        Some(step) => {
            let (step, min) = (step.units()?, min.units()?);
            let steps = asked.units()?.checked_sub(min)?.div_ceil(step.max(1));
            Quantity::whole(min.checked_add(steps.checked_mul(step)?)?)
        }
    };
    max.is_none_or(|max| rounded <= max).then_some(rounded)
}

/// Returns the attribute with a qualified name.
fn attribute<'a>(device: &'a Device, driver: &str, name: &str) -> Option<&'a Attribute> {
    let of_driver = || {
        let (domain, name) = name.split_once('/')?;
        (domain == driver).then(|| device.attributes.get(name)).flatten()
    };
    device.attributes.get(name).or_else(of_driver)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Found,
    /// There is no solution with the devices that are taken so far.
    NoFit,
    /// The claim would have more than [`MAX_RESULTS`] devices.
    TooMany,
    /// The search took too long.
    Stopped,
}

/// A device with the use by the present search.
struct Candidate<'a> {
    at: (usize, usize),
    driver: &'a str,
    device: &'a Device,
    /// True if the search has taken the device, which has a single user.
    is_taken: bool,
    /// Amounts in use in the order of the capacities, including those of the present search.
    in_use: Vec<Quantity>,
}

impl<'a> Candidate<'a> {
    fn new(at: (usize, usize), driver: &'a str, device: &'a Device) -> Self {
        let in_use =
            device.capacity.keys().map(|name| device.consumed.get(name).copied().unwrap_or_default());
        Self { at, driver, device, is_taken: device.is_taken, in_use: in_use.collect() }
    }

    fn is_selected(&self, selectors: &[Selector]) -> bool {
        selectors.iter().all(|selector| match selector {
            Selector::Driver(driver) => **driver == *self.driver,
            Selector::Attribute { name, value } => attribute(self.device, self.driver, name) == Some(value),
        })
    }

    /// Returns the amounts that a request would consume, in the order of the capacities; `None` if there is not enough.
    fn fit(&self, request: &DeviceRequest) -> Option<Vec<Quantity>> {
        let Device { capacity, .. } = self.device;
        if self.is_taken || request.capacity.keys().any(|name| !capacity.contains_key(name)) {
            return None;
        }
        let amounts = capacity.iter().zip(&self.in_use).map(|((name, capacity), in_use)| {
            let amount = consumed(request.capacity.get(name).copied(), capacity)?;
            in_use.checked_add(amount).filter(|sum| *sum <= capacity.value).map(|_| amount)
        });
        amounts.collect()
    }
}

/// Devices to which a constraint applies.
#[derive(Clone, Default)]
struct ConstraintState<'a> {
    devices: usize,
    /// Value of the first device, for an attribute whose values match.
    first: Option<&'a Attribute>,
    /// Value of the last device of each request, for an attribute whose values differ. Like the scheduler, this forgets the other
    /// devices of a request.
    last: BTreeMap<usize, &'a Attribute>,
}

struct Search<'a> {
    devices: Vec<Candidate<'a>>,
    claims: &'a [Claim],
    /// State of each constraint of each claim.
    constraints: Vec<Vec<ConstraintState<'a>>>,
    results: Vec<Vec<AllocatedDevice>>,
    steps: usize,
}

impl<'a> Search<'a> {
    fn claim(&mut self, claim: usize) -> Outcome {
        if claim == self.claims.len() { Outcome::Found } else { self.request(claim, 0) }
    }

    fn request(&mut self, claim: usize, request: usize) -> Outcome {
        let claims = self.claims;
        let Some(of) = claims[claim].requests.get(request) else {
            return match self.claim(claim + 1) {
                Outcome::TooMany => Outcome::NoFit,
                outcome => outcome,
            };
        };
        match &of.alternatives {
            Alternatives::Exactly(wanted) => self.device((claim, request, None), wanted, 0, 0),
            Alternatives::FirstAvailable(alternatives) => {
                let mut outcome = Outcome::TooMany;
                for (number, (_, wanted)) in alternatives.iter().enumerate() {
                    match self.device((claim, request, Some(number)), wanted, 0, 0) {
                        Outcome::TooMany => {}
                        Outcome::NoFit => outcome = Outcome::NoFit,
                        end @ (Outcome::Found | Outcome::Stopped) => return end,
                    }
                }
                outcome
            }
        }
    }

    /// Takes the device with this number of a request, from `start` on, and everything after it.
    fn device(
        &mut self,
        of: (usize, usize, Option<usize>),
        wanted: &'a DeviceRequest,
        number: usize,
        start: usize,
    ) -> Outcome {
        let (claim, request, alternative) = of;
        if number >= wanted.count {
            return self.request(claim, request + 1);
        }
        if self.results[claim].len() + wanted.count - number > MAX_RESULTS {
            return Outcome::TooMany;
        }
        for position in start..self.devices.len() {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return Outcome::Stopped;
            }
            let candidate = &self.devices[position];
            if !candidate.is_selected(&wanted.selectors) {
                continue;
            }
            let Some(amounts) = candidate.fit(wanted) else { continue };
            if !self.constrain(of, position) {
                continue;
            }
            let candidate = &mut self.devices[position];
            let Device { capacity, allow_multiple_allocations: is_shared, .. } = candidate.device;
            let before = candidate.in_use.clone();
            let mut consumed = Amounts::new();
            if *is_shared {
                let sums = candidate.in_use.iter_mut().zip(&amounts);
                sums.for_each(|(sum, amount)| *sum = sum.checked_add(*amount).unwrap_or(*sum));
                consumed.extend(capacity.keys().cloned().zip(amounts));
            }
            candidate.is_taken = !is_shared;
            let device = candidate.at;
            self.results[claim].push(AllocatedDevice { request, alternative, device, consumed });
            let outcome = self.device(of, wanted, number + 1, position + 1);
            if outcome == Outcome::Found {
                return outcome;
            }
            self.results[claim].pop();
            let candidate = &mut self.devices[position];
            (candidate.is_taken, candidate.in_use) = (false, before);
            self.unconstrain(of);
            if outcome != Outcome::NoFit {
                return outcome;
            }
        }
        Outcome::NoFit
    }

    fn applies(&self, (claim, request, alternative): (usize, usize, Option<usize>), to: &Constraint) -> bool {
        let of = &self.claims[claim].requests[request];
        let alternative = match (&of.alternatives, alternative) {
            (Alternatives::FirstAvailable(all), Some(number)) => all.get(number).map(|(name, _)| name),
            _ => None,
        };
        to.requests.is_empty()
            || to.requests.iter().any(|name| match name.split_once('/') {
                None => *name == of.name,
                Some((parent, name)) => {
                    *parent == *of.name && alternative.is_some_and(|alternative| **alternative == *name)
                }
            })
    }

    /// Adds a device to the constraints of its claim. Returns false, without a change, if one is violated.
    fn constrain(&mut self, of: (usize, usize, Option<usize>), position: usize) -> bool {
        let (claim, request, _) = of;
        let claims = self.claims;
        let Candidate { device, driver, .. } = self.devices[position];
        let constraints = claims[claim].constraints.iter().enumerate();
        let applied: Vec<_> = constraints.filter(|(_, constraint)| self.applies(of, constraint)).collect();
        let mut added = Vec::with_capacity(applied.len());
        for (number, constraint) in applied {
            let known = &self.constraints[claim][number];
            let (Relation::MatchAttribute(name) | Relation::DistinctAttribute(name)) = &constraint.relation;
            let Some(value) = attribute(device, driver, name) else { return false };
            let is_satisfied = match &constraint.relation {
                _ if known.devices == 0 => true,
                Relation::MatchAttribute(_) => known.first == Some(value),
                Relation::DistinctAttribute(_) => known.last.values().all(|other| *other != value),
            };
            if !is_satisfied {
                return false;
            }
            added.push((number, value));
        }
        for (number, value) in added {
            let known = &mut self.constraints[claim][number];
            if known.devices == 0 {
                known.first = Some(value);
            }
            known.devices += 1;
            known.last.insert(request, value);
        }
        true
    }

    /// Removes the device that was added last.
    fn unconstrain(&mut self, of: (usize, usize, Option<usize>)) {
        let claims = self.claims;
        for (number, constraint) in claims[of.0].constraints.iter().enumerate() {
            if self.applies(of, constraint) {
                let known = &mut self.constraints[of.0][number];
                known.devices -= 1;
                known.last.remove(&of.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use serde_json::{Value, json};

    use super::*;

    fn parse<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn device(name: &str, numa: i64, socket: i64, cpus: u64) -> Value {
        let policy = json!({"default": "0", "validRange": {"min": "0", "step": "2"}});
        json!({
            "name": name, "allowMultipleAllocations": true,
            "attributes": {"resource.kubernetes.io/numaNode": numa, "socket": socket},
            "capacity": {"cpu": {"value": cpus.to_string(), "requestPolicy": policy}, "whole": {"value": "1"}},
        })
    }

    /// Returns four nodes on two sockets, and a device of another driver.
    fn slices() -> Vec<Slice> {
        let nodes =
            [device("n0", 0, 0, 4), device("n1", 1, 0, 6), device("n2", 2, 1, 6), device("n3", 3, 1, 7)];
        let gpu = json!({"name": "g", "attributes": {"resource.kubernetes.io/numaNode": 1}});
        parse(json!([
            {"name": "a", "driver": "gpu.example", "pool": "h", "devices": [gpu]},
            {"name": "b", "driver": "numaward.io", "pool": "h", "devices": nodes},
        ]))
    }

    fn request(name: &str, count: usize, cpus: &str) -> Value {
        json!({"name": name, "exactly": sub(count, cpus)})
    }

    fn sub(count: usize, cpus: &str) -> Value {
        let capacity = json!({"cpu": cpus, "whole": "0"});
        json!({"selectors": [{"driver": "numaward.io"}], "count": count, "capacity": capacity})
    }

    /// Returns the names of the allocated devices by claim, with the consumed CPUs.
    fn names(slices: &[Slice], claims: &[Value]) -> Option<Vec<Vec<String>>> {
        let claims: Vec<Claim> = claims.iter().cloned().map(parse).collect();
        let name = |of: &AllocatedDevice| {
            let name = &slices[of.device.0].devices[of.device.1].name;
            of.consumed.get("cpu").map_or_else(|| name.to_string(), |cpus| format!("{name}:{cpus}"))
        };
        let results = allocate(slices, &claims)?;
        Some(results.iter().map(|claim| claim.iter().map(name).collect()).collect())
    }

    fn one_claim(slices: &[Slice], requests: &[Value], constraints: &[Value]) -> Option<Vec<String>> {
        names(slices, &[json!({"requests": requests, "constraints": constraints})])
            .map(|mut all| all.remove(0))
    }

    #[test]
    fn first_device_that_fits_is_taken() {
        let mut slices = slices();
        assert_eq!(one_claim(&slices, &[request("r", 1, "500m")], &[]).unwrap(), ["n0:2"]);
        assert_eq!(one_claim(&slices, &[request("r", 1, "5")], &[]).unwrap(), ["n1:6"], "rounded up");
        assert_eq!(one_claim(&slices, &[request("r", 1, "7")], &[]), None, "8 of 7");
        let claim: Claim = parse(json!({"requests": [request("r", 2, "3")]}));
        let allocated = allocate(&slices, &[claim]).unwrap();
        consume(&mut slices, &allocated[0]);
        assert_eq!(one_claim(&slices, &[request("r", 1, "3")], &[]).unwrap(), ["n2:4"]);
        assert_eq!(one_claim(&slices, &[request("r", 1, "2")], &[]).unwrap(), ["n1:2"]);
    }

    #[test]
    fn capacity_without_request_takes_default_or_all() {
        let slices = slices();
        let all = |capacity: Value| {
            let exactly = json!({"selectors": [{"driver": "numaward.io"}], "capacity": capacity});
            let request = |name: &str| json!({"name": name, "exactly": exactly});
            one_claim(&slices, &[request("a"), request("b")], &[]).unwrap()
        };
        assert_eq!(all(json!({"whole": "0"})), ["n0:0", "n0:0"]);
        assert_eq!(all(json!({})), ["n0:0", "n1:0"], "no policy: the first request takes all of it");
        let unknown = json!({"name": "a", "exactly": {"capacity": {"gpus": "1"}}});
        assert_eq!(one_claim(&slices, &[unknown], &[]), None);
    }

    #[test]
    fn devices_of_a_request_differ() {
        let slices = slices();
        assert_eq!(one_claim(&slices, &[request("r", 2, "2")], &[]).unwrap(), ["n0:2", "n1:2"]);
        let two = [request("p", 1, "2"), request("q", 1, "2")];
        assert_eq!(one_claim(&slices, &two, &[]).unwrap(), ["n0:2", "n0:2"]);
        let distinct = json!({"distinctAttribute": "resource.kubernetes.io/numaNode"});
        assert_eq!(one_claim(&slices, &two, &[distinct]).unwrap(), ["n0:2", "n1:2"]);
        assert_eq!(one_claim(&slices, &[request("r", 5, "0")], &[]), None, "four devices");
    }

    #[test]
    fn constraint_makes_search_return_to_earlier_requests() {
        let slices = slices();
        let socket = json!({"matchAttribute": "numaward.io/socket"});
        assert_eq!(
            one_claim(&slices, &[request("r", 2, "6")], &[socket]).unwrap_or_default(),
            ["n2:6", "n3:6"]
        );
        let gpu = json!({"name": "g", "exactly": {"selectors": [{"driver": "gpu.example"}]}});
        let node = json!({"matchAttribute": "resource.kubernetes.io/numaNode"});
        assert_eq!(one_claim(&slices, &[request("r", 1, "2"), gpu.clone()], &[node]).unwrap(), ["n1:2", "g"]);
        let one_gpu = json!({"requests": [gpu]});
        assert_eq!(names(&slices, &[one_gpu.clone(), one_gpu]), None, "a device for one claim");
    }

    #[test]
    fn first_alternative_with_a_solution_is_taken() {
        let slices = slices();
        let request = |cpus: &str, half: &str| json!({"name": "r", "firstAvailable": [["one", sub(1, cpus)], ["pair", sub(2, half)], ["any", sub(1, "0")]]});
        let near = json!({"matchAttribute": "numaward.io/socket", "requests": ["r/pair"]});
        let allocated =
            |cpus, half| one_claim(&slices, &[request(cpus, half)], slice::from_ref(&near)).unwrap();
        assert_eq!(allocated("6", "3"), ["n1:6"]);
        assert_eq!(allocated("10", "5"), ["n2:6", "n3:6"], "one socket");
        assert_eq!(allocated("16", "8"), ["n0:0"]);
        // A later request is considered.
        let later = json!({"name": "s", "exactly": sub(3, "6")});
        assert_eq!(
            one_claim(&slices, &[request("6", "4"), later], &[]).unwrap(),
            ["n0:0", "n1:6", "n2:6", "n3:6"]
        );
    }

    #[test]
    fn claims_have_few_devices() {
        let nodes: Vec<_> = (0..40).map(|number| device(&format!("n{number}"), number, 0, 4)).collect();
        let slices: Vec<Slice> =
            parse(json!([{"name": "a", "driver": "numaward.io", "pool": "h", "devices": nodes}]));
        assert!(one_claim(&slices, &[request("r", 32, "2")], &[]).is_some());
        assert_eq!(one_claim(&slices, &[request("r", 33, "2")], &[]), None);
        let many = json!({"name": "r", "firstAvailable": [["many", sub(20, "2")], ["few", sub(2, "2")]]});
        let more = request("s", 20, "2");
        assert_eq!(one_claim(&slices, &[many, more], &[]).unwrap().len(), 22, "the second alternative");
    }

    #[test]
    fn slices_with_binding_conditions_are_last() {
        let slice = |driver: &str, pool: &str, name: &str, waits: bool| {
            let device = json!({"name": "d", "hasBindingConditions": waits});
            json!({"name": name, "driver": driver, "pool": pool, "devices": [device]})
        };
        let mut slices: Vec<Slice> = parse(json!([
            slice("b", "p", "0", false),
            slice("a", "q", "1", true),
            slice("a", "p", "3", false),
            slice("a", "p", "2", false),
            slice("a", "q", "0", false),
        ]));
        sort_slices(&mut slices);
        let names: Vec<_> =
            slices.iter().map(|slice| format!("{}/{}/{}", slice.driver, slice.pool, slice.name)).collect();
        assert_eq!(names, ["a/p/2", "a/p/3", "b/p/0", "a/q/0", "a/q/1"]);
    }

    #[test]
    fn long_search_ends() {
        let nodes: Vec<_> = (0..30).map(|number| device(&format!("n{number}"), number, 0, 4)).collect();
        let slices: Vec<Slice> =
            parse(json!([{"name": "a", "driver": "numaward.io", "pool": "h", "devices": nodes}]));
        let requests = [request("r", 15, "2"), request("s", 1, "5")];
        assert_eq!(one_claim(&slices, &requests, &[]), None);
    }
}
