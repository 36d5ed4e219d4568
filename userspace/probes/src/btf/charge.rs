//! Finds the functions that charge user pages to memory cgroups, and the places of the owner and of the number of pages.
//!
//! What a kernel has follows from its types, not from its version: see `ebpf/src/charge.rs`.

use numaward_abi::ChargeOwner;

use super::{Btf, BtfError};

/// The names of the functions, best first.
const CHARGE: [&str; 3] = ["charge_memcg", "__mem_cgroup_charge", "mem_cgroup_charge"];
/// The names of the function for pages that are swapped in.
const SWAPIN: [&str; 2] = ["mem_cgroup_swapin_charge_folio", "mem_cgroup_swapin_charge_page"];
const NO_FUNCTION: BtfError =
    BtfError::Missing("function charge_memcg, __mem_cgroup_charge or mem_cgroup_charge");

/// Parameters of the programs for charges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChargeLayout {
    /// The functions, best first. Each of them sees all charges; at least one.
    pub(crate) hooks: Vec<ChargeHook>,
    /// The offsets of the serial number and of the cgroup in `struct mem_cgroup`.
    pub(crate) memcg: [u32; 2],
    /// The offset of `obj_cgroup.memcg`; 0 if pages are not charged to object cgroups.
    pub(crate) objcg_memcg: u32,
    /// The number of the flag `PG_head`.
    pub(crate) head_bit: u32,
    /// The offset of `page.page_type`, and the type of hugepages from pools; zeros before such types.
    pub(crate) hugetlb: [u32; 2],
}

/// A function that charges pages, together with that for pages that are swapped in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChargeHook {
    pub(crate) function: &'static str,
    /// The function for pages that are swapped in, if those do not pass the first one.
    pub(crate) swapin: Option<&'static str>,
    pub(crate) owner: ChargeOwner,
    /// The offset of `memcg_data` or `mem_cgroup` in the page; 0 if the owner is an argument.
    pub(crate) memcg_data: u32,
    /// The offset of the number of pages in `struct folio`; 0 if the function takes a `struct page`.
    pub(crate) folio_pages: u32,
    /// The flags of pages that were charged before, all of which are set; 0 if the function never gets such pages.
    pub(crate) charged_before: u64,
}

impl ChargeLayout {
    pub(super) fn new(btf: &Btf<'_>) -> Result<Self, BtfError> {
        let offset = |path| Ok::<_, BtfError>(btf.member(path, path)?.1 / 8);
        let css = offset("mem_cgroup.css")?;
        let object_cgroup = objcg_memcg(btf)?;
        let mut hooks = Vec::new();
        let mut error = NO_FUNCTION;
        for function in CHARGE.into_iter().filter(|function| btf.hooks.contains_key(function.as_bytes())) {
            match hook(btf, function, object_cgroup.is_some()) {
                Ok(hook) => hooks.push(hook),
                Err(reason) => error = reason,
            }
        }
        if hooks.is_empty() {
            return Err(error);
        }
        let hugetlb = match btf.enumerator("pagetype", "PGTY_hugetlb")? {
            Some(hugetlb) => [offset("page.page_type")?, hugetlb],
            None => [0; 2],
        };
        Ok(Self {
            hooks,
            memcg: [
                css.saturating_add(offset("cgroup_subsys_state.serial_nr")?),
                css.saturating_add(offset("cgroup_subsys_state.cgroup")?),
            ],
            objcg_memcg: object_cgroup.unwrap_or_default(),
            head_bit: flag(btf, "PG_head")?,
            hugetlb,
        })
    }
}

/// Returns the offset of `obj_cgroup.memcg` if user pages are charged to object cgroups: these can then be of the root.
fn objcg_memcg(btf: &Btf<'_>) -> Result<Option<u32>, BtfError> {
    match btf.member("obj_cgroup.is_root", "obj_cgroup.is_root") {
        Ok(_) => Ok(Some(btf.member("obj_cgroup.memcg", "obj_cgroup.memcg")?.1 / 8)),
        Err(BtfError::Missing(_)) => Ok(None),
        Err(malformed) => Err(malformed),
    }
}

fn hook(btf: &Btf<'_>, function: &'static str, has_object_cgroups: bool) -> Result<ChargeHook, BtfError> {
    match btf.arguments(function, function)? {
        3 => {}
        found => return Err(BtfError::Arguments { what: function, found, expected: "3" }),
    }
    let unexpected = || BtfError::ArgumentTypes(function);
    let is_folio = match btf.argument_struct(function, 0)? {
        Some(b"folio") => true,
        Some(b"page") => false,
        _ => return Err(unexpected()),
    };
    // The names of these members are the same in the two structs.
    let of_page = |page, folio| btf.member(if is_folio { folio } else { page }, page);
    if let (_, moved @ 1..) = of_page("page.flags", "folio.flags")? {
        return Err(BtfError::FlagsMoved(moved));
    }
    let folio_pages = if is_folio {
        let what = "folio._folio_nr_pages or _nr_pages";
        let pages = btf.member("folio._nr_pages", what);
        pages.or_else(|_| btf.member("folio._folio_nr_pages", what))?.1 / 8
    } else {
        0
    };
    match btf.argument_struct(function, 1)? {
        Some(b"mem_cgroup") => Ok(ChargeHook {
            function,
            swapin: None,
            owner: ChargeOwner::Argument,
            memcg_data: 0,
            folio_pages,
            charged_before: 0,
        }),
        Some(b"mm_struct") => {
            let swapin = SWAPIN.into_iter().find(|name| btf.hooks.contains_key(name.as_bytes()));
            if let Some(swapin) = swapin {
                match btf.arguments(swapin, swapin)? {
                    4 => {}
                    found => return Err(BtfError::Arguments { what: swapin, found, expected: "4" }),
                }
            }
            let (owner, (_, memcg_data)) = match of_page("page.memcg_data", "folio.memcg_data") {
                Ok(data) if has_object_cgroups => (ChargeOwner::ObjectCgroup, data),
                Ok(data) => (ChargeOwner::MemoryCgroup, data),
                Err(_) => {
                    (ChargeOwner::Pointer, btf.member("page.mem_cgroup", "page.memcg_data or mem_cgroup")?)
                }
            };
            // Then this function gets pages of the swap cache, too: those of shared memory twice, at last when they were
            // read.
            let charged_before = match swapin {
                Some(_) => 0,
                None => {
                    1_u64.wrapping_shl(flag(btf, "PG_uptodate")?)
                        | 1_u64.wrapping_shl(flag(btf, "PG_swapcache")?)
                }
            };
            Ok(ChargeHook {
                function,
                swapin,
                owner,
                memcg_data: memcg_data / 8,
                folio_pages,
                charged_before,
            })
        }
        _ => Err(unexpected()),
    }
}

/// Returns the number of a flag of pages.
fn flag(btf: &Btf<'_>, name: &'static str) -> Result<u32, BtfError> {
    btf.enumerator("pageflags", name)?.filter(|&bit| bit < u64::BITS).ok_or(BtfError::Missing(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btf::{KIND_ENUM, KIND_FUNC, KIND_FUNC_PROTO, KIND_PTR, KIND_STRUCT, MAGIC, Structures};

    /// BTF under construction.
    struct Types {
        words: Vec<u32>,
        strings: Vec<u8>,
        count: u32,
    }

    impl Types {
        fn new() -> Self {
            let mut types = Self { words: Vec::new(), strings: vec![0], count: 0 };
            let name = types.name("int");
            types.add(&[name, 1 << 24, 4, 32]);
            types
        }

        fn name(&mut self, name: &str) -> u32 {
            let at = u32::try_from(self.strings.len()).unwrap();
            self.strings.extend_from_slice(name.as_bytes());
            self.strings.push(0);
            at
        }

        /// Adds a type and returns its id.
        fn add(&mut self, words: &[u32]) -> u32 {
            self.words.extend_from_slice(words);
            self.count += 1;
            self.count
        }

        /// Adds a struct with members at these offsets in bytes.
        fn structure(&mut self, name: &str, members: &[(&str, u32)]) -> u32 {
            let mut words =
                vec![self.name(name), KIND_STRUCT << 24 | u32::try_from(members.len()).unwrap(), 64];
            for (member, offset) in members {
                words.extend([self.name(member), 1, offset * 8]);
            }
            self.add(&words)
        }

        fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) {
            let mut words = vec![self.name(name), KIND_ENUM << 24 | u32::try_from(values.len()).unwrap(), 4];
            for (value, number) in values {
                words.extend([self.name(value), *number]);
            }
            self.add(&words);
        }

        /// Adds a function. Arguments without a pointed-to struct are numbers.
        fn function(&mut self, name: &str, arguments: &[Option<u32>]) {
            let mut words = vec![0, KIND_FUNC_PROTO << 24 | u32::try_from(arguments.len()).unwrap(), 1];
            for argument in arguments {
                let of = argument.map_or(1, |of| self.add(&[0, KIND_PTR << 24, of]));
                words.extend([0, of]);
            }
            let prototype = self.add(&words);
            let name = self.name(name);
            self.add(&[name, KIND_FUNC << 24, prototype]);
        }

        fn data(&self) -> Vec<u8> {
            let types = u32::try_from(4 * self.words.len()).unwrap();
            let header = [MAGIC | 1 << 16, 24, 0, types, types, u32::try_from(self.strings.len()).unwrap()];
            let words = header.iter().chain(&self.words).flat_map(|word| word.to_ne_bytes());
            words.chain(self.strings.iter().copied()).collect()
        }

        fn layout(&self) -> Result<ChargeLayout, BtfError> {
            Structures::from_btf(&self.data()).unwrap().charge
        }
    }

    /// Returns the types of a kernel without functions, and the ids of `page`, `folio`, `mm_struct` and `mem_cgroup`.
    fn kernel(owner: &str, flags: &[(&str, u32)]) -> (Types, [u32; 4]) {
        let mut types = Types::new();
        let page = types.structure("page", &[("flags", 0), ("page_type", 48), (owner, 56)]);
        let folio = types.structure("folio", &[("flags", 0), (owner, 56), ("_folio_nr_pages", 96)]);
        let mm = types.structure("mm_struct", &[]);
        let memcg = types.structure("mem_cgroup", &[("css", 0)]);
        types.structure("cgroup_subsys_state", &[("cgroup", 0), ("serial_nr", 88)]);
        types.enumeration("pageflags", flags);
        (types, [page, folio, mm, memcg])
    }

    const FLAGS: [(&str, u32); 3] = [("PG_uptodate", 3), ("PG_head", 6), ("PG_swapcache", 10)];

    #[test]
    fn owner_is_argument() {
        let (mut types, [_, folio, mm, memcg]) = kernel("memcg_data", &FLAGS);
        types.function("__mem_cgroup_charge", &[Some(folio), Some(mm), None]);
        types.function("charge_memcg", &[Some(folio), Some(memcg), None]);
        types.function("mem_cgroup_swapin_charge_folio", &[Some(folio), Some(mm), None, None]);
        let hook = ChargeHook {
            function: "charge_memcg",
            swapin: None,
            owner: ChargeOwner::Argument,
            memcg_data: 0,
            folio_pages: 96,
            charged_before: 0,
        };
        let outer = ChargeHook {
            function: "__mem_cgroup_charge",
            swapin: Some("mem_cgroup_swapin_charge_folio"),
            owner: ChargeOwner::MemoryCgroup,
            memcg_data: 56,
            ..hook.clone()
        };
        let expected = ChargeLayout {
            hooks: vec![hook, outer.clone()],
            memcg: [88, 0],
            objcg_memcg: 0,
            head_bit: 6,
            hugetlb: [0; 2],
        };
        assert_eq!(types.layout(), Ok(expected.clone()));

        // Object cgroups of the root, and types of pages.
        types.structure("obj_cgroup", &[("memcg", 16), ("is_root", 48)]);
        types.enumeration("pagetype", &[("PGTY_hugetlb", 0xf4)]);
        let newer = types.layout().unwrap();
        assert_eq!((newer.objcg_memcg, newer.hugetlb), (16, [48, 0xf4]));
        assert_eq!(newer.hooks[1], ChargeHook { owner: ChargeOwner::ObjectCgroup, ..outer });
    }

    #[test]
    fn owner_is_in_page() {
        for (member, owner) in
            [("mem_cgroup", ChargeOwner::Pointer), ("memcg_data", ChargeOwner::MemoryCgroup)]
        {
            let (mut types, [page, _, mm, _]) = kernel(member, &FLAGS);
            types.function("mem_cgroup_charge", &[Some(page), Some(mm), None]);
            let hook = ChargeHook {
                function: "mem_cgroup_charge",
                swapin: None,
                owner,
                memcg_data: 56,
                folio_pages: 0,
                charged_before: 1 << 3 | 1 << 10,
            };
            assert_eq!(types.layout().unwrap().hooks, std::slice::from_ref(&hook));
            types.function("mem_cgroup_swapin_charge_page", &[Some(page), Some(mm), None, None]);
            let swapin = Some("mem_cgroup_swapin_charge_page");
            assert_eq!(types.layout().unwrap().hooks, [ChargeHook { swapin, charged_before: 0, ..hook }]);
        }
        // Linux 5.14 has the inner function under this name.
        let (mut types, [page, _, _, memcg]) = kernel("memcg_data", &FLAGS);
        types.function("__mem_cgroup_charge", &[Some(page), Some(memcg), None]);
        let hooks = types.layout().unwrap().hooks;
        assert_eq!((hooks[0].owner, hooks[0].swapin), (ChargeOwner::Argument, None));
    }

    #[test]
    fn unexpected_functions_are_refused() {
        let (types, _) = kernel("memcg_data", &FLAGS);
        assert_eq!(types.layout(), Err(NO_FUNCTION));
        let (mut types, [_, folio, mm, memcg]) = kernel("memcg_data", &FLAGS);
        types.function("charge_memcg", &[Some(memcg), Some(folio), None]);
        assert_eq!(types.layout(), Err(BtfError::ArgumentTypes("charge_memcg")));
        // Another function may still be as expected.
        types.function("__mem_cgroup_charge", &[Some(folio), Some(mm), None]);
        assert_eq!(types.layout().unwrap().hooks.len(), 1);
        types.function("mem_cgroup_swapin_charge_folio", &[Some(folio)]);
        let refusal = types.layout().unwrap_err().to_string();
        assert!(refusal.contains("mem_cgroup_swapin_charge_folio has 1 arguments; expected 4"), "{refusal}");
        let (mut types, [_, folio, _, memcg]) = kernel("memcg_data", &[("PG_head", 64)]);
        types.function("charge_memcg", &[Some(folio), Some(memcg), None]);
        assert_eq!(types.layout(), Err(BtfError::Missing("PG_head")));
    }

    #[test]
    fn corrupt_types_never_panic() {
        let (mut types, [_, folio, mm, _]) = kernel("memcg_data", &FLAGS);
        types.function("__mem_cgroup_charge", &[Some(folio), Some(mm), None]);
        types.structure("obj_cgroup", &[("memcg", 16), ("is_root", 48)]);
        let good = types.data();
        for at in 0..good.len() {
            for byte in [0, 0x7f, 0xff] {
                let mut bad = good.clone();
                bad[at] = byte;
                let _any = Structures::from_btf(&bad);
            }
        }
    }
}
