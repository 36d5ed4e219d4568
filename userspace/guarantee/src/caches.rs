//! Conversion of the resctrl configuration (L3 caches, memory bandwidth) to class shares.

use std::collections::BTreeMap;

use numaward_config::resctrl::{Class, Resctrl};
use numaward_enforce::resctrl::{ClassShare, Ways};

/// Returns the configured share of each resctrl class, by class name.
pub fn shares(config: &Resctrl) -> BTreeMap<String, ClassShare> {
    let share = |class: &Class| {
        let Class { l3_ways, l3_percent, memory_bandwidth_percent, exclusive } = *class;
        let ways = l3_ways.map(Ways::Count).or(l3_percent.map(Ways::Percent));
        ClassShare { ways, bandwidth_percent: memory_bandwidth_percent, is_exclusive: exclusive }
    };
    config.classes.iter().map(|(name, class)| (name.to_string(), share(class))).collect()
}
