//! Dependencies between the files of a crate, with the used names.
//!
//! A path counts wherever it is written: in a `use`, a type, an expression, an attribute, and among the tokens of a
//! macro. It leads to the file that defines its name, through re-exports, or else to the deepest module in the path.
//! Methods and fields of a value have no path and do not count; a file that names the value's type depends on it.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::{
    Arm, Attribute, Expr, ExprCall, ExprLit, ExprPath, Field, ImplItem, Item, ItemUse, Lit, LitStr, Local,
    Macro, Meta, Path, Stmt, TraitItem, Variant, Visibility,
    ext::IdentExt as _,
    visit::{self, Visit},
};

use super::tree::{Import, Module, ModuleTree, attributes, imports, is_for_tests};

/// The used names, by the using file and the defining file.
pub(super) type Arrows = BTreeMap<(usize, usize), BTreeSet<String>>;

/// Maximum number of re-exports of re-exports and of nested modules: more are a path that leads to itself.
pub(super) const MAX_STEPS: usize = 32;

/// Returns the dependencies between the files of a crate.
pub(super) fn arrows(tree: &ModuleTree) -> Arrows {
    let modules = tree.modules();
    let mut visitor = PathVisitor { scopes: Scopes(modules), module: 0, arrows: Arrows::new() };
    for (index, module) in modules.iter().enumerate() {
        visitor.module = index;
        for item in &module.items {
            visitor.visit_item(item);
        }
    }
    visitor.arrows
}

/// Resolves names in each module.
pub(super) struct Scopes<'a>(pub(super) &'a [Module]);

impl Scopes<'_> {
    /// Returns the module that defines a path's name, as it is written in a module; `None` for another crate's.
    pub(super) fn resolve(&self, module: usize, path: &[String], steps: usize) -> Option<usize> {
        let (first, mut rest) = path.split_first()?;
        let steps = steps.checked_sub(1)?;
        let mut start = match first.as_str() {
            "crate" => 0,
            "self" => module,
            "super" => self.0[module].parent?,
            _ => return self.find(module, path, steps),
        };
        while let Some(("super", after)) = rest.split_first().map(|(first, after)| (first.as_str(), after)) {
            start = self.0[start].parent?;
            rest = after;
        }
        if rest.is_empty() {
            return Some(start);
        }
        // A name that is not found is defined by a macro, and belongs to the module where it was searched.
        self.find(start, rest, steps).or(Some(start))
    }

    /// Resolves a path that starts at a module's own names.
    fn find(&self, module: usize, path: &[String], steps: usize) -> Option<usize> {
        let (first, rest) = path.split_first()?;
        let steps = steps.checked_sub(1)?;
        let Module { children, names, imports, .. } = &self.0[module];
        if let Some(&child) = children.get(first) {
            return if rest.is_empty() { Some(child) } else { self.find(child, rest, steps).or(Some(child)) };
        }
        if names.contains(first) {
            return Some(module);
        }
        if let Some(import) = imports.iter().find(|import| import.name.as_ref() == Some(first)) {
            return self.resolve(module, &[import.path.as_slice(), rest].concat(), steps);
        }
        imports.iter().filter(|import| import.is_glob).find_map(|import| {
            let from = self.resolve(module, &import.path, steps)?;
            self.find(from, path, steps)
        })
    }

    /// Returns the module that a private `use` of a module leads to, by the imported name.
    fn imported(&self, module: usize, name: &str) -> Option<usize> {
        let mut imports = self.0[module].imports.iter();
        let import = imports.find(|import| !import.is_public && import.name.as_deref() == Some(name))?;
        self.resolve(module, &import.path, MAX_STEPS)
    }

    /// Returns true if a module is inside of another one.
    pub(super) fn is_below(&self, module: usize, ancestor: usize) -> bool {
        let mut parents = std::iter::successors(self.0[module].parent, |&parent| self.0[parent].parent);
        parents.any(|parent| parent == ancestor)
    }
}

struct PathVisitor<'a> {
    scopes: Scopes<'a>,
    /// The module that contains the code.
    module: usize,
    arrows: Arrows,
}

impl PathVisitor<'_> {
    fn add(&mut self, target: Option<usize>, name: impl FnOnce() -> String) {
        let file = |module: usize| self.scopes.0[module].file;
        if let Some(target) = target
            && file(target) != file(self.module)
        {
            self.arrows.entry((file(self.module), file(target))).or_default().insert(name());
        }
    }

    fn add_import(&mut self, Import { path, is_glob, is_public, .. }: &Import) {
        let target = self.scopes.resolve(self.module, path, MAX_STEPS);
        // A re-export: the use of the name is a use of the defining file.
        let is_front = *is_public && target.is_some_and(|target| self.scopes.is_below(target, self.module));
        if !is_front {
            self.add(target, || path.join("::") + if *is_glob { "::*" } else { "" });
        }
    }

    /// Adds a path outside a `use`. A single name may be a variable or a field, unless it is a type or is called.
    fn add_path(&mut self, path: &[String], is_called: bool) {
        let is_type = |name: &String| name.starts_with(char::is_uppercase);
        match path {
            [name] if !is_called && !is_type(name) => {}
            // The name of a module.
            [name] if self.scopes.0[self.module].children.contains_key(name) => {}
            _ => {
                let target = self.scopes.resolve(self.module, path, MAX_STEPS);
                // An imported name was counted at its `use`.
                if target.is_none() || target != self.scopes.imported(self.module, &path[0]) {
                    self.add(target, || path.join("::"));
                }
            }
        }
    }

    fn add_syntax(&mut self, path: &Path, is_called: bool) {
        if path.leading_colon.is_none() {
            let path = path.segments.iter().map(|segment| segment.ident.unraw().to_string());
            self.add_path(&path.collect::<Vec<_>>(), is_called);
        }
    }

    /// Searches for paths among the tokens of a macro.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        let mut path = Vec::new();
        // Number of colons since the path's last name.
        let mut colons = 0;
        // A name after one dot or `::` does not begin a path.
        let mut dots = 0;
        loop {
            let token = tokens.next();
            let is_ident = matches!(token, Some(TokenTree::Ident(_)));
            let is_colon = matches!(&token, Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
            let goes_on = is_colon && colons < 2 || is_ident && colons == 2;
            if !path.is_empty() && !goes_on {
                let is_called = matches!(&token, Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
                // The names of `crate::{…}` are not known.
                if path != ["crate"] && path != ["self"] && path != ["super"] {
                    self.add_path(&path, is_called && colons == 0);
                }
                path.clear();
            }
            match token {
                None => break,
                Some(TokenTree::Ident(ident)) => {
                    if dots != 1 && (colons != 2 || !path.is_empty()) {
                        path.push(ident.unraw().to_string());
                    }
                    (colons, dots) = (0, 0);
                }
                Some(TokenTree::Punct(punct)) => {
                    colons = if is_colon { colons + 1 } else { 0 };
                    dots = if punct.as_char() == '.' { dots + 1 } else { 0 };
                }
                Some(TokenTree::Group(group)) => {
                    (colons, dots) = (0, 0);
                    self.add_tokens(group.stream());
                }
                Some(TokenTree::Literal(literal)) => {
                    (colons, dots) = (0, 0);
                    // `#[serde(with = "crate::module")]`
                    let path =
                        syn::parse_str::<LitStr>(&literal.to_string()).and_then(|text| text.parse::<Path>());
                    if let Ok(path) = path
                        && path.segments.len() > 1
                    {
                        self.add_syntax(&path, false);
                    }
                }
            }
        }
    }
}

impl<'ast> Visit<'ast> for PathVisitor<'_> {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        for import in imports(item) {
            self.add_import(&import);
        }
    }

    fn visit_path(&mut self, path: &'ast Path) {
        self.add_syntax(path, false);
        visit::visit_path(self, path);
    }

    fn visit_expr_call(&mut self, call: &'ast ExprCall) {
        if let Expr::Path(ExprPath { qself: None, path, .. }) = &*call.func {
            self.add_syntax(path, true);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_macro(&mut self, called: &'ast Macro) {
        self.add_syntax(&called.path, true);
        self.add_tokens(called.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        match &attribute.meta {
            Meta::List(list) if !list.path.is_ident("cfg") => self.add_tokens(list.tokens.clone()),
            Meta::NameValue(pair) if !matches!(pair.value, Expr::Lit(ExprLit { lit: Lit::Str(_), .. })) => {
                self.visit_expr(&pair.value);
            }
            _ => {}
        }
    }

    // `pub(in path)` names users, not dependencies.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_item(&mut self, item: &'ast Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes = match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Macro(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            _ => return,
        };
        if !is_for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        let attributes = match item {
            TraitItem::Const(item) => &item.attrs,
            TraitItem::Fn(item) => &item.attrs,
            TraitItem::Macro(item) => &item.attrs,
            TraitItem::Type(item) => &item.attrs,
            _ => return,
        };
        if !is_for_tests(attributes) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        let attributes = match statement {
            Stmt::Local(Local { attrs, .. }) => attrs,
            Stmt::Macro(statement) => &statement.attrs,
            Stmt::Expr(Expr::Block(block), _) => &block.attrs,
            Stmt::Expr(Expr::Call(call), _) => &call.attrs,
            Stmt::Expr(Expr::If(block), _) => &block.attrs,
            Stmt::Expr(Expr::MethodCall(call), _) => &call.attrs,
            _ => return visit::visit_stmt(self, statement),
        };
        if !is_for_tests(attributes) {
            visit::visit_stmt(self, statement);
        }
    }

    fn visit_arm(&mut self, arm: &'ast Arm) {
        if !is_for_tests(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }

    fn visit_field(&mut self, field: &'ast Field) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast Variant) {
        if !is_for_tests(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }
}
