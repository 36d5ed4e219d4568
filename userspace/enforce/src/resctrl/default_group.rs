//! Cache ways that the default group loses to exclusive classes, and its original masks.
//!
//! # Problem
//! Threads without a class are in the default group, which has all ways. While workloads have an exclusive class, its
//! ways are removed from that group, and are restored afterwards. Another program may have given the group another mask
//! before, or may do so meanwhile.
//!
//! # Algorithm
//! [`obstacle`] returns the reason why a class cannot be held. [`plan`] compares the present masks with the original
//! and the written ones. The masks to write are stored first, with the original ones.
//!
//! # Invariants
//! Only a mask that is the original one, or that is stored as written, is replaced. Any other mask belongs to another
//! program, and stays.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::schemata::{WayMasks, up_to};

/// Masks of the default group before and after its reduction, by resource (`L3`, or `L3CODE` and `L3DATA`) and id of
/// the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReducedWays(BTreeMap<String, BTreeMap<u32, Masks>>);

impl ReducedWays {
    /// Returns whether the default group is not reduced.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn masks(&self, resource: &str, cache: u32) -> Option<&Masks> {
        self.0.get(resource)?.get(&cache)
    }
}

/// Masks of the default group on one cache, one bit per way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Masks {
    found: u64,
    /// Masks that the daemon may have written: more than one while one replaces the other.
    written: BTreeSet<u64>,
}

impl Masks {
    /// Returns whether this is the original or a written mask.
    fn is(&self, shown: u64) -> bool {
        self.found == shown || self.written.contains(&shown)
    }
}

/// Writes to the default group.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct WayPlan {
    /// State to store before the writes.
    pub(super) reduced: ReducedWays,
    /// Masks to write, by resource and cache.
    pub(super) writes: BTreeMap<String, BTreeMap<u32, u64>>,
}

/// Returns the reason why the default group, which has the masks `shown` and must keep at least `least` ways, cannot
/// lose the ways in `ways`.
pub(super) fn obstacle(shown: &WayMasks, ways: u64, before: &ReducedWays, least: u32) -> Option<String> {
    let masks = shown.iter().flat_map(|(resource, caches)| caches.iter().map(move |of| (*resource, of)));
    masks.into_iter().find_map(|(resource, (cache, shown))| {
        let known = before.masks(resource, *cache);
        if known.is_some_and(|of| !of.is(*shown)) {
            return (shown & ways != 0).then(|| {
                format!(
                    "another program has given the default group {resource}:{cache}={shown:x}, which has some of the ways of the class"
                )
            });
        }
        let left = (known.map_or(*shown, |of| of.found) & !up_to(ways)).count_ones();
        let least = least.max(1);
        (left < least).then(|| {
            format!("it would leave {left} of the ways of {resource}:{cache} to those without a class, which need {least}")
        })
    })
}

/// Plans the writes after which the default group, which has the masks `shown`, has none of the ways in `taken`. While
/// an exclusive class is in use, the original masks are kept even if another program has written since.
pub(super) fn plan(shown: &WayMasks, taken: u64, before: &ReducedWays, is_any_in_use: bool) -> WayPlan {
    let mut plan = WayPlan::default();
    for (resource, caches) in shown {
        for (&cache, &shown) in caches {
            let known = before.masks(resource, cache);
            let is_ours = known.is_none_or(|of| of.is(shown));
            let found = known.map_or(shown, |of| of.found);
            let wanted = found & !taken;
            let writes = is_ours && shown != wanted;
            if writes {
                plan.writes.entry((*resource).to_owned()).or_default().insert(cache, wanted);
            }
            let mut written = known.map(|of| of.written.clone()).unwrap_or_default();
            if is_ours {
                written.retain(|mask| *mask == shown);
                written.insert(wanted);
            }
            if taken != 0 || writes || (!is_ours && is_any_in_use) {
                let masks = Masks { found, written };
                plan.reduced.0.entry((*resource).to_owned()).or_default().insert(cache, masks);
            }
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(shown: [u64; 2]) -> WayMasks {
        vec![("L3", [(0, shown[0]), (3, shown[1])].into())]
    }

    fn plan_masks(of: [u64; 2], taken: u64, before: &ReducedWays) -> WayPlan {
        plan(&shown(of), taken, before, taken != 0)
    }

    fn writes(plan: &WayPlan) -> Vec<(u32, u64)> {
        plan.writes.values().flatten().map(|(cache, mask)| (*cache, *mask)).collect()
    }

    #[test]
    fn takes_and_restores_ways() {
        assert_eq!(plan_masks([0xfff, 0xfff], 0, &ReducedWays::default()), WayPlan::default());
        let first = plan_masks([0xfff, 0xf0f], 0x3f, &ReducedWays::default());
        assert_eq!(writes(&first), [(0, 0xfc0), (3, 0xf00)]);
        // The stored state is sufficient after a crash, before or after the write.
        for shown in [[0xfff, 0xf0f], [0xfc0, 0xf0f]] {
            let again = plan_masks(shown, 0x3f, &first.reduced);
            assert!(again.writes.contains_key("L3"));
            assert_eq!(again.reduced, first.reduced, "nothing new is to be stored");
        }
        let kept = plan_masks([0xfc0, 0xf00], 0x3f, &first.reduced);
        assert_eq!((writes(&kept), &kept.reduced), (Vec::new(), &first.reduced));
        // A second class is added.
        let more = plan_masks([0xfc0, 0xf00], 0xff, &first.reduced);
        assert_eq!(writes(&more), [(0, 0xf00)], "the other has none of them");
        let halfway = plan_masks([0xfc0, 0xf00], 0xff, &more.reduced);
        assert_eq!((writes(&halfway), &halfway.reduced), (vec![(0, 0xf00)], &more.reduced));
        let back = plan_masks([0xf00, 0xf00], 0, &more.reduced);
        assert_eq!(writes(&back), [(0, 0xfff), (3, 0xf0f)]);
        assert_eq!(plan_masks([0xfff, 0xf0f], 0, &back.reduced), WayPlan::default());
        let text = serde_json::to_string(&first.reduced).unwrap();
        assert_eq!(serde_json::from_str::<ReducedWays>(&text).unwrap(), first.reduced, "{text}");
    }

    #[test]
    fn keeps_masks_of_other_programs() {
        let first = plan_masks([0xfff, 0xfff], 0x3f, &ReducedWays::default());
        let why = |of, ways| obstacle(&shown(of), ways, &first.reduced, 2);
        let other = plan_masks([0x00f, 0xfc0], 0x3f, &first.reduced);
        assert_eq!((writes(&other), &other.reduced), (Vec::new(), &first.reduced));
        assert!(
            why([0x00f, 0xfc0], 0x3f).unwrap().contains("L3:0=f, which has some of the ways of the class")
        );
        assert_eq!(why([0x00f, 0xfc0], 0x30), None, "it has none of these");
        assert_eq!(why([0xfc0, 0xfff], 0x3f), None, "both are known");
        assert_eq!(writes(&plan_masks([0x00f, 0xfc0], 0, &first.reduced)), [(3, 0xfff)]);
        let refused = plan(&shown([0x00f, 0xfff]), 0, &first.reduced, true);
        assert!(
            refused.writes.is_empty() && refused.reduced.masks("L3", 0).is_some_and(|of| of.found == 0xfff)
        );
        assert!(refused.reduced.masks("L3", 3).is_none());
    }

    #[test]
    fn default_group_keeps_least_ways() {
        let none = ReducedWays::default();
        let left = |of, ways, least| obstacle(&shown(of), ways, &none, least);
        let why = left([0xfff, 0xfff], 0x7ff, 2).unwrap();
        assert!(
            why.starts_with("it would leave 1 of the ways of L3:0") && why.ends_with("which need 2"),
            "{why}"
        );
        assert_eq!(left([0xfff, 0xfff], 0x7ff, 0), None);
        assert!(left([0xfff, 0xfff], 0xfff, 0).is_some(), "also where the kernel takes an empty mask");
        assert!(left([0xfff, 0x0ff], 0xf0, 2).unwrap().contains("L3:3"));
        assert_eq!((up_to(0), up_to(0x30), up_to(1 << 63)), (0, 0x3f, u64::MAX));
    }

    #[test]
    fn restores_no_way_removed_before() {
        let first = plan_masks([0xfc0, 0xfc0], 0x3f, &ReducedWays::default());
        assert!(first.writes.is_empty() && !first.reduced.is_empty());
        assert_eq!(plan_masks([0xfc0, 0xfc0], 0, &first.reduced), WayPlan::default());
        assert_eq!(writes(&plan_masks([0xfff, 0xfc0], 0x3f, &first.reduced)), [], "another program's by now");
    }
}
