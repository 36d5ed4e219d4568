//! Memory `QoS`: derives `memory.min`, `memory.low` and `memory.high` of cgroup v2 from requests and limits.
//!
//! - *Reservation* protects requested memory from reclaim: strictly for Guaranteed owners (`memory.min`), as far as
//!   possible for Burstable ones (`memory.low`).
//! - *Throttling* slows a container down before it reaches its limit (`memory.high`).
//!
//! A setting of `None` is not written. Sizes are bytes. A factor is a fraction of integers, not a floating-point
//! number.
//!
//! Source: KEP-2570, as of Kubernetes v1.27 and later; the throttling formula also as of v1.22.

use std::{fmt, str::FromStr};

use numaward_topology::{Bytes, ZoneKind};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

pub use crate::policy_names::ThrottlingFormula;
use crate::{
    qos::QosClass,
    quantity::Quantity,
    request::{ContainerRequest, Request, Resources},
};

/// Protection of requested memory from reclaim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryReservationPolicy {
    /// No protection.
    #[default]
    None,
    /// Strict protection for Guaranteed owners, protection as far as possible for Burstable ones.
    TieredReservation,
}

/// Factor in (0, 1], exact to billionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ThrottlingFactor {
    billionths: u32,
}

/// Error for a factor outside of (0, 1].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory throttling factor is {0}; it must be greater than 0 and at most 1, such as 0.9")]
pub struct FactorError(pub String);

impl ThrottlingFactor {
    /// Default of the kubelet.
    pub const KUBELET_DEFAULT: Self = Self { billionths: 900_000_000 };

    /// Returns this fraction of a number of bytes.
    fn apply(self, bytes: u64) -> u64 {
        let share = u128::from(bytes) * u128::from(self.billionths) / 1_000_000_000;
        // The factor is at most one, so the result fits.
        u64::try_from(share).unwrap_or(bytes)
    }
}

impl ThrottlingFormula {
    /// Returns the value of `memory.high` in whole pages, even if it is not meaningful. `ceiling` is the limit or,
    /// without one, the allocatable memory of the host. A request above the ceiling counts as the ceiling.
    fn high(self, factor: ThrottlingFactor, request: Bytes, ceiling: Bytes, page_size: Bytes) -> Bytes {
        let exact = match self {
            Self::V1_22 => factor.apply(ceiling.0),
            Self::V1_27 => {
                let above = factor.apply(ceiling.0.saturating_sub(request.0));
                request.0.min(ceiling.0).saturating_add(above)
            }
        };
        Bytes(exact - exact % page_size.0.max(1))
    }
}

impl FromStr for ThrottlingFactor {
    type Err = FactorError;

    /// Parses a decimal fraction such as `0.9` with at most nine decimals.
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
    /// Serializes as text, which is exact.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ThrottlingFactor {
    /// Accepts a number or its text.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Spelling {
            Integer(i64),
            // The shortest decimal form of a floating-point number has the digits that were written.
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

/// Settings of one cgroup. `None` leaves the knob unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemorySettings {
    /// Value of `memory.min`.
    pub min: Option<Bytes>,
    /// Value of `memory.low`.
    pub low: Option<Bytes>,
    /// Value of `memory.high`.
    pub high: Option<Bytes>,
}

/// Configuration of Memory `QoS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryQos {
    pub reservation: MemoryReservationPolicy,
    /// Throttling factor; `None` switches throttling off.
    pub throttling: Option<ThrottlingFactor>,
    /// Formula for `memory.high`.
    pub formula: ThrottlingFormula,
    /// Size of a base page.
    pub page_size: Bytes,
    /// Allocatable memory of the host over all nodes: the ceiling of containers without a limit.
    pub node_allocatable: Bytes,
}

fn memory(resources: &Resources) -> Bytes {
    let quantity = resources.memory.get(&ZoneKind::Memory).copied();
    Bytes(quantity.map_or(0, |quantity: Quantity| quantity.units().unwrap_or(u64::MAX)))
}

fn positive(bytes: Bytes) -> Option<Bytes> {
    Some(bytes).filter(|bytes| bytes.0 > 0)
}

impl MemoryQos {
    /// Returns the settings of a container.
    pub fn container(&self, request: &Request, container: &ContainerRequest) -> MemorySettings {
        self.container_settings(request.qos(), memory(&container.requests), memory(&container.limits))
    }

    /// Returns the settings of a container of an owner with this class, for these amounts. A limit of zero means no
    /// limit.
    pub fn container_settings(&self, class: QosClass, requested: Bytes, limit: Bytes) -> MemorySettings {
        let high = self.throttling.filter(|_| class != QosClass::Guaranteed).and_then(|factor| {
            let ceiling = positive(limit).unwrap_or(self.node_allocatable);
            let high = self.formula.high(factor, requested, ceiling, self.page_size);
            // A value at or below the request would throttle guaranteed memory.
            Some(high).filter(|&high| high > requested)
        });
        let protected =
            positive(requested).filter(|_| self.reservation == MemoryReservationPolicy::TieredReservation);
        MemorySettings {
            min: protected.filter(|_| class == QosClass::Guaranteed),
            low: protected.filter(|_| class == QosClass::Burstable),
            high,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factor(text: &str) -> ThrottlingFactor {
        text.parse().unwrap()
    }

    fn qos(text: &str, page_size: Bytes) -> MemoryQos {
        MemoryQos {
            reservation: MemoryReservationPolicy::TieredReservation,
            throttling: Some(factor(text)),
            formula: ThrottlingFormula::V1_27,
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

    /// Makes a pod that is Burstable because of its second container.
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
            resources: None,
        }
    }

    fn high(qos: &MemoryQos, request: u64, limit: u64) -> Option<u64> {
        let request = burstable(request, limit);
        qos.container(&request, &request.containers[0]).high.map(|high| high.0 >> 20)
    }

    #[test]
    fn matches_kep_table_of_requests() {
        // KEP-2570, Alpha v1.27: the factor is 0.9 and a page has 1 Mi.
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
            let formula = ThrottlingFormula::default();
            let high = formula.high(factor("0.9"), Bytes::mib(request), Bytes::mib(1000), Bytes::mib(1));
            assert_eq!(high, Bytes::mib(expected), "request {request}");
        }
    }

    #[test]
    fn matches_kep_table_of_factors() {
        // KEP-2570: the limit is 1000 Mi and a page has 1 Mi. `None` stands for `max`, or no throttling.
        for (request, factor, expected) in [
            (500, "0.6", Some(800)),
            (800, "0.6", Some(920)),
            (1000, "0.6", None),
            (500, "0.8", Some(900)),
            (850, "0.8", Some(970)),
            (500, "0.4", Some(700)),
        ] {
            let got = high(&qos(factor, Bytes::mib(1)), request, 1000);
            assert_eq!(got, expected, "request {request}, factor {factor}");
        }
    }

    #[test]
    fn matches_other_kep_examples() {
        let qos = |factor| qos(factor, Bytes::mib(1));
        // Without a limit, the host's 2000 Mi count.
        assert_eq!(high(&qos("0.9"), 100, 0), Some(1810));
        // Without a request, zero counts.
        assert_eq!(high(&qos("0.9"), 0, 1000), Some(900));
        // A factor of 1 throttles at the limit.
        assert_eq!(high(&qos("1"), 100, 1000), Some(1000));
        // A request above the host's memory is not throttled.
        assert_eq!(high(&qos("0.9"), 3000, 0), None);
    }

    #[test]
    fn v1_22_formula_scales_the_limit() {
        // KEP-2570, Alpha v1.22: the limit is 1000 Mi and the host has 2000 Mi.
        for (request, limit, factor, expected) in [
            (0, 1000, "0.8", Some(800)),
            (500, 1000, "0.8", Some(800)),
            (800, 1000, "0.8", None),
            (900, 1000, "0.8", None),
            (500, 1000, "0.6", Some(600)),
            (100, 0, "0.9", Some(1800)),
        ] {
            let qos = MemoryQos { formula: ThrottlingFormula::V1_22, ..qos(factor, Bytes::mib(1)) };
            assert_eq!(high(&qos, request, limit), expected, "request {request}, factor {factor}");
        }
    }

    #[test]
    fn high_is_whole_pages() {
        let page = Bytes::kib(4);
        let (request, limit) = (Bytes(0), Bytes(10_000));
        let all = Bytes(u64::MAX);
        for formula in [ThrottlingFormula::V1_22, ThrottlingFormula::V1_27] {
            assert_eq!(formula.high(factor("0.9"), request, limit, page), Bytes(8192));
            assert_eq!(formula.high(factor("0.9"), request, limit, Bytes(0)), Bytes(9000));
            assert_eq!(formula.high(factor("1"), request, all, Bytes(1)), all);
        }
    }

    #[test]
    fn classes_are_protected_in_tiers() {
        let qos = qos("0.9", Bytes::mib(1));
        let full = mib(100).with_cpu(Quantity::whole(1));
        let guaranteed = Request::workload("g", full);
        let burstable = burstable(300, 1000);
        let best_effort = Request::workload("b", Resources::none());

        let min = |mib| MemorySettings { min: Some(Bytes::mib(mib)), ..MemorySettings::default() };
        let low = |mib| MemorySettings { low: Some(Bytes::mib(mib)), ..MemorySettings::default() };
        assert_eq!(qos.container(&guaranteed, &guaranteed.containers[0]), min(100), "never throttled");
        let throttled = MemorySettings { high: Some(Bytes::mib(930)), ..low(300) };
        assert_eq!(qos.container(&burstable, &burstable.containers[0]), throttled);
        let throttled = MemorySettings { high: Some(Bytes::mib(1800)), ..MemorySettings::default() };
        assert_eq!(qos.container(&best_effort, &best_effort.containers[0]), throttled);

        let off = MemoryQos { reservation: MemoryReservationPolicy::None, throttling: None, ..qos };
        assert_eq!(off.container(&burstable, &burstable.containers[0]), MemorySettings::default());
    }

    #[test]
    fn factor_is_exact_and_in_range() {
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
