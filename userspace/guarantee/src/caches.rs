//! What is configured of L3 caches and memory bandwidth.

use std::collections::BTreeMap;

use numaward_config::resctrl::{Class, Resctrl};
use numaward_enforce::resctrl::{ClassShare, Ways};

/// The share of each class, by name.
pub fn shares(config: &Resctrl) -> BTreeMap<String, ClassShare> {
    let share = |class: &Class| {
        let Class { l3_ways, l3_percent, memory_bandwidth_percent, exclusive } = *class;
        let ways = l3_ways.map(Ways::Count).or(l3_percent.map(Ways::Percent));
        ClassShare { ways, bandwidth_percent: memory_bandwidth_percent, is_exclusive: exclusive }
    };
    config.classes.iter().map(|(name, class)| (name.to_string(), share(class))).collect()
}
