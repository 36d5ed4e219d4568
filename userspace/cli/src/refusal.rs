//! Why the daemon refuses, for people.

use std::fmt::Write as _;

use numaward_api::{self as api, Refusal};

use crate::table::size;

/// What a refusal says.
pub(crate) fn in_words(refusal: &Refusal) -> String {
    match &refusal.rejection {
        Some(rejection) => format!("refused: {}", self::rejection(rejection)),
        None => refusal.detail.clone(),
    }
}

/// Why the engine decided so, node by node.
pub(crate) fn rejection(rejection: &api::Rejection) -> String {
    let mut text = format!("{} ({})", rejection.message, rejection.reason);
    for shortfall in &rejection.shortfalls {
        let amount = |amount: u64| match shortfall.resource.as_str() {
            "cpu" => amount.to_string(),
            _ => size(amount),
        };
        let enough = if shortfall.free >= shortfall.requested { "" } else { ", too little" };
        let _ = write!(
            text,
            "\n  node {}: {} requested {}, free {}{enough}",
            shortfall.node,
            shortfall.resource,
            amount(shortfall.requested),
            amount(shortfall.free),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejection_names_nodes_and_shortfalls() {
        let shortfall = |node, free| api::Shortfall { node, resource: "cpu".to_owned(), requested: 2, free };
        let text = rejection(&api::Rejection {
            reason: "TopologyAffinityError".to_owned(),
            message: "no".to_owned(),
            shortfalls: vec![shortfall(0, 1), shortfall(1, 2)],
        });
        assert_eq!(
            text,
            "no (TopologyAffinityError)\n  node 0: cpu requested 2, free 1, too little\n  node 1: cpu requested 2, free 2"
        );
    }
}
