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
    /// CRI-O.
    Crio,
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
    row("answers::answers_runtime_while_it_waits", &[(CI, &["6.12"]), (Rest, &["6.1", "latest"])]),
    row("book::book_commands_do_what_pages_say", &[(Rest, &["6.12"])]),
    row("book::each_command_is_in_a_table", &[(CI, &["6.12"])]),
    row("budgets::budgets_let_workloads_share_a_node", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("cgroup_v1::observes_by_v2_or_names_the_reason", &[(CI, &["5.10"])]),
    row("chaos::reports_match_kernel_after_faults", &[(CI, &["6.12"]), (Rest, &["6.1", "latest"])]),
    cluster("cluster::at_once::hundred_pods_come_and_go_at_once"),
    cluster("cluster::chart::chart_is_installed_and_uninstalled"),
    cluster("cluster::claim_faults::claims_survive_crashes"),
    cluster("cluster::claims::claimed_devices_are_followed"),
    cluster("cluster::decisions::repeats_kubelet_decisions"),
    cluster("cluster::dra::claims_get_nodes_that_the_scheduler_chose"),
    cluster("cluster::evictions::evicts_pods_without_their_claim"),
    cluster("cluster::life::pods_survive_node_changes"),
    cluster("cluster::pods_get_their_guarantees"),
    cluster("cluster::readers::readers_see_what_kubelet_reports"),
    cluster("cluster::refusals::refused_pods_are_evicted"),
    cluster("cluster::siblings::gives_whole_cores_if_configured"),
    cluster("cluster::whole::repeats_pod_level_decisions"),
    row("containerd::containerd_1_7", &[(Rest, &["6.12"])]),
    also_arm64(row("containerd::containerd_2", &[(CI, &["6.12"])]), &["6.12"]),
    row("containerd::containerd_2_with_crun", &[(Rest, &["6.12"])]),
    row("containerd::containerd_2_with_crun_and_systemd", &[(Rest, &["6.12"])]),
    row("containerd::containerd_2_with_systemd", &[(CI, &["6.12"])]),
    row("containerd::containerd_with_systemd", &[(Rest, &["6.12"])]),
    needs(row("containerd::crio::containers_are_placed", &[(Rest, &["6.12"])]), Programs::Crio),
    needs(row("containerd::crio::containers_are_placed_with_systemd", &[(Rest, &["6.12"])]), Programs::Crio),
    needs(row("containerd::crio::forty_containers_share_no_cpu", &[(Rest, &["6.12"])]), Programs::Crio),
    needs(row("containerd::crio::refused_pod_leaves_nothing", &[(Rest, &["6.12"])]), Programs::Crio),
    needs(row("containerd::crio::required_plugin_stops_pods", &[(Rest, &["6.12"])]), Programs::Crio),
    needs(row("containerd::crio::running_pod_makes_room", &[(Rest, &["6.12"])]), Programs::Crio),
    row("containerd::forty_containers_share_no_cpu", &[(Rest, &["6.12"])]),
    needs(row("containerd::newer::containers_get_memory_policy", &[(Rest, &["6.12"])]), Programs::Containerd),
    needs(row("containerd::newer::crun_sets_memory_policy", &[(Rest, &["6.12"])]), Programs::Containerd),
    needs(row("containerd::newer::required_plugin_stops_pods", &[(Rest, &["6.12"])]), Programs::Containerd),
    row("containerd::refused_pod_leaves_nothing_in_1_7", &[(Rest, &["6.12"])]),
    row("containerd::refused_pod_leaves_nothing_in_2", &[(CI, &["6.12"])]),
    row("containerd::running_pod_makes_room", &[(CI, &["6.12"])]),
    row("containerd::tenant_cannot_harm_other_pods", &[(CI, &["6.12"])]),
    row("cpu_kinds::gives_cpus_of_requested_kind", &[(CI, &["6.12"])]),
    row("cpu_kinds::hides_siblings_of_exclusive_cpus", &[(CI, &["6.12"])]),
    row("cpu_power::drop_in_of_page_allows_settings", &[(CI, &["6.12"])]),
    row("cpu_power::sets_and_restores_cpu_power", &[(CI, &["6.12"])]),
    row("crash::recovers_from_crash_at_any_point", &[(CI, &["6.12"]), (Rest, &["6.1", "6.12"])]),
    also_arm64(
        row(
            "daemon::counters_match_the_kernel",
            &[(Lane::Quick, &["6.12"]), (CI, &["6.1", "6.12"]), (Rest, &["latest"])],
        ),
        &["6.12", "6.12-16k", "latest"],
    ),
    also_arm64(
        row("daemon::counters_match_under_lockdown", &[(CI, &["6.1", "6.12"]), (Rest, &["latest"])]),
        &["6.12", "6.12-16k", "latest"],
    ),
    also_arm64(row("deploy::image_runs_as_manifests_demand", &[(Rest, &["6.12"])]), &["6.12"]),
    row("doors::floods_of_one_user_delay_no_other", &[(CI, &["6.12"]), (Rest, &["latest"])]),
    row("doors::hung_workloads_hold_no_place", &[(CI, &["6.12"]), (Rest, &["latest"])]),
    row("doors::unprivileged_users_get_no_access", &[(CI, &["6.1"]), (Rest, &["6.12", "latest"])]),
    also_arm64(
        row(
            "enforce::enforcement_holds_on_this_kernel",
            &[(CI, &["5.10", "6.1", "6.12"]), (Rest, &["latest"])],
        ),
        &["6.12"],
    ),
    row("faults::host_faults_end_in_known_state", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    also_arm64(
        row(
            "guarantee::guarantees_outlive_the_daemon",
            &[(CI, &["5.10", "6.1", "6.12"]), (Rest, &["latest"])],
        ),
        &["6.12"],
    ),
    row("guard::guard_reclaims_unused_page_cache", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("guard::guard_stops_page_cache_hog", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("guides::dpdk", &[(Rest, &["6.12"])]),
    row("guides::jvm", &[(Rest, &["6.12"])]),
    row("guides::libvirt", &[(Rest, &["6.12"])]),
    row("guides::llama", &[(Rest, &["6.12"])]),
    row("guides::postgresql", &[(Rest, &["6.12"])]),
    row("guides::qemu", &[(Rest, &["6.12"])]),
    row("guides::redis", &[(Rest, &["6.12"])]),
    row("harm::other_cgroups_are_not_harmed", &[(CI, &["6.12"])]),
    row("harm::own_policies_and_masks_are_kept", &[(CI, &["6.12"])]),
    row("harm::random_sequences_harm_no_cgroup", &[(CI, &["6.12"]), (Rest, &["6.12"])]),
    row("herd::confines_cgroups_on_four_nodes", &[(CI, &["6.12"])]),
    row("herd::confines_cgroups_on_two_nodes", &[(CI, &["6.12"]), (Rest, &["6.1", "latest"])]),
    row("home::places_workloads_automatically", &[(Rest, &["6.12"])]),
    also_arm64(
        row("host::probes_pass_their_own_test", &[(Rest, &["5.10", "6.1", "6.12", "latest"])]),
        ALL_ARM64,
    ),
    also_arm64(row("host::probes_pass_with_device_tree", &[]), &["6.12"]),
    row("hot::finds_pages_accessed_remotely", &[(CI, &["6.12"])]),
    row("hotplug::counts_memory_added_later", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("hugepages::counts_hugepages_by_node", &[(CI, &["6.1", "6.12"]), (Rest, &["latest"])]),
    row("interrupts::drop_in_of_page_allows_moves", &[(CI, &["6.12"])]),
    row("interrupts::moves_and_restores_interrupts", &[(CI, &["6.12"])]),
    row("kernels::page_names_features_of_kernel", &[(CI, &["5.10", "6.12"]), (Rest, &["6.1", "latest"])]),
    row("load::loads_are_placed_or_refused", &[(CI, &["6.12"]), (Rest, &["6.1", "latest"])]),
    row("machine::dropped_machine_is_stopped", &[(CI, &["6.12"])]),
    row("machine::failed_machine_is_an_error", &[(CI, &["6.12"])]),
    row("machine::forwards_port_to_loopback", &[(CI, &["6.12"])]),
    row("machine::hung_machine_is_stopped", &[(CI, &["6.12"])]),
    row("machine::machine_has_requested_nodes", &[(CI, &["6.12"])]),
    row("machine::real_time_is_that_of_host", &[(CI, &["6.12"])]),
    row("machine::returns_output_and_exit_code", &[(CI, &["6.12"])]),
    row("memory_policy::pages_follow_memory_policy", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("numactl::agrees_with_numactl_on_four_nodes", &[(CI, &["6.12"])]),
    also_arm64(
        row("observe::reports_broken_kubelet_guarantees", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
        &["6.12"],
    ),
    also_arm64(row("package::hardened_package_leaves_nothing", &[(Rest, &["6.12"])]), &["6.12"]),
    row("packages::apt_installs_upgrades_and_removes", &[(Rest, &["6.12"])]),
    row("packages::lintian_has_no_objection", &[(Rest, &["6.12"])]),
    row("packages::newcomer::newcomer_gets_what_the_pages_say", &[(Rest, &["6.12"])]),
    row("packages::playbook_rolls_out_and_stops_at_faults", &[(Rest, &["6.12"])]),
    row("packages::rpm_installs_upgrades_and_erases", &[(Rest, &["6.12"])]),
    row("power::answers_survive_power_loss", &[(CI, &["6.12"]), (Rest, &["6.12"])]),
    row("probes::map_memory_is_bounded", &[(Rest, &["6.12"])]),
    also_arm64(row("probes::probes_agree_with_kernel", &[(Rest, &["6.1", "6.12", "latest"])]), &["6.12"]),
    row("rebalance::moves_workload_without_miss", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("reconcile::repairs_changed_guarantees", &[(CI, &["6.12"]), (Rest, &["6.1"])]),
    row("resize::resizes_guarantees_in_place", &[(CI, &["6.1", "6.12"])]),
    row("soak::daemon_resources_do_not_grow", &[(Rest, &["6.12"])]),
    row("stacks::names_function_of_remote_pages", &[(CI, &["6.12"])]),
    row("systemd::unit_keeps_pins_after_restart", &[(CI, &["6.12"])]),
    row("tiers::guarantee_stays_in_fast_memory", &[(CI, &["6.12"])]),
    row("uninstall::restores_every_knob", &[(CI, &["6.1", "6.12"])]),
    row("weights::spreads_pages_by_bandwidth", &[(CI, &["6.12"])]),
];

/// The tests that take longest, in this order: they start first where no earlier run has left times, because a long test
/// that starts last keeps one CPU busy and the others idle.
const LONGEST: &[&str] = &[
    "answers::answers_runtime_while_it_waits",
    "doors::floods_of_one_user_delay_no_other",
    "containerd::containerd_2",
    "guard::guard_reclaims_unused_page_cache",
    "systemd::unit_keeps_pins_after_restart",
    "doors::unprivileged_users_get_no_access",
    "rebalance::moves_workload_without_miss",
    "harm::random_sequences_harm_no_cgroup",
    "faults::host_faults_end_in_known_state",
    "guard::guard_stops_page_cache_hog",
    "harm::own_policies_and_masks_are_kept",
    "harm::other_cgroups_are_not_harmed",
    "containerd::containerd_2_with_systemd",
    "uninstall::restores_every_knob",
    "numactl::agrees_with_numactl_on_four_nodes",
    "reconcile::repairs_changed_guarantees",
    "machine::failed_machine_is_an_error",
];

/// Returns the place of a test in the order of their times.
pub(crate) fn place(test: &str) -> usize {
    LONGEST.iter().position(|long| *long == test).unwrap_or(LONGEST.len())
}

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
        assert!(LONGEST.iter().all(|test| ROWS.iter().any(|row| row.test == *test)));
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
