//! Checks that no two top-level modules of a crate depend on each other.
//!
//! A top-level module is a file in the crate's root with its folder: `foo.rs` or `foo/mod.rs`, and `foo/**`. Within it,
//! files may use each other; between two modules, dependencies have one direction. A cycle of files therefore never
//! leaves the folder of one module, and a module can be read, tested and moved together with the modules below it. The
//! crate's root file is a module of its own: definitions that other modules use must not depend on these.
//!
//! A dependency is a name that a file uses from another one ([`arrows`]). `mod` is none, and neither is a re-export of
//! a name below: the use of the re-exported name is a use of the defining file. Code for tests does not count.
//!
//! Also checks that no type with many fields makes input or output ([`data`]), that the methods of a type stand together, and that the
//! concerns of some folders form no circle ([`concerns`]).

mod arrows;
mod concerns;
mod data;
mod tree;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::PathBuf,
    thread,
};

use anyhow::{Result, anyhow, bail};
use serde::Deserialize;

use self::{
    arrows::{Arrows, arrows},
    tree::ModuleTree,
};
use crate::command;

#[derive(Deserialize)]
struct ModuleMetadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    targets: Vec<CargoTarget>,
}

#[derive(Deserialize)]
struct CargoTarget {
    kind: Vec<String>,
    src_path: PathBuf,
}

/// Checks this workspace.
pub(crate) fn check() -> Result<()> {
    let metadata: ModuleMetadata = command::metadata()?;
    let mut faults = Vec::new();
    for (Package { name, .. }, found) in metadata.packages.iter().zip(all_faults(&metadata.packages)) {
        faults.extend(found?.iter().map(|fault| format!("{name}: {fault}")));
    }
    if !faults.is_empty() {
        bail!("modules that need each other, or types of too many parts:\n{}", faults.join("\n"));
    }
    let crates = metadata.packages.len();
    println!(
        "the modules of {crates} crates form no circle, and none of their large types does input or output"
    );
    Ok(())
}

/// Returns the faults of each package's libraries and programs, all packages in parallel, because parsing takes most of
/// the time.
fn all_faults(packages: &[Package]) -> Vec<Result<Vec<String>>> {
    let of_package = |package: &Package| {
        let is_program =
            |target: &&CargoTarget| target.kind.iter().any(|kind| kind == "lib" || kind == "bin");
        let mut all = Vec::new();
        for target in package.targets.iter().filter(is_program) {
            let tree = ModuleTree::read(&target.src_path)?;
            all.extend(circles(&tree));
            all.extend(concerns::scattered(&tree));
            all.extend(concerns::circles(&package.name, &tree));
            all.extend(data::too_large(&tree));
        }
        Ok(all)
    };
    thread::scope(|scope| {
        let threads = packages.iter().map(|package| scope.spawn(move || of_package(package)));
        let threads = threads.collect::<Vec<_>>();
        let join = |it: thread::ScopedJoinHandle<'_, _>| {
            it.join().unwrap_or_else(|_| Err(anyhow!("the search for faults panicked")))
        };
        threads.into_iter().map(join).collect()
    })
}

/// Returns the cycles of top-level modules in a crate, each with its dependencies.
fn circles(tree: &ModuleTree) -> Vec<String> {
    circles_of(tree, &arrows(tree), "", |file| Some(tree.top(file)))
}

/// Returns the cycles of the modules that `module_of` names; `folder` is theirs. Files without one do not count.
fn circles_of<'a>(
    tree: &'a ModuleTree,
    arrows: &Arrows,
    folder: &str,
    module_of: impl Fn(usize) -> Option<&'a str>,
) -> Vec<String> {
    let mut used = BTreeMap::<&str, BTreeSet<&str>>::new();
    for &(from, to) in arrows.keys() {
        if let (Some(from), Some(to)) = (module_of(from), module_of(to)) {
            used.entry(from).or_default().insert(to);
        }
    }
    let mut circles = Vec::new();
    let mut rest: BTreeSet<&str> = used.keys().copied().collect();
    while let Some(module) = rest.pop_first() {
        let reached = reached(module, &used);
        let mut circle = BTreeSet::from([module]);
        circle.extend(
            reached
                .into_iter()
                .filter(|&other| rest.contains(other) && self::reached(other, &used).contains(module)),
        );
        rest.retain(|other| !circle.contains(other));
        if circle.len() > 1 {
            circles.push(described(tree, arrows, folder, &circle, &module_of));
        }
    }
    circles
}

/// Returns the modules that a module uses directly or indirectly.
fn reached<'a>(module: &str, used: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&str> = used.get(module).into_iter().flatten().copied().collect();
    while let Some(module) = next.pop() {
        if reached.insert(module) {
            next.extend(used.get(module).into_iter().flatten());
        }
    }
    reached
}

/// Describes a cycle, with each dependency as `file -> file: names`.
fn described<'a>(
    tree: &ModuleTree,
    arrows: &Arrows,
    folder: &str,
    circle: &BTreeSet<&str>,
    module_of: impl Fn(usize) -> Option<&'a str>,
) -> String {
    let modules = circle.iter().copied().collect::<Vec<_>>().join(", ");
    let place = if folder.is_empty() { String::new() } else { format!(" in {folder}") };
    let mut text = format!("a circle of the modules {modules}{place}:");
    for (&(from, to), names) in arrows {
        let ends = [from, to].map(&module_of);
        if ends[0] != ends[1] && ends.iter().all(|end| end.is_some_and(|end| circle.contains(end))) {
            let names = names.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            let _ = write!(text, "\n  {} -> {}: {names}", tree.file(from), tree.file(to));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns the cycles of a crate with these files.
    fn circles_of_files(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        circles(&ModuleTree::read(&folder.path().join(files[0].0)).unwrap())
    }

    #[test]
    fn this_workspace_has_no_cycle() {
        check().unwrap();
    }

    #[test]
    fn finds_cycle_by_any_path() {
        let a = "use crate::b::{Type as Other, self}; pub struct A(Other);";
        for b in [
            "use crate::a::A;",
            "use super::a;",
            "use crate::{a::{A as _}};",
            "use crate::a::*;",
            "fn f() { use crate::a; }",
            "fn f(it: crate::a::A) {}",
            "fn f() { g::<super::a::A>() }",
            "impl From<crate::a::A> for Type {}",
            "fn f() { println!(\"{}\", crate::a::A::new()); }",
            "macro_rules! m { () => { $crate::a::A }; }",
            "#[error(\"{}\", crate::a::text(.0))] struct Error;",
            "#[serde(with = \"crate::a\")] struct Serialized;",
            "mod inner { use super::super::a::A; }",
            "use crate::A;",
            "use super::*; fn f(it: A) {}",
            "use super::*; fn f() { g!(A) }",
            "fn f() { g!(1..crate::a::A, x.y) }",
            "fn f() { g!(crate::a::A { x: 1 }.crate_x) }",
            "use super::*; fn f() { a::g() }",
        ] {
            let lib = "mod a; mod b; pub use a::A;";
            let found = circles_of_files(&[("lib.rs", lib), ("a.rs", a), ("b.rs", b)]);
            assert_eq!(found.len(), 1, "{b}: {found:?}");
            assert!(
                found[0]
                    .starts_with("a circle of the modules a, b:\n  a.rs -> b.rs: crate::b, crate::b::Type"),
                "{b}: {found:?}"
            );
        }
    }

    #[test]
    fn one_direction_is_no_cycle() {
        let found = circles_of_files(&[
            ("main.rs", "mod a; mod b; mod c; use a::A; fn main() { b::run(A); c::run() }"),
            // Files of one module may use each other.
            ("a.rs", "mod one; mod two; pub use self::two::Two; pub struct A; fn f() { one::f() }"),
            ("a/one.rs", "use super::{A, Two}; pub fn f() {}"),
            ("a/two/mod.rs", "mod deep; use crate::a::one;"),
            ("a/two/deep.rs", "use crate::a::A; use std::fmt; use other::b;"),
            ("b/mod.rs", "use crate::a::{A, Two}; pub fn run(it: A) { let c = it.c(); c }"),
            ("c.rs", "use crate::b; pub fn run() { b::run(crate::a::A) }"),
        ]);
        assert_eq!(found, <[String; 0]>::default());
    }

    #[test]
    fn reports_files_of_cycle() {
        let lib = "mod a; mod b; mod c; mod d;";
        let files = |deep| {
            circles_of_files(&[
                ("lib.rs", lib),
                ("a.rs", "use crate::b::B;"),
                ("b.rs", "mod deep; pub struct B;"),
                ("b/deep.rs", deep),
                ("c.rs", "use crate::a::f;"),
                ("d.rs", "use crate::c::g;"),
            ])
        };
        assert_eq!(files("use super::B;"), <[String; 0]>::default());
        assert_eq!(
            files("use super::B; use crate::c::{g, h};"),
            ["a circle of the modules a, b, c:\
              \n  a.rs -> b.rs: crate::b::B\
              \n  b/deep.rs -> c.rs: crate::c::g, crate::c::h\
              \n  c.rs -> a.rs: crate::a::f"]
        );
    }

    #[test]
    fn root_is_a_module() {
        let root = "mod a; pub struct Root; fn f() { a::f() }";
        let found = circles_of_files(&[("lib.rs", root), ("a.rs", "use crate::Root; pub fn f() {}")]);
        assert_eq!(
            found,
            ["a circle of the modules a, lib.rs:\n  lib.rs -> a.rs: a::f\n  a.rs -> lib.rs: crate::Root"]
        );
    }

    #[test]
    fn re_exports_belong_to_defining_file() {
        let lib = "mod a; mod b;";
        let found = circles_of_files(&[
            ("lib.rs", lib),
            ("a.rs", "pub use crate::b::B;"),
            ("b.rs", "use crate::a::A;"),
        ]);
        assert_eq!(found.len(), 1, "what another module re-exports, it uses");
        let found = circles_of_files(&[
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::C;"),
            ("b.rs", "pub use crate::c::*;"),
            ("c.rs", "pub struct C; use crate::a::A;"),
        ]);
        assert_eq!(
            found,
            ["a circle of the modules a, c:\n  a.rs -> c.rs: crate::b::C\n  c.rs -> a.rs: crate::a::A"]
        );
    }

    #[test]
    fn ignores_code_for_tests() {
        let found = circles_of_files(&[
            ("lib.rs", "mod a; mod b; #[cfg(test)] mod fixture;"),
            ("a.rs", "use crate::b::B; #[cfg(test)] use crate::fixture::F;"),
            (
                "b.rs",
                "#[cfg(test)] mod tests; #[cfg(all(test, unix))] use crate::a::A;
                 #[cfg(test)] impl B { fn f() { crate::a::f() } }
                 impl B { #[cfg(test)] fn g() { crate::a::f() } fn h() { #[cfg(test)] crate::a::f(); } }",
            ),
            ("b/tests.rs", "use crate::a::A;"),
            ("fixture.rs", "use crate::a::A;"),
        ]);
        assert_eq!(found, <[String; 0]>::default());
        let found = circles_of_files(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "#[cfg(any(test, feature = \"fake\"))] use crate::a::A; #[cfg(not(test))] struct B;"),
        ]);
        assert_eq!(found.len(), 1, "what a feature turns on counts");
    }

    #[test]
    fn finds_files_of_modules() {
        let found = circles_of_files(&[
            ("main.rs", "mod a; #[path = \"other/place.rs\"] mod b;"),
            ("a.rs", "mod inline { mod deep; } use crate::b::child::x;"),
            ("a/inline/deep.rs", "use super::super::super::b;"),
            ("other/place.rs", "mod child;"),
            ("other/child.rs", "use crate::a::inline::deep;"),
        ]);
        assert_eq!(
            found,
            ["a circle of the modules a, b:\
              \n  a.rs -> other/child.rs: crate::b::child::x\
              \n  a/inline/deep.rs -> other/place.rs: super::super::super::b\
              \n  other/child.rs -> a/inline/deep.rs: crate::a::inline::deep"]
        );
    }
}
