//! The modules of a crate: their files, and the names in each.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use syn::{
    Attribute, Expr, ExprLit, Item, ItemMod, Lit, Meta, Token, UseTree, Visibility, ext::IdentExt as _,
    punctuated::Punctuated,
};

/// A crate's modules; the first one is its root.
pub(super) struct ModuleTree {
    /// Paths below the root's folder.
    files: Vec<String>,
    /// The top-level module that each file belongs to.
    tops: Vec<String>,
    modules: Vec<Module>,
}

/// A module, which may be only a part of a file.
pub(super) struct Module {
    pub(super) parent: Option<usize>,
    /// Index of the module's file.
    pub(super) file: usize,
    pub(super) children: BTreeMap<String, usize>,
    /// Names that the module defines.
    pub(super) names: BTreeSet<String>,
    pub(super) imports: Vec<Import>,
    /// Items of the module except for its modules.
    pub(super) items: Vec<Item>,
}

/// A name that a `use` imports into a module.
pub(super) struct Import {
    /// Name in the module; `None` for all names of another module, or without a name.
    pub(super) name: Option<String>,
    pub(super) path: Vec<String>,
    pub(super) is_glob: bool,
    pub(super) is_public: bool,
}

/// Location of the files of a module's children.
struct ChildLocation {
    folder: PathBuf,
    /// The folder to which `#[path]` is relative.
    base: PathBuf,
}

impl ChildLocation {
    fn in_folder(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), base: folder.to_owned() }
    }
}

impl ModuleTree {
    /// Reads the crate with this root file.
    pub(super) fn read(root: &Path) -> Result<Self> {
        let folder = root.parent().context("a file without a folder")?;
        let mut tree = Self { files: Vec::new(), tops: Vec::new(), modules: Vec::new() };
        tree.add_file(None, None, root, folder, &ChildLocation::in_folder(folder))?;
        Ok(tree)
    }

    pub(super) fn modules(&self) -> &[Module] {
        &self.modules
    }

    #[cfg(test)]
    pub(super) fn items_mut(&mut self) -> impl Iterator<Item = &mut Item> {
        self.modules.iter_mut().flat_map(|module| &mut module.items)
    }

    #[cfg(test)]
    pub(super) fn items_of_mut(&mut self, file: &str) -> &mut Vec<Item> {
        let index = self.files.iter().position(|known| known == file).unwrap();
        &mut self.modules.iter_mut().find(|module| module.file == index).unwrap().items
    }

    /// Returns a file's path below the root's folder.
    pub(super) fn file(&self, file: usize) -> &str {
        &self.files[file]
    }

    /// Returns the top-level module of a file.
    pub(super) fn top(&self, file: usize) -> &str {
        &self.tops[file]
    }

    fn add_file(
        &mut self,
        parent: Option<usize>,
        top: Option<&str>,
        path: &Path,
        root: &Path,
        place: &ChildLocation,
    ) -> Result<usize> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let syntax = syn::parse_file(&text).with_context(|| format!("cannot parse {}", path.display()))?;
        let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
        self.tops.push(top.map_or_else(|| name.clone(), str::to_owned));
        self.files.push(name);
        self.add(parent, self.files.len() - 1, syntax.items, root, place)
    }

    fn add(
        &mut self,
        parent: Option<usize>,
        file: usize,
        items: Vec<Item>,
        root: &Path,
        place: &ChildLocation,
    ) -> Result<usize> {
        let index = self.modules.len();
        self.modules.push(Module {
            parent,
            file,
            children: BTreeMap::new(),
            names: BTreeSet::new(),
            imports: Vec::new(),
            items: Vec::new(),
        });
        for item in items {
            match item {
                Item::Mod(module) if is_for_tests(&module.attrs) => {}
                Item::Mod(module) => {
                    let name = module.ident.unraw().to_string();
                    let child = self.add_child(index, file, module, root, place)?;
                    self.modules[index].children.insert(name, child);
                }
                item if is_for_tests(attributes(&item)) => {}
                item => {
                    let module = &mut self.modules[index];
                    module.names.extend(name(&item));
                    if let Item::Use(item) = &item {
                        module.imports.extend(imports(item));
                    }
                    module.items.push(item);
                }
            }
        }
        Ok(index)
    }

    fn add_child(
        &mut self,
        parent: usize,
        file: usize,
        module: ItemMod,
        root: &Path,
        place: &ChildLocation,
    ) -> Result<usize> {
        let name = module.ident.unraw().to_string();
        let below = place.folder.join(&name);
        if let Some((_, items)) = module.content {
            return self.add(Some(parent), file, items, root, &ChildLocation::in_folder(&below));
        }
        let (path, place) = match path_attribute(&module.attrs) {
            Some(path) => {
                let path = place.base.join(path);
                let folder = ChildLocation::in_folder(path.parent().unwrap_or(root));
                (path, folder)
            }
            None if below.join("mod.rs").exists() => (below.join("mod.rs"), ChildLocation::in_folder(&below)),
            None => (
                below.with_added_extension("rs"),
                ChildLocation { folder: below, base: place.folder.clone() },
            ),
        };
        let top = if parent == 0 { name } else { self.tops[file].clone() };
        self.add_file(Some(parent), Some(&top), &path, root, &place)
    }
}

/// Returns the name that an item defines.
fn name(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.unraw().to_string())
}

/// Returns the attributes of an item.
pub(super) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns whether code with these attributes is compiled for tests only.
pub(super) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args().is_ok_and(|condition| needs_test(&condition))
    })
}

fn needs_test(condition: &Meta) -> bool {
    let Meta::List(list) = condition else { return condition.path().is_ident("test") };
    let Ok(parts) = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated) else {
        return false;
    };
    if list.path.is_ident("all") {
        parts.iter().any(needs_test)
    } else {
        list.path.is_ident("any") && parts.iter().all(needs_test)
    }
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(path), .. }) => Some(path.value()),
            _ => None,
        },
        _ => None,
    })
}

/// Returns the names that a `use` imports.
pub(super) fn imports(item: &syn::ItemUse) -> Vec<Import> {
    let mut imports = Vec::new();
    // A leading `::` names another crate.
    if item.leading_colon.is_none() {
        let is_public = !matches!(item.vis, Visibility::Inherited);
        add_imports(&item.tree, &mut Vec::new(), is_public, &mut imports);
    }
    imports
}

fn add_imports(tree: &UseTree, path: &mut Vec<String>, is_public: bool, imports: &mut Vec<Import>) {
    let import = |path, name, is_glob| Import { name, path, is_glob, is_public };
    // `use foo::{self}` is `use foo`.
    let leaf = |ident: &syn::Ident| match (ident == "self", path.is_empty()) {
        (true, false) => path.clone(),
        _ => [path.as_slice(), &[ident.unraw().to_string()]].concat(),
    };
    match tree {
        UseTree::Path(tree) => {
            path.push(tree.ident.unraw().to_string());
            add_imports(&tree.tree, path, is_public, imports);
            path.pop();
        }
        UseTree::Name(tree) => {
            let path = leaf(&tree.ident);
            imports.push(import(path.clone(), path.last().cloned(), false));
        }
        UseTree::Rename(tree) => {
            let name = (tree.rename != "_").then(|| tree.rename.unraw().to_string());
            imports.push(import(leaf(&tree.ident), name, false));
        }
        UseTree::Glob(_) => imports.push(import(path.clone(), None, true)),
        UseTree::Group(group) => {
            for tree in &group.items {
                add_imports(tree, path, is_public, imports);
            }
        }
    }
}
