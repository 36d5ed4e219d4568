//! List of the crates in the program, as a `CycloneDX` document (version 1.6).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use numaward_vm::Arch;
use serde::Deserialize;
use serde_json::{Value, json};

use super::rfc3339;
use crate::command;

#[derive(Deserialize)]
struct CrateMetadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// `None` for a crate of this workspace.
    source: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<ResolveNode>,
}

#[derive(Deserialize)]
struct ResolveNode {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// `null` for a linked crate.
    kind: Option<String>,
}

/// Writes one document of the program for all of these processors.
pub(crate) fn write(path: &Path, archs: &[Arch], epoch: u64) -> Result<PathBuf> {
    let mut cargo = command::cargo();
    cargo.args(["metadata", "--locked", "--format-version=1"]);
    cargo.args(archs.iter().map(|arch| format!("--filter-platform={}", arch.rust_target())));
    let metadata: CrateMetadata =
        serde_json::from_str(&command::read(&mut cargo)?).context("cannot read cargo's metadata")?;
    let document = document(&metadata, "numaward", &rfc3339(epoch)?)?;
    let mut text = serde_json::to_string_pretty(&document)?;
    text.push('\n');
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.to_owned())
}

fn document(metadata: &CrateMetadata, program: &str, created: &str) -> Result<Value> {
    let packages: BTreeMap<_, _> =
        metadata.packages.iter().map(|package| (package.id.as_str(), package)).collect();
    let nodes: BTreeMap<_, _> = metadata.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
    let is_program = |package: &&Package| package.name == program && package.source.is_none();
    let root =
        metadata.packages.iter().find(is_program).with_context(|| format!("there is no crate {program}"))?;
    let mut linked = BTreeSet::new();
    let mut open = vec![root.id.as_str()];
    while let Some(id) = open.pop() {
        let Some(node) = nodes.get(id) else { continue };
        let links = |dependency: &&Dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none());
        for dependency in node.deps.iter().filter(links) {
            if linked.insert(dependency.pkg.as_str()) {
                open.push(&dependency.pkg);
            }
        }
    }
    let mut crates: Vec<_> = linked.iter().filter_map(|id| packages.get(id)).collect();
    crates.sort_by_key(|package| (&package.name, &package.version));
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": { "timestamp": created, "component": component(root) },
        "components": crates.into_iter().map(|package| component(package)).collect::<Vec<_>>(),
    }))
}

fn component(package: &Package) -> Value {
    let Package { name, version, license, source, .. } = package;
    let mut component = json!({
        "type": if name == "numaward" { "application" } else { "library" }, "name": name, "version": version,
    });
    if source.is_some() {
        component["purl"] = format!("pkg:cargo/{name}@{version}").into();
    }
    if let Some(license) = license {
        component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
    }
    component
}

#[cfg(test)]
mod tests {
    use super::super::VERSION;
    use super::*;

    #[test]
    fn lists_linked_crates_once() {
        let package = |id: &str, source: Option<&str>| Package {
            id: id.to_owned(),
            name: id.to_owned(),
            version: VERSION.to_owned(),
            license: source.map(|_| "MIT/Apache-2.0".to_owned()),
            source: source.map(str::to_owned),
        };
        let dependency = |to: &str, kind: Option<&str>| Dependency {
            pkg: to.to_owned(),
            dep_kinds: vec![DependencyKind { kind: kind.map(str::to_owned) }],
        };
        let node = |id: &str, deps| ResolveNode { id: id.to_owned(), deps };
        let registry = Some("registry");
        let metadata = CrateMetadata {
            packages: vec![
                package("numaward", None),
                package("own", None),
                package("b", registry),
                package("a", registry),
                package("builds", registry),
                package("tests", registry),
            ],
            resolve: Resolve {
                nodes: vec![
                    node(
                        "numaward",
                        vec![
                            dependency("own", None),
                            dependency("b", None),
                            dependency("tests", Some("dev")),
                        ],
                    ),
                    node("own", vec![dependency("b", None), dependency("builds", Some("build"))]),
                    node("b", vec![dependency("a", None)]),
                    node("a", vec![]),
                ],
            },
        };
        let document = document(&metadata, "numaward", "2023-11-14T22:13:20Z").unwrap();
        let names: Vec<_> = document["components"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
        assert_eq!(names, ["a", "b", "own"]);
        let first = &document["components"][0];
        assert_eq!(first["purl"], format!("pkg:cargo/a@{VERSION}"));
        assert_eq!(first["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(document["metadata"]["component"]["name"], "numaward");
        assert!(document["components"][2].get("purl").is_none());
    }
}
