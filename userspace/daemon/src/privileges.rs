//! Gives up the privileges that are not needed once the probes are attached.

use numaward_cgroup::kernel_features;
use numaward_config::{Config, OperatingMode};
use numaward_topology::KernelRelease;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};

/// What is kept where nothing is written, and why.
///
/// - `CAP_DAC_READ_SEARCH`: a cgroup delegated to a user may be unreadable for others, and root without this is one of
///   them.
/// - [`CAP_SYS_PTRACE`](needs_ptrace), only where call chains are taken: it shows where a process of another user, or with more
///   capabilities, has mapped what, and lets that be read.
const READS: CapabilitySet = CapabilitySet::DAC_READ_SEARCH;
/// What is kept where cgroups are written, and why.
///
/// - `CAP_DAC_OVERRIDE`: the knobs of a cgroup that a user made below a delegated one belong to that user, and nobody
///   else may write them; without this, no guarantee could be given to it, nor be taken back. Files that belong to
///   root can be written without it anyhow. It includes [`READS`].
/// - `CAP_SYS_NICE`: to hand the cpuset controller down to a cgroup with processes is, to older kernels (6.1 is one), to
///   schedule them anew, which nobody may do to a process that has more capabilities than himself. And to let threads of other
///   users run on all CPUs of their cgroup again, if they have kept those of a time when it was narrowed.
/// - [`CAP_SYS_PTRACE`](needs_ptrace), only where pages of single processes are moved, or their memory policies are read: those of
///   a process with more capabilities, or of another user; and where call chains are taken.
/// - `CAP_NET_ADMIN`, only where interrupts are kept off exclusive CPUs: for the queues of network interfaces (RPS, XPS).
const WRITES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::SYS_NICE);

/// What this kernel demands beyond what newer ones do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Demands {
    /// Maps of probes are read and written by nobody without `CAP_BPF` (before Linux 5.19).
    pub(crate) bpf: bool,
    /// A write to `cpuset.mems` moves no pages (before Linux 5.15).
    pub(crate) moves: bool,
}

impl Demands {
    /// Those of the running kernel. Nothing but its number says what a write to `cpuset.mems` does before one was made; the
    /// pages are moved where they are seen to stay, whatever the number.
    pub(crate) fn of_this_kernel(bpf: bool) -> Self {
        let uname = rustix::system::uname();
        let release = KernelRelease::parse(&uname.release().to_string_lossy());
        Self { bpf, moves: release.is_some_and(|release| release < kernel_features::MOVES_PAGES.since) }
    }
}

/// What is kept of what is held. Where one of the capabilities that lets it read is not held, the other serves.
fn kept(held: CapabilitySet, config: &Config, mode: OperatingMode, demands: Demands) -> CapabilitySet {
    let (wanted, instead) = match mode {
        OperatingMode::Enforce => (WRITES, READS),
        OperatingMode::Observe => (READS, CapabilitySet::DAC_OVERRIDE),
    };
    let when = |is_needed, capability| if is_needed { capability } else { CapabilitySet::empty() };
    let ptrace = when(needs_ptrace(config, mode, demands), CapabilitySet::SYS_PTRACE);
    let bpf = when(demands.bpf, CapabilitySet::BPF);
    let is_network = mode == OperatingMode::Enforce && config.enforcement.moves_interrupts();
    let network = when(is_network, CapabilitySet::NET_ADMIN);
    let reads = READS | CapabilitySet::DAC_OVERRIDE;
    let instead = if held.intersects(wanted & reads) { CapabilitySet::empty() } else { instead };
    held & (wanted | ptrace | bpf | network | instead)
}

/// Whether pages of single processes are to be moved (`move_pages(2)`, `migrate_pages(2)`), or their memory policies or code looked
/// at: the kernel lets only those do that who may trace the process.
fn needs_ptrace(config: &Config, mode: OperatingMode, demands: Demands) -> bool {
    let moves =
        demands.moves || config.holds_budgets() || config.places_workloads() || config.keeps_off_nodes();
    mode == OperatingMode::Enforce && moves || config.observe.call_chains.enabled
}

/// Drops every capability but those that are [`kept`], from this thread and from those it starts later; none can be got
/// back. Call it while the process has one thread. Returns what is left.
pub(crate) fn drop_unneeded(
    config: &Config,
    mode: OperatingMode,
    demands: Demands,
) -> rustix::io::Result<CapabilitySet> {
    let held = capabilities(None)?;
    let kept = kept(held.permitted, config, mode, demands);
    set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() },
    )?;
    // Nothing is executed; if ever, a set-user-id program gives nothing back.
    set_no_new_privs(true)?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use numaward_api::EnforcementMode;
    use numaward_config::{enforcement::Interrupts, guard::GuardMode, home::HomeMode, policy::StrategyKind};

    use super::*;

    #[test]
    fn processes_can_be_traced_only_where_pages_of_single_ones_are_moved() {
        let mut config = Config::default();
        let new = Demands::default();
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
        let old = Demands { moves: true, ..new };
        assert!(super::needs_ptrace(&config, OperatingMode::Enforce, old), "the kernel moves nothing");
        assert!(!super::needs_ptrace(&config, OperatingMode::Observe, old));
        config.observe.call_chains.enabled = true;
        assert!(super::needs_ptrace(&config, OperatingMode::Observe, new), "functions are to have names");
    }

    #[test]
    fn no_more_is_kept_than_the_mode_takes() {
        use CapabilitySet as Set;
        let mut config = Config { strategy: StrategyKind::Kubelet, ..Config::default() };
        let of = |config: &Config, held| {
            [OperatingMode::Enforce, OperatingMode::Observe]
                .map(|mode| kept(held, config, mode, Demands::default()))
        };
        assert_eq!(of(&config, Set::all()), [Set::DAC_OVERRIDE | Set::SYS_NICE, Set::DAC_READ_SEARCH]);
        config.strategy = StrategyKind::Native;
        let [enforces, observes] = of(&config, Set::all());
        assert_eq!(enforces, Set::DAC_OVERRIDE | Set::SYS_NICE | Set::SYS_PTRACE);
        assert_eq!(observes, Set::DAC_READ_SEARCH);
        config.enforcement.interrupts = Interrupts::MoveAway;
        let moving = of(&config, Set::all());
        assert_eq!(moving, [enforces | Set::NET_ADMIN, observes]);
        config.enforcement.interrupts = Interrupts::Leave;
        // A container that was given one of the two that let it read.
        for held in [Set::DAC_READ_SEARCH, Set::DAC_OVERRIDE] {
            assert_eq!(of(&config, held | Set::BPF), [held, held]);
        }
        assert_eq!(of(&config, Set::BPF), [Set::empty(), Set::empty()]);
        let old = Demands { bpf: true, moves: true };
        let observes = kept(Set::all(), &config, OperatingMode::Observe, old);
        assert_eq!(observes, Set::DAC_READ_SEARCH | Set::BPF);
    }

    /// Capabilities are a thread's own, so the test gives up those of a thread it starts.
    #[test]
    fn nothing_but_what_is_kept_is_left_and_none_can_be_had_back() {
        std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            let kept = drop_unneeded(&Config::default(), OperatingMode::Observe, Demands::default()).unwrap();
            assert_eq!(kept, before.permitted & READS);
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
