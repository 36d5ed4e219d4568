//! Conversion of the engine's decisions to the types of the API.

use numaward_api as api;
use numaward_engine::{
    self as engine,
    explain::Merge,
    hint::{Provider, ProviderHints},
    placement_search::PlacementSearch,
};

/// Converts a rejection.
pub fn rejection(rejection: &engine::Rejection) -> api::Rejection {
    api::Rejection {
        reason: rejection.reason.to_string(),
        message: rejection.message.clone(),
        shortfalls: shortfalls(&rejection.shortfalls),
    }
}

fn shortfalls(shortfalls: &[engine::Shortfall]) -> Vec<api::Shortfall> {
    let shortfalls = shortfalls.iter().map(|shortfall| api::Shortfall {
        node: shortfall.node.0,
        resource: shortfall.resource.to_string(),
        requested: shortfall.requested,
        free: shortfall.free,
        withheld: shortfall.withheld,
    });
    shortfalls.collect()
}

/// Converts a resize error. The reason is Kubernetes' `Deferred` if the resize can succeed later, otherwise `Infeasible`.
pub fn resize(error: &engine::ResizeError) -> api::Rejection {
    let (reason, missing) = match error {
        engine::ResizeError::Shortfall(missing) => ("Deferred", missing.as_slice()),
        engine::ResizeError::SharedPool { .. } => ("Deferred", &[][..]),
        _ => ("Infeasible", &[][..]),
    };
    let message = match error {
        engine::ResizeError::Shortfall(_) => "its nodes do not have enough free resources".to_owned(),
        _ => error.to_string(),
    };
    api::Rejection { reason: reason.to_owned(), message, shortfalls: shortfalls(missing) }
}

/// Converts the explanation of a decision.
pub fn explanation(explanation: &engine::explain::Explanation) -> api::Explanation {
    let in_use = explanation.withheld.iter().map(|withheld| {
        let engine::conditions::WithheldMemory { node, kind, bytes } = withheld;
        format!(
            "node {node}: {bytes} of {kind} are used by workloads without a guarantee, and were not offered"
        )
    });
    let offline = &explanation.offline_cpus;
    let offline = (!offline.is_empty()).then(|| format!("CPUs {offline} are offline, and were not offered"));
    let partitions = &explanation.partition_cpus;
    let partitions = (!partitions.is_empty()).then(|| {
        format!("CPUs {partitions} are in cpuset partitions of other programs, and were not offered")
    });
    let gave_up = explanation.work_limit_reached.then(|| {
        "the search ended before everything was tried, as the request is too complex: there may be a placement".to_owned()
    });
    let cut_off = explanation.searches.iter().filter_map(cut_off);
    let notes = gave_up.into_iter().chain(cut_off).chain(in_use).chain(offline).chain(partitions);
    let searches = explanation.searches.iter().map(search);
    let merges = explanation.merges.iter().map(merge).chain(searches).collect();
    api::Explanation { merges, notes: notes.collect(), absent_nodes: explanation.absent_nodes.to_string() }
}

/// Returns a note if the search ended early, so that better candidates may exist.
fn cut_off(search: &PlacementSearch) -> Option<String> {
    let compared = search.considered;
    search
        .is_incomplete
        .then(|| format!("the search ended after {compared} candidates: there may be better ones"))
}

/// Converts a search of the strategy `native`, which uses candidates instead of hints.
fn search(search: &PlacementSearch) -> api::Merge {
    let chosen = search.chosen.and_then(|index| search.candidates.get(index));
    let candidates = search.candidates.iter().zip(search.verdicts());
    api::Merge {
        hints: Vec::new(),
        candidates: candidates
            .take(MAX_LISTED_SETS)
            .map(|(candidate, verdict)| api::MergeCandidate {
                nodes: candidate.nodes.to_string(),
                preferred: search
                    .candidates
                    .first()
                    .is_some_and(|best| best.rank.nodes == candidate.rank.nodes),
                verdict: verdict.to_string(),
            })
            .collect(),
        candidates_omitted: search
            .considered
            .saturating_sub(search.candidates.len().min(MAX_LISTED_SETS) as u64),
        // An empty string is "no nodes"; an absent field would mean all nodes.
        nodes: Some(chosen.map_or_else(String::new, |candidate| candidate.nodes.to_string())),
        accepted: chosen.is_some(),
    }
}

/// Maximum number of node sets per list. Eight nodes have at most 256 sets, and each further node doubles the number.
const MAX_LISTED_SETS: usize = 256;

/// Returns the number of items that are omitted from a list with this length.
fn omitted(length: usize) -> u64 {
    length.saturating_sub(MAX_LISTED_SETS) as u64
}

fn merge(merge: &Merge) -> api::Merge {
    let candidates = merge.candidates();
    api::Merge {
        hints: merge.hints.iter().flat_map(|(provider, hints)| by_resource(*provider, hints)).collect(),
        candidates: candidates
            .iter()
            .take(MAX_LISTED_SETS)
            .map(|candidate| api::MergeCandidate {
                nodes: candidate.affinity.to_string(),
                preferred: candidate.preferred,
                verdict: candidate.verdict.to_string(),
            })
            .collect(),
        candidates_omitted: omitted(candidates.len()),
        nodes: merge.best.affinity.as_ref().map(ToString::to_string),
        accepted: merge.accepted,
    }
}

fn by_resource(provider: Provider, hints: &ProviderHints) -> Vec<api::ResourceHints> {
    let without = |sets| vec![api::ResourceHints { resource: provider.to_string(), sets, omitted: 0 }];
    match hints {
        ProviderHints::NoPreference => without(None),
        ProviderHints::NothingFeasible => without(Some(Vec::new())),
        ProviderHints::ByResource(resources) => resources
            .iter()
            .map(|(resource, hints)| api::ResourceHints {
                resource: resource.to_string(),
                // Small sets are first, and preferred sets are the smallest.
                sets: Some(
                    hints
                        .iter()
                        .take(MAX_LISTED_SETS)
                        .map(|hint| api::Hint {
                            nodes: hint.affinity.map_or_else(String::new, |nodes| nodes.to_string()),
                            preferred: hint.preferred,
                        })
                        .collect(),
                ),
                omitted: omitted(hints.len()),
            })
            .collect(),
    }
}
