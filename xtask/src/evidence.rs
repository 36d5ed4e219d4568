//! Kernels in `docs/evidence.md`, generated from the table of end-to-end tests.
//!
//! # Problem
//! The page names the tests of each feature, and the kernels on which they run. A list of kernels that is edited by
//! hand is wrong as soon as the table of lanes changes.
//!
//! # Algorithm
//! A name in backquotes with `::` stands for the end-to-end test with this name or, if there is none, for all tests
//! with this prefix. The kernels on which all of them run are written behind it, in parentheses, and replace existing
//! ones.
//!
//! # Invariant
//! The page names each end-to-end test, and each row of its table names a test of some kind or declares that there is
//! none.

use std::fmt::Write as _;
use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context as _, Result, bail, ensure};
use regex::Regex;

use crate::setup::kernels;
use crate::vm::{Lane, Programs, ROWS, TestRow};

/// Path of the page from the root of the checkout.
pub(crate) const PAGE: &str = "docs/evidence.md";
/// The cell of a row without a test.
const NO_TEST: &str = "no test";

/// Writes the kernels into the page.
pub(crate) fn write(root: &Path) -> Result<()> {
    let path = root.join(PAGE);
    let page = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let new = with_kernels(&page, ROWS)?;
    if new != page {
        fs::write(&path, new).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns the page with the kernels of this table.
fn with_kernels(page: &str, rows: &[TestRow]) -> Result<String> {
    check_cells(page)?;
    let name = Regex::new(r"`([a-z0-9_]+::[a-z0-9_:]*)`(?: \([^()]*\))?")?;
    let (mut new, mut end, mut named) = (String::new(), 0, BTreeSet::new());
    for found in name.captures_iter(page) {
        let (all, name) = (found.get(0).context("no match")?, &found[1]);
        let tests = selected(name, rows);
        ensure!(!tests.is_empty(), "{PAGE}: there is no end-to-end test `{name}`");
        new.push_str(&page[end..all.start()]);
        // Writing to a String cannot fail.
        let _ = write!(new, "`{name}` ({})", kernels_of(name, &tests)?);
        end = all.end();
        named.extend(tests.iter().map(|row| row.test));
    }
    new.push_str(&page[end..]);
    let missing: Vec<_> = rows.iter().map(|row| row.test).filter(|test| !named.contains(test)).collect();
    ensure!(missing.is_empty(), "{PAGE} names no feature that these tests carry: {}", missing.join(", "));
    Ok(new)
}

/// Checks that each row of the table has all columns, and a test in the last one.
fn check_cells(page: &str) -> Result<()> {
    for line in page.lines().filter(|line| line.starts_with('|') && !line.starts_with("|-")) {
        // A vertical bar within a cell has a backslash before it.
        let line = line.replace(r"\|", "");
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [feature, _, tests] = cells[..] else {
            bail!("{PAGE}: a row has {} columns instead of 3: {line}", cells.len());
        };
        let is_head = tests == "tested by";
        ensure!(
            is_head || tests.contains('`') || tests.contains(NO_TEST),
            "{PAGE}: no test carries this row, and it does not say so: {feature}"
        );
    }
    Ok(())
}

/// Returns the tests for which a name stands.
fn selected<'a>(name: &str, rows: &'a [TestRow]) -> Vec<&'a TestRow> {
    if let Some(row) = rows.iter().find(|row| row.test == name) {
        return vec![row];
    }
    rows.iter().filter(|row| row.test.starts_with(name)).collect()
}

/// Returns the kernels on which all of these tests run: first those of each change, then the additional ones of other
/// runs.
fn kernels_of(name: &str, tests: &[&TestRow]) -> Result<String> {
    let common = |of: &dyn Fn(&TestRow) -> Vec<&'static str>| {
        let names = kernels::all_names().into_iter();
        names.filter(|kernel| tests.iter().all(|row| of(row).contains(kernel))).collect::<Vec<_>>()
    };
    let ci = common(&|row| row.kernels(Lane::Ci).collect());
    let both = common(&|row| row.kernels(Lane::Ci).chain(row.kernels(Lane::Rest)).collect());
    let rest: Vec<_> = both.into_iter().filter(|kernel| !ci.contains(kernel)).collect();
    let cluster = common(&|row| row.kernels(Lane::Cluster).collect());
    let arm64 = common(&|row| row.arm64_kernels().to_vec());
    let mut programs = tests.iter().map(|row| row.programs);
    let first = programs.next().flatten();
    ensure!(
        programs.all(|of| of == first),
        "{PAGE}: some tests of `{name}` need other programs than the rest: name them apart"
    );
    let of_rest = match first {
        Some(Programs::Containerd) => "rest, with a newer containerd: ",
        Some(Programs::Crio) => "rest, with CRI-O: ",
        Some(Programs::Kubernetes) | None => "rest: ",
    };
    let parts = [("", ci), (of_rest, rest), ("cluster: ", cluster), ("Arm: ", arm64)];
    let parts = parts.into_iter().filter(|(_, kernels)| !kernels.is_empty());
    let parts: Vec<_> = parts.map(|(lane, kernels)| format!("{lane}{}", kernels.join(", "))).collect();
    ensure!(!parts.is_empty(), "{PAGE}: the tests of `{name}` have no kernel in common: name them apart");
    Ok(parts.join("; "))
}

#[cfg(test)]
mod tests {
    use numaward_tests_support::assert_golden;

    use super::*;
    use crate::command;

    const HEAD: &str = "| what | state | tested by |\n|---|---|---|\n";

    fn rows(names: &[&str]) -> Vec<TestRow> {
        ROWS.iter().filter(|row| names.iter().any(|name| row.test.starts_with(name))).copied().collect()
    }

    #[test]
    fn page_matches_table() {
        let path = command::root().join(PAGE);
        let expected = with_kernels(&fs::read_to_string(&path).unwrap(), ROWS).unwrap();
        assert_golden(&path, &expected);
    }

    #[test]
    fn writes_kernels_once() {
        let rows = rows(&["crash::", "daemon::", "cluster::whole"]);
        let page = format!(
            "{HEAD}| a | works on `x` | `daemon::`, stage `page`, `crash::recovers_from_crash_at_any_point` (9.9; rest: none) |\n\
             | b\\|c | works | `cluster::whole` |\n"
        );
        let expected = format!(
            "{HEAD}| a | works on `x` | `daemon::` (6.1, 6.12; rest: latest; Arm: 6.12, latest, 6.12-16k), stage `page`, \
             `crash::recovers_from_crash_at_any_point` (6.12; rest: 6.1) |\n\
             | b\\|c | works | `cluster::whole` (cluster: 6.12) |\n"
        );
        assert_eq!(with_kernels(&page, &rows).unwrap(), expected);
        assert_eq!(with_kernels(&expected, &rows).unwrap(), expected);
    }

    #[test]
    fn reports_errors_of_page() {
        let rows = rows(&["crash::", "cgroup_v1::", "containerd::"]);
        let fault =
            |cells: &str| with_kernels(&format!("{HEAD}| {cells} |\n"), &rows).unwrap_err().to_string();
        assert!(fault("a | works | `crush::`").contains("there is no end-to-end test `crush::`"));
        assert!(fault("a | works | `crash::`").contains("these tests carry: cgroup_v1::"));
        assert!(fault("a | works").contains("2 columns instead of 3"));
        assert!(fault("a | works | often").contains("no test carries this row, and it does not say so: a"));
        assert!(fault("a | works | `containerd::`").contains("name them apart"));
        assert!(fault("a | works | `c::`").contains("no end-to-end test"));
    }

    #[test]
    fn refuses_tests_without_common_kernel() {
        let rows = rows(&["cgroup_v1::", "crash::"]);
        let error = kernels_of("c", &rows.iter().collect::<Vec<_>>()).unwrap_err().to_string();
        assert!(error.contains("no kernel in common"), "{error}");
    }
}
