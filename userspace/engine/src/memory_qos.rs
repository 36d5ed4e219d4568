//! Memory `QoS`: what `memory.min`, `memory.low` and `memory.high` of cgroup v2 follow from requests and limits.
//!
//! - *Reservation* protects what is requested from reclaim: of Guaranteed owners for good (`memory.min`), of
//!   Burstable ones as far as possible (`memory.low`). A cgroup is protected only as far as its ancestors are,
//!   so these get the sums.
//! - *Throttling* slows a container down before it reaches its limit (`memory.high`). It is set for
//!   containers only: a whole pod would be slowed down for the fault of one of its containers.
//!
//! What is `None` here is not to be written. All sizes are bytes; a factor is a fraction of integers, never a
//! floating-point number.
//!
//! Source: KEP-2570.

use std::{fmt, str::FromStr};

use numaward_topology::{Bytes, ZoneKind};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::{
    qos::QosClass,
    quantity::Quantity,
    request::{ContainerRequest, Request, Resources},
};

/// Whether requests are protected from reclaim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MemoryReservationPolicy {
    /// They are not.
    #[default]
    None,
    /// Those of Guaranteed owners for good, those of Burstable owners as far as possible.
    TieredReservation,
}

/// How `memory.high` is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ThrottlingFormula {
    /// Kubernetes v1.22: the limit times the factor. Close to the limit a request is never throttled.
    LimitShare,
    /// Kubernetes v1.27 and later: the request, plus what is between it and the limit times the factor; whole
    /// pages.
    AboveRequest,
}

impl ThrottlingFormula {
    /// The factor that Kubernetes used with this formula where none was configured. (Since v1.37 it does not
    /// throttle then.)
    pub const fn default_factor(self) -> ThrottlingFactor {
        match self {
            Self::LimitShare => ThrottlingFactor { billionths: 800_000_000 },
            Self::AboveRequest => ThrottlingFactor { billionths: 900_000_000 },
        }
    }

    /// The value of `memory.high`, whether it makes sense or not. `ceiling` is the limit, or what is
    /// allocatable on the host where there is no limit. A request above the ceiling counts as the ceiling.
    pub fn apply(self, request: Bytes, ceiling: Bytes, factor: ThrottlingFactor, page_size: Bytes) -> Bytes {
        match self {
            Self::LimitShare => factor.of(ceiling.0),
            Self::AboveRequest => {
                let above = factor.of(ceiling.0.saturating_sub(request.0));
                let exact = request.0.min(ceiling.0).saturating_add(above.0);
                Bytes(exact - exact % page_size.0.max(1))
            }
        }
    }
}

/// A factor of more than zero and at most one, exact to billionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ThrottlingFactor {
    billionths: u32,
}

/// The factor is not in (0, 1].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory throttling factor is {0}; it must be greater than 0 and at most 1, such as 0.9")]
pub struct FactorError(pub String);

impl ThrottlingFactor {
    /// The share of a number of bytes, rounded down.
    fn of(self, bytes: u64) -> Bytes {
        let share = u128::from(bytes) * u128::from(self.billionths) / 1_000_000_000;
        // At most `bytes`, since the factor is at most one.
        Bytes(u64::try_from(share).unwrap_or(bytes))
    }
}

impl FromStr for ThrottlingFactor {
    type Err = FactorError;

    /// Reads a decimal fraction such as `0.9`. What is finer than billionths is not taken.
    fn from_str(text: &str) -> Result<Self, FactorError> {
        let read = || {
            let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
            let digits = fraction.trim_end_matches('0');
            let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
            if (whole.is_empty() && fraction.is_empty())
                || digits.len() > 9
                || !is_number(whole)
                || !is_number(digits)
            {
                return None;
            }
            let whole: u32 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
            let fraction: u32 = format!("{digits:0<9}").parse().ok()?;
            let billionths = whole.checked_mul(1_000_000_000)?.checked_add(fraction)?;
            (1..=1_000_000_000).contains(&billionths).then_some(Self { billionths })
        };
        read().ok_or_else(|| FactorError(text.to_owned()))
    }
}

impl fmt::Display for ThrottlingFactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, fraction) = (self.billionths / 1_000_000_000, self.billionths % 1_000_000_000);
        let digits = format!("{fraction:09}");
        match digits.trim_end_matches('0') {
            "" => write!(f, "{whole}"),
            digits => write!(f, "{whole}.{digits}"),
        }
    }
}

impl Serialize for ThrottlingFactor {
    /// As text, so that it stays exact.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ThrottlingFactor {
    /// A number or its text.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Spelling {
            Integer(i64),
            // Printed, a floating-point number has the shortest digits that mean it: those that were written.
            Float(f64),
            Text(String),
        }
        let text = match Spelling::deserialize(deserializer)? {
            Spelling::Integer(number) => number.to_string(),
            Spelling::Float(number) => number.to_string(),
            Spelling::Text(text) => text,
        };
        text.parse().map_err(D::Error::custom)
    }
}

/// Slowing down before the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Throttling {
    /// How `memory.high` is computed.
    pub formula: ThrottlingFormula,
    /// The factor in it.
    pub factor: ThrottlingFactor,
}

/// What is to be written into a cgroup, in bytes. `None` is left as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemorySettings {
    /// `memory.min`
    pub min: Option<Bytes>,
    /// `memory.low`
    pub low: Option<Bytes>,
    /// `memory.high`
    pub high: Option<Bytes>,
}

/// The settings of the cgroups above those of pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AncestorSettings {
    /// The cgroup of all pods (`kubepods`).
    pub pods: MemorySettings,
    /// The cgroup of all Burstable pods (`kubepods-burstable`).
    pub burstable: MemorySettings,
}

/// The settings of the cgroups of reserved resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeSettings {
    /// The cgroup of `kube-reserved`.
    pub kube_reserved: MemorySettings,
    /// The cgroup of `system-reserved`.
    pub system_reserved: MemorySettings,
}

/// The configuration of Memory `QoS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryQos {
    /// Whether requests are protected.
    pub reservation: MemoryReservationPolicy,
    /// Whether containers are slowed down.
    pub throttling: Option<Throttling>,
    /// The size of a base page.
    pub page_size: Bytes,
    /// What is allocatable on the host, all nodes together: the ceiling of who has no limit.
    pub node_allocatable: Bytes,
}

fn memory(resources: &Resources) -> Bytes {
    let quantity = resources.memory.get(&ZoneKind::Memory).copied();
    Bytes(quantity.map_or(0, |quantity: Quantity| quantity.units().unwrap_or(u64::MAX)))
}

fn positive(bytes: Bytes) -> Option<Bytes> {
    Some(bytes).filter(|bytes| bytes.0 > 0)
}

/// What an owner requests while it runs: app containers, sidecars and what it costs to run it at all.
/// Init containers do not count, as they are gone by then.
fn running(request: &Request, overhead: Bytes) -> Bytes {
    let sidecars = request.init_containers.iter().filter(|container| container.restartable);
    let requests = sidecars.chain(&request.containers).map(|container| memory(&container.requests).0);
    Bytes(requests.fold(overhead.0, u64::saturating_add))
}

impl MemoryQos {
    fn protection(&self, class: QosClass, bytes: Bytes) -> MemorySettings {
        match (self.reservation, class) {
            (MemoryReservationPolicy::TieredReservation, QosClass::Guaranteed) => {
                MemorySettings { min: positive(bytes), ..MemorySettings::default() }
            }
            (MemoryReservationPolicy::TieredReservation, QosClass::Burstable) => {
                MemorySettings { low: positive(bytes), ..MemorySettings::default() }
            }
            _ => MemorySettings::default(),
        }
    }

    /// The settings of one container.
    pub fn container(&self, request: &Request, container: &ContainerRequest) -> MemorySettings {
        self.container_of(request.qos(), memory(&container.requests), memory(&container.limits))
    }

    /// The settings of one container of an owner of this class, which requests and may use so much; a limit of zero
    /// is none.
    pub fn container_of(&self, class: QosClass, requested: Bytes, limit: Bytes) -> MemorySettings {
        let high = self.throttling.filter(|_| class != QosClass::Guaranteed).and_then(|throttling| {
            let ceiling = positive(limit).unwrap_or(self.node_allocatable);
            let high = throttling.formula.apply(requested, ceiling, throttling.factor, self.page_size);
            // At or below the request it would throttle what was promised.
            Some(high).filter(|&high| high > requested)
        });
        MemorySettings { high, ..self.protection(class, requested) }
    }

    /// The settings of a pod, or of a workload's own cgroup. `overhead` is what its runtime class adds.
    pub fn pod(&self, request: &Request, overhead: Bytes) -> MemorySettings {
        self.protection(request.qos(), running(request, overhead))
    }

    /// The settings of the ancestors of all pods, each given with its overhead.
    pub fn ancestors<'a>(&self, pods: impl IntoIterator<Item = (&'a Request, Bytes)>) -> AncestorSettings {
        if self.reservation == MemoryReservationPolicy::None {
            return AncestorSettings::default();
        }
        let (mut guaranteed, mut burstable) = (0u64, 0u64);
        for (request, overhead) in pods {
            let sum = match request.qos() {
                QosClass::Guaranteed => &mut guaranteed,
                QosClass::Burstable => &mut burstable,
                QosClass::BestEffort => continue,
            };
            *sum = sum.saturating_add(running(request, overhead).0);
        }
        let all = Bytes(guaranteed.saturating_add(burstable));
        AncestorSettings {
            // A parent must be protected as far as all of its children together.
            pods: MemorySettings { min: Some(all), ..MemorySettings::default() },
            burstable: MemorySettings { low: Some(Bytes(burstable)), ..MemorySettings::default() },
        }
    }

    /// The settings of the cgroups of reserved resources, where these are enforced.
    pub fn node(&self, kube_reserved: Option<Bytes>, system_reserved: Option<Bytes>) -> NodeSettings {
        let settings = |reserved| MemorySettings { min: reserved, ..MemorySettings::default() };
        NodeSettings { kube_reserved: settings(kube_reserved), system_reserved: settings(system_reserved) }
    }

    /// What undoes an earlier reservation: without the ancestors' protection that of pods and containers
    /// has no effect.
    pub fn rollback() -> AncestorSettings {
        AncestorSettings {
            pods: MemorySettings { min: Some(Bytes(0)), ..MemorySettings::default() },
            burstable: MemorySettings { low: Some(Bytes(0)), ..MemorySettings::default() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factor(text: &str) -> ThrottlingFactor {
        text.parse().unwrap()
    }

    fn qos(formula: ThrottlingFormula, text: &str, page_size: Bytes) -> MemoryQos {
        MemoryQos {
            reservation: MemoryReservationPolicy::TieredReservation,
            throttling: Some(Throttling { formula, factor: factor(text) }),
            page_size,
            node_allocatable: Bytes::mib(2000),
        }
    }

    fn mib(amount: u64) -> Resources {
        match amount {
            0 => Resources::none(),
            amount => Resources::none().with_memory(Quantity::whole(amount << 20)),
        }
    }

    /// A container of a pod with another container that makes it Burstable.
    fn burstable(request: u64, limit: u64) -> Request {
        let container = |name: &str, requests, limits| ContainerRequest {
            name: name.into(),
            restartable: false,
            requests,
            limits,
        };
        let other = container("other", mib(1), Resources::none());
        Request {
            owner: "p".into(),
            init_containers: vec![],
            containers: vec![container("c", mib(request), mib(limit)), other],
        }
    }

    fn high(qos: &MemoryQos, request: u64, limit: u64) -> Option<u64> {
        let request = burstable(request, limit);
        qos.container(&request, &request.containers[0]).high.map(|high| high.0 >> 20)
    }

    #[test]
    fn the_table_of_requests_below_a_limit_of_1000() {
        // KEP-2570, Alpha v1.27; the factor is 0.9 and a page 1 Mi.
        for (request, expected) in [
            (0, 900),
            (100, 910),
            (200, 920),
            (300, 930),
            (400, 940),
            (500, 950),
            (600, 960),
            (700, 970),
            (800, 980),
            (900, 990),
            (1000, 1000),
        ] {
            let high = ThrottlingFormula::AboveRequest.apply(
                Bytes::mib(request),
                Bytes::mib(1000),
                ThrottlingFormula::AboveRequest.default_factor(),
                Bytes::mib(1),
            );
            assert_eq!(high, Bytes::mib(expected), "request {request}");
        }
    }

    #[test]
    fn the_table_that_compares_the_formulas() {
        // KEP-2570; the limit is 1000 Mi and a page 1 Mi. None: `max`, or no throttling.
        for (request, factor, v1_22, v1_27) in [
            (500, "0.6", Some(600), Some(800)),
            (800, "0.6", None, Some(920)),
            (1000, "0.6", None, None),
            (500, "0.8", Some(800), Some(900)),
            (850, "0.8", None, Some(970)),
            (500, "0.4", None, Some(700)),
        ] {
            let page = Bytes::mib(1);
            for (formula, expected) in
                [(ThrottlingFormula::LimitShare, v1_22), (ThrottlingFormula::AboveRequest, v1_27)]
            {
                let got = high(&qos(formula, factor, page), request, 1000);
                assert_eq!(got, expected, "{formula:?}, request {request}, factor {factor}");
            }
        }
    }

    #[test]
    fn the_other_examples_of_the_kep() {
        let page = Bytes::mib(1);
        let v1_22 = |factor| qos(ThrottlingFormula::LimitShare, factor, page);
        let v1_27 = |factor| qos(ThrottlingFormula::AboveRequest, factor, page);
        // requests.memory=50, limits.memory=100, a factor of .8: 80.
        assert_eq!(high(&v1_22("0.8"), 50, 100), Some(80));
        // requests.memory=85: 80 would be below the request.
        assert_eq!(high(&v1_22("0.8"), 85, 100), None);
        // Without a limit the host's 2000 Mi count.
        assert_eq!(high(&v1_22("0.8"), 100, 0), Some(1600));
        assert_eq!(high(&v1_27("0.9"), 100, 0), Some(1810));
        // Without a request it is taken for zero.
        assert_eq!(high(&v1_27("0.9"), 0, 1000), Some(900));
        // A factor of 1 throttles at the limit.
        assert_eq!(high(&v1_27("1"), 100, 1000), Some(1000));
        // More than the host has cannot be throttled.
        assert_eq!(high(&v1_27("0.9"), 3000, 0), None);
        assert_eq!(ThrottlingFormula::LimitShare.default_factor(), factor("0.8"));
    }

    #[test]
    fn high_is_whole_pages_since_v1_27_only() {
        let page = Bytes::kib(4);
        let (request, limit) = (Bytes(0), Bytes(10_000));
        let f = factor("0.9");
        assert_eq!(ThrottlingFormula::AboveRequest.apply(request, limit, f, page), Bytes(8192));
        assert_eq!(ThrottlingFormula::LimitShare.apply(request, limit, f, page), Bytes(9000));
        assert_eq!(ThrottlingFormula::AboveRequest.apply(request, limit, f, Bytes(0)), Bytes(9000));
        let all = Bytes(u64::MAX);
        assert_eq!(ThrottlingFormula::LimitShare.apply(all, all, factor("1"), page), all);
    }

    #[test]
    fn classes_are_protected_in_tiers() {
        let qos = qos(ThrottlingFormula::AboveRequest, "0.9", Bytes::mib(1));
        let full = mib(100).with_cpu(Quantity::whole(1));
        let mut guaranteed = Request::workload("g", full.clone());
        let mut sidecar = ContainerRequest::guaranteed("s", full.clone());
        sidecar.restartable = true;
        let init = ContainerRequest::guaranteed("i", full);
        guaranteed.init_containers = vec![init, sidecar];
        let burstable = burstable(300, 1000);
        let best_effort = Request::workload("b", Resources::none());

        let min = |mib| MemorySettings { min: Some(Bytes::mib(mib)), ..MemorySettings::default() };
        let low = |mib| MemorySettings { low: Some(Bytes::mib(mib)), ..MemorySettings::default() };
        assert_eq!(qos.container(&guaranteed, &guaranteed.containers[0]), min(100), "never throttled");
        assert_eq!(qos.pod(&guaranteed, Bytes::mib(5)), min(205), "the sidecar and the overhead count");
        let throttled = MemorySettings { high: Some(Bytes::mib(930)), ..low(300) };
        assert_eq!(qos.container(&burstable, &burstable.containers[0]), throttled);
        assert_eq!(qos.pod(&burstable, Bytes(0)), low(301));
        let throttled = MemorySettings { high: Some(Bytes::mib(1800)), ..MemorySettings::default() };
        assert_eq!(qos.container(&best_effort, &best_effort.containers[0]), throttled);
        assert_eq!(qos.pod(&best_effort, Bytes::mib(7)), MemorySettings::default());

        let pods = [(&guaranteed, Bytes::mib(5)), (&burstable, Bytes(0)), (&best_effort, Bytes::mib(7))];
        let ancestors = AncestorSettings { pods: min(506), burstable: low(301) };
        assert_eq!(qos.ancestors(pods), ancestors);
        assert_eq!(qos.ancestors([]), MemoryQos::rollback(), "the last one resets the sums");
        let node = NodeSettings { kube_reserved: min(10), system_reserved: MemorySettings::default() };
        assert_eq!(qos.node(Some(Bytes::mib(10)), None), node);

        let off = MemoryQos { reservation: MemoryReservationPolicy::None, throttling: None, ..qos };
        assert_eq!(off.container(&burstable, &burstable.containers[0]), MemorySettings::default());
        assert_eq!(off.pod(&guaranteed, Bytes(0)), MemorySettings::default());
        assert_eq!(off.ancestors(pods), AncestorSettings::default());
    }

    #[test]
    fn factors_are_exact_and_in_range() {
        for text in ["0.8", "1", "0.000000001", "0.123456789"] {
            assert_eq!(factor(text).to_string(), text);
        }
        assert_eq!(factor("1.0"), factor("1"));
        assert_eq!(factor(".9"), factor("0.9000"));
        for text in ["", ".", "0", "0.0", "1.1", "-0.5", "2", "0.0000000001", "0,9", "nan", "1e-1"] {
            assert_eq!(text.parse::<ThrottlingFactor>(), Err(FactorError(text.to_owned())));
        }
        for (json, expected) in [("0.9", "0.9"), ("1", "1"), ("\"0.7\"", "0.7"), ("1.0", "1")] {
            assert_eq!(serde_json::from_str::<ThrottlingFactor>(json).unwrap(), factor(expected));
        }
        let error = serde_json::from_str::<ThrottlingFactor>("1.5").unwrap_err().to_string();
        assert!(error.contains("is 1.5; it must be greater than 0 and at most 1"), "{error}");
    }
}
