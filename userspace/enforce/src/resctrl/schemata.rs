//! Capabilities of the processor, and the shares of groups in the kernel's notation (`schemata`).

use std::{collections::BTreeMap, fmt::Write as _};

/// Values by resource and cache. Ids of caches may have gaps.
///
/// The kernel pads names and values with spaces, and the order of the lines differs by kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Schemata(BTreeMap<String, BTreeMap<u32, String>>);

impl Schemata {
    /// Parses the content of a file `schemata`. The error is the malformed line.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let line = |line: &str| {
            let (name, values) = line.split_once(':')?;
            let values = values.split(';').map(str::trim).filter(|value| !value.is_empty());
            let values = values.map(|value| {
                let (cache, value) = value.split_once('=')?;
                Some((cache.trim().parse().ok()?, value.trim().to_owned()))
            });
            Some((name.trim().to_owned(), values.collect::<Option<_>>()?))
        };
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        lines.map(|text| line(text).ok_or_else(|| text.trim().to_owned())).collect::<Result<_, _>>().map(Self)
    }

    /// Returns the masks of a resource by cache; `None` if the resource is missing or has other values.
    pub(super) fn masks(&self, resource: &str) -> Option<BTreeMap<u32, u64>> {
        let of = self.0.get(resource)?;
        of.iter().map(|(cache, mask)| Some((*cache, u64::from_str_radix(mask, 16).ok()?))).collect()
    }

    /// Returns the shares of memory bandwidth by cache, in the unit of this host; `None` if there are none.
    pub(super) fn bandwidth(&self) -> Option<BTreeMap<u32, u64>> {
        let of = self.0.get(BANDWIDTH)?;
        of.iter().map(|(cache, value)| Some((*cache, value.parse().ok()?))).collect()
    }
}

/// Ways of a group, by resource and cache.
pub(super) type WayMasks = Vec<(&'static str, BTreeMap<u32, u64>)>;

/// Returns all ways up to the highest one of these, so that the remaining ways are contiguous.
pub(super) fn up_to(ways: u64) -> u64 {
    u64::MAX.checked_shr(ways.leading_zeros()).unwrap_or(0)
}

/// Name of the memory bandwidth in `schemata` and below `info`.
pub(super) const BANDWIDTH: &str = "MB";

/// Formats the line that gives caches these values.
pub(super) fn line(resource: &str, values: impl Iterator<Item = (u32, String)>) -> String {
    let mut text = format!("{resource}:");
    for (number, (cache, value)) in values.enumerate() {
        let comma = if number == 0 { "" } else { ";" };
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}{cache}={value}");
    }
    // The kernel refuses a line without a newline.
    text.push('\n');
    text
}

/// Capabilities to divide L3 caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caches {
    /// Names in `schemata`: `L3`, or one for code and one for data.
    pub resources: Vec<&'static str>,
    /// Mask of all ways, one bit each.
    pub mask: u64,
    /// Minimum number of ways of a group.
    pub least: u32,
    /// Maximum number of groups, including the default one.
    pub groups: u32,
}

/// Capabilities to divide memory bandwidth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bandwidth {
    /// Minimum share, in percent if this host uses percent.
    pub least: u64,
    /// Shares are rounded up to a multiple of this.
    pub step: u64,
    /// Maximum number of groups, including the default one.
    pub groups: u32,
}

impl Bandwidth {
    /// Returns whether the kernel's value, which it has rounded up, is that of a share.
    pub(super) fn holds(&self, percent: u64, shown: u64) -> bool {
        shown >= percent && shown < percent.saturating_add(self.step.max(1))
    }
}

/// Capabilities to monitor groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Monitoring {
    /// Supported events: `llc_occupancy`, `mbm_total_bytes`, `mbm_local_bytes`.
    pub events: Vec<String>,
    /// Maximum number of monitored groups, including the default one.
    pub groups: u32,
}

/// Capabilities of the processor and the kernel of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// Division of L3 caches.
    pub caches: Option<Caches>,
    /// Division of memory bandwidth.
    pub bandwidth: Option<Bandwidth>,
    /// Monitoring.
    pub monitoring: Option<Monitoring>,
}

impl Info {
    /// Returns the reasons why classes cannot be held on this host, regardless of other groups.
    pub fn refused(&self, classes: &BTreeMap<String, ClassShare>) -> Vec<String> {
        let targets = targets(classes.iter().map(|(name, share)| (name.as_str(), *share)), self);
        let refused = targets.iter().filter_map(|(name, target)| {
            let problem = target.as_ref().err()?;
            Some(format!("class {name}: {problem}"))
        });
        let mut refused: Vec<String> = refused.collect();
        let exclusive =
            targets.iter().filter(|(name, _)| classes.get(**name).is_some_and(|of| of.is_exclusive));
        let exclusive = exclusive.filter_map(|(_, target)| target.as_ref().ok()?.mask);
        let exclusive = exclusive.fold(0, |all, ways| all | up_to(ways));
        if let Some(caches) = &self.caches {
            let (left, least) = ((caches.mask & !exclusive).count_ones(), caches.least.max(1));
            if left < least {
                refused.push(format!(
                    "all exclusive classes leave {left} of the ways to those without a class, which need {least}"
                ));
            }
        }
        refused
    }
}

/// Amount of the L3 caches that a class has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ways {
    /// Number of ways.
    Count(u32),
    /// Percentage of all ways, rounded down, but at least the kernel's minimum.
    Percent(u32),
}

/// Share of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassShare {
    /// Share of the L3 caches; `None` for the kernel's default, which is all ways.
    pub ways: Option<Ways>,
    /// Share of the memory bandwidth in percent; `None` for all.
    pub bandwidth_percent: Option<u32>,
    /// If true, no other group gets its ways.
    pub is_exclusive: bool,
}

/// Values that the group of a class should hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupTarget {
    pub(super) mask: Option<u64>,
    pub(super) bandwidth: Option<u64>,
}

/// Returns the values of the groups of all classes, or the reason why a class cannot be held. Classes with ways get the
/// lowest free ones in the order of names, exclusive classes first, so that the remaining ways are contiguous. The
/// position of a class therefore does not depend on which classes are in use. A class without ways has all except those
/// of exclusive ones.
pub(super) fn targets<'a>(
    classes: impl Iterator<Item = (&'a str, ClassShare)>,
    info: &Info,
) -> BTreeMap<&'a str, Result<GroupTarget, String>> {
    let (mut taken, mut exclusive) = (0, 0);
    let mut target = |share: ClassShare| {
        let own = share.ways.map(|ways| mask(ways, info.caches.as_ref(), &mut taken)).transpose()?;
        if share.is_exclusive {
            exclusive |= own.unwrap_or_default();
        }
        let others = info.caches.as_ref().filter(|_| own.is_none() && exclusive != 0);
        let others = others.map(|of| {
            let left = of.mask & !exclusive;
            let is_enough = left.count_ones() >= of.least.max(1);
            is_enough.then_some(left).ok_or_else(|| "exclusive classes leave it no ways".to_owned())
        });
        Ok(GroupTarget {
            mask: own.or(others.transpose()?),
            bandwidth: share
                .bandwidth_percent
                .map(|percent| bandwidth(percent, info.bandwidth.as_ref()))
                .transpose()?,
        })
    };
    let (first, then): (Vec<_>, Vec<_>) = classes.partition(|(_, share)| share.is_exclusive);
    first.into_iter().chain(then).map(|(name, share)| (name, target(share))).collect()
}

fn mask(ways: Ways, caches: Option<&Caches>, taken: &mut u32) -> Result<u64, String> {
    let Some(caches) = caches else {
        return Err("the L3 cache cannot be shared out on this host (there is no info/L3)".to_owned());
    };
    // AMD's processors accept an empty mask.
    let (all, least) = (caches.mask.count_ones(), caches.least.max(1));
    let count = match ways {
        Ways::Count(count) => count,
        Ways::Percent(percent) => (all * percent / 100).max(least),
    };
    if count < least {
        return Err(format!("{count} of the L3 cache's ways are fewer than the kernel takes: {least}"));
    }
    let left = all.saturating_sub(*taken);
    if count > left {
        return Err(format!(
            "{count} of the L3 cache's ways are asked for: it has {all}, of which classes before it have {taken}"
        ));
    }
    let mask = (u64::MAX >> (64 - count)) << *taken;
    *taken += count;
    Ok(mask)
}

fn bandwidth(percent: u32, bandwidth: Option<&Bandwidth>) -> Result<u64, String> {
    let percent = u64::from(percent);
    match bandwidth {
        None => Err("memory bandwidth cannot be shared out on this host (there is no info/MB)".to_owned()),
        Some(of) if percent < of.least => {
            Err(format!("{percent} % of the memory bandwidth is less than the kernel takes: {} %", of.least))
        }
        Some(_) => Ok(percent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_padded_schemata() {
        let text = "    MB:0=2048;1=  16\n    L3:0=ffff;3=00f0\n  SMBA:0=2048\n";
        let read = Schemata::parse(text).unwrap();
        assert_eq!(read.masks("L3"), Some([(0, 0xffff), (3, 0xf0)].into()));
        assert_eq!(read.bandwidth(), Some([(0, 2048), (1, 16)].into()));
        assert_eq!(read.masks("L3CODE"), None);
        for wrong in ["L3", "L3:0", "L3:x=f", "L3:0=f\nMB=1"] {
            assert!(Schemata::parse(wrong).is_err(), "{wrong}");
        }
        // A value that is no number is `None`, and causes no panic.
        assert_eq!(Schemata::parse("L3:0=zz\nMB:0=\n").unwrap().masks("L3"), None);
        let values = [(0, "f0".to_owned()), (3, "f".to_owned())];
        assert_eq!(line("L3", values.into_iter()), "L3:0=f0;3=f\n");
    }

    fn info() -> Info {
        Info {
            caches: Some(Caches { resources: vec!["L3"], mask: 0xf_ffff, least: 2, groups: 16 }),
            bandwidth: Some(Bandwidth { least: 10, step: 10, groups: 8 }),
            monitoring: None,
        }
    }

    fn share(ways: Option<Ways>, bandwidth_percent: Option<u32>) -> ClassShare {
        ClassShare { ways, bandwidth_percent, is_exclusive: false }
    }

    #[test]
    fn exclusive_class_gets_lowest_ways() {
        let exclusive = |ways| ClassShare { is_exclusive: true, ..share(Some(Ways::Count(ways)), None) };
        let classes = [
            ("a", share(Some(Ways::Count(4)), None)),
            ("b", exclusive(2)),
            ("c", share(None, Some(50))),
            ("d", exclusive(40)),
            ("e", exclusive(3)),
        ];
        let found = targets(classes.into_iter(), &info());
        let mask = |name: &str| found[name].as_ref().map(|of| of.mask);
        assert_eq!((mask("b"), mask("e")), (Ok(Some(0x3)), Ok(Some(0x1c))));
        assert_eq!((mask("a"), mask("c")), (Ok(Some(0x1e0)), Ok(Some(0xf_ffe0))));
        assert!(found["d"].as_ref().unwrap_err().contains("40 of the L3 cache's ways are asked for"));
        let refused = |classes: &[(&str, ClassShare)]| {
            info().refused(&classes.iter().map(|(name, share)| ((*name).to_owned(), *share)).collect())
        };
        assert_eq!(refused(&classes).len(), 1);
        let most = [("a", exclusive(10)), ("b", exclusive(9))];
        assert_eq!(
            refused(&most),
            ["all exclusive classes leave 1 of the ways to those without a class, which need 2"]
        );
        assert!(refused(&[("a", exclusive(10)), ("b", share(Some(Ways::Count(10)), None))]).is_empty());
    }

    #[test]
    fn classes_get_separate_ways() {
        let classes = [
            ("a", share(Some(Ways::Count(4)), None)),
            ("b", share(None, Some(25))),
            ("c", share(Some(Ways::Percent(50)), Some(100))),
            ("d", share(Some(Ways::Percent(1)), None)),
            ("e", share(Some(Ways::Count(5)), None)),
            ("f", share(Some(Ways::Count(4)), None)),
            ("g", share(Some(Ways::Count(1)), None)),
        ];
        let found = targets(classes.into_iter(), &info());
        let of = |name: &str| found[name].clone();
        assert_eq!(of("a"), Ok(GroupTarget { mask: Some(0xf), bandwidth: None }));
        assert_eq!(of("b"), Ok(GroupTarget { mask: None, bandwidth: Some(25) }));
        assert_eq!(of("c"), Ok(GroupTarget { mask: Some(0x3ff0), bandwidth: Some(100) }));
        assert_eq!(
            of("d"),
            Ok(GroupTarget { mask: Some(0xc000), bandwidth: None }),
            "no fewer than the kernel takes"
        );
        assert!(
            of("e").unwrap_err().contains("it has 20, of which classes before it have 16"),
            "{:?}",
            of("e")
        );
        assert_eq!(of("f"), Ok(GroupTarget { mask: Some(0xf_0000), bandwidth: None }));
        assert!(of("g").unwrap_err().contains("fewer than the kernel takes: 2"));
    }

    #[test]
    fn reports_missing_capabilities() {
        let info = Info { bandwidth: Some(Bandwidth { least: 10, step: 10, groups: 8 }), ..Info::default() };
        let classes = [
            ("a", share(Some(Ways::Count(4)), None)),
            ("b", share(None, Some(5))),
            ("c", share(None, Some(10))),
        ];
        let found = targets(classes.into_iter(), &info);
        assert!(found["a"].as_ref().unwrap_err().contains("info/L3"));
        assert!(found["b"].as_ref().unwrap_err().contains("less than the kernel takes: 10 %"));
        assert!(found["c"].is_ok());
        let found = targets([("b", share(None, Some(50)))].into_iter(), &Info::default());
        assert!(found["b"].as_ref().unwrap_err().contains("info/MB"));
        // If the kernel accepts an empty mask, a class has at least one way.
        let caches = Caches { resources: vec!["L3"], mask: 0xffff, least: 0, groups: 16 };
        let info = Info { caches: Some(caches), ..Info::default() };
        let classes = [("a", share(Some(Ways::Percent(5)), None)), ("b", share(Some(Ways::Count(0)), None))];
        let found = targets(classes.into_iter(), &info);
        assert_eq!(found["a"], Ok(GroupTarget { mask: Some(1), bandwidth: None }));
        assert!(found["b"].is_err());
        // All 64 bits do not overflow.
        let caches = Caches { resources: vec!["L3"], mask: u64::MAX, least: 1, groups: 2 };
        let info = Info { caches: Some(caches), ..Info::default() };
        let found = targets([("a", share(Some(Ways::Percent(100)), None))].into_iter(), &info);
        assert_eq!(found["a"], Ok(GroupTarget { mask: Some(u64::MAX), bandwidth: None }));
    }

    #[test]
    fn accepts_rounded_share() {
        let of = Bandwidth { least: 10, step: 10, groups: 8 };
        for (percent, shown, holds) in
            [(25, 30, true), (25, 25, true), (25, 40, false), (25, 20, false), (100, 100, true)]
        {
            assert_eq!(of.holds(percent, shown), holds, "{percent} {shown}");
        }
    }
}
