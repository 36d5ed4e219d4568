//! What the processor can share out, and what a group of the kernel's tree holds of it.

use std::{collections::BTreeMap, fmt::Write as _};

/// The value of each cache (by its id, which need not be without gaps), by resource.
///
/// The kernel pads names and values with spaces, and the order of the lines differs by kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Schemata(BTreeMap<String, BTreeMap<u32, String>>);

impl Schemata {
    /// Reads the text of a file `schemata`; a line that is none is an error with that line.
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

    /// The masks of a resource by cache; none if it is not there, or holds something else.
    pub(super) fn masks(&self, resource: &str) -> Option<BTreeMap<u32, u64>> {
        let of = self.0.get(resource)?;
        of.iter().map(|(cache, mask)| Some((*cache, u64::from_str_radix(mask, 16).ok()?))).collect()
    }

    /// The shares of memory bandwidth by cache, in whatever unit this host has; none if there are none.
    pub(super) fn bandwidth(&self) -> Option<BTreeMap<u32, u64>> {
        let of = self.0.get(BANDWIDTH)?;
        of.iter().map(|(cache, value)| Some((*cache, value.parse().ok()?))).collect()
    }
}

/// The ways that a group has, by resource and cache.
pub(super) type Shown = Vec<(&'static str, BTreeMap<u32, u64>)>;

/// The ways up to the highest one of these: what a group is left with has no gaps then.
pub(super) fn up_to(ways: u64) -> u64 {
    u64::MAX.checked_shr(ways.leading_zeros()).unwrap_or(0)
}

/// Memory bandwidth, in `schemata` and below `info`.
pub(super) const BANDWIDTH: &str = "MB";

/// The line that gives caches these values.
pub(super) fn line(resource: &str, values: impl Iterator<Item = (u32, String)>) -> String {
    let mut text = format!("{resource}:");
    for (number, (cache, value)) in values.enumerate() {
        let comma = if number == 0 { "" } else { ";" };
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}{cache}={value}");
    }
    // Without it, the kernel takes nothing.
    text.push('\n');
    text
}

/// The L3 caches as far as they can be shared out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caches {
    /// What they are called in `schemata`: `L3`, or one for code and one for data.
    pub resources: Vec<&'static str>,
    /// All ways, a bit each.
    pub mask: u64,
    /// The fewest ways that a group can have.
    pub least: u32,
    /// How many groups there can be, with the default one.
    pub groups: u32,
}

/// Memory bandwidth as far as it can be shared out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bandwidth {
    /// The smallest share, in percent where this host has percent.
    pub least: u64,
    /// Shares are rounded up to the next multiple of this.
    pub step: u64,
    /// How many groups there can be, with the default one.
    pub groups: u32,
}

impl Bandwidth {
    /// Whether a share is held by what the kernel shows, which it has rounded up.
    pub(super) fn holds(&self, percent: u64, shown: u64) -> bool {
        shown >= percent && shown < percent.saturating_add(self.step.max(1))
    }
}

/// What can be counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Monitoring {
    /// Its events: `llc_occupancy`, `mbm_total_bytes`, `mbm_local_bytes`.
    pub events: Vec<String>,
    /// How many groups can be counted, with the default one.
    pub groups: u32,
}

/// What the processor and the kernel of this host can do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// Sharing out of L3 caches.
    pub caches: Option<Caches>,
    /// Sharing out of memory bandwidth.
    pub bandwidth: Option<Bandwidth>,
    /// Counting.
    pub monitoring: Option<Monitoring>,
}

impl Info {
    /// What of these classes cannot be held on this host, whatever else there is in its tree.
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

/// How much of the L3 caches a class has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ways {
    /// So many ways.
    Count(u32),
    /// This part of all ways, rounded down, but no fewer than the kernel takes.
    Percent(u32),
}

/// What a class has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassShare {
    /// Of the L3 caches; none: all of them, as the kernel gives it.
    pub ways: Option<Ways>,
    /// Of the memory bandwidth, in percent; none: all of it.
    pub bandwidth_percent: Option<u32>,
    /// Whether nobody else is to have its ways.
    pub is_exclusive: bool,
}

/// What the group of a class is to hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) mask: Option<u64>,
    pub(super) bandwidth: Option<u64>,
}

/// What the groups of all classes are to hold, or why that cannot be: each class that names ways has its own, the lowest that
/// are left, in the order of names, exclusive ones first, so that what is left for others has no gaps. So where a class lies
/// does not depend on which of them are in use. A class that names none has all but those of exclusive ones.
pub(super) fn targets<'a>(
    classes: impl Iterator<Item = (&'a str, ClassShare)>,
    info: &Info,
) -> BTreeMap<&'a str, Result<Target, String>> {
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
        Ok(Target {
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
    // AMD's processors take none at all.
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
    fn schemata_are_read_however_the_kernel_pads_them() {
        let text = "    MB:0=2048;1=  16\n    L3:0=ffff;3=00f0\n  SMBA:0=2048\n";
        let read = Schemata::parse(text).unwrap();
        assert_eq!(read.masks("L3"), Some([(0, 0xffff), (3, 0xf0)].into()));
        assert_eq!(read.bandwidth(), Some([(0, 2048), (1, 16)].into()));
        assert_eq!(read.masks("L3CODE"), None);
        for wrong in ["L3", "L3:0", "L3:x=f", "L3:0=f\nMB=1"] {
            assert!(Schemata::parse(wrong).is_err(), "{wrong}");
        }
        // A word that is no number is no value, and no panic.
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

    fn of(ways: Option<Ways>, bandwidth_percent: Option<u32>) -> ClassShare {
        ClassShare { ways, bandwidth_percent, is_exclusive: false }
    }

    #[test]
    fn exclusive_ways_are_the_lowest_and_no_other_class_has_them() {
        let exclusive = |ways| ClassShare { is_exclusive: true, ..of(Some(Ways::Count(ways)), None) };
        let classes = [
            ("a", of(Some(Ways::Count(4)), None)),
            ("b", exclusive(2)),
            ("c", of(None, Some(50))),
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
        assert!(refused(&[("a", exclusive(10)), ("b", of(Some(Ways::Count(10)), None))]).is_empty());
    }

    #[test]
    fn each_class_has_ways_of_its_own_from_the_lowest() {
        let classes = [
            ("a", of(Some(Ways::Count(4)), None)),
            ("b", of(None, Some(25))),
            ("c", of(Some(Ways::Percent(50)), Some(100))),
            ("d", of(Some(Ways::Percent(1)), None)),
            ("e", of(Some(Ways::Count(5)), None)),
            ("f", of(Some(Ways::Count(4)), None)),
            ("g", of(Some(Ways::Count(1)), None)),
        ];
        let found = targets(classes.into_iter(), &info());
        let of = |name: &str| found[name].clone();
        assert_eq!(of("a"), Ok(Target { mask: Some(0xf), bandwidth: None }));
        assert_eq!(of("b"), Ok(Target { mask: None, bandwidth: Some(25) }));
        assert_eq!(of("c"), Ok(Target { mask: Some(0x3ff0), bandwidth: Some(100) }));
        assert_eq!(
            of("d"),
            Ok(Target { mask: Some(0xc000), bandwidth: None }),
            "no fewer than the kernel takes"
        );
        assert!(
            of("e").unwrap_err().contains("it has 20, of which classes before it have 16"),
            "{:?}",
            of("e")
        );
        assert_eq!(of("f"), Ok(Target { mask: Some(0xf_0000), bandwidth: None }));
        assert!(of("g").unwrap_err().contains("fewer than the kernel takes: 2"));
    }

    #[test]
    fn what_the_host_does_not_have_is_said() {
        let info = Info { bandwidth: Some(Bandwidth { least: 10, step: 10, groups: 8 }), ..Info::default() };
        let classes =
            [("a", of(Some(Ways::Count(4)), None)), ("b", of(None, Some(5))), ("c", of(None, Some(10)))];
        let found = targets(classes.into_iter(), &info);
        assert!(found["a"].as_ref().unwrap_err().contains("info/L3"));
        assert!(found["b"].as_ref().unwrap_err().contains("less than the kernel takes: 10 %"));
        assert!(found["c"].is_ok());
        let found = targets([("b", of(None, Some(50)))].into_iter(), &Info::default());
        assert!(found["b"].as_ref().unwrap_err().contains("info/MB"));
        // Where the kernel takes an empty mask, a class has one way at least.
        let caches = Caches { resources: vec!["L3"], mask: 0xffff, least: 0, groups: 16 };
        let info = Info { caches: Some(caches), ..Info::default() };
        let classes = [("a", of(Some(Ways::Percent(5)), None)), ("b", of(Some(Ways::Count(0)), None))];
        let found = targets(classes.into_iter(), &info);
        assert_eq!(found["a"], Ok(Target { mask: Some(1), bandwidth: None }));
        assert!(found["b"].is_err());
        // All 64 bits do not overflow.
        let caches = Caches { resources: vec!["L3"], mask: u64::MAX, least: 1, groups: 2 };
        let info = Info { caches: Some(caches), ..Info::default() };
        let found = targets([("a", of(Some(Ways::Percent(100)), None))].into_iter(), &info);
        assert_eq!(found["a"], Ok(Target { mask: Some(u64::MAX), bandwidth: None }));
    }

    #[test]
    fn a_share_that_was_rounded_up_is_held() {
        let of = Bandwidth { least: 10, step: 10, groups: 8 };
        for (percent, shown, holds) in
            [(25, 30, true), (25, 25, true), (25, 40, false), (25, 20, false), (100, 100, true)]
        {
            assert_eq!(of.holds(percent, shown), holds, "{percent} {shown}");
        }
    }
}
