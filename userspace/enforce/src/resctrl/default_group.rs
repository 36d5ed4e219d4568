//! Ways that the default group gives up for exclusive classes, and what it had before.
//!
//! Problem: who has no class is in the default group, which has all ways. While workloads have an exclusive class, its ways are
//! taken from that group, and come back afterwards. Others may have given the group another share before, or do so meanwhile.
//!
//! Algorithm: [`obstacle`] says why a class cannot be held. [`plan`] compares what each cache shows with what was found there and
//! what was written since. What is to be written is stored first, beside what was found.
//!
//! Invariants: only a mask that was found, or that is stored as written, is replaced. Another one is somebody else's, and stays.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::schemata::{Shown, up_to};

/// What was taken from the default group, by resource (`L3`, or `L3CODE` and `L3DATA`) and the id of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReducedWays(BTreeMap<String, BTreeMap<u32, Masks>>);

impl ReducedWays {
    /// Whether nothing is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn of(&self, resource: &str, cache: u32) -> Option<&Masks> {
        self.0.get(resource)?.get(&cache)
    }
}

/// The share of the default group on one cache, a bit for each way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Masks {
    found: u64,
    /// What it may hold by our hand: more than one while one is written over the other.
    written: BTreeSet<u64>,
}

impl Masks {
    /// Whether this was found or written.
    fn is(&self, shown: u64) -> bool {
        self.found == shown || self.written.contains(&shown)
    }
}

/// What is to be done.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// What is to be stored before anything is written.
    pub(super) reduced: ReducedWays,
    /// Masks to write, by resource and cache.
    pub(super) writes: BTreeMap<String, BTreeMap<u32, u64>>,
}

/// Why the default group, which shows these masks and has to keep so many ways, cannot do without these.
pub(super) fn obstacle(shown: &Shown, ways: u64, before: &ReducedWays, least: u32) -> Option<String> {
    let masks = shown.iter().flat_map(|(resource, caches)| caches.iter().map(move |of| (*resource, of)));
    masks.into_iter().find_map(|(resource, (cache, shown))| {
        let known = before.of(resource, *cache);
        if known.is_some_and(|of| !of.is(*shown)) {
            return (shown & ways != 0).then(|| {
                format!(
                    "somebody else has given the default group {resource}:{cache}={shown:x}, which has some of the ways of the class"
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

/// What is to be done so that the default group, which shows these masks, has none of the ways in `taken`. While any exclusive
/// class is in use, what was found is known also where somebody else has written since.
pub(super) fn plan(shown: &Shown, taken: u64, before: &ReducedWays, is_any_in_use: bool) -> Plan {
    let mut plan = Plan::default();
    for (resource, caches) in shown {
        for (&cache, &shown) in caches {
            let known = before.of(resource, cache);
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

    fn shown(shown: [u64; 2]) -> Shown {
        vec![("L3", [(0, shown[0]), (3, shown[1])].into())]
    }

    fn look(of: [u64; 2], taken: u64, before: &ReducedWays) -> Plan {
        plan(&shown(of), taken, before, taken != 0)
    }

    fn writes(plan: &Plan) -> Vec<(u32, u64)> {
        plan.writes.values().flatten().map(|(cache, mask)| (*cache, *mask)).collect()
    }

    #[test]
    fn ways_are_taken_and_come_back_as_they_were_found() {
        assert_eq!(look([0xfff, 0xfff], 0, &ReducedWays::default()), Plan::default());
        let first = look([0xfff, 0xf0f], 0x3f, &ReducedWays::default());
        assert_eq!(writes(&first), [(0, 0xfc0), (3, 0xf00)]);
        // What is stored says what to do after a crash, before or after the write.
        for shown in [[0xfff, 0xf0f], [0xfc0, 0xf0f]] {
            let again = look(shown, 0x3f, &first.reduced);
            assert!(again.writes.contains_key("L3"));
            assert_eq!(again.reduced, first.reduced, "nothing new is to be stored");
        }
        let kept = look([0xfc0, 0xf00], 0x3f, &first.reduced);
        assert_eq!((writes(&kept), &kept.reduced), (Vec::new(), &first.reduced));
        // Another class comes.
        let more = look([0xfc0, 0xf00], 0xff, &first.reduced);
        assert_eq!(writes(&more), [(0, 0xf00)], "the other has none of them");
        let halfway = look([0xfc0, 0xf00], 0xff, &more.reduced);
        assert_eq!((writes(&halfway), &halfway.reduced), (vec![(0, 0xf00)], &more.reduced));
        let back = look([0xf00, 0xf00], 0, &more.reduced);
        assert_eq!(writes(&back), [(0, 0xfff), (3, 0xf0f)]);
        assert_eq!(look([0xfff, 0xf0f], 0, &back.reduced), Plan::default());
        let text = serde_json::to_string(&first.reduced).unwrap();
        assert_eq!(serde_json::from_str::<ReducedWays>(&text).unwrap(), first.reduced, "{text}");
    }

    #[test]
    fn what_somebody_else_wrote_stays() {
        let first = look([0xfff, 0xfff], 0x3f, &ReducedWays::default());
        let why = |of, ways| obstacle(&shown(of), ways, &first.reduced, 2);
        let other = look([0x00f, 0xfc0], 0x3f, &first.reduced);
        assert_eq!((writes(&other), &other.reduced), (Vec::new(), &first.reduced));
        assert!(
            why([0x00f, 0xfc0], 0x3f).unwrap().contains("L3:0=f, which has some of the ways of the class")
        );
        assert_eq!(why([0x00f, 0xfc0], 0x30), None, "it has none of these");
        assert_eq!(why([0xfc0, 0xfff], 0x3f), None, "both are known");
        assert_eq!(writes(&look([0x00f, 0xfc0], 0, &first.reduced)), [(3, 0xfff)]);
        let refused = plan(&shown([0x00f, 0xfff]), 0, &first.reduced, true);
        assert!(refused.writes.is_empty() && refused.reduced.of("L3", 0).is_some_and(|of| of.found == 0xfff));
        assert!(refused.reduced.of("L3", 3).is_none());
    }

    #[test]
    fn something_is_left_for_those_without_a_class() {
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
    fn ways_that_the_administrator_has_taken_already_are_not_given_back() {
        let first = look([0xfc0, 0xfc0], 0x3f, &ReducedWays::default());
        assert!(first.writes.is_empty() && !first.reduced.is_empty());
        assert_eq!(look([0xfc0, 0xfc0], 0, &first.reduced), Plan::default());
        assert_eq!(writes(&look([0xfff, 0xfc0], 0x3f, &first.reduced)), [], "somebody else's by now");
    }
}
