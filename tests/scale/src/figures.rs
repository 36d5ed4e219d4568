//! Figures of a run, and the checks of the scheduler's allocations.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use numaward_engine::{
    claims::{
        allocator::{Amounts, Claim, Device, Slice, allocate},
        devices::DRIVER,
    },
    quantity::Quantity,
};
use serde_json::Value;

use crate::load::Totals;

/// Amounts that allocated claims consume: by Kubernetes node and device.
pub(crate) type DeviceUsage = BTreeMap<(String, String), Amounts>;

/// Returns the amounts that these claims consume of the devices of numaward, and messages about claims of several pods and amounts that
/// cannot be read.
pub(crate) fn consumed<'a>(claims: impl Iterator<Item = &'a Value>) -> (DeviceUsage, Vec<String>) {
    let (mut sums, mut problems) = (DeviceUsage::new(), Vec::new());
    for claim in claims {
        let name = claim["metadata"]["name"].as_str().unwrap_or("?");
        let users = claim["status"]["reservedFor"].as_array().map_or(0, Vec::len);
        if users > 1 {
            problems.push(format!("the claim {name} is reserved for {users} pods"));
        }
        let results = claim["status"]["allocation"]["devices"]["results"].as_array();
        for result in results.into_iter().flatten().filter(|result| result["driver"] == DRIVER) {
            let text = |field: &str| result[field].as_str().unwrap_or_default().to_owned();
            let sum = sums.entry((text("pool"), text("device"))).or_default();
            for (name_of_capacity, amount) in result["consumedCapacity"].as_object().into_iter().flatten() {
                let parsed = amount.as_str().and_then(|amount| amount.parse::<Quantity>().ok());
                let sum = sum.entry(name_of_capacity.as_str().into()).or_default();
                match parsed.and_then(|amount| sum.checked_add(amount)) {
                    Some(added) => *sum = added,
                    None => problems.push(format!("the claim {name} consumes {amount}")),
                }
            }
        }
    }
    (sums, problems)
}

/// Returns messages about devices of which claims have more than there is: amounts that are allocated twice.
pub(crate) fn allocated_twice(
    consumed: &DeviceUsage,
    limit: impl Fn(&str, &str, &str) -> Option<Quantity>,
) -> Vec<String> {
    let mut messages = Vec::new();
    for ((host, device), amounts) in consumed {
        for (name, amount) in amounts {
            let limit = limit(host, device, name).unwrap_or_default();
            if *amount > limit {
                messages
                    .push(format!("claims have {amount} of {name} of {host}/{device}, which has {limit}"));
            }
        }
    }
    messages
}

/// Returns true if a host has room for a pod by the rules of the scheduler: the requests, and the devices of the claim.
pub(crate) fn has_room(
    (allocatable, requested): (&Totals, &Totals),
    asked: &Totals,
    (mut devices, claim): (Vec<Device>, Option<&Claim>),
    (host, consumed): (&str, &DeviceUsage),
) -> bool {
    let fits = asked.iter().filter(|(_, asked)| **asked > 0).all(|(name, asked)| {
        let of = |totals: &Totals| totals.get(name).copied().unwrap_or(0);
        of(requested).saturating_add(*asked) <= of(allocatable)
    });
    let Some(claim) = claim.filter(|_| fits) else { return fits };
    for device in &mut devices {
        let key = (host.to_owned(), device.name.to_string());
        device.consumed = consumed.get(&key).cloned().unwrap_or_default();
    }
    let slice = Slice { name: host.into(), driver: DRIVER.into(), pool: Arc::from(host), devices };
    allocate(&[slice], std::slice::from_ref(claim)).is_some()
}

/// Returns the value below which this share of the sorted values is, in percent; `None` without values.
fn percentile(sorted: &[Duration], percent: usize) -> Option<Duration> {
    sorted.get((sorted.len() * percent / 100).min(sorted.len().checked_sub(1)?)).copied()
}

/// Memory of Guaranteed pods times their lifetime, in MiB and ticks, of all pods of the load: the sum is the same in each run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryTime {
    pub(crate) admitted: u64,
    /// Of pods that did not run within their time.
    pub(crate) given_up: u64,
    /// Of pods that neither ran nor were given up in time. If these did not count, a growing queue would look like success.
    pub(crate) undecided: u64,
}

impl MemoryTime {
    /// Returns the shares of the admitted, given up and undecided memory time in thousandths.
    fn permille(self) -> [u128; 3] {
        let parts = [self.admitted, self.given_up, self.undecided].map(u128::from);
        let all: u128 = parts.iter().sum();
        parts.map(|part| (part * 1000).checked_div(all).unwrap_or(0))
    }
}

/// Outcome of the simulation for the same pods and hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SimulatedFigures {
    /// Admitted memory time in MiB and ticks.
    pub(crate) admitted: u64,
    pub(crate) refusals: u64,
}

/// Outcome of a run.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) pods: usize,
    pub(crate) claiming: usize,
    /// Pods that request more than in the trace, because their claim has more.
    pub(crate) raised: usize,
    /// Pods with and without a claim that a host refused when they were bound.
    pub(crate) refused: [usize; 2],
    pub(crate) memory_time: MemoryTime,
    /// `None` if the simulation has no such run.
    pub(crate) simulated: Option<SimulatedFigures>,
    /// Times from the creation to the binding.
    pub(crate) bound_after: Vec<Duration>,
    /// Time from the first creation to the last binding.
    pub(crate) bound_within: Duration,
    pub(crate) slice_writes: u64,
    /// Time in which these were written: the duration of the load.
    pub(crate) written_within: Duration,
    /// Number of looks at all claims.
    pub(crate) looks: usize,
    pub(crate) twice: BTreeSet<String>,
    /// Pods that are not bound when the load is over and the clock stands, and those of them for which a host has room.
    pub(crate) pending: [usize; 2],
    /// Pods that are bound at that time, and wait on their host.
    pub(crate) waiting: usize,
    /// Failed requests of the harness, which count for nothing else.
    pub(crate) failures: Vec<String>,
    /// Reasons of some refusals.
    pub(crate) reasons: Vec<String>,
}

/// Maximum number of printed messages of a kind.
const MAX_MESSAGES: usize = 5;

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per_second = |count: f64, within: Duration| count / within.as_secs_f64().max(0.001);
        let [with_claim, plain] = self.refused;
        writeln!(
            f,
            "  refusals on hosts: {} ({with_claim} of pods with a claim, {plain} of plain pods)",
            with_claim + plain
        )?;
        let MemoryTime { admitted, given_up, undecided } = self.memory_time;
        let percent = |permille: u128| format!("{}.{} %", permille / 10, permille % 10);
        let [of_admitted, of_given_up, of_undecided] = self.memory_time.permille().map(percent);
        let all = u128::from(admitted) + u128::from(given_up) + u128::from(undecided);
        writeln!(
            f,
            "  admitted memory time: {of_admitted} of {all} MiB x ticks ({of_given_up} given up, {of_undecided} undecided)"
        )?;
        match self.simulated {
            Some(SimulatedFigures { admitted, refusals }) => {
                let share = (u128::from(admitted) * 1000).checked_div(all).unwrap_or(0);
                writeln!(f, "  the simulation: {} admitted, {refusals} refusals", percent(share))?;
            }
            None => writeln!(f, "  the simulation: has no such run")?,
        }
        let bound = u32::try_from(self.bound_after.len()).unwrap_or(u32::MAX);
        let pods = u32::try_from(self.pods).unwrap_or(u32::MAX);
        writeln!(
            f,
            "  bound pods per second: {:.1} ({bound} bound); {:.1} arrived per second",
            per_second(bound.into(), self.bound_within),
            per_second(pods.into(), self.written_within)
        )?;
        let mut sorted = self.bound_after.clone();
        sorted.sort_unstable();
        let of = |percent| match percentile(&sorted, percent) {
            Some(time) => format!("{} ms", time.as_millis()),
            None => "-".to_owned(),
        };
        writeln!(f, "  time to bind: p50 {}, p99 {}", of(50), of(99))?;
        let writes = u32::try_from(self.slice_writes).unwrap_or(u32::MAX);
        writeln!(
            f,
            "  slice writes per second: {:.1} ({writes})",
            per_second(writes.into(), self.written_within)
        )?;
        writeln!(f, "  claims allocated twice: {} ({} looks at all claims)", self.twice.len(), self.looks)?;
        let [pending, with_room] = self.pending;
        writeln!(
            f,
            "  pods pending although room exists: {with_room} (of {pending} pending after the load, and {} waiting on hosts)",
            self.waiting
        )?;
        writeln!(f, "  failed requests of the harness: {}", self.failures.len())?;
        let messages = [
            ("refusal", &self.reasons[..]),
            ("allocated twice", &self.twice.iter().cloned().collect::<Vec<_>>()[..]),
            ("failed", &self.failures[..]),
        ];
        for (kind, messages) in messages {
            for message in messages.iter().take(MAX_MESSAGES) {
                writeln!(f, "    {kind}: {message}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::host::{DeviceOrder, tests::host};

    fn claim(device: &str, cpus: &str, users: usize) -> Value {
        let result =
            json!({"driver": DRIVER, "pool": "h0", "device": device, "consumedCapacity": {"cpu": cpus}});
        let other = json!({"driver": "gpu.example", "pool": "h0", "device": "node-0"});
        json!({"metadata": {"name": "c"}, "status": {
            "allocation": {"devices": {"results": [result, other]}}, "reservedFor": vec![json!({}); users]}})
    }

    #[test]
    fn finds_amounts_allocated_twice() {
        let limit = |_: &str, device: &str, _: &str| (device == "node-0").then(|| Quantity::whole(8));
        let look = |claims: &[Value]| {
            let (consumed, problems) = consumed(claims.iter());
            (allocated_twice(&consumed, limit), problems)
        };
        assert_eq!(look(&[claim("node-0", "4", 1), claim("node-0", "4", 1)]), (vec![], vec![]));
        let (twice, _) = look(&[claim("node-0", "4", 1), claim("node-0", "5", 1)]);
        assert_eq!(twice, ["claims have 9 of cpu of h0/node-0, which has 8"]);
        assert_eq!(look(&[claim("node-7", "1", 1)]).0.len(), 1, "no such device");
        assert_eq!(look(&[claim("node-0", "1", 2)]).1, ["the claim c is reserved for 2 pods"]);
        assert_eq!(look(&[claim("node-0", "x", 1)]).1.len(), 1);
        let pending = json!({"metadata": {"name": "pending"}, "status": {}});
        assert_eq!(look(&[pending]), (vec![], vec![]));
    }

    #[test]
    fn room_is_that_of_requests_and_devices() {
        let (host, cpus) = host();
        let all = host.kind().totals();
        let claim = |cpus: u64| Claim {
            requests: vec![numaward_engine::claims::allocator::ClaimRequest {
                name: "r".into(),
                alternatives: numaward_engine::claims::allocator::Alternatives::Exactly(
                    numaward_engine::claims::allocator::DeviceRequest {
                        selectors: Vec::new(),
                        count: 1,
                        capacity: [("cpu".into(), Quantity::whole(cpus))].into(),
                    },
                ),
            }],
            constraints: Vec::new(),
        };
        let asked = |cpus: u64| Totals::from([("cpu".to_owned(), 1000 * cpus)]);
        let free = |requested: &Totals, cpus, consumed: &DeviceUsage| {
            let devices = host.devices(DeviceOrder::LeastFree);
            let claim = claim(cpus);
            has_room((&all, requested), &asked(cpus), (devices, Some(&claim)), ("h0", consumed))
        };
        let none = DeviceUsage::new();
        assert!(free(&Totals::new(), 4, &none));
        assert!(!free(&all, 4, &none), "all is requested");
        let total = all["cpu"] / 1000;
        assert!(!free(&Totals::new(), total, &none), "no node has all CPUs");
        assert!(has_room((&all, &Totals::new()), &asked(total), (Vec::new(), None), ("h0", &none)));
        let devices = host.devices(DeviceOrder::Fixed);
        let taken = |name: &str| {
            let of = |device: &Device| device.capacity[name].value;
            let used = devices.iter().map(|device| {
                (("h0".to_owned(), device.name.to_string()), [(Arc::from(name), of(device))].into())
            });
            used.collect::<DeviceUsage>()
        };
        assert!(cpus > 0 && !free(&Totals::new(), 1, &taken("cpu")));
    }

    #[test]
    fn undecided_pods_are_not_admitted() {
        let time = MemoryTime { admitted: 70, given_up: 10, undecided: 20 };
        assert_eq!(time.permille(), [700, 100, 200]);
        assert_eq!(MemoryTime::default().permille(), [0; 3]);
    }

    #[test]
    fn percentiles_are_values() {
        let all: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        assert_eq!(percentile(&all, 50), Some(Duration::from_millis(101)));
        assert_eq!(percentile(&all, 99), Some(Duration::from_millis(199)));
        assert_eq!(percentile(&all[..1], 99), Some(Duration::from_millis(1)));
        assert_eq!(percentile(&[], 50), None);
    }
}
