//! Reads the offsets and signatures that the probes need from the kernel's BTF.
//!
//! - The node of a page is in the highest `log2(MAX_NUMNODES)` bits of `page->flags`
//!   (`include/linux/page-flags-layout.h`, for 64-bit kernels with a virtual memory map). `MAX_NUMNODES` is a
//!   build-time constant. BTF has no constants, but it has arrays of these sizes: `struct zone
//!   node_zones[MAX_NR_ZONES]` in `struct pglist_data`, and `struct zoneref _zonerefs[MAX_NUMNODES * MAX_NR_ZONES + 1]`
//!   in `struct zonelist`.
//! - The cgroup of a task is at `task->cgroups->dfl_cgrp->kn->id`. `task->migration_disabled` shows if it must not
//!   migrate.
//! - The other probes need offsets of members, and a check that functions and tracepoints still have the arguments that
//!   the programs read: see [`Structures`].
//!
//! Format: Documentation/bpf/btf.rst. Only the necessary parts are parsed.

pub(crate) mod charge;

use std::{collections::HashMap, fs, path::Path};

use self::charge::ChargeLayout;

/// The kernel's BTF does not provide a needed value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BtfError {
    #[error("the kernel has no BTF (/sys/kernel/btf/vmlinux: {0}); it needs CONFIG_DEBUG_INFO_BTF")]
    Unreadable(String),
    #[error("the kernel's BTF is malformed at byte {0}")]
    Malformed(usize),
    #[error("the kernel's BTF has types of the unknown kind {0}")]
    UnknownKind(u32),
    #[error("the kernel's BTF has no {0}")]
    Missing(&'static str),
    #[error("the kernel's struct page begins with {0} bits before its flags; expected none")]
    FlagsMoved(u32),
    #[error(
        "the kernel's zonelists hold {zonerefs} entries for {zones} zones per node, which does not match any number of nodes"
    )]
    NoNodeCount { zonerefs: u32, zones: u32 },
    #[error("the kernel's {what} has {found} arguments; expected {expected}")]
    Arguments { what: &'static str, found: u32, expected: &'static str },
    #[error("the kernel's function {0} has arguments of unexpected types")]
    ArgumentTypes(&'static str),
}

const MAGIC: u32 = 0xeb9f;
/// The names of the structs that are searched for members.
const STRUCTS: [&[u8]; 20] = [
    b"page",
    b"folio",
    b"pglist_data",
    b"zonelist",
    b"task_struct",
    b"css_set",
    b"cgroup",
    b"kernfs_node",
    b"vm_area_struct",
    b"file",
    b"inode",
    b"oom_control",
    b"bpf_array",
    b"cgroup_rstat_cpu",
    b"cgroup_rstat_base_cpu",
    b"cgroup_base_stat",
    b"task_cputime",
    b"mem_cgroup",
    b"cgroup_subsys_state",
    b"obj_cgroup",
];
/// The names of the functions and of the types of tracepoints that are checked.
const HOOKS: [&[u8]; 14] = [
    b"task_numa_fault",
    b"vma_policy_mof",
    b"oom_kill_process",
    b"alloc_hugetlb_folio",
    b"alloc_huge_page",
    b"move_to_new_folio",
    b"btf_trace_mm_migrate_pages",
    b"btf_trace_mm_migrate_pages_start",
    b"btf_trace_sched_skip_cpuset_numa",
    b"charge_memcg",
    b"__mem_cgroup_charge",
    b"mem_cgroup_charge",
    b"mem_cgroup_swapin_charge_folio",
    b"mem_cgroup_swapin_charge_page",
];
/// The names of the enums that are searched for values.
const ENUMS: [&[u8]; 2] = [b"pageflags", b"pagetype"];
const KIND_PTR: u32 = 2;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_TYPEDEF: u32 = 8;
const KIND_FUNC: u32 = 12;
const KIND_FUNC_PROTO: u32 = 13;
/// The maximum nesting depth of unnamed structs.
const MAX_DEPTH: u32 = 4;

/// Offsets and signatures of the kernel. Each value is independent of the others: a missing one affects only the probes
/// that need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Structures {
    /// The number of bits by which `page->flags` is shifted right to get the node id; 64 if the kernel supports only
    /// one node.
    pub(crate) node_shift: Result<u32, BtfError>,
    /// The offsets in bytes of `task_struct.cgroups`, `css_set.dfl_cgrp`, `cgroup.kn`, `kernfs_node.id`.
    pub(crate) cgroup_path: Result<[u32; 4], BtfError>,
    /// The offset of the pointer to the parent in `kernfs_node`.
    pub(crate) kernfs_parent: Result<u32, BtfError>,
    /// The offset of `task_struct.migration_disabled`.
    pub(crate) migration_disabled: Result<u32, BtfError>,
    /// The offsets of `vm_area_struct.vm_start` and `vm_end`, if `vma_policy_mof` has the expected arguments.
    pub(crate) scan: Result<[u32; 2], BtfError>,
    /// The offsets of `oom_control.constraint` and `chosen`, `task_struct.tgid` and `comm`, if `oom_kill_process` has
    /// the expected arguments.
    pub(crate) oom: Result<[u32; 4], BtfError>,
    /// The function that takes a page from a pool of hugepages, if it has the expected arguments, and the offsets of
    /// `vm_area_struct.vm_file`, `file.f_inode` and `inode.i_blkbits`.
    pub(crate) hugepages: Result<(&'static str, [u32; 3]), BtfError>,
    /// The offsets of `task_struct.flags` and `pid`.
    pub(crate) task: Result<[u32; 2], BtfError>,
    /// The offset of `task_struct.flags`.
    pub(crate) task_flags: Result<u32, BtfError>,
    /// An error unless `task_numa_fault` has the expected arguments.
    pub(crate) hint: Result<(), BtfError>,
    /// The index of the argument `reason` of the tracepoint `mm_migrate_pages`.
    pub(crate) migrate_reason: Result<u32, BtfError>,
    /// The offsets of the second page's reference to its head in `struct folio`, and of the number of pages, if
    /// `move_to_new_folio` and the tracepoint `mm_migrate_pages_start` have the expected arguments.
    pub(crate) folio_size: Result<[u32; 2], BtfError>,
    /// The offsets of `bpf_array.ptrs`, of the per-CPU pointer to the counters of a cgroup, and of the run time in these.
    pub(crate) cpu_time: Result<[u32; 3], BtfError>,
    /// The functions that charge pages to memory cgroups, and the parameters of their programs.
    pub(crate) charge: Result<ChargeLayout, BtfError>,
    /// True if NUMA balancing skips tasks with a cpuset of one node (since about Linux 6.18).
    pub(crate) skips_single_node_cpusets: bool,
}

/// Reads the kernel's BTF. `root` is `/` in production.
pub(crate) fn read_structures(root: &Path) -> Result<Structures, BtfError> {
    let data = fs::read(root.join("sys/kernel/btf/vmlinux"));
    Structures::from_btf(&data.map_err(|error| BtfError::Unreadable(error.to_string()))?)
}

impl Structures {
    pub(crate) fn from_btf(data: &[u8]) -> Result<Self, BtfError> {
        let btf = Btf::parse(data)?;
        let offset = |path| Ok::<_, BtfError>(btf.member(path, path)?.1 / 8);
        let arguments = |of, what, allowed: &[u32], expected| match btf.arguments(of, what)? {
            found if allowed.contains(&found) => Ok(found),
            found => Err(BtfError::Arguments { what, found, expected }),
        };
        let node_shift = || {
            let (_, flags_offset) = btf.member("page.flags", "struct page with flags")?;
            if flags_offset != 0 {
                return Err(BtfError::FlagsMoved(flags_offset));
            }
            let zones = btf.array_len("pglist_data.node_zones", "array pglist_data.node_zones")?;
            let zonerefs = btf.array_len("zonelist._zonerefs", "array zonelist._zonerefs")?;
            let nodes = zonerefs.checked_sub(1).and_then(|entries| {
                let nodes = entries.checked_div(zones)?;
                (nodes * zones == entries && nodes.is_power_of_two()).then_some(nodes)
            });
            Ok(64 - nodes.ok_or(BtfError::NoNodeCount { zonerefs, zones })?.ilog2())
        };
        let cgroup_path = || {
            Ok([
                offset("task_struct.cgroups")?,
                offset("css_set.dfl_cgrp")?,
                offset("cgroup.kn")?,
                offset("kernfs_node.id")?,
            ])
        };
        // The name changed when the pointer was put under RCU.
        let parent = offset("kernfs_node.parent");
        let parent = parent.or_else(|_| Ok(btf.member("kernfs_node.__parent", "kernfs_node.parent")?.1 / 8));
        let scan = || {
            arguments("vma_policy_mof", "function vma_policy_mof", &[1], "1")?;
            Ok([offset("vm_area_struct.vm_start")?, offset("vm_area_struct.vm_end")?])
        };
        let oom = || {
            arguments("oom_kill_process", "function oom_kill_process", &[2], "2")?;
            Ok([
                offset("oom_control.constraint")?,
                offset("oom_control.chosen")?,
                offset("task_struct.tgid")?,
                offset("task_struct.comm")?,
            ])
        };
        let hugepages = || {
            let (function, what) = if btf.hooks.contains_key(&b"alloc_hugetlb_folio"[..]) {
                ("alloc_hugetlb_folio", "function alloc_hugetlb_folio")
            } else {
                ("alloc_huge_page", "function alloc_hugetlb_folio or alloc_huge_page")
            };
            arguments(function, what, &[3], "3")?;
            if let Ok((_, moved @ 1..)) = btf.member("folio.flags", "struct folio with flags") {
                return Err(BtfError::FlagsMoved(moved));
            }
            let path =
                [offset("vm_area_struct.vm_file")?, offset("file.f_inode")?, offset("inode.i_blkbits")?];
            Ok((function, path))
        };
        let task = || Ok([offset("task_struct.flags")?, offset("task_struct.pid")?]);
        let migrate_reason = || {
            let what = "tracepoint mm_migrate_pages";
            let found = arguments("btf_trace_mm_migrate_pages", what, &[5, 8, 9, 10], "4, 7, 8 or 9")?;
            // The first argument is not the tracepoint's own, and the reason is the last one.
            Ok(found - 2)
        };
        let folio_size = || {
            arguments("move_to_new_folio", "function move_to_new_folio", &[3], "3")?;
            let what = "tracepoint mm_migrate_pages_start";
            // The first argument is not the tracepoint's own.
            arguments("btf_trace_mm_migrate_pages_start", what, &[3], "2")?;
            let (_, flags_offset) = btf.member("folio.flags", "struct folio with flags")?;
            if flags_offset != 0 {
                return Err(BtfError::FlagsMoved(flags_offset));
            }
            // Both names changed after Linux 6.1.
            let head = btf.member("folio._head_1", "folio.__head or _head_1");
            let head = head.or_else(|_| btf.member("folio.__head", "folio.__head or _head_1"))?;
            let what = "folio._folio_nr_pages or _nr_pages";
            let pages = btf.member("folio._nr_pages", what);
            let pages = pages.or_else(|_| btf.member("folio._folio_nr_pages", what))?;
            Ok([head.1 / 8, pages.1 / 8])
        };
        let cpu_time = || {
            // Both names changed after Linux 6.15.
            let counters = offset("cgroup.rstat_base_cpu").or_else(|_| offset("cgroup.rstat_cpu"))?;
            let base = offset("cgroup_rstat_base_cpu.bstat").or_else(|_| offset("cgroup_rstat_cpu.bstat"))?;
            let run_time = offset("cgroup_base_stat.cputime")? + offset("task_cputime.sum_exec_runtime")?;
            // The per-CPU pointers are at the same place, because they share a union.
            Ok([offset("bpf_array.ptrs")?, counters, base.saturating_add(run_time)])
        };
        Ok(Self {
            node_shift: node_shift(),
            cgroup_path: cgroup_path(),
            kernfs_parent: parent,
            migration_disabled: offset("task_struct.migration_disabled"),
            scan: scan(),
            oom: oom(),
            hugepages: hugepages(),
            task: task(),
            task_flags: offset("task_struct.flags"),
            hint: arguments("task_numa_fault", "function task_numa_fault", &[4], "4").map(drop),
            migrate_reason: migrate_reason(),
            folio_size: folio_size(),
            cpu_time: cpu_time(),
            charge: ChargeLayout::new(&btf),
            skips_single_node_cpusets: btf.hooks.contains_key(&b"btf_trace_sched_skip_cpuset_numa"[..]),
        })
    }
}

struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    /// The offset of each type in `types`, by id; id 0 is void and has none.
    offsets: Vec<usize>,
    /// The offsets of the structs in `STRUCTS`, by name.
    structs: HashMap<&'a [u8], usize>,
    /// The offsets of the functions and types of tracepoints in `HOOKS`, by name.
    hooks: HashMap<&'a [u8], usize>,
    /// The offsets of the enums in `ENUMS`, by name.
    enums: HashMap<&'a [u8], usize>,
}

impl<'a> Btf<'a> {
    fn parse(data: &'a [u8]) -> Result<Self, BtfError> {
        if read_word(data, 0)? & 0xffff != MAGIC {
            return Err(BtfError::Malformed(0));
        }
        let header = read_word(data, 4)? as usize;
        let section = |at: usize| -> Result<&'a [u8], BtfError> {
            let (offset, length) = (read_word(data, at)? as usize, read_word(data, at + 4)? as usize);
            let rest = data.get(header..).and_then(|rest| rest.get(offset..));
            rest.and_then(|rest| rest.get(..length)).ok_or(BtfError::Malformed(at))
        };
        let mut btf = Self {
            types: section(8)?,
            strings: section(16)?,
            offsets: vec![0],
            structs: HashMap::new(),
            hooks: HashMap::new(),
            enums: HashMap::new(),
        };
        let mut at = 0;
        while at < btf.types.len() {
            let info = read_word(btf.types, at + 4)?;
            let (kind, members) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
            let more = match kind {
                1 | 14 | 17 => 4,
                KIND_ARRAY => 12,
                KIND_STRUCT | 5 | 15 | 19 => 12 * members,
                KIND_ENUM | 13 => 8 * members,
                2 | 7..=12 | 16 | 18 => 0,
                _ => return Err(BtfError::UnknownKind(kind)),
            };
            let name = btf.name(read_word(btf.types, at)?)?;
            if kind == KIND_STRUCT && STRUCTS.contains(&name) {
                btf.structs.insert(name, at);
            }
            if matches!(kind, KIND_FUNC | KIND_TYPEDEF) && HOOKS.contains(&name) {
                btf.hooks.insert(name, at);
            }
            if kind == KIND_ENUM && ENUMS.contains(&name) {
                btf.enums.insert(name, at);
            }
            btf.offsets.push(at);
            at += 12 + more;
        }
        Ok(btf)
    }

    fn name(&self, offset: u32) -> Result<&'a [u8], BtfError> {
        let rest = self.strings.get(offset as usize..).ok_or(BtfError::Malformed(offset as usize))?;
        Ok(rest.split(|&byte| byte == 0).next().unwrap_or_default())
    }

    /// Returns the type id and the offset in bits of a member, `STRUCT.MEMBER`. `what` is its description in an error.
    fn member(&self, path: &str, what: &'static str) -> Result<(u32, u32), BtfError> {
        let missing = || BtfError::Missing(what);
        let (of, name) = path.split_once('.').ok_or_else(missing)?;
        let at = *self.structs.get(of.as_bytes()).ok_or_else(missing)?;
        self.member_at(at, name, MAX_DEPTH)?.ok_or_else(missing)
    }

    /// Returns the type id and the offset in bits of a member of the struct or union at an offset in `types`. Members
    /// of unnamed structs and unions count as its own.
    fn member_at(&self, at: usize, name: &str, depth: u32) -> Result<Option<(u32, u32)>, BtfError> {
        let members = (read_word(self.types, at + 4)? & 0xffff) as usize;
        for member in (0..members).map(|index| at + 12 + 12 * index) {
            let found = self.name(read_word(self.types, member)?)?;
            // If the struct has bit fields, the highest byte is a width, which is 0 for other members.
            let (id, offset) =
                (read_word(self.types, member + 4)?, read_word(self.types, member + 8)? & 0x00ff_ffff);
            if found == name.as_bytes() {
                return Ok(Some((id, offset)));
            }
            if let Some((at, KIND_STRUCT | KIND_UNION)) = self.type_at(id)?
                && found.is_empty()
                && depth > 0
                && let Some((id, inner)) = self.member_at(at, name, depth - 1)?
            {
                return Ok(Some((id, offset.saturating_add(inner))));
            }
        }
        Ok(None)
    }

    /// Returns the offset and the kind of a type; `None` for void and unknown ids.
    fn type_at(&self, id: u32) -> Result<Option<(usize, u32)>, BtfError> {
        match self.offsets.get(id as usize).filter(|_| id != 0) {
            Some(&at) => Ok(Some((at, read_word(self.types, at + 4)? >> 24 & 0x1f))),
            None => Ok(None),
        }
    }

    /// Returns the number of arguments of a function, or of a tracepoint's type (which has an additional first one).
    fn arguments(&self, of: &str, what: &'static str) -> Result<u32, BtfError> {
        Ok(read_word(self.types, self.prototype(of, what)? + 4)? & 0xffff)
    }

    /// Returns the offset of the prototype of a function or of a tracepoint's type.
    fn prototype(&self, of: &str, what: &'static str) -> Result<usize, BtfError> {
        let missing = || BtfError::Missing(what);
        let mut at = *self.hooks.get(of.as_bytes()).ok_or_else(missing)?;
        for _ in 0..MAX_DEPTH {
            let (next, kind) = self.type_at(read_word(self.types, at + 8)?)?.ok_or_else(missing)?;
            match kind {
                KIND_FUNC_PROTO => return Ok(next),
                KIND_PTR | KIND_TYPEDEF => at = next,
                _ => break,
            }
        }
        Err(missing())
    }

    /// Returns the name of the struct to which an argument of a function points; `None` if it is no such pointer.
    fn argument_struct(&self, of: &'static str, index: usize) -> Result<Option<&'a [u8]>, BtfError> {
        let argument = self.prototype(of, of)? + 12 + 8 * index;
        let Some((at, KIND_PTR)) = self.type_at(read_word(self.types, argument + 4)?)? else {
            return Ok(None);
        };
        match self.type_at(read_word(self.types, at + 8)?)? {
            Some((at, KIND_STRUCT)) => self.name(read_word(self.types, at)?).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the value of an enumerator; `None` if the kernel does not have it.
    fn enumerator(&self, of: &str, name: &str) -> Result<Option<u32>, BtfError> {
        let Some(&at) = self.enums.get(of.as_bytes()) else { return Ok(None) };
        let count = (read_word(self.types, at + 4)? & 0xffff) as usize;
        for at in (0..count).map(|index| at + 12 + 8 * index) {
            if self.name(read_word(self.types, at)?)? == name.as_bytes() {
                return read_word(self.types, at + 4).map(Some);
            }
        }
        Ok(None)
    }

    /// Returns the number of elements of a member that is an array.
    fn array_len(&self, path: &str, what: &'static str) -> Result<u32, BtfError> {
        let (id, _) = self.member(path, what)?;
        match self.type_at(id)? {
            Some((at, KIND_ARRAY)) => read_word(self.types, at + 20),
            _ => Err(BtfError::Missing(what)),
        }
    }
}

fn read_word(data: &[u8], at: usize) -> Result<u32, BtfError> {
    let bytes = data.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map(|&bytes| u32::from_ne_bytes(bytes)).ok_or(BtfError::Malformed(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns BTF with the structs of a kernel that are needed for pages and cgroups. `cgroup` is the name of that
    /// struct.
    fn btf(zones: u32, zonerefs: u32, flags_offset: u32, zonelist: &str, cgroup: &str) -> Vec<u8> {
        let mut strings = vec![0];
        let mut name = |name: &str| {
            let at = u32::try_from(strings.len()).unwrap();
            strings.extend_from_slice(name.as_bytes());
            strings.push(0);
            at
        };
        let one_member = 4 << 24 | 1;
        let with_bit_fields = one_member | 1 << 31;
        #[rustfmt::skip]
        let types = [
            name("long unsigned int"), 1 << 24, 8, 64,                                      // 1: int
            0, 3 << 24, 0, 1, 1, zones,                                                     // 2: array
            0, 3 << 24, 0, 1, 1, zonerefs,                                                  // 3: array
            name("page"), one_member, 64, name("flags"), 1, flags_offset,                   // 4: struct
            name("pglist_data"), one_member, 64, name("node_zones"), 2, 0,                  // and so on
            name(zonelist), with_bit_fields, 64, name("_zonerefs"), 3, 0,
            name("task_struct"), with_bit_fields + 1, 64,
                name("cgroups"), 1, 2376 * 8, name("migration_disabled"), 1, 992 * 8,
            name("css_set"), one_member, 64, name("dfl_cgrp"), 1, 112 * 8,
            name(cgroup), one_member, 64, name("kn"), 1, 256 * 8,
            name("kernfs_node"), one_member, 64, name("id"), 1, 96 * 8,
        ];
        let types: Vec<u8> = types.iter().flat_map(|read_word: &u32| read_word.to_ne_bytes()).collect();
        let [types_len, strings_len] = [types.len(), strings.len()].map(|len| u32::try_from(len).unwrap());
        let header = [MAGIC | 1 << 16, 24, 0, types_len, types_len, strings_len];
        header.iter().flat_map(|read_word| read_word.to_ne_bytes()).chain(types).chain(strings).collect()
    }

    #[test]
    fn node_shift_follows_from_max_nodes() {
        for (nodes, node_shift) in [(1, 64), (2, 63), (64, 58), (1024, 54)] {
            let found = Structures::from_btf(&btf(4, nodes * 4 + 1, 0, "zonelist", "cgroup")).unwrap();
            assert_eq!(found.node_shift, Ok(node_shift), "{nodes} nodes");
            assert_eq!(found.cgroup_path, Ok([2376, 112, 256, 96]));
            assert_eq!(found.migration_disabled, Ok(992));
        }
    }

    #[test]
    fn cgroup_path_may_be_missing() {
        let found = Structures::from_btf(&btf(4, 4097, 0, "zonelist", "other")).unwrap();
        assert_eq!(found.cgroup_path, Err(BtfError::Missing("cgroup.kn")));
        assert_eq!(found.node_shift, Ok(54), "the rest is known all the same");
    }

    #[test]
    fn refuses_unexpected_layout() {
        for (data, error) in [
            (btf(4, 4097, 64, "zonelist", "cgroup"), BtfError::FlagsMoved(64)),
            (btf(4, 4097, 0, "other", "cgroup"), BtfError::Missing("array zonelist._zonerefs")),
            (btf(4, 4096, 0, "zonelist", "cgroup"), BtfError::NoNodeCount { zonerefs: 4096, zones: 4 }),
            (btf(4, 13, 0, "zonelist", "cgroup"), BtfError::NoNodeCount { zonerefs: 13, zones: 4 }),
            (btf(0, 13, 0, "zonelist", "cgroup"), BtfError::NoNodeCount { zonerefs: 13, zones: 0 }),
            (btf(4, 0, 0, "zonelist", "cgroup"), BtfError::NoNodeCount { zonerefs: 0, zones: 4 }),
        ] {
            assert_eq!(Structures::from_btf(&data).unwrap().node_shift, Err(error));
        }
    }

    /// Returns BTF with the types that the secondary probes need, with one name replaced.
    fn structures(replaced: (&str, &str), hint_arguments: u32) -> Vec<u8> {
        let mut strings = vec![0];
        let mut name = |name: &str| {
            let name = if name == replaced.0 { replaced.1 } else { name };
            let at = u32::try_from(strings.len()).unwrap();
            strings.extend_from_slice(name.as_bytes());
            strings.push(0);
            at
        };
        let (record, union) = (4 << 24, 5 << 24);
        #[rustfmt::skip]
        let mut types = vec![
            name("long unsigned int"), 1 << 24, 8, 64,                                      // 1: int
            0, record | 2, 16, name("vm_start"), 1, 0, name("vm_end"), 1, 64,               // 2: without a name
            0, union | 1, 16, 0, 2, 0,                                                      // 3: the same
            name("vm_area_struct"), record | 3, 80, name("first"), 1, 0, 0, 3, 64,          // 4: struct
                name("vm_file"), 1, 72 * 8,
            name("task_struct"), record | 5, 64,
                name("flags"), 1, 44 * 8, name("pid"), 1, 100 * 8, name("tgid"), 1, 104 * 8,
                name("comm"), 1, 200 * 8, name("cgroups"), 1, 300 * 8,
            name("css_set"), record | 1, 64, name("dfl_cgrp"), 1, 112 * 8,
            name("cgroup"), record | 2, 64, name("kn"), 1, 256 * 8, name("rstat_base_cpu"), 1, 928 * 8,
            name("kernfs_node"), record | 2, 64, name("__parent"), 1, 16 * 8, name("id"), 1, 96 * 8,
            name("oom_control"), record | 2, 64, name("chosen"), 1, 40 * 8, name("constraint"), 1, 56 * 8, // 9
            name("file"), record | 1, 64, name("f_inode"), 1, 24 * 8,
            name("inode"), record | 1, 64, name("i_blkbits"), 1, 142 * 8,
            name("folio"), record | 3, 64, name("flags"), 1, 0, name("_head_1"), 1, 72 * 8,
                name("_nr_pages"), 1, 96 * 8,                                               // 12
            name("bpf_array"), record | 1, 64, name("ptrs"), 1, 312 * 8,
            name("cgroup_rstat_base_cpu"), record | 1, 64, name("bstat"), 1, 8 * 8,
            name("cgroup_base_stat"), record | 1, 64, name("cputime"), 1, 0,
            name("task_cputime"), record | 1, 64, name("sum_exec_runtime"), 1, 16 * 8,
        ];
        let proto = |types: &mut Vec<u32>, arguments: u32| {
            types.extend([0, 13 << 24 | arguments, 0]);
            types.extend(std::iter::repeat_n([0, 1], arguments as usize).flatten());
        };
        let mut id = 16;
        for (function, arguments) in [
            ("task_numa_fault", hint_arguments),
            ("vma_policy_mof", 1),
            ("oom_kill_process", 2),
            ("alloc_hugetlb_folio", 3),
            ("move_to_new_folio", 3),
        ] {
            proto(&mut types, arguments);
            types.extend([name(function), 12 << 24, id + 1]);
            id += 2;
        }
        for (tracepoint, arguments) in
            [("btf_trace_mm_migrate_pages", 9), ("btf_trace_mm_migrate_pages_start", 3)]
        {
            proto(&mut types, arguments);
            types.extend([0, 2 << 24, id + 1]);
            types.extend([name(tracepoint), 8 << 24, id + 2]);
            id += 3;
        }
        let types: Vec<u8> = types.iter().flat_map(|read_word: &u32| read_word.to_ne_bytes()).collect();
        let [types_len, strings_len] = [types.len(), strings.len()].map(|len| u32::try_from(len).unwrap());
        let header = [MAGIC | 1 << 16, 24, 0, types_len, types_len, strings_len];
        header.iter().flat_map(|read_word| read_word.to_ne_bytes()).chain(types).chain(strings).collect()
    }

    #[test]
    fn values_are_independent() {
        let all = Structures::from_btf(&structures(("", ""), 4)).unwrap();
        let expected = Structures {
            node_shift: Err(BtfError::Missing("struct page with flags")),
            cgroup_path: Ok([300, 112, 256, 96]),
            kernfs_parent: Ok(16),
            migration_disabled: Err(BtfError::Missing("task_struct.migration_disabled")),
            scan: Ok([8, 16]),
            oom: Ok([56, 40, 104, 200]),
            hugepages: Ok(("alloc_hugetlb_folio", [72, 24, 142])),
            task: Ok([44, 100]),
            task_flags: Ok(44),
            hint: Ok(()),
            migrate_reason: Ok(7),
            folio_size: Ok([72, 96]),
            cpu_time: Ok([312, 928, 24]),
            charge: Err(BtfError::Missing("mem_cgroup.css")),
            skips_single_node_cpusets: false,
        };
        assert_eq!(all, expected);

        let without = |name| Structures::from_btf(&structures((name, "x"), 4)).unwrap();
        let missing = BtfError::Missing("oom_control.constraint");
        assert_eq!(without("constraint"), Structures { oom: Err(missing), ..expected.clone() });
        let missing = BtfError::Missing("vm_area_struct.vm_end");
        assert_eq!(without("vm_end"), Structures { scan: Err(missing), ..expected.clone() });
        let missing = BtfError::Missing("kernfs_node.parent");
        assert_eq!(without("__parent"), Structures { kernfs_parent: Err(missing), ..expected.clone() });
        let missing = BtfError::Missing("tracepoint mm_migrate_pages");
        assert_eq!(
            without("btf_trace_mm_migrate_pages"),
            Structures { migrate_reason: Err(missing), ..expected.clone() }
        );
        let of_6_1 = Structures::from_btf(&structures(("_head_1", "__head"), 4));
        assert_eq!(of_6_1, Ok(expected.clone()));
        for (name, what) in [
            ("move_to_new_folio", "function move_to_new_folio"),
            ("btf_trace_mm_migrate_pages_start", "tracepoint mm_migrate_pages_start"),
            ("_nr_pages", "folio._folio_nr_pages or _nr_pages"),
        ] {
            let folio_size = Err(BtfError::Missing(what));
            assert_eq!(without(name), Structures { folio_size, ..expected.clone() });
        }
        let missing = BtfError::Missing("function alloc_hugetlb_folio or alloc_huge_page");
        assert_eq!(
            without("alloc_hugetlb_folio"),
            Structures { hugepages: Err(missing), ..expected.clone() }
        );
        let of_old = Structures::from_btf(&structures(("alloc_hugetlb_folio", "alloc_huge_page"), 4));
        let hugepages = Ok(("alloc_huge_page", [72, 24, 142]));
        assert_eq!(of_old, Ok(Structures { hugepages, ..expected.clone() }));
        let missing = BtfError::Missing("task_cputime.sum_exec_runtime");
        let unknown = without("sum_exec_runtime");
        assert_eq!(unknown, Structures { cpu_time: Err(missing), ..expected.clone() });
        let of_6_12 = without("rstat_base_cpu").cpu_time;
        assert_eq!(of_6_12, Err(BtfError::Missing("cgroup.rstat_cpu")));
        let missing = BtfError::Missing("inode.i_blkbits");
        assert_eq!(without("i_blkbits"), Structures { hugepages: Err(missing), ..expected.clone() });
        let moved = Structures::from_btf(&structures(("", ""), 5)).unwrap().hint.unwrap_err();
        assert_eq!(moved.to_string(), "the kernel's function task_numa_fault has 5 arguments; expected 4");
    }

    #[test]
    fn corrupt_structures_never_panic() {
        let good = structures(("", ""), 4);
        for at in 0..good.len() {
            for byte in [0, 0x7f, 0xff] {
                let mut bad = good.clone();
                bad[at] = byte;
                let _any = Structures::from_btf(&bad);
            }
            assert!(Structures::from_btf(&good[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn corrupt_data_never_panics() {
        let good = btf(4, 4097, 0, "zonelist", "cgroup");
        for end in 0..good.len() {
            let cut = Structures::from_btf(&good[..end]);
            assert!(cut.is_err(), "cut at {end}: {cut:?}");
        }
        for at in 0..good.len() {
            for byte in [0, 0x7f, 0xff] {
                let mut bad = good.clone();
                bad[at] = byte;
                // Many changes are harmless. The test only checks that the reader never panics.
                let _any = Structures::from_btf(&bad);
            }
        }
        let mut kind = good.clone();
        kind[24 + 7] = 31;
        assert_eq!(Structures::from_btf(&kind), Err(BtfError::UnknownKind(31)));
    }
}
