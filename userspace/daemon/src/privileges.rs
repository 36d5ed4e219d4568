//! Gives up the privileges that are not needed once the probes are attached.

use numaward_config::{Config, OperatingMode};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};

/// What is kept where nothing is written, and why.
///
/// - `CAP_DAC_READ_SEARCH`: a cgroup delegated to a user may be unreadable for others, and root without this is one of
///   them.
const READS: CapabilitySet = CapabilitySet::DAC_READ_SEARCH;
/// What is kept where cgroups are written, and why.
///
/// - `CAP_DAC_OVERRIDE`: the knobs of a cgroup that a user made below a delegated one belong to that user, and nobody
///   else may write them; without this, no guarantee could be given to it, nor be taken back. Files that belong to
///   root can be written without it anyhow. It includes [`READS`].
/// - `CAP_SYS_NICE`: to hand the cpuset controller down to a cgroup with processes is, to older kernels (6.1 is one), to
///   schedule them anew, which nobody may do to a process that has more capabilities than himself.
/// - [`CAP_SYS_PTRACE`](needs_ptrace), only where budgets are held: to move pages of a process with more capabilities.
const WRITES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::SYS_NICE);

/// What is kept of what is held. Where one of the capabilities that lets it read is not held, the other serves.
fn kept(held: CapabilitySet, config: &Config, mode: OperatingMode) -> CapabilitySet {
    let (wanted, instead) = match mode {
        OperatingMode::Enforce => (WRITES, READS),
        OperatingMode::Observe => (READS, CapabilitySet::DAC_OVERRIDE),
    };
    let ptrace = if needs_ptrace(config, mode) { CapabilitySet::SYS_PTRACE } else { CapabilitySet::empty() };
    let reads = READS | CapabilitySet::DAC_OVERRIDE;
    let instead = if held.intersects(wanted & reads) { CapabilitySet::empty() } else { instead };
    held & (wanted | ptrace | instead)
}

/// Whether pages of single processes are to be moved (`move_pages(2)`): the kernel lets only those do that who may trace
/// the process.
fn needs_ptrace(config: &Config, mode: OperatingMode) -> bool {
    mode == OperatingMode::Enforce && config.holds_budgets()
}

/// Drops every capability but those that are [`kept`], from this thread and from those it starts later; none can be had
/// back. Call it while the process has one thread. Returns what is left.
pub(crate) fn drop_unneeded(config: &Config, mode: OperatingMode) -> rustix::io::Result<CapabilitySet> {
    let held = capabilities(None)?;
    let kept = kept(held.permitted, config, mode);
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
    use numaward_config::policy::StrategyKind;

    use super::*;

    #[test]
    fn processes_can_be_traced_only_where_budgets_are_held() {
        let mut config = Config::default();
        let needs_ptrace = |config: &Config| needs_ptrace(config, OperatingMode::Enforce);
        config.strategy = StrategyKind::Kubelet;
        assert!(!needs_ptrace(&config));
        config.strategy = StrategyKind::Native;
        assert!(needs_ptrace(&config));
        assert!(!super::needs_ptrace(&config, OperatingMode::Observe), "nothing is written");
        config.enforcement.mode = EnforcementMode::DryRun;
        assert!(!needs_ptrace(&config));
        config.enforcement.mode = EnforcementMode::On;
        config.budgets.enabled = false;
        assert!(!needs_ptrace(&config));
    }

    #[test]
    fn no_more_is_kept_than_the_mode_takes() {
        use CapabilitySet as Set;
        let mut config = Config { strategy: StrategyKind::Kubelet, ..Config::default() };
        let of = |config: &Config, held| {
            [OperatingMode::Enforce, OperatingMode::Observe].map(|mode| kept(held, config, mode))
        };
        assert_eq!(of(&config, Set::all()), [Set::DAC_OVERRIDE | Set::SYS_NICE, Set::DAC_READ_SEARCH]);
        config.strategy = StrategyKind::Native;
        let [enforces, observes] = of(&config, Set::all());
        assert_eq!(enforces, Set::DAC_OVERRIDE | Set::SYS_NICE | Set::SYS_PTRACE);
        assert_eq!(observes, Set::DAC_READ_SEARCH);
        // A container that was given one of the two that let it read.
        for held in [Set::DAC_READ_SEARCH, Set::DAC_OVERRIDE] {
            assert_eq!(of(&config, held | Set::BPF), [held, held]);
        }
        assert_eq!(of(&config, Set::BPF), [Set::empty(), Set::empty()]);
    }

    /// Capabilities are a thread's own, so the test gives up those of a thread it starts.
    #[test]
    fn nothing_but_what_is_kept_is_left_and_none_can_be_had_back() {
        std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            let kept = drop_unneeded(&Config::default(), OperatingMode::Observe).unwrap();
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
