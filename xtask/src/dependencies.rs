//! Checks the dependencies between crates against a table of the allowed ones.
//!
//! The direction is the architecture: `numaward → {cli, control, daemon}`, `daemon → {http, guarantee, observe, telemetry, kube}`,
//! `http → {observe, telemetry}`, `control → guarantee`,
//! `guarantee → {enforce, store, config, model, engine, cgroup}`,
//! `observe → {probes, cgroup, config, model}`, `telemetry → {model, config}`, `enforce → {model, cgroup, store}`,
//! `config → {api, engine, cgroup}`, `model → {api, engine, cgroup}`, `api → {engine, topology}`,
//! `kube → {config, engine, topology}`, `probes → {abi, topology}`,
//! `simulation → engine`, `cgroup → topology`, `engine → topology`, `ebpf → abi`.
//! A crate may use all crates below it, not only the next layer; a dependency upwards is an error. The engine decides
//! and has no other effect, so it may only use crates without input and output; of `topology` it gets the plain types,
//! not the readers of sysfs.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use serde::Deserialize;

use crate::command;

/// Dependencies that a crate may have.
struct Rule {
    package: &'static str,
    /// Allowed crates of this workspace.
    own: &'static [&'static str],
    /// Crates of this workspace that only its tests may use.
    for_tests: &'static [&'static str],
    /// Allowed external crates; `None` for any.
    others: Option<&'static [&'static str]>,
    /// Features of own crates that must stay off, as `package/feature`.
    without: &'static [&'static str],
}

const fn rule(package: &'static str, own: &'static [&'static str]) -> Rule {
    Rule { package, own, for_tests: &[], others: None, without: &[] }
}

impl Rule {
    const fn testing_with(self, for_tests: &'static [&'static str]) -> Self {
        Self { for_tests, ..self }
    }
}

/// Crate that the tests of each crate may use. It uses no crate itself, so there is no cycle.
const TEST_SUPPORT: &str = "numaward-tests-support";

const TABLE: &[Rule] = &[
    rule("numaward", &["numaward-cli", "numaward-control", "numaward-daemon", "numaward-guarantee"])
        // With `daemon/tests/support`, which starts a daemon on made-up machines.
        .testing_with(&[
            "numaward-api",
            "numaward-cgroup",
            "numaward-config",
            "numaward-http",
            "numaward-kube",
            "numaward-model",
            "numaward-observe",
            "numaward-telemetry",
            "numaward-terminal",
            "numaward-topology",
        ]),
    rule(
        "numaward-cli",
        &[
            "numaward-accesses",
            "numaward-api",
            "numaward-cgroup",
            "numaward-config",
            "numaward-engine",
            "numaward-probes",
            "numaward-simulation",
            "numaward-topology",
        ],
    ),
    rule(
        "numaward-daemon",
        &[
            "numaward-api",
            "numaward-cgroup",
            "numaward-config",
            "numaward-enforce",
            "numaward-engine",
            "numaward-guarantee",
            "numaward-http",
            "numaward-kube",
            "numaward-model",
            "numaward-observe",
            "numaward-probes",
            "numaward-store",
            "numaward-telemetry",
            "numaward-topology",
        ],
    )
    .testing_with(&["numaward-control", "numaward-simulation"]),
    rule(
        "numaward-control",
        &[
            "numaward-api",
            "numaward-cgroup",
            "numaward-config",
            "numaward-enforce",
            "numaward-engine",
            "numaward-guarantee",
            "numaward-model",
            "numaward-store",
            "numaward-topology",
        ],
    ),
    rule(
        "numaward-guarantee",
        &[
            "numaward-api",
            "numaward-cgroup",
            "numaward-config",
            "numaward-enforce",
            "numaward-engine",
            "numaward-model",
            "numaward-store",
            "numaward-topology",
        ],
    ),
    rule(
        "numaward-observe",
        &[
            "numaward-api",
            "numaward-cgroup",
            "numaward-config",
            "numaward-engine",
            "numaward-model",
            "numaward-probes",
            "numaward-topology",
        ],
    ),
    rule(
        "numaward-http",
        &["numaward-api", "numaward-config", "numaward-model", "numaward-observe", "numaward-telemetry"],
    ),
    rule("numaward-telemetry", &["numaward-api", "numaward-config", "numaward-model", "numaward-topology"]),
    // Uses the store only for its fault points.
    rule("numaward-enforce", &["numaward-cgroup", "numaward-model", "numaward-store", "numaward-topology"]),
    rule("numaward-config", &["numaward-api", "numaward-cgroup", "numaward-engine", "numaward-topology"]),
    rule("numaward-model", &["numaward-api", "numaward-cgroup", "numaward-engine", "numaward-topology"]),
    rule("numaward-store", &[]),
    rule("numaward-api", &["numaward-engine", "numaward-topology"]),
    rule("numaward-kube", &["numaward-config", "numaward-engine", "numaward-topology"]),
    rule("numaward-probes", &["numaward-abi", "numaward-topology"]),
    rule("numaward-cgroup", &["numaward-topology"]),
    rule("numaward-accesses", &["numaward-api", "numaward-cgroup", "numaward-topology"]),
    rule("numaward-simulation", &["numaward-engine", "numaward-topology"]),
    Rule {
        package: "numaward-engine",
        own: &["numaward-topology"],
        // Its tests replay recorded pods.
        for_tests: &["numaward-simulation"],
        // schemars and utoipa only with the feature `schema`, which `api` enables: they describe the types of the
        // configuration and of
        // the API.
        others: Some(&["derive_more", "schemars", "serde", "serde_json", "thiserror", "utoipa"]),
        without: &["numaward-topology/sysfs"],
    },
    Rule {
        package: "numaward-topology",
        own: &[],
        for_tests: &[],
        // libc behind the feature `sysfs`.
        others: Some(&["derive_more", "libc", "serde", "thiserror"]),
        without: &[],
    },
    // aya only with a feature of userspace's: it marks the types that may be read from maps.
    Rule { package: "numaward-abi", own: &[], for_tests: &[], others: Some(&["aya"]), without: &[] },
    rule("numaward-ebpf", &["numaward-abi"]),
    // Readers of files and messages from other programs.
    rule(
        "numaward-fuzz",
        &[
            "numaward-api",
            "numaward-cgroup",
            "numaward-config",
            "numaward-control",
            "numaward-daemon",
            "numaward-enforce",
            "numaward-engine",
            "numaward-guarantee",
            "numaward-http",
            "numaward-kube",
            "numaward-model",
            "numaward-observe",
            "numaward-probes",
            "numaward-simulation",
            "numaward-store",
            "numaward-telemetry",
            TEST_SUPPORT,
            "numaward-topology",
        ],
    ),
    // The tools: none depends on the crates that it builds and tests, and the load generator only for the notation of
    // CPUs and nodes.
    rule("xtask", &["numaward-terminal", TEST_SUPPORT, "numaward-vm"]),
    // The engine's rule about published nodes, which the scheduler's plugin uses.
    rule(
        "numaward-tests",
        &[
            "numaward-control-plane",
            "numaward-engine",
            "numaward-simulation",
            TEST_SUPPORT,
            "numaward-topology",
            "numaward-vm",
        ],
    ),
    rule("numaward-control-plane", &[]),
    // The publisher, the devices and the books of the product on synthetic hosts.
    rule(
        "numaward-scale",
        &[
            "numaward-control-plane",
            "numaward-daemon",
            "numaward-engine",
            "numaward-guarantee",
            "numaward-kube",
            "numaward-simulation",
            "numaward-topology",
        ],
    ),
    rule("numaward-terminal", &[]),
    rule("numaward-vm", &[]),
    rule("numaward-tests-daemon", &[]),
    rule(TEST_SUPPORT, &[]),
    rule("numaward-capabilities", &[]),
    rule("numaward-harm-check", &[]),
    // The fake kubelet uses the fake API server of kube's tests.
    rule("numaward-cri", &["numaward-kube"]),
    // Part of the tested system: they run inside the machine, on its kernel.
    // The fake container runtime is that of kube's tests.
    rule("numaward-answers-check", &["numaward-kube", "numaward-tests-daemon", "numaward-topology"]),
    rule(
        "numaward-crash-check",
        &[
            "numaward-api",
            "numaward-config",
            "numaward-control",
            "numaward-daemon",
            "numaward-engine",
            "numaward-store",
            "numaward-tests-daemon",
            "numaward-topology",
        ],
    ),
    rule(
        "numaward-enforce-check",
        &["numaward-cgroup", "numaward-enforce", "numaward-model", "numaward-store", "numaward-topology"],
    ),
    Rule {
        package: "numaward-load",
        own: &["numaward-topology"],
        for_tests: &[],
        others: None,
        without: &["numaward-topology/sysfs"],
    },
];

#[derive(Deserialize)]
struct WorkspaceMetadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `null` for an ordinary dependency.
    kind: Option<String>,
    features: Vec<String>,
}

/// Checks this workspace.
pub(crate) fn check() -> Result<()> {
    let metadata: WorkspaceMetadata = command::metadata()?;
    let faults = faults(&metadata.packages, TABLE);
    if !faults.is_empty() {
        bail!("dependencies against the table in xtask/src/dependencies.rs:\n  {}", faults.join("\n  "));
    }
    println!("{} crates keep to the table of dependencies", metadata.packages.len());
    Ok(())
}

fn faults(packages: &[Package], table: &[Rule]) -> Vec<String> {
    let members: BTreeSet<_> = packages.iter().map(|package| package.name.as_str()).collect();
    let mut faults = Vec::new();
    for rule in table.iter().filter(|rule| !members.contains(rule.package)) {
        faults.push(format!("{} is in the table, but not in the workspace", rule.package));
    }
    for Package { name, dependencies } in packages {
        let Some(rule) = table.iter().find(|rule| rule.package == name) else {
            faults.push(format!("{name} is not in the table: add it with what it may use"));
            continue;
        };
        for Dependency { name: used, kind, features } in dependencies {
            // The tests of a crate are no part of its architecture, but they must not depend on upper layers either.
            let is_for_tests = kind.as_deref() == Some("dev");
            let is_own = members.contains(used.as_str());
            let may_test_with = is_for_tests
                && ([name, TEST_SUPPORT].contains(&used.as_str()) || rule.for_tests.contains(&used.as_str()));
            if is_own && !rule.own.contains(&used.as_str()) && !may_test_with {
                faults.push(format!("{name} must not use {used}"));
            }
            if is_for_tests {
                continue;
            }
            if let Some(others) = rule.others.filter(|others| !is_own && !others.contains(&used.as_str())) {
                faults.push(format!("{name} must not use {used}, but only {}", others.join(", ")));
            }
            for feature in features {
                if rule.without.contains(&format!("{used}/{feature}").as_str()) {
                    faults.push(format!("{name} must not turn on the feature {feature} of {used}"));
                }
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspace_matches_table() {
        check().unwrap();
    }

    #[test]
    fn finds_forbidden_dependencies() {
        let table = &[
            Rule { package: "top", own: &["low"], for_tests: &[], others: None, without: &["low/extra"] },
            Rule {
                package: "low",
                own: &[],
                for_tests: &["top", "new"],
                others: Some(&["serde"]),
                without: &[],
            },
            rule("gone", &[]),
            rule(TEST_SUPPORT, &[]),
        ];
        let package = |name: &str, dependencies: &[(&str, Option<&str>, &[&str])]| Package {
            name: name.to_owned(),
            dependencies: dependencies
                .iter()
                .map(|(name, kind, features)| Dependency {
                    name: (*name).to_owned(),
                    kind: kind.map(str::to_owned),
                    features: features.iter().map(|feature| (*feature).to_owned()).collect(),
                })
                .collect(),
        };
        let packages = [
            package(TEST_SUPPORT, &[]),
            package(
                "top",
                &[
                    ("low", None, &["extra", "fine"]),
                    ("tokio", None, &[]),
                    ("new", Some("dev"), &[]),
                    (TEST_SUPPORT, None, &[]),
                ],
            ),
            package(
                "low",
                &[
                    ("top", Some("build"), &[]),
                    ("serde", None, &[]),
                    ("tokio", None, &[]),
                    ("tempfile", Some("dev"), &[]),
                    ("low", Some("dev"), &[]),
                    (TEST_SUPPORT, Some("dev"), &[]),
                    ("new", Some("dev"), &[]),
                ],
            ),
            package("new", &[]),
        ];
        assert_eq!(
            faults(&packages, table),
            [
                "gone is in the table, but not in the workspace",
                "top must not turn on the feature extra of low",
                "top must not use new",
                "top must not use numaward-tests-support",
                "low must not use top",
                "low must not use tokio, but only serde",
                "new is not in the table: add it with what it may use",
            ]
        );
    }
}
