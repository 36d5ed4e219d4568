//! Checks that no type of a crate both has many fields and makes input or output.
//!
//! A type with more than [`MAX_FIELDS`] fields is either data, or several types in one. Its parts can be named, moved
//! and tested only if each part with behavior has a type of its own.
//!
//! A type makes input or output if one of its methods names a function of [`IO_PATHS`], or calls a method of a field of
//! such a type in the same crate. A method is one of any `impl`, including those of traits, or a function below the type's
//! module whose first parameter is `&mut` of the type. Only its own code counts: the code of other free functions and of other crates does not count, nor the tokens
//! of a macro, nor a type behind a generic or an alias. Code for tests does not count.

use std::collections::{BTreeMap, BTreeSet};

use syn::{
    Expr, ExprField, ExprMethodCall, ExprPath, Fields, FnArg, ImplItem, Item, ItemFn, ItemImpl, ItemStruct,
    Member, Pat, PatType, Path, Type, TypeReference,
    ext::IdentExt as _,
    visit::{self, Visit},
};

use super::{
    arrows::{MAX_STEPS, Scopes},
    tree::{Import, ModuleTree, is_for_tests},
};

/// Maximum number of fields of a type that makes input or output.
const MAX_FIELDS: usize = 12;

/// Modules and types that read or write outside of the process, by their full paths; includes those of this workspace.
const IO_PATHS: [&[&str]; 12] = [
    &["std", "fs"],
    &["std", "net"],
    &["std", "os", "unix", "net"],
    &["std", "process", "Command"],
    &["tokio", "fs"],
    &["tokio", "net"],
    &["tokio", "process"],
    &["rustix"],
    &["libc"],
    &["numaward_cgroup", "read"],
    &["numaward_cgroup", "knob", "enable_controllers"],
    &["numaward_topology", "sysfs"],
];

/// A type: the module that defines it, and its name there.
type Key = (usize, String);

/// Properties of a type.
#[derive(Default)]
struct TypeProperties {
    file: usize,
    fields: usize,
    /// Types that each field names.
    types: BTreeMap<String, BTreeSet<Key>>,
    /// A method that makes input or output, with the reason.
    outside: Option<String>,
    /// Fields with called methods, and the calling method.
    called: BTreeMap<String, String>,
}

/// Describes the types of a crate that have too many fields.
pub(super) fn too_large(tree: &ModuleTree) -> Vec<String> {
    let mut known = all(tree);
    // Each round finds the types that use one of the previous round.
    loop {
        let outside: BTreeSet<Key> =
            known.iter().filter(|(_, of)| of.outside.is_some()).map(|(key, _)| key.clone()).collect();
        let mut is_change = false;
        for of in known.values_mut().filter(|of| of.outside.is_none()) {
            let uses = |field: &&String| of.types.get(*field).is_some_and(|it| !it.is_disjoint(&outside));
            if let Some((field, method)) = of.called.iter().find(|(field, _)| uses(field)) {
                of.outside = Some(format!("`{method}` uses the field `{field}`"));
                is_change = true;
            }
        }
        if !is_change {
            break;
        }
    }
    let large = known.iter().filter(|(_, of)| of.fields > MAX_FIELDS);
    let faults = large.filter_map(|((_, name), of)| {
        let (file, fields, how) = (tree.file(of.file), of.fields, of.outside.as_ref()?);
        Some(format!("{file}: {name} has {fields} fields, and does input or output: {how}"))
    });
    faults.collect()
}

/// Returns the types of a crate with named fields.
fn all(tree: &ModuleTree) -> BTreeMap<Key, TypeProperties> {
    let scopes = Scopes(tree.modules());
    let mut known = BTreeMap::<Key, TypeProperties>::new();
    for (index, module) in tree.modules().iter().enumerate() {
        for item in &module.items {
            if let Item::Struct(ItemStruct { ident, fields: Fields::Named(fields), .. }) = item {
                let of = known.entry((index, ident.unraw().to_string())).or_default();
                let fields = fields.named.iter().filter(|field| !is_for_tests(&field.attrs));
                let types: BTreeMap<_, _> = fields
                    .filter_map(|field| {
                        let name = field.ident.as_ref()?.unraw().to_string();
                        Some((name, types_in(&scopes, index, &field.ty)))
                    })
                    .collect();
                if types.len() > of.fields {
                    (of.file, of.fields) = (module.file, types.len());
                }
                of.types.extend(types);
            }
        }
    }
    for (index, module) in tree.modules().iter().enumerate() {
        for item in &module.items {
            if let Item::Fn(function) = item {
                add_function(&scopes, index, function, &module.imports, &mut known);
            }
            let Item::Impl(ItemImpl { self_ty, items, .. }) = item else { continue };
            let Type::Path(path) = &**self_ty else { continue };
            let Some(of) = defined(&scopes, index, &path.path).and_then(|key| known.get_mut(&key)) else {
                continue;
            };
            for item in items {
                let ImplItem::Fn(method) = item else { continue };
                if is_for_tests(&method.attrs) {
                    continue;
                }
                let method_name = method.sig.ident.unraw().to_string();
                let mut visitor =
                    IoVisitor { imports: &module.imports, method: &method_name, receiver: "self", of };
                visitor.visit_block(&method.block);
            }
        }
    }
    known
}

/// Adds a free function below a type's module that changes a value of the type, which is its first parameter.
fn add_function(
    scopes: &Scopes<'_>,
    module: usize,
    function: &ItemFn,
    imports: &[Import],
    known: &mut BTreeMap<Key, TypeProperties>,
) {
    let Some(FnArg::Typed(PatType { pat, ty, .. })) = function.sig.inputs.first() else { return };
    let (Pat::Ident(receiver), Type::Reference(TypeReference { mutability: Some(_), elem, .. })) =
        (&**pat, &**ty)
    else {
        return;
    };
    let Type::Path(path) = &**elem else { return };
    let Some(key) = defined(scopes, module, &path.path).filter(|key| scopes.is_below(module, key.0)) else {
        return;
    };
    let Some(of) = known.get_mut(&key) else { return };
    let method = function.sig.ident.unraw().to_string();
    let receiver = receiver.ident.unraw().to_string();
    IoVisitor { imports, method: &method, receiver: &receiver, of }.visit_block(&function.block);
}

/// Returns the type of this crate that a path names in a module.
fn defined(scopes: &Scopes<'_>, module: usize, path: &Path) -> Option<Key> {
    let path: Vec<String> = path.segments.iter().map(|segment| segment.ident.unraw().to_string()).collect();
    Some((scopes.resolve(module, &path, MAX_STEPS)?, path.last()?.clone()))
}

/// Returns the types of this crate that a type in a module names.
fn types_in(scopes: &Scopes<'_>, module: usize, of: &Type) -> BTreeSet<Key> {
    struct TypeNames<'a>(&'a Scopes<'a>, usize, BTreeSet<Key>);
    impl<'ast> Visit<'ast> for TypeNames<'_> {
        fn visit_path(&mut self, path: &'ast Path) {
            self.2.extend(defined(self.0, self.1, path));
            visit::visit_path(self, path);
        }
    }
    let mut found = TypeNames(scopes, module, BTreeSet::new());
    found.visit_type(of);
    found.2
}

struct IoVisitor<'a> {
    imports: &'a [Import],
    method: &'a str,
    /// Name of the variable that has the type.
    receiver: &'a str,
    of: &'a mut TypeProperties,
}

impl<'ast> Visit<'ast> for IoVisitor<'_> {
    fn visit_expr_path(&mut self, path: &'ast ExprPath) {
        let written: Vec<String> =
            path.path.segments.iter().map(|segment| segment.ident.unraw().to_string()).collect();
        let import = self.imports.iter().find(|import| import.name.as_ref() == written.first());
        let full = match import {
            Some(import) => [import.path.as_slice(), &written[1..]].concat(),
            None => written.clone(),
        };
        let is_below =
            |outside: &&[&str]| full.len() >= outside.len() && full.iter().zip(*outside).all(|(a, b)| a == b);
        // An error number of the system is no call.
        if !full.iter().any(|name| name == "Errno") && IO_PATHS.iter().any(is_below) {
            let (method, name) = (self.method, written.join("::"));
            self.of.outside.get_or_insert_with(|| format!("`{method}` names `{name}`"));
        }
        visit::visit_expr_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        if let Some(field) = field_of(&call.receiver, self.receiver) {
            self.of.called.entry(field).or_insert_with(|| self.method.to_owned());
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// Returns the field of this variable at the beginning of an expression.
fn field_of(of: &Expr, variable: &str) -> Option<String> {
    match of {
        Expr::Field(ExprField { base, member, .. }) => match (&**base, member) {
            (Expr::Path(path), Member::Named(name)) if path.path.is_ident(variable) => {
                Some(name.unraw().to_string())
            }
            _ => field_of(base, variable),
        },
        Expr::MethodCall(call) => field_of(&call.receiver, variable),
        Expr::Try(of) => field_of(&of.expr, variable),
        Expr::Reference(of) => field_of(&of.expr, variable),
        Expr::Paren(of) => field_of(&of.expr, variable),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns the types that are too large in a crate of two files.
    fn too_large_in(lib: &str, other: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("lib.rs"), format!("mod other;\n{lib}")).unwrap();
        fs::write(folder.path().join("other.rs"), other).unwrap();
        too_large(&ModuleTree::read(&folder.path().join("lib.rs")).unwrap())
    }

    /// Returns a type with this number of fields, and with these.
    fn with_fields(count: usize, more: &str) -> String {
        let fields: Vec<String> = (0..count).map(|number| format!("f{number}: u32")).collect();
        format!("struct Large {{ {}, {more} }}", fields.join(", "))
    }

    #[test]
    fn finds_io_by_any_name() {
        for body in [
            "std::fs::read(p)",
            "fs::read(p)",
            "File::open(p)",
            "let it = move || Command::new(p).spawn();",
            "if a { tokio::net::TcpStream::connect(p).await } else { b }",
            "p.map(files::read_to_string)",
            "getxattr(p)",
            "match a { _ => libc::getpid() }",
            "self.part.work()",
            "self.parts.lock().first().work()",
        ] {
            let other = format!(
                "use std::{{fs::{{self, File}}, process::Command}}; use std::fs as files; use rustix::fs::getxattr;
                 impl crate::Large {{ async fn f(&self) {{ {body} }} }}"
            );
            let more = "part: Part, parts: Mutex<Vec<Part>>";
            let part = "struct Part { file: Deep } impl Part { fn work(&self) { self.file.read() } }
                struct Deep { a: u32 } impl Deep { fn read(&self) { std::fs::read(p) } }";
            let found = too_large_in(&(with_fields(11, more) + part), &other);
            assert_eq!(found.len(), 1, "{body}: {found:?}");
            assert!(
                found[0].starts_with("lib.rs: Large has 13 fields, and does input or output: `f` "),
                "{found:?}"
            );
            assert_eq!(
                too_large_in(&(with_fields(10, more) + part), &other),
                <[String; 0]>::default(),
                "{body}"
            );
        }
    }

    #[test]
    fn data_may_be_large() {
        for other in [
            "impl crate::Large { fn f(&self) -> std::fs::Metadata { self.f1.to_string() } }",
            "use rustix::io::Errno; impl crate::Large { fn f(&self) { e == Errno::PERM } }",
            "fn f(it: &crate::Large) { std::fs::write(it) }",
            "impl crate::Large { #[cfg(test)] fn f(&self) { std::fs::read(p) } }",
            "#[cfg(test)] impl crate::Large { fn f(&self) { std::fs::read(p) } }",
            // Another type with the same name.
            "struct Part { a: u32 } impl Part { fn work(&self) { std::fs::read(p) } }
             impl crate::Large { fn f(&self) { self.part.work() } }",
        ] {
            let lib =
                with_fields(20, "part: Part") + "struct Part { a: u32 } impl Part { fn work(&self) {} }";
            assert_eq!(too_large_in(&lib, other), <[String; 0]>::default(), "{other}");
        }
    }

    /// Adds one field too many to the types that were once too large, which must be found.
    #[test]
    fn finds_surplus_field_in_this_workspace() {
        let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for (root, name) in [
            ("userspace/control/src/lib.rs", "Core"),
            ("userspace/control/src/lib.rs", "ReconcilerLoop"),
            ("userspace/observe/src/lib.rs", "Observer"),
            ("tests/vm/src/lib.rs", "Vm"),
        ] {
            let mut tree = ModuleTree::read(&workspace.join(root)).unwrap();
            let found = too_large(&tree);
            assert!(!found.iter().any(|fault| fault.contains(&format!(": {name} has "))), "{found:?}");
            let mut structs = tree.items_mut().filter_map(|item| match item {
                Item::Struct(item) if item.ident == name => Some(item),
                _ => None,
            });
            let Some(ItemStruct { fields: Fields::Named(fields), .. }) = structs.next() else {
                panic!("there is no {name}")
            };
            for number in fields.named.len()..=MAX_FIELDS {
                let ident = quote_ident(&format!("by_hand_{number}"));
                let mut more = fields.named.first().unwrap().clone();
                (more.ident, more.ty) = (Some(ident), syn::parse_str("u32").unwrap());
                fields.named.push(more);
            }
            drop(structs);
            let found = too_large(&tree);
            assert!(
                found.iter().any(|fault| fault.contains(&format!(": {name} has 13 fields"))),
                "{name}: {found:?}"
            );
        }
    }

    fn quote_ident(name: &str) -> syn::Ident {
        syn::parse_str(name).unwrap()
    }
}
