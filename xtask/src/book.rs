//! `cargo xtask test book`: builds the book and checks its links.
//!
//! The links of the book are read from the output of mdbook, because mdbook derives anchors from headings and paths from folders. Pages of
//! the repository outside the book are checked in their Markdown text.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use numaward_vm::Cache;

use crate::command;
use crate::setup::DebianTool;

/// The output folder of the book, in the checkout.
const MADE: &str = "target/book";
/// All chapters on one page, with links as they were on their own.
const ONE_PAGE: &str = "print.html";
/// Pages that are read where they lie.
const PAGES: [&str; 6] = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "deploy/README.md",
    "deploy/helm/numaward/README.md",
];

/// Heading of the table of contents at which the user's part of the book ends.
const CONTRIBUTORS: &str = "# For contributors";
/// Pages that are looked up, not read; most of their text is generated.
const REFERENCE: [&str; 4] =
    ["configuration.md", "reference/http.md", "reference/kernels.md", "reference/metrics.md"];
/// Maximum numbers of words of `README.md` and of the user's part of the book without the reference.
const MAX_WORDS: [usize; 2] = [1_100, 38_000];

/// Makes the book and checks it.
pub(crate) fn test() -> Result<()> {
    let root = command::root();
    let docs = root.join("docs");
    let made = root.join(MADE);
    let mut build = DebianTool::MDBOOK.command(&Cache::locate()?, "mdbook");
    build.arg("build").arg("--dest-dir").arg(&made).arg(&docs);
    let output = build.output().context("cannot run mdbook")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() || said.contains("[WARN]") || said.contains("[ERROR]") {
        bail!("mdbook: {}\n{said}", output.status);
    }
    let mut faults = unlisted(&docs)?;
    faults.extend(find_long_texts(root, &docs)?);
    let (links, wrong) = rendered(&made)?;
    faults.extend(wrong);
    for page in PAGES {
        faults.extend(written(root, Path::new(page))?);
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n  "));
    }
    println!("{links} links of the book lead somewhere; it is at {}", made.join("index.html").display());
    Ok(())
}

/// Pages that the table of contents does not name: mdbook skips them without a word.
fn unlisted(docs: &Path) -> Result<Vec<String>> {
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).context("cannot read docs/SUMMARY.md")?;
    let listed: BTreeSet<&str> = targets(&summary).collect();
    let pages = files(docs, "md")?;
    let names = pages.iter().filter_map(|page| page.strip_prefix(docs).ok()?.to_str());
    Ok(names
        .filter(|name| *name != "SUMMARY.md" && !listed.contains(name))
        .map(|name| format!("docs/{name} is not in docs/SUMMARY.md"))
        .collect())
}

/// Returns messages about texts with more words than [`MAX_WORDS`].
fn find_long_texts(root: &Path, docs: &Path) -> Result<Vec<String>> {
    let count = |path: PathBuf| -> Result<usize> {
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(text.split_whitespace().count())
    };
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).context("cannot read docs/SUMMARY.md")?;
    let (of_users, _) =
        summary.split_once(CONTRIBUTORS).context("docs/SUMMARY.md has no part for contributors")?;
    let pages = targets(of_users).filter(|page| !REFERENCE.contains(page));
    let book = pages.map(|page| count(docs.join(page))).sum::<Result<usize>>()?;
    let counted = [("README.md", count(root.join("README.md"))?), ("the user's part of the book", book)];
    let long = counted.into_iter().zip(MAX_WORDS).filter(|((_, words), most)| words > most);
    Ok(long.map(|((name, words), most)| format!("{name} has {words} words, of at most {most}")).collect())
}

/// Returns the number of links in the pages of the output, and messages about the broken ones.
fn rendered(made: &Path) -> Result<(usize, Vec<String>)> {
    let mut pages = BTreeMap::new();
    for path in files(made, "html")? {
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        pages.insert(path, content(&text).to_owned());
    }
    let (mut count, mut faults) = (0, Vec::new());
    for (page, text) in pages.iter().filter(|(page, _)| !page.ends_with(ONE_PAGE)) {
        for link in attributes(text, &["href", "src"]).filter(|link| !is_elsewhere(link)) {
            count += 1;
            let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
            let mut target =
                if path.is_empty() { page.clone() } else { plain(&page.with_file_name("").join(path)) };
            if target.is_dir() {
                target.push("index.html");
            }
            let name = page.strip_prefix(made).unwrap_or(page).display();
            match pages.get(&target) {
                None if !target.exists() => faults.push(format!("{name}: {link} leads nowhere")),
                Some(text) if !fragment.is_empty() && !attributes(text, &["id"]).any(|id| id == fragment) => {
                    faults.push(format!("{name}: {link}: that page has no such heading"));
                }
                _ => {}
            }
        }
    }
    Ok((count, faults))
}

/// Returns the broken links of a page of the repository.
fn written(root: &Path, page: &Path) -> Result<Vec<String>> {
    let text =
        fs::read_to_string(root.join(page)).with_context(|| format!("cannot read {}", page.display()))?;
    let wrong = targets(&text).filter(|link| !is_elsewhere(link)).filter(|link| {
        let path = link.split('#').next().unwrap_or_default();
        !path.is_empty() && !root.join(page.with_file_name("")).join(path).exists()
    });
    Ok(wrong.map(|link| format!("{}: {link} leads nowhere", page.display())).collect())
}

fn is_elsewhere(link: &str) -> bool {
    ["http:", "https:", "mailto:", "data:"].iter().any(|scheme| link.starts_with(scheme))
}

/// Returns the content of a page without the frame of mdbook, which differs between packages of mdbook.
fn content(html: &str) -> &str {
    let from = html.split_once("<main>").map_or("", |(_, rest)| rest);
    from.split_once("</main>").map_or(from, |(content, _)| content)
}

/// Returns the values of attributes in the notation of mdbook.
fn attributes<'a>(html: &'a str, names: &'static [&'static str]) -> impl Iterator<Item = &'a str> {
    names.iter().flat_map(move |name| {
        html.split(&format!(" {name}=\""))
            .skip(1)
            .filter_map(|rest| rest.split('"').next())
            .collect::<Vec<_>>()
    })
}

/// Returns the targets of links in Markdown.
fn targets(markdown: &str) -> impl Iterator<Item = &str> {
    markdown.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next())
}

/// A path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => drop(plain.pop()),
            component => plain.push(component),
        }
    }
    plain
}

/// The files below a folder with this extension.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let context = || format!("cannot list {}", folder.display());
    for entry in fs::read_dir(folder).with_context(context)? {
        let path = entry.with_context(context)?.path();
        if path.is_dir() {
            found.extend(files(&path, extension)?);
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(pages: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in pages {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn long_texts_are_reported() {
        let root = folder(&[
            ("README.md", &"word ".repeat(1_101)),
            (
                "docs/SUMMARY.md",
                "- [A](a.md)\n- [B](configuration.md)\n\n# For contributors\n\n- [C](c.md)\n",
            ),
            ("docs/a.md", &"word ".repeat(38_000)),
        ]);
        let report = find_long_texts(root.path(), &root.path().join("docs")).unwrap();
        assert_eq!(report, ["README.md has 1101 words, of at most 1100"]);
        fs::write(root.path().join("docs/a.md"), "word ".repeat(38_001)).unwrap();
        let report = find_long_texts(root.path(), &root.path().join("docs")).unwrap();
        assert_eq!(report[1..], ["the user's part of the book has 38001 words, of at most 38000"]);
    }

    #[test]
    fn links_that_lead_nowhere_are_reported() {
        let made = folder(&[
            (
                "index.html",
                r#"<link href="theme.css"><main><a href="a/b.html#x">1</a> <a href="a/b.html#y">2</a> <img src="no.png"> <a href="https://x/">3</a></main> <script src="theme.js">"#,
            ),
            (
                "a/b.html",
                r##"<main><h2 id="x"><a class="header" href="#x">x</a></h2> <a href="../index.html">4</a> <a href="">5</a></main>"##,
            ),
            ("print.html", r#"<a href="nowhere.html">"#),
        ]);
        let (links, faults) = rendered(made.path()).unwrap();
        assert_eq!(
            (links, faults),
            (
                6,
                vec![
                    "index.html: a/b.html#y: that page has no such heading".to_owned(),
                    "index.html: no.png leads nowhere".to_owned(),
                ]
            )
        );
    }

    #[test]
    fn pages_that_are_not_listed_are_reported() {
        let docs = folder(&[("SUMMARY.md", "- [A](a.md)\n"), ("a.md", ""), ("b/c.md", "")]);
        assert_eq!(unlisted(docs.path()).unwrap(), ["docs/b/c.md is not in docs/SUMMARY.md"]);
    }

    #[test]
    fn pages_of_the_repository_link_to_what_is_there() {
        let root = folder(&[
            ("README.md", "[a](docs/a.md#b) [c](docs/c.md) [d](#d) [e](https://e)"),
            ("docs/a.md", ""),
        ]);
        assert_eq!(
            written(root.path(), Path::new("README.md")).unwrap(),
            ["README.md: docs/c.md leads nowhere"]
        );
    }
}
