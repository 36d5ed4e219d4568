//! Call chains of code that allocates or accesses memory of other nodes (`observe.callChains`).
//!
//! The probes record addresses. They are resolved on request, from the workload's current processes, so the names of
//! an ended process are lost. If another process of the workload has code at all of the addresses, the names come from
//! that process, because forks have the same mappings.
//!
//! Resolving takes at most [`RESOLVE_TIMEOUT`]; an address that is not resolved by then is shown as an offset
//! in its file, or as `[unknown]`.

mod elf;
mod floor;
mod kernel;
mod process;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use numaward_api::{self as api, CallStack, MAX_STACKS, StackKind};
use numaward_model::error_chain;
use numaward_probes::{CallChain, ChainKind, Stack};

pub(crate) use self::{kernel::KernelSymbols, process::processes_below};
use self::{
    kernel::is_probe_function,
    process::{Mapping, MappingSearch, SearchedProcess},
};

/// Longest time for resolving names.
pub(crate) const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of names while a response is prepared. The limit applies to each of three groups: file names, function
/// names, and the names in the frames. Programs choose the number and the length of their names.
const MAX_NAME_BYTES: usize = 4 << 20;
/// Most processes of a workload that are searched for the code of an ended process.
const MAX_SUBSTITUTES: usize = 64;
/// Name of a function that cannot be resolved.
const UNKNOWN_NAME: &str = "[unknown]";
/// Name of a kernel function without a known symbol.
const KERNEL_NAME: &str = "[kernel]";

/// Returns the names of the functions at these offsets of a program or library ([`elf::names`]), for fuzzing.
#[cfg(feature = "testing")]
pub fn function_names(
    file: &std::fs::File,
    offsets: impl IntoIterator<Item = u64>,
    deadline: Instant,
) -> std::io::Result<BTreeMap<u64, String>> {
    elf::names(file, offsets, deadline, &mut MAX_NAME_BYTES.clone())
}

/// Returns the names of the executable mappings at these addresses, from `/proc/PID/maps` ([`process::mappings`]), for fuzzing. `room` are
/// the bytes available for the mappings.
#[cfg(feature = "testing")]
pub fn code_mappings(
    maps: impl std::io::BufRead,
    addresses: Vec<u64>,
    room: usize,
    deadline: Instant,
) -> std::io::Result<Vec<String>> {
    let mut search = MappingSearch { addresses, room, is_full: false, deadline };
    let found = process::mappings(maps, &mut search)?;
    Ok(found.into_iter().map(|mapping| mapping.name).collect())
}

/// Call chains of some workloads.
pub(crate) struct ChainSet {
    pub(crate) chains: Vec<CallChain>,
    /// Number of chains, of all workloads, that found no space in the probes' maps.
    pub(crate) lost: u64,
    /// Directories of the workloads' cgroups.
    pub(crate) dirs: Vec<PathBuf>,
}

/// Resolves the addresses of chains to names, and sums up the bytes of equal stacks. `proc` is the mount point of procfs.
pub(crate) fn resolve(
    found: ChainSet,
    proc: &Path,
    kernel: Option<&KernelSymbols>,
    page_size: u64,
    deadline: Instant,
) -> api::Stacks {
    let ChainSet { chains, lost, dirs } = found;
    let mut notes = BTreeSet::new();
    let kernel = kernel_names(&chains, kernel, &mut notes);
    let mut addresses: Vec<u64> = chains.iter().flat_map(|chain| lookup_addresses(&chain.user)).collect();
    addresses.sort_unstable();
    addresses.dedup();
    let search = MappingSearch { addresses, room: MAX_NAME_BYTES, is_full: false, deadline };
    let mut processes = Processes::below(proc, &dirs, search, &mut notes);
    // The largest chains come first, because the last ones may exceed the limits.
    let mut chains = chains;
    chains.sort_by_key(|chain| Reverse(chain.pages));
    let owners: Vec<Option<u32>> = chains.iter().map(|chain| processes.process_of(chain)).collect();
    let names = processes.names(chains.iter().zip(owners.iter().copied()), deadline);
    let is_late = Instant::now() >= deadline;
    if is_late {
        notes.insert("there was not enough time to look for all names".to_owned());
    }
    if processes.search.is_full {
        notes.insert("some functions have no names: its processes have too many mappings".to_owned());
    }
    let (mut sums, mut rest, mut room) = (StackSums::new(), FoldedSums::new(), MAX_NAME_BYTES);
    for (chain, owner) in chains.iter().zip(owners) {
        let process = owner.and_then(|pid| processes.known.get(&pid)?.as_ref());
        let command = process
            .map_or(if is_late { UNKNOWN_NAME } else { "[ended]" }, |process| process.command.as_str());
        let mut frames = vec![command.to_owned()];
        match process {
            None if is_late => {}
            None => drop(notes.insert("processes that have ended have no names of functions".to_owned())),
            Some(SearchedProcess { read_error: Some(error), .. }) => {
                let hint = "functions of workloads have no names without CAP_SYS_PTRACE";
                notes.insert(format!("{hint}: {}", error_chain(error)));
            }
            _ => {}
        }
        frames.extend(user_frames(&chain.user, process, owner.and_then(|pid| names.get(&pid))));
        frames.extend(kernel_frames(&chain.kernel, &kernel));
        let kind = match chain.kind {
            ChainKind::Allocations => StackKind::Allocations,
            ChainKind::Accesses => StackKind::Accesses,
        };
        let (node, bytes) = (chain.node.map(|node| node.0), chain.pages.0.saturating_mul(page_size));
        let key = (kind, node, frames);
        let size: usize = key.2.iter().map(String::len).sum();
        let sum = match room.checked_sub(size) {
            _ if sums.contains_key(&key) => sums.entry(key).or_default(),
            Some(left) => {
                room = left;
                sums.entry(key).or_default()
            }
            None => rest.entry((kind, node)).or_default(),
        };
        *sum = sum.saturating_add(bytes);
    }
    let stacks =
        sums.into_iter().map(|((kind, node, frames), bytes)| CallStack { kind, node, bytes, frames });
    let stacks = keep_largest(stacks.collect(), rest);
    api::Stacks { sample_every: 1, lost, notes: notes.into_iter().collect(), stacks }
}

/// Bytes by kind, node and frames.
type StackSums = BTreeMap<(StackKind, Option<u32>, Vec<String>), u64>;
/// Bytes of stacks beyond the limits, by kind and node.
type FoldedSums = BTreeMap<(StackKind, Option<u32>), u64>;

/// Returns the [`MAX_STACKS`] largest stacks, largest first, followed by the sums of all other stacks by kind and node.
fn keep_largest(mut stacks: Vec<CallStack>, mut sums: FoldedSums) -> Vec<CallStack> {
    stacks.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.frames.cmp(&b.frames)));
    for stack in stacks.split_off(stacks.len().min(MAX_STACKS)) {
        let sum = sums.entry((stack.kind, stack.node)).or_default();
        *sum = sum.saturating_add(stack.bytes);
    }
    let others = |((kind, node), bytes)| CallStack { kind, node, bytes, frames: vec!["[others]".to_owned()] };
    stacks.extend(sums.into_iter().map(others));
    stacks
}

/// Returns the names of the kernel functions in chains. Adds a note if there are none.
fn kernel_names(
    chains: &[CallChain],
    symbols: Option<&KernelSymbols>,
    notes: &mut BTreeSet<String>,
) -> BTreeMap<u64, String> {
    let addresses: BTreeSet<u64> = chains.iter().flat_map(|chain| lookup_addresses(&chain.kernel)).collect();
    if addresses.is_empty() {
        return BTreeMap::new();
    }
    let names = symbols.and_then(|symbols| symbols.names(addresses).ok()).unwrap_or_default();
    if names.is_empty() {
        let note = "functions of the kernel have no names: /proc/kallsyms shows them with CAP_SYSLOG only";
        notes.insert(note.to_owned());
    }
    names
}

/// Returns the addresses by which the functions of a stack are looked up, the innermost first. All but the first are
/// return addresses. They are reduced by one, because a return address can be the start of the next function.
fn lookup_addresses(stack: &Stack) -> Vec<u64> {
    let Stack::Addresses(addresses) = stack else { return Vec::new() };
    addresses
        .iter()
        .enumerate()
        .map(|(depth, address)| address.saturating_sub(u64::from(depth > 0)))
        .collect()
}

/// Returns the kernel frames, the outermost first, without those of the probe itself.
fn kernel_frames(stack: &Stack, names: &BTreeMap<u64, String>) -> Vec<String> {
    let mut addresses = lookup_addresses(stack);
    let is_probe_function = |address: &u64| names.get(address).is_some_and(|name| is_probe_function(name));
    let own = addresses.iter().take_while(|address| is_probe_function(address)).count();
    addresses.drain(..own);
    if matches!(stack, Stack::NoRoom) || !addresses.is_empty() && names.is_empty() {
        return vec![KERNEL_NAME.to_owned()];
    }
    let name = |address: &u64| {
        names.get(address).map_or_else(|| KERNEL_NAME.to_owned(), |name| format!("{name}_[k]"))
    };
    addresses.iter().rev().map(name).collect()
}

/// Returns the user frames, the outermost first.
fn user_frames(
    stack: &Stack,
    process: Option<&SearchedProcess>,
    names: Option<&BTreeMap<u64, String>>,
) -> Vec<String> {
    if matches!(stack, Stack::NoRoom) {
        return vec!["[no room]".to_owned()];
    }
    let frame = |address: &u64| {
        let known = names.and_then(|names| names.get(address)).cloned();
        known.unwrap_or_else(|| {
            process.and_then(|of| of.mapping(*address)).map_or_else(unknown, |of| file_offset(of, *address))
        })
    };
    let mut frames: Vec<String> = lookup_addresses(stack).iter().rev().map(frame).collect();
    frames.dedup_by(|a, b| a == UNKNOWN_NAME && b == UNKNOWN_NAME);
    frames
}

fn unknown() -> String {
    UNKNOWN_NAME.to_owned()
}

/// Formats an address as the name of its file and the offset in it.
fn file_offset(mapping: &Mapping, address: u64) -> String {
    let name = mapping.name.rsplit('/').next().unwrap_or_default();
    match name {
        "" => unknown(),
        // A mapping of the kernel, such as [vdso].
        _ if name.starts_with('[') => name.to_owned(),
        _ => format!(
            "{name}+{:#x}",
            address.saturating_sub(mapping.range.start).saturating_add(mapping.offset)
        ),
    }
}

/// Processes of some workloads, read on first use.
struct Processes<'a> {
    proc: &'a Path,
    all: Vec<u32>,
    known: BTreeMap<u32, Option<SearchedProcess>>,
    search: MappingSearch,
}

impl<'a> Processes<'a> {
    fn below(proc: &'a Path, dirs: &[PathBuf], search: MappingSearch, notes: &mut BTreeSet<String>) -> Self {
        let in_time = dirs.iter().take_while(|_| Instant::now() < search.deadline);
        let all = in_time.flat_map(|dir| processes_below(dir, notes)).collect();
        Self { proc, all, known: BTreeMap::new(), search }
    }

    fn read(&mut self, pid: u32) -> Option<&SearchedProcess> {
        let (proc, search) = (self.proc, &mut self.search);
        self.known.entry(pid).or_insert_with(|| SearchedProcess::read(proc, pid, search)).as_ref()
    }

    /// Returns the process from which a chain is resolved: its own if that still runs in the workload, else another one
    /// with code at all of the addresses. `None` if there is none, and after the deadline.
    fn process_of(&mut self, chain: &CallChain) -> Option<u32> {
        if Instant::now() >= self.search.deadline {
            return None;
        }
        let addresses = lookup_addresses(&chain.user);
        let has_all =
            |process: &SearchedProcess| addresses.iter().all(|address| process.mapping(*address).is_some());
        if self.all.contains(&chain.pid) && self.read(chain.pid).is_some() {
            return Some(chain.pid);
        }
        let others: Vec<u32> = self.all.iter().copied().take(MAX_SUBSTITUTES).collect();
        let mut others = others.into_iter();
        if addresses.is_empty() { None } else { others.find(|pid| self.read(*pid).is_some_and(has_all)) }
    }

    /// Returns the names of the functions in chains, by process and address. Each file is read once per process.
    fn names<'b>(
        &self,
        chains: impl Iterator<Item = (&'b CallChain, Option<u32>)>,
        deadline: Instant,
    ) -> BTreeMap<u32, BTreeMap<u64, String>> {
        // Keyed by process and file, because two containers may have different files of the same name.
        let mut wanted: BTreeMap<(u32, &str), BTreeMap<u64, u64>> = BTreeMap::new();
        let mut mappings = BTreeMap::new();
        for (chain, owner) in chains {
            let Some((pid, process)) = owner.and_then(|pid| Some((pid, self.known.get(&pid)?.as_ref()?)))
            else {
                continue;
            };
            for address in lookup_addresses(&chain.user) {
                let Some(mapping) = process.mapping(address).filter(|of| of.name.starts_with('/')) else {
                    continue;
                };
                let offset = address - mapping.range.start + mapping.offset;
                wanted.entry((pid, &mapping.name)).or_default().insert(address, offset);
                mappings.insert((pid, mapping.name.as_str()), (process, mapping));
            }
        }
        let (mut found, mut room) = (BTreeMap::<u32, BTreeMap<u64, String>>::new(), MAX_NAME_BYTES);
        for ((pid, path), addresses) in wanted {
            if Instant::now() >= deadline {
                break;
            }
            let Some((process, mapping)) = mappings.get(&(pid, path)) else { continue };
            let names = process
                .open(mapping)
                .and_then(|file| elf::names(&file, addresses.values().copied(), deadline, &mut room))
                .inspect_err(|error| tracing::debug!(pid, path, %error, "its functions have no names"))
                .unwrap_or_default();
            let of_file =
                addresses.iter().filter_map(|(address, offset)| Some((*address, names.get(offset)?.clone())));
            found.entry(pid).or_default().extend(of_file);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _};

    use numaward_probes::Pages;
    use numaward_tests_support::{is_alone, peak, reset_peak};
    use numaward_topology::NodeId;

    use super::*;

    fn chain(pid: u32, pages: u64, user: &[u64], kernel: &[u64]) -> CallChain {
        let stack = |addresses: &[u64]| match addresses {
            [] => Stack::Empty,
            some => Stack::Addresses(some.to_vec()),
        };
        CallChain {
            kind: ChainKind::Allocations,
            node: Some(NodeId(1)),
            pages: Pages(pages),
            pid,
            user: stack(user),
            kernel: stack(kernel),
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    /// Returns a host with the processes 10 and 11 in a cgroup, and process 12 outside of it.
    fn host() -> tempfile::TempDir {
        let host = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = host.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("cgroup/cgroup.procs", "10\n11\n");
        for (pid, start) in [(10, 0x1000), (11, 0x5000), (12, 0x1000)] {
            write(&format!("proc/{pid}/comm"), &format!("process{pid}\n"));
            let end = start + 0x1000;
            write(
                &format!("proc/{pid}/maps"),
                &format!("{start:x}-{end:x} r-xp 00002000 fd:00 12     /usr/bin/server\n"),
            );
        }
        write(
            "proc/kallsyms",
            "f0000000 T bpf_trace_run4\nf0001000 T handle_mm_fault\nf0002000 T exc_page_fault\n",
        );
        host
    }

    fn stacks_of(host: &Path, chains: Vec<CallChain>) -> api::Stacks {
        let kernel = KernelSymbols::open(host).unwrap();
        let found = ChainSet { chains, lost: 3, dirs: vec![host.join("cgroup")] };
        resolve(found, &host.join("proc"), Some(&kernel), 4096, soon())
    }

    #[test]
    fn frames_run_from_process_to_kernel() {
        let host = host();
        let kernel = [0xf000_0010, 0xf000_1010, 0xf000_2010];
        let stacks = stacks_of(
            host.path(),
            vec![chain(10, 64, &[0x1800, 0x1101], &kernel), chain(10, 1, &[0x1800, 0x1101], &kernel)],
        );
        let [stack] = &*stacks.stacks else { panic!("{stacks:?}") };
        assert_eq!(
            stack.frames,
            ["process10", "server+0x2100", "server+0x2800", "exc_page_fault_[k]", "handle_mm_fault_[k]"]
        );
        assert_eq!((stack.bytes, stack.node, stacks.lost), (65 * 4096, Some(1), 3));
        assert!(stacks.notes.is_empty(), "{stacks:?}");
    }

    #[test]
    fn substitute_is_of_the_same_workload() {
        let host = host();
        let first = |chains| stacks_of(host.path(), chains).stacks.remove(0).frames;
        // The process has ended, and process 11 has code at the address.
        assert_eq!(first(vec![chain(99, 1, &[0x5800], &[])]), ["process11", "server+0x2800"]);
        // The id now belongs to a process outside the workload.
        assert_eq!(first(vec![chain(12, 1, &[0x9800], &[])]), ["[ended]", UNKNOWN_NAME]);
        let stacks = stacks_of(host.path(), vec![chain(99, 1, &[0x9800, 0x9900], &[])]);
        assert_eq!(stacks.stacks[0].frames, ["[ended]", UNKNOWN_NAME]);
        assert_eq!(stacks.notes.len(), 1, "{stacks:?}");
    }

    #[test]
    fn notes_missing_privileges() {
        let host = host();
        fs::write(host.path().join("proc/kallsyms"), "0000000000000000 T handle_mm_fault\n").unwrap();
        fs::remove_file(host.path().join("proc/10/maps")).unwrap();
        let stacks = stacks_of(host.path(), vec![chain(10, 1, &[0x1800], &[0xf000_1010, 0xf000_2010])]);
        assert_eq!(stacks.stacks[0].frames, ["process10", UNKNOWN_NAME, KERNEL_NAME]);
        let notes = stacks.notes.join("\n");
        assert!(notes.contains("CAP_SYS_PTRACE") && notes.contains("CAP_SYSLOG"), "{notes}");
    }

    #[test]
    fn no_process_is_read_after_the_deadline() {
        let host = host();
        let found = ChainSet {
            chains: vec![chain(10, 1, &[0x1800], &[])],
            lost: 0,
            dirs: vec![host.path().join("cgroup")],
        };
        let stacks = resolve(found, &host.path().join("proc"), None, 4096, Instant::now());
        assert_eq!(stacks.stacks[0].frames, [UNKNOWN_NAME, UNKNOWN_NAME]);
        assert!(stacks.notes.iter().any(|note| note.contains("time")), "{stacks:?}");
    }

    /// The `maps` of each process can have hundreds of megabytes.
    #[test]
    fn memory_is_bounded_for_any_mappings() {
        const CEILING: u64 = 32 << 20;
        const PROCESSES: u32 = 12;
        if !is_alone() {
            return;
        }
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("cgroup")).unwrap();
        let pids: Vec<String> = (1..=PROCESSES).map(|pid| pid.to_string()).collect();
        fs::write(host.path().join("cgroup/cgroup.procs"), pids.join("\n")).unwrap();
        let maps = host.path().join("maps");
        let mut text = std::io::BufWriter::new(fs::File::create(&maps).unwrap());
        for at in 1..=4000_u64 {
            let folder = "x".repeat(4000);
            writeln!(text, "{at:x}000-{at:x}800 r-xp 0 0:1 9 /{at}/{folder}").unwrap();
        }
        drop(text);
        for pid in 1..=PROCESSES {
            fs::create_dir_all(host.path().join(format!("proc/{pid}"))).unwrap();
            fs::write(host.path().join(format!("proc/{pid}/comm")), "flood\n").unwrap();
            fs::hard_link(&maps, host.path().join(format!("proc/{pid}/maps"))).unwrap();
        }
        // Chains of 100 addresses each.
        let chains = (1..=PROCESSES).flat_map(|pid| {
            (0..30).map(move |part| {
                let addresses: Vec<u64> = (1..=100).map(|at| ((100 * part + at) << 12) + 1).collect();
                chain(pid, 1, &addresses, &[])
            })
        });
        let found = ChainSet { chains: chains.collect(), lost: 0, dirs: vec![host.path().join("cgroup")] };
        reset_peak();
        let start = peak();
        let stacks =
            resolve(found, &host.path().join("proc"), None, 4096, Instant::now() + Duration::from_mins(5));
        let most = peak();
        assert!(most < start + CEILING, "{} KiB became {} KiB", start >> 10, most >> 10);
        assert!(stacks.notes.iter().any(|note| note.contains("mappings")), "{:?}", stacks.notes);
    }

    #[test]
    fn excess_stacks_are_folded() {
        let stack = |number: usize| CallStack {
            kind: StackKind::Allocations,
            node: Some(0),
            bytes: number as u64,
            frames: vec![format!("f{number}")],
        };
        let all = keep_largest((1..=MAX_STACKS + 5).map(stack).collect(), FoldedSums::new());
        assert_eq!(all.len(), MAX_STACKS + 1);
        assert_eq!((all[0].bytes, all[MAX_STACKS].bytes), (MAX_STACKS as u64 + 5, 1 + 2 + 3 + 4 + 5));
        assert_eq!(keep_largest(vec![stack(1)], FoldedSums::new()), [stack(1)]);
    }
}
