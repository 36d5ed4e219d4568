//! Drop of the capabilities that the daemon does not need once its probes are attached.

use numaward_cgroup::kernel_features;
use numaward_config::{Config, OperatingMode};
use numaward_topology::KernelRelease;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};

/// Capabilities of a daemon that writes nothing.
///
/// - `CAP_DAC_READ_SEARCH`, to read a delegated cgroup with a directory that only its owner may read.
/// - [`CAP_SYS_PTRACE`](needs_ptrace), only if call chains are sampled: to read the mappings, and the mapped files, of processes of
///   another user or with more capabilities.
const READ_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_READ_SEARCH;
/// Capabilities of a daemon that writes cgroups.
///
/// - `CAP_DAC_OVERRIDE`: the knobs of a cgroup that a user made below a delegated one belong to that user. Without this capability, the
///   daemon could not write them to give or release a guarantee. Files of root can be written without it. It includes
///   [`READ_CAPABILITIES`].
/// - `CAP_SYS_NICE`: older kernels, such as 6.1, reschedule the processes of a cgroup when it gets the cpuset controller, which requires
///   this capability for processes that have more capabilities than the writer. It is also required to widen the affinity of threads
///   of other users that still have the CPUs of a time when their cgroup was confined.
/// - [`CAP_SYS_PTRACE`](needs_ptrace), only if the daemon moves pages of single processes, reads their memory policies or samples call
///   chains: for processes of another user or with more capabilities.
/// - `CAP_NET_ADMIN`, only if interrupts are moved off exclusive CPUs: for the queues of network interfaces (RPS, XPS).
const WRITE_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::SYS_NICE);

/// Needs of an older kernel that newer ones do not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelNeeds {
    /// True if the maps of probes can only be accessed with `CAP_BPF` (before Linux 5.19).
    pub(crate) bpf: bool,
    /// True if a write to `cpuset.mems` does not move pages (before Linux 5.15).
    pub(crate) moves: bool,
}

impl KernelNeeds {
    /// Returns the needs of the running kernel. The effect of a write to `cpuset.mems` cannot be probed without a write, so it is
    /// derived from the release. This decides on the capability only: pages are moved if they were observed to stay.
    pub(crate) fn of_this_kernel(bpf: bool) -> Self {
        let uname = rustix::system::uname();
        let release = KernelRelease::parse(&uname.release().to_string_lossy());
        Self { bpf, moves: release.is_some_and(|release| release < kernel_features::MOVES_PAGES.since) }
    }
}

/// Returns the capabilities to keep of the ones that the process has. `CAP_DAC_OVERRIDE` and `CAP_DAC_READ_SEARCH` both allow reads: a
/// process without the preferred one of them keeps the other.
fn needed(held: CapabilitySet, config: &Config, mode: OperatingMode, kernel: KernelNeeds) -> CapabilitySet {
    let (wanted, instead) = match mode {
        OperatingMode::Enforce => (WRITE_CAPABILITIES, READ_CAPABILITIES),
        OperatingMode::Observe => (READ_CAPABILITIES, CapabilitySet::DAC_OVERRIDE),
    };
    let when = |is_needed, capability| if is_needed { capability } else { CapabilitySet::empty() };
    let ptrace = when(needs_ptrace(config, mode, kernel), CapabilitySet::SYS_PTRACE);
    let bpf = when(kernel.bpf, CapabilitySet::BPF);
    let is_network = mode == OperatingMode::Enforce && config.enforcement.moves_interrupts();
    let network = when(is_network, CapabilitySet::NET_ADMIN);
    let reads = READ_CAPABILITIES | CapabilitySet::DAC_OVERRIDE;
    let instead = if held.intersects(wanted & reads) { CapabilitySet::empty() } else { instead };
    held & (wanted | ptrace | bpf | network | instead)
}

/// Returns true if the daemon moves pages of single processes (`move_pages(2)`, `migrate_pages(2)`), or reads their memory policies or
/// code. The kernel requires permission to trace the process for each of these.
fn needs_ptrace(config: &Config, mode: OperatingMode, kernel: KernelNeeds) -> bool {
    let moves =
        kernel.moves || config.holds_budgets() || config.places_workloads() || config.keeps_off_nodes();
    mode == OperatingMode::Enforce && moves || config.observe.call_chains.enabled
}

/// Drops all capabilities but the [`needed`] ones, irrevocably, from this thread and the threads that it starts later. Must be called
/// while the process has one thread. Returns the remaining capabilities.
pub(crate) fn drop_unneeded(
    config: &Config,
    mode: OperatingMode,
    kernel: KernelNeeds,
) -> rustix::io::Result<CapabilitySet> {
    let held = capabilities(None)?;
    let kept = needed(held.permitted, config, mode, kernel);
    set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() },
    )?;
    // The daemon executes no program. With this, even a set-user-id program would get no capability.
    set_no_new_privs(true)?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use numaward_api::EnforcementMode;
    use numaward_config::{enforcement::Interrupts, guard::GuardMode, home::HomeMode, policy::StrategyKind};

    use super::*;

    #[test]
    fn keeps_ptrace_only_if_needed() {
        let mut config = Config::default();
        let new = KernelNeeds::default();
        let needs_ptrace = |config: &Config| needs_ptrace(config, OperatingMode::Enforce, new);
        config.strategy = StrategyKind::Kubelet;
        assert!(!needs_ptrace(&config));
        config.strategy = StrategyKind::Native;
        assert!(needs_ptrace(&config));
        assert!(!super::needs_ptrace(&config, OperatingMode::Observe, new), "nothing is written");
        config.enforcement.mode = EnforcementMode::DryRun;
        assert!(!needs_ptrace(&config));
        config.enforcement.mode = EnforcementMode::On;
        config.budgets.enabled = false;
        assert!(!needs_ptrace(&config));
        config.home.mode = HomeMode::Place;
        assert!(needs_ptrace(&config));
        config.home.mode = HomeMode::Report;
        assert!(!needs_ptrace(&config));
        config.guard = GuardMode::Act;
        assert!(needs_ptrace(&config), "memory policies are read");
        config.guard = GuardMode::Report;
        let old = KernelNeeds { moves: true, ..new };
        assert!(super::needs_ptrace(&config, OperatingMode::Enforce, old), "the kernel moves nothing");
        assert!(!super::needs_ptrace(&config, OperatingMode::Observe, old));
        config.observe.call_chains.enabled = true;
        assert!(super::needs_ptrace(&config, OperatingMode::Observe, new), "functions are to have names");
    }

    #[test]
    fn keeps_capabilities_of_the_mode() {
        use CapabilitySet as Set;
        let mut config = Config { strategy: StrategyKind::Kubelet, ..Config::default() };
        let needed_by_mode = |config: &Config, held| {
            [OperatingMode::Enforce, OperatingMode::Observe]
                .map(|mode| needed(held, config, mode, KernelNeeds::default()))
        };
        assert_eq!(
            needed_by_mode(&config, Set::all()),
            [Set::DAC_OVERRIDE | Set::SYS_NICE, Set::DAC_READ_SEARCH]
        );
        config.strategy = StrategyKind::Native;
        let [enforces, observes] = needed_by_mode(&config, Set::all());
        assert_eq!(enforces, Set::DAC_OVERRIDE | Set::SYS_NICE | Set::SYS_PTRACE);
        assert_eq!(observes, Set::DAC_READ_SEARCH);
        config.enforcement.interrupts = Interrupts::MoveAway;
        let moving = needed_by_mode(&config, Set::all());
        assert_eq!(moving, [enforces | Set::NET_ADMIN, observes]);
        config.enforcement.interrupts = Interrupts::Leave;
        // A container that has only one of the two capabilities to read.
        for held in [Set::DAC_READ_SEARCH, Set::DAC_OVERRIDE] {
            assert_eq!(needed_by_mode(&config, held | Set::BPF), [held, held]);
        }
        assert_eq!(needed_by_mode(&config, Set::BPF), [Set::empty(), Set::empty()]);
        let old = KernelNeeds { bpf: true, moves: true };
        let observes = needed(Set::all(), &config, OperatingMode::Observe, old);
        assert_eq!(observes, Set::DAC_READ_SEARCH | Set::BPF);
    }

    /// Each thread has its own capabilities, so the test drops those of a thread that it starts.
    #[test]
    fn drop_is_irrevocable() {
        std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            let kept =
                drop_unneeded(&Config::default(), OperatingMode::Observe, KernelNeeds::default()).unwrap();
            assert_eq!(kept, before.permitted & READ_CAPABILITIES);
            let after = capabilities(None).unwrap();
            assert_eq!((after.effective, after.permitted), (kept, kept));
            assert!(!after.permitted.contains(CapabilitySet::SYS_ADMIN));
            if !before.permitted.is_empty() {
                assert!(set_capabilities(None, before).is_err());
            }
        })
        .join()
        .unwrap();
    }
}
