//! Generation of docs/reference/kernels.md from the results of the end-to-end tests on each kernel.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

use numaward_tests_support::assert_golden;
use numaward_topology::{KernelFeature, KernelRelease};
use serde::Deserialize;

#[derive(Deserialize)]
struct KernelResults {
    release: String,
    needs: BTreeMap<String, bool>,
    probes: BTreeMap<String, String>,
}

/// Reads the results for each kernel, oldest first.
fn read_results(root: &Path) -> Vec<KernelResults> {
    let text = fs::read_to_string(root.join("tests/kernels/seen.json")).unwrap();
    let seen: BTreeMap<String, KernelResults> = serde_json::from_str(&text).unwrap();
    let mut seen: Vec<_> = seen.into_values().collect();
    seen.sort_by_key(|seen| KernelRelease::parse(&seen.release).unwrap());
    seen
}

fn row(text: &mut String, cells: impl IntoIterator<Item = String>) {
    writeln!(text, "| {} |", cells.into_iter().collect::<Vec<_>>().join(" | ")).unwrap();
}

fn page(seen: &[KernelResults]) -> String {
    let mut needs: Vec<KernelFeature> = numaward_probes::kernel_features::ALL.to_vec();
    needs.extend(numaward_cgroup::kernel_features::ALL);
    needs.sort_by_key(|need| need.since);
    let known: Vec<_> = needs.iter().map(|need| need.name).collect();
    for KernelResults { release, needs, .. } in seen {
        let stale: Vec<_> = needs.keys().filter(|name| !known.contains(&name.as_str())).collect();
        assert!(stale.is_empty(), "{release}: no code uses {stale:?}");
    }

    let mut text = String::from(
        "# Kernels\n\n\
         <!-- Generated from the kernels that the tests have seen by `cargo xtask generate` -->\n\n\
         numaward supports Linux 5.10 and newer. Newer features are used if the kernel has them; otherwise, there is a fallback. \
         This page is generated from the results of the tests in virtual machines with Debian's kernels. `numaward doctor` \
         reports the same for your host: missing features, their fallbacks, and the first kernel that has them. Where \
         possible, it probes for the feature and does not compare versions: distributions backport features to older kernels.\n\n\
         A *yes* for a kernel that is older than the release in the second column: a stable update or the distribution has \
         backported the feature. The kernels between 5.10 and 6.1, such as 5.14 (RHEL 9) and 5.15 (Ubuntu 22.04), were not \
         tested: the second column shows their features.\n\n\
         ## Optional features\n\n",
    );
    let heading = ["feature", "since", "fallback"].map(str::to_owned);
    let kernels = || seen.iter().map(|seen| seen.release.clone());
    row(&mut text, heading.into_iter().chain(kernels()));
    row(&mut text, (0..3 + seen.len()).map(|_| "---".to_owned()));
    for need in &needs {
        let lost = if need.is_degraded { "" } else { "no restriction: " };
        let cells = [format!("`{}`", need.name), need.since.to_string(), format!("{lost}{}", need.fallback)];
        let available = seen.iter().map(|KernelResults { release, needs, .. }| {
            let is_available =
                needs.get(need.name).unwrap_or_else(|| panic!("{release}: {} has no result", need.name));
            if *is_available { "yes" } else { "no" }.to_owned()
        });
        row(&mut text, cells.into_iter().chain(available));
    }
    text.push_str(
        "\n## How the probes attach\n\n\
         [Architecture](../architecture.md) explains the counters of each probe. For a kernel without BTF, see `numaward doctor`.\n\n",
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
        "\n## Required features\n\n\
         cgroup v2 with `cpuset`, `memory` with `memory.numa_stat` (5.10) and `memory.min`, `hugetlb` and pressure; BPF with \
         ring buffers, `CAP_BPF` and `CAP_PERFMON` (5.8), programs at functions and tracepoints with BTF. numaward neither \
         kills nor freezes cgroups, so it does not use `cgroup.kill` (5.14). It maps the memory of the probes' counters, so it \
         does not use batched lookups.\n\n\
         A host with cgroup v1: see [Limits](../limits.md).\n\n\
         On architectures other than x86-64, the probe of allocations requires Linux 5.12, because it uses atomic operations that \
         return a value. No such machine was tested with an older kernel.\n",
    );
    text
}

/// `cargo xtask generate` writes it.
#[test]
fn kernels_page_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let path = root.join("docs/reference/kernels.md");
    let page = page(&read_results(root));
    assert_golden(&path, &page);
}
