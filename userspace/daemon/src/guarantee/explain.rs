//! The engine's decisions in the form in which the API serves them.

use numaward_engine::{
    self as engine,
    explain::Merge,
    hint::{Provider, ProviderHints},
};

use crate::api;

/// Why a request is rejected.
pub(super) fn rejection(rejection: &engine::Rejection) -> api::Rejection {
    api::Rejection {
        reason: rejection.reason.to_string(),
        message: rejection.message.clone(),
        shortfalls: rejection
            .shortfalls
            .iter()
            .map(|shortfall| api::Shortfall {
                node: shortfall.node.0,
                resource: shortfall.resource.to_string(),
                requested: shortfall.requested,
                free: shortfall.free,
            })
            .collect(),
    }
}

/// How a decision came about.
pub(super) fn explanation(explanation: &engine::explain::Explanation) -> api::Explanation {
    api::Explanation { merges: explanation.merges.iter().map(merge).collect(), notes: Vec::new() }
}

fn merge(merge: &Merge) -> api::Merge {
    api::Merge {
        hints: merge.hints.iter().flat_map(|(provider, hints)| by_resource(*provider, hints)).collect(),
        candidates: merge
            .candidates()
            .iter()
            .map(|candidate| api::Candidate {
                nodes: candidate.affinity.to_string(),
                preferred: candidate.preferred,
                verdict: candidate.verdict.to_string(),
            })
            .collect(),
        nodes: merge.best.affinity.as_ref().map(ToString::to_string),
        accepted: merge.accepted,
    }
}

fn by_resource(provider: Provider, hints: &ProviderHints) -> Vec<api::ResourceHints> {
    match hints {
        ProviderHints::NoPreference => {
            vec![api::ResourceHints { resource: provider.to_string(), sets: None }]
        }
        ProviderHints::NothingFeasible => {
            vec![api::ResourceHints { resource: provider.to_string(), sets: Some(Vec::new()) }]
        }
        ProviderHints::ByResource(resources) => resources
            .iter()
            .map(|(resource, hints)| api::ResourceHints {
                resource: resource.to_string(),
                sets: Some(
                    hints
                        .iter()
                        .map(|hint| api::Hint {
                            nodes: hint.affinity.map_or_else(String::new, |nodes| nodes.to_string()),
                            preferred: hint.preferred,
                        })
                        .collect(),
                ),
            })
            .collect(),
    }
}
