//! Checks that the methods of a type stand together, and that the concerns of a folder depend on each other one way.
//!
//! A method call has no path, so [`arrows`](super::arrows) does not see how the methods of one type in many files call each other. A type's
//! inherent `impl` blocks stand in at most [`MAX_FILES`] files of one folder, where the file `foo.rs` counts for the folder `foo`.
//!
//! In the folders of [`ROOMS`], the files and folders form no circle. The folder's own file composes them and does not count. A method call
//! on a field of a type of that file, such as `core.pool.update()`, is a dependency on the file of the field's type.
//! Implementations of traits and code for tests do not count.

use std::collections::{BTreeMap, BTreeSet};

use syn::{
    Expr, ExprMethodCall, Fields, ImplItem, Item, ItemImpl, Member, Type,
    ext::IdentExt as _,
    visit::{self, Visit},
};

use super::{
    arrows::{Arrows, MAX_STEPS, Scopes, arrows},
    tree::{ModuleTree, is_for_tests},
};

/// Maximum number of files with inherent `impl` blocks of one type.
const MAX_FILES: usize = 3;

/// Package and folder of each group of concerns.
const ROOMS: [(&str, &str); 3] =
    [("numaward-control", "core"), ("numaward-control", "core/pods"), ("numaward-control", "reconciler")];

/// Returns the types of a package whose methods are scattered over files.
pub(super) fn scattered(tree: &ModuleTree) -> Vec<String> {
    let faults = files_of_types(tree).into_iter().filter_map(|(name, files)| {
        if files.len() > MAX_FILES {
            let count = files.len();
            return Some(format!(
                "{name} has methods in {count} files, more than {MAX_FILES}: {}",
                join(&files)
            ));
        }
        (!is_one_folder(&files)).then(|| format!("{name} has methods in several folders: {}", join(&files)))
    });
    faults.collect()
}

fn join(files: &BTreeSet<&str>) -> String {
    files.iter().copied().collect::<Vec<_>>().join(", ")
}

/// Returns true if these files are of one folder.
fn is_one_folder(files: &BTreeSet<&str>) -> bool {
    let folder = |file: &str| file.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
    let own =
        |file: &str| file.strip_suffix("/mod.rs").or(file.strip_suffix(".rs")).unwrap_or(file).to_owned();
    let candidates = files.iter().flat_map(|file| [folder(file), own(file)]);
    let mut candidates = candidates.collect::<BTreeSet<_>>().into_iter();
    candidates.any(|of| files.iter().all(|file| folder(file) == of || own(file) == of))
}

/// Returns the files with inherent `impl` blocks of each type of a crate.
fn files_of_types(tree: &ModuleTree) -> BTreeMap<String, BTreeSet<&str>> {
    let scopes = Scopes(tree.modules());
    let mut found = BTreeMap::<(usize, String), BTreeSet<&str>>::new();
    for (index, module) in tree.modules().iter().enumerate() {
        for item in &module.items {
            let Item::Impl(ItemImpl { trait_: None, self_ty, items, .. }) = item else { continue };
            let Type::Path(path) = &**self_ty else { continue };
            let is_product =
                |item: &ImplItem| !matches!(item, ImplItem::Fn(method) if is_for_tests(&method.attrs));
            if !items.iter().any(is_product) {
                continue;
            }
            let path: Vec<String> =
                path.path.segments.iter().map(|of| of.ident.unraw().to_string()).collect();
            if let (Some(module_of), Some(name)) = (scopes.resolve(index, &path, MAX_STEPS), path.last()) {
                found.entry((module_of, name.clone())).or_default().insert(tree.file(module.file));
            }
        }
    }
    let mut by_name = BTreeMap::<String, BTreeSet<&str>>::new();
    for ((module, name), files) in found {
        // The file distinguishes types with the same name.
        let name = if by_name.contains_key(&name) {
            format!("{name} of {}", tree.file(tree.modules()[module].file))
        } else {
            name
        };
        by_name.insert(name, files);
    }
    by_name
}

/// Returns the circles in the rooms of a package, each with its dependencies.
pub(super) fn circles(package: &str, tree: &ModuleTree) -> Vec<String> {
    let rooms = ROOMS.iter().filter(|(of, _)| *of == package);
    rooms.flat_map(|(_, folder)| circles_in(tree, folder)).collect()
}

fn circles_in(tree: &ModuleTree, folder: &str) -> Vec<String> {
    let mut arrows = arrows(tree);
    add_calls(tree, folder, &mut arrows);
    let prefix = format!("{folder}/");
    super::circles_of(tree, &arrows, folder, |file| {
        let name = tree.file(file).strip_prefix(&prefix)?;
        let name = name.split('/').next()?;
        (name != "mod.rs").then(|| name.strip_suffix(".rs").unwrap_or(name))
    })
}

/// Adds calls of methods on the fields of the types in the folder's own file.
fn add_calls(tree: &ModuleTree, folder: &str, arrows: &mut Arrows) {
    let scopes = Scopes(tree.modules());
    let own = [format!("{folder}.rs"), format!("{folder}/mod.rs")];
    let mut fields = BTreeMap::<String, usize>::new();
    for (index, module) in tree.modules().iter().enumerate() {
        if !own.iter().any(|own| own == tree.file(module.file)) {
            continue;
        }
        for item in &module.items {
            let Item::Struct(item) = item else { continue };
            let Fields::Named(of) = &item.fields else { continue };
            for field in &of.named {
                if let (Some(name), Type::Path(path)) = (&field.ident, &field.ty) {
                    let path: Vec<String> =
                        path.path.segments.iter().map(|of| of.ident.unraw().to_string()).collect();
                    if let Some(target) = scopes.resolve(index, &path, MAX_STEPS) {
                        fields.insert(name.unraw().to_string(), tree.modules()[target].file);
                    }
                }
            }
        }
    }
    for module in tree.modules() {
        let mut calls = FieldCalls { fields: &fields, file: module.file, arrows };
        if tree.file(module.file).starts_with(folder) {
            module.items.iter().for_each(|item| calls.visit_item(item));
        }
    }
}

struct FieldCalls<'a> {
    fields: &'a BTreeMap<String, usize>,
    file: usize,
    arrows: &'a mut Arrows,
}

impl<'ast> Visit<'ast> for FieldCalls<'_> {
    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        if let Expr::Field(field) = &*call.receiver
            && let Member::Named(name) = &field.member
            && let Expr::Path(base) = &*field.base
            && base.path.get_ident().is_some_and(|base| base == "core" || base == "change")
            && let Some(&target) = self.fields.get(&name.unraw().to_string())
            && target != self.file
        {
            let call = format!("core.{name}.{}()", call.method);
            self.arrows.entry((self.file, target)).or_default().insert(call);
        }
        visit::visit_expr_method_call(self, call);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> ModuleTree {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        ModuleTree::read(&folder.path().join(files[0].0)).unwrap()
    }

    fn workspace_tree(root: &str) -> ModuleTree {
        let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        ModuleTree::read(&workspace.join(root)).unwrap()
    }

    /// Adds code to a file of this workspace.
    fn add_by_hand(tree: &mut ModuleTree, file: &str, code: &str) {
        let more = syn::parse_file(code).unwrap().items;
        tree.items_of_mut(file).extend(more);
    }

    #[test]
    fn finds_circle_put_back_by_hand() {
        let mut tree = workspace_tree("userspace/control/src/lib.rs");
        assert_eq!(circles(PACKAGE, &tree), <[String; 0]>::default());
        let answer = "fn answer(core: &mut Core) { crate::core::pods::commands::pod_command(core) }";
        add_by_hand(&mut tree, "core/execution.rs", answer);
        let found = circles(PACKAGE, &tree);
        assert!(
            matches!(&found[..], [found] if found.contains("core/execution.rs -> core/pods/commands.rs")),
            "{found:?}"
        );
        let mut tree = workspace_tree("userspace/control/src/lib.rs");
        add_by_hand(
            &mut tree,
            "core/narrowing.rs",
            "fn f(core: &mut Core) { core.isolation.concerns(event); }",
        );
        let found = circles(PACKAGE, &tree);
        assert!(
            matches!(&found[..], [found] if found.contains("core/narrowing.rs -> core/cpu_isolation.rs: core.isolation.concerns()")),
            "{found:?}"
        );
    }

    #[test]
    fn finds_methods_scattered_by_hand() {
        for (root, path, files) in [
            ("userspace/control/src/lib.rs", "crate::core::Core", &["core/pods.rs", "core/release.rs"][..]),
            ("userspace/observe/src/lib.rs", "crate::observer::Observer", &["activity.rs", "load.rs"][..]),
        ] {
            let mut tree = workspace_tree(root);
            assert_eq!(scattered(&tree), <[String; 0]>::default());
            for file in files {
                add_by_hand(&mut tree, file, &format!("impl {path} {{ fn by_hand() {{}} }}"));
            }
            let found = scattered(&tree);
            let name = path.rsplit("::").next().unwrap();
            assert!(
                matches!(&found[..], [found] if found.starts_with(&format!("{name} has methods in "))),
                "{found:?}"
            );
        }
    }

    const PACKAGE: &str = "numaward-control";
    const CORE: &str =
        "pub mod a; pub mod b; use self::a::A; pub struct Core { a: A } impl Core { fn f() {} }";

    #[test]
    fn scattered_methods_are_faults() {
        let method = "impl super::Core { fn g() {} }";
        let files = |deep: &'static str, others: usize| {
            let mut files = vec![
                ("lib.rs", "mod core;"),
                ("core.rs", "mod a; mod b; mod c; mod d; pub struct Core; impl Core { fn f() {} }"),
            ];
            files.extend(
                [("core/a.rs", method), ("core/b.rs", method), ("core/c.rs", method)]
                    .into_iter()
                    .take(others),
            );
            files.extend([("core/b.rs", ""), ("core/c.rs", "")].into_iter().skip(others.saturating_sub(1)));
            files.push((
                "core/d.rs",
                "mod deep; impl Clone for super::Core {} #[cfg(test)] impl super::Core {}",
            ));
            files.push(("core/d/deep.rs", deep));
            scattered(&tree(&files))
        };
        assert_eq!(files("", 2), <[String; 0]>::default(), "three files");
        assert_eq!(
            files("", 3),
            ["Core has methods in 4 files, more than 3: core.rs, core/a.rs, core/b.rs, core/c.rs"]
        );
        assert_eq!(
            files("impl super::super::Core { fn h() {} }", 1),
            ["Core has methods in several folders: core.rs, core/a.rs, core/d/deep.rs"]
        );
    }

    #[test]
    fn concerns_form_no_circle() {
        let found = |a: &'static str, b: &'static str| {
            circles(
                PACKAGE,
                &tree(&[("lib.rs", "mod core;"), ("core.rs", CORE), ("core/a.rs", a), ("core/b.rs", b)]),
            )
        };
        let a = "use super::Core; pub struct A; pub fn f(core: &Core) {}";
        assert_eq!(
            found(a, "use super::{Core, a}; fn g(core: &Core) { a::f(core) }"),
            <[String; 0]>::default()
        );
        let upwards = "use super::{Core, b}; pub struct A; pub fn f(core: &Core) { b::g(core) }";
        assert_eq!(
            found(upwards, "use super::Core; pub fn g(core: &Core) { core.a.h() }"),
            ["a circle of the modules a, b in core:\
              \n  core/a.rs -> core/b.rs: super::b\
              \n  core/b.rs -> core/a.rs: core.a.h()"]
        );
    }
}
