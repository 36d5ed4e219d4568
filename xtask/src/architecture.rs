//! Checks `docs/architecture.md` against the code: every name and every path between backquotes must exist.
//!
//! A *name* is an identifier, or several joined by `::` or `.`. Each identifier must occur in the code of the checkout, or be
//! a literal; words of comments and in literals do not count. An identifier after that of a type must be a field, variant,
//! method or associated item of a type of this name. A
//! *path* ends with `.rs` or `.sh`; the folder `userspace` of a crate is omitted.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use proc_macro2::{TokenStream, TokenTree};
use regex::Regex;
use syn::{
    Fields, ImplItem, ItemEnum, ItemImpl, ItemStruct, ItemTrait, TraitItem, Type,
    ext::IdentExt as _,
    visit::{self, Visit},
};

use crate::command;

const PAGE: &str = "docs/architecture.md";
/// System calls of the standard library.
const SYSTEM_CALLS: &[&str] = &["fdatasync"];

/// The names of the code.
#[derive(Default)]
struct Names {
    /// All identifiers.
    identifiers: BTreeSet<String>,
    /// The members of each type, by the name of the type.
    members: BTreeMap<String, BTreeSet<String>>,
}

impl Names {
    fn add_rust(&mut self, text: &str) -> Result<()> {
        let file = syn::parse_file(text)?;
        self.add_tokens(text.parse().map_err(|error| anyhow::anyhow!("{error}"))?);
        self.visit_file(&file);
        Ok(())
    }

    fn add_tokens(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Ident(identifier) => {
                    self.identifiers.insert(identifier.unraw().to_string());
                }
                TokenTree::Group(group) => self.add_tokens(group.stream()),
                // The name of a thread or of a key.
                TokenTree::Literal(literal) => {
                    self.identifiers.insert(literal.to_string().trim_matches('"').to_owned());
                }
                TokenTree::Punct(_) => {}
            }
        }
    }

    fn add_members(&mut self, of: &syn::Ident, members: impl Iterator<Item = syn::Ident>) {
        let names = members.map(|member| member.unraw().to_string());
        self.members.entry(of.unraw().to_string()).or_default().extend(names);
    }

    fn has(&self, name: &str) -> bool {
        let parts: Vec<_> = words(name).filter(|part| !part.is_empty()).collect();
        let is_member = |pair: &[&str]| match pair {
            [of, member] => self.members.get(*of).is_none_or(|members| members.contains(*member)),
            _ => true,
        };
        parts.iter().all(|part| self.identifiers.contains(*part)) && parts.windows(2).all(is_member)
    }
}

impl Visit<'_> for Names {
    fn visit_item_struct(&mut self, item: &ItemStruct) {
        let fields = match &item.fields {
            Fields::Named(fields) => fields.named.iter().filter_map(|field| field.ident.clone()).collect(),
            Fields::Unnamed(_) | Fields::Unit => Vec::new(),
        };
        self.add_members(&item.ident, fields.into_iter());
    }

    fn visit_item_enum(&mut self, item: &ItemEnum) {
        self.add_members(&item.ident, item.variants.iter().map(|variant| variant.ident.clone()));
    }

    fn visit_item_trait(&mut self, item: &ItemTrait) {
        let methods = item.items.iter().filter_map(|item| match item {
            TraitItem::Fn(method) => Some(method.sig.ident.clone()),
            TraitItem::Const(constant) => Some(constant.ident.clone()),
            TraitItem::Type(of) => Some(of.ident.clone()),
            _ => None,
        });
        self.add_members(&item.ident, methods);
    }

    fn visit_item_impl(&mut self, item: &ItemImpl) {
        if let Type::Path(of) = &*item.self_ty
            && let Some(of) = of.path.segments.last()
        {
            let methods = item.items.iter().filter_map(|item| match item {
                ImplItem::Fn(method) => Some(method.sig.ident.clone()),
                ImplItem::Const(constant) => Some(constant.ident.clone()),
                ImplItem::Type(of) => Some(of.ident.clone()),
                _ => None,
            });
            self.add_members(&of.ident, methods);
        }
        visit::visit_item_impl(self, item);
    }
}

pub(crate) fn check() -> Result<()> {
    let root = command::root();
    let page = fs::read_to_string(root.join(PAGE)).with_context(|| format!("cannot read {PAGE}"))?;
    let mut git = Command::new("git");
    let listed = command::read(git.args(["ls-files", "-z"]).current_dir(root))
        .context("the names are looked for in the files of a checkout")?;
    let files: Vec<_> = listed.split_terminator('\0').collect();
    let is_code = |file: &&&str| [".rs", ".sh", ".toml", ".yaml"].iter().any(|end| file.ends_with(end));
    let mut names = Names::default();
    for file in files.iter().filter(is_code).filter(|file| root.join(file).is_file()) {
        let text = fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"))?;
        if Path::new(file).extension().is_some_and(|extension| extension == "rs") {
            names.add_rust(&text).with_context(|| format!("cannot parse {file}"))?;
        } else {
            names.identifiers.extend(words(&text).map(str::to_owned));
        }
    }
    let missing = missing(&page, &files, &names)?;
    if !missing.is_empty() {
        bail!("{PAGE} names what is not there (any more):\n{}", missing.join("\n"));
    }
    println!("{PAGE}: all names and paths are there");
    Ok(())
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|character: char| !character.is_alphanumeric() && character != '_')
}

/// Returns each name on the page that is neither a file nor a name of the code, with its line.
fn missing(page: &str, files: &[&str], names: &Names) -> Result<Vec<String>> {
    let quoted = Regex::new("`([^`\n]+)`")?;
    let name = Regex::new("^[A-Za-z_][A-Za-z0-9_]*(?:(?:::|[.])[A-Za-z_][A-Za-z0-9_]*)*$")?;
    let path = Regex::new("^[A-Za-z0-9_/-]+[.](?:rs|sh)$")?;
    let is_there = |text: &str| {
        if path.is_match(text) {
            let of_userspace = format!("userspace/{text}");
            return files
                .iter()
                .any(|file| *file == text || *file == of_userspace || file.ends_with(&format!("/{text}")));
        }
        !name.is_match(text) || SYSTEM_CALLS.contains(&text) || names.has(text)
    };
    let mut missing = Vec::new();
    for (line, text) in page.lines().enumerate() {
        let texts = quoted.captures_iter(text).filter_map(|found| Some(found.get(1)?.as_str()));
        missing.extend(texts.filter(|text| !is_there(text)).map(|text| format!("{}: {text}", line + 1)));
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(code: &str) -> Names {
        let mut names = Names::default();
        names.add_rust(code).unwrap();
        names
    }

    #[test]
    fn missing_names_have_their_lines() {
        let names = names("struct Core { state: u8 }\nfn wait_for() {}");
        let files = ["userspace/guarantee/src/state.rs", "tests/e2e/answers.rs"];
        let page = "`Core.state` waits in `wait_for`,\n`Core::gone`, `guarantee/src/state.rs` `state.rs`\n`tests/e2e/no.rs` \
                    and `GET /metrics`";
        assert_eq!(missing(page, &files, &names).unwrap(), ["2: Core::gone", "3: tests/e2e/no.rs"]);
    }

    #[test]
    fn words_of_comments_are_no_names() {
        let names = names(
            "/// reported\nstruct Session; // sent\nconst TEXT: &str = \"an other\"; const THREAD: &str = \"worker\";",
        );
        assert!(names.has("Session") && names.has("worker"));
        assert!(!["reported", "sent", "other", "Session.sent"].into_iter().any(|name| names.has(name)));
    }

    #[test]
    fn member_must_be_one_of_its_type() {
        let names = names(
            "mod a { struct A { x: u8 } } impl A { const Z: u8 = 1; fn f() {} } enum B { Y } fn g() { x() }",
        );
        assert!(["A.x", "A::f", "A::Z", "B::Y", "a::A"].into_iter().all(|name| names.has(name)));
        assert!(!["A.Y", "B::x", "A::g"].into_iter().any(|name| names.has(name)));
    }
}
