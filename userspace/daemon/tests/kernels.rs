//! The page of the book that says what each kernel has is made from what the tests saw on each.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

use numaward_tests_support::assert_golden;
use numaward_topology::{KernelFeature, KernelRelease};
use serde::Deserialize;

#[derive(Deserialize)]
struct Seen {
    release: String,
    needs: BTreeMap<String, bool>,
    probes: BTreeMap<String, String>,
}

/// What each kernel has, oldest first.
fn seen(root: &Path) -> Vec<Seen> {
    let text = fs::read_to_string(root.join("tests/kernels/seen.json")).unwrap();
    let seen: BTreeMap<String, Seen> = serde_json::from_str(&text).unwrap();
    let mut seen: Vec<_> = seen.into_values().collect();
    seen.sort_by_key(|seen| KernelRelease::parse(&seen.release).unwrap());
    seen
}

fn row(text: &mut String, cells: impl IntoIterator<Item = String>) {
    writeln!(text, "| {} |", cells.into_iter().collect::<Vec<_>>().join(" | ")).unwrap();
}

fn page(seen: &[Seen]) -> String {
    let mut needs: Vec<KernelFeature> = numaward_probes::kernel_features::ALL.to_vec();
    needs.extend(numaward_cgroup::kernel_features::ALL);
    needs.sort_by_key(|need| need.since);
    let known: Vec<_> = needs.iter().map(|need| need.name).collect();
    for Seen { release, needs, .. } in seen {
        let stale: Vec<_> = needs.keys().filter(|name| !known.contains(&name.as_str())).collect();
        assert!(stale.is_empty(), "{release}: nobody needs {stale:?}");
    }

    let mut text = String::from(
        "# Kernels\n\n\
         <!-- Generated from the kernels that the tests have seen by `cargo xtask generate` -->\n\n\
         numaward works from Linux 5.10 on. What came later is used where it is there; else something takes its place. This page \
         is made from what the tests saw in virtual machines with Debian's kernels. `numaward doctor` says the same of your \
         host: what is missing, what takes its place, and the first kernel that has it. It looks for the thing, not for the \
         number, where it can: distributions take features into older kernels.\n\n\
         A *yes* before the release in the second column: a stable update, or the distribution, has taken it over. \
         5.10 stands for the kernels between it and 6.1 as well, such as 5.14 (RHEL 9) and 5.15 (Ubuntu 22.04): what they have \
         follows from the second column. They were not booted.\n\n\
         ## What is used where it is there\n\n",
    );
    let heading = ["what", "since", "without it"].map(str::to_owned);
    let kernels = || seen.iter().map(|seen| seen.release.clone());
    row(&mut text, heading.into_iter().chain(kernels()));
    row(&mut text, (0..3 + seen.len()).map(|_| "---".to_owned()));
    for need in &needs {
        let lost = if need.is_degraded { "" } else { "nothing is lost: " };
        let cells = [format!("`{}`", need.name), need.since.to_string(), format!("{lost}{}", need.fallback)];
        let here = seen.iter().map(|Seen { release, needs, .. }| {
            let is_here =
                needs.get(need.name).unwrap_or_else(|| panic!("{release}: {} was not looked for", need.name));
            if *is_here { "yes" } else { "no" }.to_owned()
        });
        row(&mut text, cells.into_iter().chain(here));
    }
    text.push_str(
        "\n## How the probes attach\n\n\
         [Architecture](../architecture.md) has what each counts. Where a kernel has no BTF, see `numaward doctor`.\n\n",
    );
    row(&mut text, ["probe".to_owned()].into_iter().chain(kernels()));
    row(&mut text, (0..=seen.len()).map(|_| "---".to_owned()));
    let probes = seen.iter().flat_map(|seen| seen.probes.keys());
    for probe in probes.collect::<std::collections::BTreeSet<_>>() {
        let modes = seen
            .iter()
            .map(|seen| seen.probes.get(probe).map_or("absent".to_owned(), |mode| format!("`{mode}`")));
        row(&mut text, [format!("`{probe}`")].into_iter().chain(modes));
    }
    text.push_str(
        "\n## What every supported kernel has\n\n\
         cgroup v2 with `cpuset`, `memory` with `memory.numa_stat` (5.10) and `memory.min`, `hugetlb` and pressure; BPF with \
         ring buffers, `CAP_BPF` and `CAP_PERFMON` (5.8), programs at functions and tracepoints with BTF. numaward neither \
         kills nor freezes cgroups, so `cgroup.kill` (5.14) is of no use to it; it maps the memory of the probes' counters, and \
         looks none up in batches.\n\n\
         A host with cgroup v1: see [Limits](../limits.md).\n\n\
         On other architectures than x86-64 the probe of allocations takes Linux 5.12, because it uses fetching atomics there; no \
         such machine was tested with a kernel that old.\n",
    );
    text
}

/// `cargo xtask generate` writes it.
#[test]
fn the_page_says_what_the_tests_saw() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let path = root.join("docs/reference/kernels.md");
    let page = page(&seen(root));
    assert_golden(&path, &page);
}
