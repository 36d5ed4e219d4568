//! Names of kernel functions, from `/proc/kallsyms`.
//!
//! The kernel shows addresses only if the process is privileged when it opens the file (`kernel.kptr_restrict`,
//! `CAP_SYSLOG`). Therefore the file is opened at the start, before privileges are dropped, and read on request. It
//! is read line by line, because all symbols together would take about 15 MB.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead, BufReader, Seek as _},
    path::Path,
};

use parking_lot::Mutex;

use super::floor::SymbolLookup;

#[derive(Debug)]
pub(crate) struct KernelSymbols(Mutex<File>);

impl KernelSymbols {
    /// Opens the file below `host_root`, which is `/` in production.
    pub(crate) fn open(host_root: &Path) -> io::Result<Self> {
        File::open(host_root.join("proc/kallsyms")).map(|file| Self(Mutex::new(file)))
    }

    /// Returns the names of the functions at these addresses. Empty if the file was opened without the privilege to see
    /// addresses.
    pub(super) fn names(
        &self,
        addresses: impl IntoIterator<Item = u64>,
    ) -> io::Result<BTreeMap<u64, String>> {
        let mut file = self.0.lock();
        file.rewind()?;
        names(BufReader::with_capacity(1 << 16, &mut *file), addresses)
    }
}

fn names(
    mut text: impl BufRead,
    addresses: impl IntoIterator<Item = u64>,
) -> io::Result<BTreeMap<u64, String>> {
    let mut floor = SymbolLookup::new(addresses);
    let mut line = String::new();
    while text.read_line(&mut line)? > 0 {
        let mut words = line.split_ascii_whitespace();
        if let (Some(address), Some(_), Some(name)) = (words.next(), words.next(), words.next())
            && let Ok(address) = u64::from_str_radix(address, 16)
            && address != 0
        {
            floor.offer(address, || name.to_owned());
        }
        line.clear();
    }
    Ok(floor.into_symbols().filter_map(|(address, symbol)| Some((address, symbol?.1))).collect())
}

/// Returns whether a function belongs to the execution of a BPF program. Such functions are the innermost frames of every
/// kernel stack.
pub(super) fn is_probe_function(name: &str) -> bool {
    [
        "bpf_prog_",
        "bpf_trace_run",
        "bpf_trampoline_",
        "__bpf_",
        "bpf_get_stackid",
        "__traceiter_",
        "trace_call_bpf",
    ]
    .iter()
    .any(|begins| name.starts_with(begins))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn function_extends_to_the_next() {
        let text =
            "ffffffff81000000 T _text\nffffffff81000100 t first\nffffffff81000200 T second\t[module]\n";
        let found = names(text.as_bytes(), [0xffff_ffff_8100_01ff, 0xffff_ffff_8100_0200, 0x1000]).unwrap();
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            [(0xffff_ffff_8100_01ff, "first".to_owned()), (0xffff_ffff_8100_0200, "second".to_owned())]
        );
    }

    #[test]
    fn hidden_addresses_have_no_names() {
        let text = "0000000000000000 T _text\n0000000000000000 t first\nnonsense\n";
        assert!(names(text.as_bytes(), [0xffff_ffff_8100_01ff]).unwrap().is_empty());
    }
}
