//! The table of all end-to-end tests, with the lanes and the kernels of each.
//!
//! A *lane* is a run of tests with one purpose: [`Lane::Quick`] during development, [`Lane::Ci`] for each change,
//! [`Lane::Rest`] for everything else, and [`Lane::Cluster`] with a real Kubernetes. A test may be in several lanes,
//! with other kernels in each.
//!
//! Invariant: each test has a row, and each row a test and a lane. [`check`] compares the table with the built tests.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use numaward_vm::Arch;

use crate::setup::kernels;

/// A run of tests with one purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Lane {
    /// Unit tests and one machine: while you write code
    Quick,
    /// Required for each change, as continuous integration runs it
    Ci,
    /// Everything else that needs no folder of programs: more kernels, long tests, fuzzing with new seeds, benchmarks
    Rest,
    /// The tests with a real Kubernetes cluster
    Cluster,
}

/// Programs that a test needs and Debian does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Programs {
    /// Programs of Kubernetes.
    Kubernetes,
    /// containerd 2.3 or newer, and runc 1.4 or newer.
    Containerd,
}

/// The row of one test.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TestRow {
    /// Name of the test as printed by `--list`.
    pub(crate) test: &'static str,
    lanes: &'static [(Lane, &'static [&'static str])],
    /// Kernels for Arm of `.ci/arm64`.
    arm64: &'static [&'static str],
    pub(crate) programs: Option<Programs>,
}

impl TestRow {
    /// Returns the kernels for x86-64 on which the test runs in this lane.
    pub(crate) fn kernels(&self, lane: Lane) -> impl Iterator<Item = &'static str> {
        self.lanes.iter().filter(move |(of, _)| *of == lane).flat_map(|(_, kernels)| kernels.iter().copied())
    }

    /// Returns the kernels for Arm on which the test runs.
    pub(crate) fn arm64_kernels(&self) -> &'static [&'static str] {
        self.arm64
    }

    /// Returns the kernels for x86-64 on which the test runs in any lane.
    pub(crate) fn all_kernels(&self) -> Vec<&'static str> {
        let mut kernels: Vec<_> =
            self.lanes.iter().flat_map(|(_, kernels)| kernels.iter().copied()).collect();
        kernels.sort_by_key(|name| kernels::SOURCES.iter().position(|source| source.name == *name));
        kernels.dedup();
        kernels
    }

    /// Returns whether the test can run on machines with this processor.
    pub(crate) fn runs_on(&self, arch: Arch) -> bool {
        match arch {
            Arch::Amd64 => !self.lanes.is_empty(),
            Arch::Arm64 => !self.arm64.is_empty(),
        }
    }
}

use Lane::Rest;

const CI: Lane = Lane::Ci;
const ALL_ARM64: &[&str] = &["6.1", "6.12", "6.12-16k", "latest"];

const fn row(test: &'static str, lanes: &'static [(Lane, &'static [&'static str])]) -> TestRow {
    TestRow { test, lanes, arm64: &[], programs: None }
}

/// Adds kernels for Arm to a row.
const fn also_arm64(row: TestRow, arm64: &'static [&'static str]) -> TestRow {
    TestRow { arm64, ..row }
}

const fn needs(row: TestRow, programs: Programs) -> TestRow {
    TestRow { programs: Some(programs), ..row }
}

const fn cluster(test: &'static str) -> TestRow {
    needs(row(test, &[(Lane::Cluster, &["6.12"])]), Programs::Kubernetes)
}

/// All end-to-end tests.
pub(crate) const ROWS: &[TestRow] = &[
    row(
        "answers::a_runtime_is_answered_while_something_else_is_waited_for",
        &[(CI, &["6.12"]), (Rest, &["6.1", "latest"])],
    ),
    row("book::the_commands_of_the_book_are_true", &[(Rest, &["6.12"])]),
    row(
        "budgets::a_single_node_and_a_spanning_workload_share_a_node_only_with_budgets",
        &[(CI, &["6.12"]), (Rest, &["6.1"])],
    ),
    row(
        "cgroup_v1::workloads_are_observed_by_the_unified_hierarchy_or_it_is_said_why_not",
        &[(CI, &["5.10"])],
    ),
    row("chaos::what_is_said_agrees_with_the_kernel_again", &[(CI, &["6.12"]), (Rest, &["6.1", "latest"])]),
    cluster("cluster::at_once::a_hundred_pods_come_and_go_at_once"),
    cluster("cluster::decisions::what_the_kubelet_decides_is_repeated"),
    cluster("cluster::evictions::pods_without_their_claim_are_evicted"),
    cluster("cluster::life::pods_outlive_changes"),
    cluster("cluster::pods_get_what_they_are_promised"),
    cluster("cluster::readers::what_readers_see"),
    cluster("cluster::refusals::refused_pods_are_evicted"),
    cluster("cluster::siblings::whole_cores_are_given_where_they_are_demanded"),
    cluster("cluster::whole::what_the_kubelet_decides_of_whole_pods_is_repeated"),
    row("containerd::a_tenant_takes_nothing_from_others", &[(CI, &["6.12"])]),
    row("containerd::containerd_1_7", &[(Rest, &["6.12"])]),
    also_arm64(row("containerd::containerd_2", &[(CI, &["6.12"])]), &["6.12"]),
    row("containerd::containerd_2_with_systemd", &[(CI, &["6.12"])]),
    row("containerd::containerd_with_systemd", &[(Rest, &["6.12"])]),
    row("containerd::forty_at_once", &[(Rest, &["6.12"])]),
    needs(row("containerd::newer::memory_policies", &[(Rest, &["6.12"])]), Programs::Containerd),
    needs(row("containerd::newer::required", &[(Rest, &["6.12"])]), Programs::Containerd),
    row("containerd::refused_pods_leave_nothing_in_containerd_1_7", &[(Rest, &["6.12"])]),
    row("containerd::refused_pods_leave_nothing_in_containerd_2", &[(CI, &["6.12"])]),
    row("cpu_kinds::exclusive_cpus_are_of_the_kinds_that_are_asked_for", &[(CI, &["6.12"])]),
    row("cpu_kinds::siblings_of_exclusive_cpus_are_hidden", &[(CI, &["6.12"])]),
    row("cpu_power::exclusive_cpus_wake_up_in_time_and_what_was_found_comes_back", &[(CI, &["6.12"])]),
    row("cpu_power::the_unit_sets_it_with_the_drop_in_that_the_page_has", &[(CI, &["6.12"])]),
    row("crash::a_crash_at_any_point_is_made_good", &[(CI, &["6.12"]), (Rest, &["6.1", "6.12"])]),
    also_arm64(
        row(
            "daemon::the_daemon_agrees_with_the_kernels_book",
            &[(Lane::Quick, &["6.12"]), (CI, &["6.1", "6.12"]), (Rest, &["latest"])],
        ),
        &["6.12", "6.12-16k", "latest"],
    ),
    also_arm64(
        row(
            "daemon::the_daemon_agrees_with_the_kernels_book_under_lockdown",
            &[(CI, &["6.1", "6.12"]), (Rest, &["latest"])],
        ),
        &["6.12", "6.12-16k", "latest"],
    ),
    also_arm64(row("deploy::the_image_runs_as_the_manifests_demand", &[(Rest, &["6.12"])]), &["6.12"]),
    row("doors::floods_of_one_user_hold_up_nobody", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("doors::nobody_and_a_container_get_at_nothing", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    also_arm64(
        row(
            "enforce::enforcement_holds_on_this_kernel",
            &[(CI, &["5.10", "6.1", "6.12"]), (Rest, &["latest"])],
        ),
        &["6.12"],
    ),
    row("faults::what_goes_wrong_ends_in_a_known_state", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    also_arm64(
        row(
            "guarantee::guarantees_hold_move_pages_and_outlive_the_daemon",
            &[(CI, &["5.10", "6.1", "6.12"]), (Rest, &["latest"])],
        ),
        &["6.12"],
    ),
    row(
        "guard::the_guard_keeps_a_promise_that_a_page_cache_hog_would_break",
        &[(CI, &["6.12"]), (Rest, &["6.1"])],
    ),
    row(
        "guard::what_is_promised_is_kept_free_of_page_cache_that_nobody_uses",
        &[(CI, &["6.12"]), (Rest, &["6.1"])],
    ),
    row("guides::dpdk", &[(Rest, &["6.12"])]),
    row("guides::jvm", &[(Rest, &["6.12"])]),
    row("guides::libvirt", &[(Rest, &["6.12"])]),
    row("guides::llama", &[(Rest, &["6.12"])]),
    row("guides::postgresql", &[(Rest, &["6.12"])]),
    row("guides::qemu", &[(Rest, &["6.12"])]),
    row("guides::redis", &[(Rest, &["6.12"])]),
    row("harm::bystanders_outlive_random_sequences", &[(CI, &["6.12"]), (Rest, &["6.12"])]),
    row("harm::no_bystander_is_killed_or_narrowed", &[(CI, &["6.12"])]),
    row("herd::others_are_herded_on_four_nodes", &[(CI, &["6.12"])]),
    row("herd::others_are_herded_on_two_nodes", &[(CI, &["6.12"]), (Rest, &["6.1", "latest"])]),
    row("home::a_workload_is_brought_home_unless_its_memory_policy_names_nodes", &[(Rest, &["6.12"])]),
    also_arm64(row("host::nodes_of_a_device_tree_are_as_good", &[]), &["6.12"]),
    also_arm64(
        row("host::the_probes_pass_their_own_test", &[(Rest, &["5.10", "6.1", "6.12", "latest"])]),
        ALL_ARM64,
    ),
    row("hot::what_is_accessed_on_another_node_is_found", &[(CI, &["6.12"])]),
    row("hotplug::memory_that_comes_later_is_counted_for_its_node", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("hugepages::hugepages_are_counted_where_they_are", &[(CI, &["6.1", "6.12"]), (Rest, &["latest"])]),
    row("interrupts::the_kernels_work_leaves_exclusive_cpus_and_comes_back", &[(CI, &["6.12"])]),
    row("interrupts::the_unit_moves_interrupts_with_the_drop_in_that_the_page_has", &[(CI, &["6.12"])]),
    row(
        "kernels::what_is_missing_is_what_the_page_says",
        &[(CI, &["5.10", "6.12"]), (Rest, &["6.1", "latest"])],
    ),
    row("load::loads_are_placed_as_asked_or_refused", &[(CI, &["6.12"]), (Rest, &["6.1", "latest"])]),
    row("machine::a_dropped_machine_is_gone", &[(CI, &["6.12"])]),
    row("machine::a_forwarded_port_answers_on_the_hosts_loopback", &[(CI, &["6.12"])]),
    row("machine::a_machine_has_the_nodes_asked_for", &[(CI, &["6.12"])]),
    row("machine::a_machine_that_fails_is_an_error", &[(CI, &["6.12"])]),
    row("machine::a_machine_that_hangs_is_stopped", &[(CI, &["6.12"])]),
    row("machine::output_and_exit_code_come_home_as_they_are", &[(CI, &["6.12"])]),
    row("memory_policy::pages_are_where_the_policy_puts_them", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("numactl::a_command_has_what_numactl_gives_it_on_four_nodes", &[(CI, &["6.12"])]),
    also_arm64(
        row("observe::the_kubelet_is_held_to_its_own_promises", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
        &["6.12"],
    ),
    also_arm64(row("package::the_package_runs_hardened_and_leaves_nothing", &[(Rest, &["6.12"])]), &["6.12"]),
    row("packages::apt_installs_upgrades_and_removes_from_a_signed_repository", &[(Rest, &["6.12"])]),
    row("packages::lintian_has_no_objection", &[(Rest, &["6.12"])]),
    row("packages::rpm_installs_upgrades_and_erases", &[(Rest, &["6.12"])]),
    row("power::what_was_answered_survives_a_loss_of_power", &[(CI, &["6.12"]), (Rest, &["6.12"])]),
    row("probes::ten_thousand_workloads_take_a_bounded_memory", &[(Rest, &["6.12"])]),
    also_arm64(
        row(
            "probes::what_the_other_probes_tell_is_what_the_kernel_says",
            &[(Rest, &["6.1", "6.12", "latest"])],
        ),
        &["6.12"],
    ),
    row("rebalance::a_workload_that_runs_is_moved_without_a_miss", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("reconcile::promises_are_kept_against_whatever_changes_them", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("resize::guarantees_of_memory_alone_hold_and_change_while_they_do", &[(CI, &["6.1", "6.12"])]),
    row("soak::what_the_daemon_holds_does_not_grow", &[(Rest, &["6.12"])]),
    row("stacks::the_function_that_allocates_on_another_node_is_named", &[(CI, &["6.12"])]),
    row("systemd::a_unit_keeps_its_pins_through_reload_and_restart", &[(CI, &["6.12"])]),
    row("tiers::what_is_promised_stays_in_fast_memory", &[(CI, &["6.12"])]),
    row("uninstall::every_knob_is_as_it_was", &[(CI, &["6.1", "6.12"])]),
    row("weights::pages_are_spread_by_bandwidth", &[(CI, &["6.12"])]),
];

/// Fails if a test has no row, a row has no test, or a row has neither a lane nor kernels for Arm.
pub(crate) fn check(tests: &[String]) -> Result<()> {
    let tests: BTreeSet<_> = tests.iter().map(String::as_str).collect();
    let rows: BTreeSet<_> = ROWS.iter().map(|row| row.test).collect();
    let names = |of: Vec<&&str>| of.iter().map(|name| (**name).to_owned()).collect::<Vec<_>>().join(", ");
    let unlisted = names(tests.difference(&rows).collect());
    ensure!(unlisted.is_empty(), "without a row in xtask/src/vm/lanes.rs: {unlisted}");
    let gone = names(rows.difference(&tests).collect());
    ensure!(gone.is_empty(), "xtask/src/vm/lanes.rs has rows for tests that are gone: {gone}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_valid_and_sorted() {
        assert!(ROWS.is_sorted_by(|one, next| one.test < next.test));
        for row in ROWS {
            assert!(!row.lanes.is_empty() || !row.arm64.is_empty(), "{}", row.test);
            for (lane, names) in row.lanes {
                assert!(!names.is_empty(), "{} in {lane:?}", row.test);
                assert!(names.iter().all(|name| kernels::find(Arch::Amd64, name).is_ok()), "{}", row.test);
            }
            assert!(row.arm64.iter().all(|name| kernels::find(Arch::Arm64, name).is_ok()), "{}", row.test);
        }
    }

    #[test]
    fn names_missing_tests_and_rows() {
        let mut tests: Vec<_> = ROWS.iter().map(|row| row.test.to_owned()).collect();
        check(&tests).unwrap();
        tests.push("new::test".to_owned());
        assert!(
            check(&tests)
                .unwrap_err()
                .to_string()
                .contains("without a row in xtask/src/vm/lanes.rs: new::test")
        );
        tests.truncate(1);
        assert!(check(&tests).unwrap_err().to_string().contains("tests that are gone"));
    }
}
