//! Names of functions in the file of a program or library, from its symbol tables.
//!
//! The files belong to workloads, so their content is untrusted and may change while it is read. Therefore they are
//! not mapped into memory, tables are read in pieces, and no size in a file determines how much memory is allocated.
//! Debug information is not used, because it can be gigabytes.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    time::Instant,
};

use object::{
    LittleEndian,
    elf::{
        ELFCLASS64, ELFDATA2LSB, ELFMAG, FileHeader64, PT_LOAD, ProgramHeader64, SHT_DYNSYM, SHT_SYMTAB,
        STT_FUNC, STT_GNU_IFUNC, SectionHeader64, Sym64,
    },
    pod::{Pod, bytes_of_slice, bytes_of_slice_mut, slice_from_bytes},
};

use super::floor::SymbolLookup;

type Endian = LittleEndian;
const E: Endian = LittleEndian;

/// Most segment headers and most section headers that are read.
const MAX_HEADERS: usize = 256;
/// Number of symbols that are read at once.
const SYMBOLS_PER_READ: usize = 4096;
/// Most symbols that are read; the largest programs have some millions.
const MAX_SYMBOLS: u64 = 8 << 20;
/// Most bytes of a name, before and after demangling.
const MAX_NAME_BYTES: usize = 1024;

/// Symbol of a function.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    size: u64,
    /// Offset of the symbol's name in the file.
    name: u64,
}

/// Returns the names of the functions at these offsets of a file. Offsets without a name are absent, as are all
/// offsets that are not resolved before `deadline`. `room` are the bytes still available for names; the names are
/// subtracted, and resolving stops at the first name that exceeds it.
pub(super) fn names(
    file: &File,
    offsets: impl IntoIterator<Item = u64>,
    deadline: Instant,
    room: &mut usize,
) -> io::Result<BTreeMap<u64, String>> {
    let [header]: [FileHeader64<Endian>; 1] = single(read_at(file, 0, 1)?)?;
    if (header.e_ident.magic, header.e_ident.class, header.e_ident.data) != (ELFMAG, ELFCLASS64, ELFDATA2LSB)
    {
        return Ok(BTreeMap::new());
    }
    let count = usize::from(header.e_phnum.get(E)).min(MAX_HEADERS);
    let segments: Vec<ProgramHeader64<Endian>> = read_at(file, header.e_phoff.get(E), count)?;
    let count = usize::from(header.e_shnum.get(E)).min(MAX_HEADERS);
    let sections: Vec<SectionHeader64<Endian>> = read_at(file, header.e_shoff.get(E), count)?;
    // Symbols have the virtual addresses of the file.
    let at: Vec<(u64, u64)> =
        offsets.into_iter().filter_map(|offset| Some((address_of(&segments, offset)?, offset))).collect();
    let mut floor = SymbolLookup::new(at.iter().map(|(address, _)| *address));
    for kind in [SHT_SYMTAB, SHT_DYNSYM] {
        for section in sections.iter().filter(|section| section.sh_type.get(E) == kind) {
            let Some(names) = sections.get(section.sh_link.get(E) as usize) else { continue };
            offer_symbols(file, section, names.sh_offset.get(E), &mut floor, deadline)?;
        }
    }
    let mut by_address = BTreeMap::new();
    for (address, symbol) in floor.into_symbols() {
        if let Some((start, symbol)) = symbol
            // Symbols from assembler code may have no size.
            && (symbol.size == 0 || address - start < symbol.size)
            && let Some(name) = name_at(file, symbol.name)
        {
            let Some(left) = room.checked_sub(name.len()) else { break };
            *room = left;
            by_address.insert(address, name);
        }
    }
    let found =
        at.into_iter().filter_map(|(address, offset)| Some((offset, by_address.get(&address)?.clone())));
    Ok(found.collect())
}

/// Offers the function symbols of a table to `floor`. `names` is the offset of the table's strings. Stops at the deadline.
fn offer_symbols(
    file: &File,
    table: &SectionHeader64<Endian>,
    names: u64,
    floor: &mut SymbolLookup<Symbol>,
    deadline: Instant,
) -> io::Result<()> {
    let size = size_of::<Sym64<Endian>>() as u64;
    let count = (table.sh_size.get(E) / size).min(MAX_SYMBOLS);
    let mut first = 0;
    while first < count && Instant::now() < deadline {
        let piece = usize::try_from(count - first).unwrap_or(SYMBOLS_PER_READ).min(SYMBOLS_PER_READ);
        let at = table.sh_offset.get(E).saturating_add(first * size);
        for symbol in read_at::<Sym64<Endian>>(file, at, piece)? {
            let kind = symbol.st_info & 0xf;
            let start = symbol.st_value.get(E);
            // Undefined symbols have no address.
            if (kind == STT_FUNC || kind == STT_GNU_IFUNC) && start != 0 {
                let name = names.saturating_add(symbol.st_name.get(E).into());
                floor.offer(start, || Symbol { size: symbol.st_size.get(E), name });
            }
        }
        first += piece as u64;
    }
    Ok(())
}

/// Converts an offset in the file to a virtual address; `None` if no loadable segment contains it.
fn address_of(segments: &[ProgramHeader64<Endian>], offset: u64) -> Option<u64> {
    segments.iter().filter(|segment| segment.p_type.get(E) == PT_LOAD).find_map(|segment| {
        let within = offset.checked_sub(segment.p_offset.get(E))?;
        (within < segment.p_filesz.get(E)).then(|| segment.p_vaddr.get(E).checked_add(within))?
    })
}

/// Reads and demangles the name at this offset; `None` if it is empty or not UTF-8.
fn name_at(file: &File, at: u64) -> Option<String> {
    let mut bytes = vec![0; MAX_NAME_BYTES];
    let length = file.read_at(&mut bytes, at).ok()?;
    let text = bytes.get(..length)?.split(|byte| *byte == 0).next()?;
    let name = str::from_utf8(text).ok().filter(|name| !name.is_empty())?;
    Some(demangle(name))
}

/// Demangles a name of Rust or C++. Other names, and names that would become longer than [`MAX_NAME_BYTES`], are returned
/// unchanged.
fn demangle(name: &str) -> String {
    let mut text = BoundedText::default();
    let written = if let Ok(rust) = rustc_demangle::try_demangle(name) {
        // Without the hash at the end.
        write!(text, "{rust:#}")
    } else if name.starts_with("_Z") {
        let options = cpp_demangle::DemangleOptions::new().no_params().no_return_type();
        cpp_demangle::Symbol::new(name)
            .map_or(Err(fmt::Error), |cpp| cpp.structured_demangle(&mut text, &options))
    } else {
        Err(fmt::Error)
    };
    if written.is_ok() { text.0 } else { name.to_owned() }
}

/// Writer that accepts [`MAX_NAME_BYTES`] bytes at most. Mangled names refer to parts of themselves, so a few hundred bytes can
/// expand beyond any memory.
#[derive(Default)]
struct BoundedText(String);

impl fmt::Write for BoundedText {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        if self.0.len() + part.len() > MAX_NAME_BYTES {
            return Err(fmt::Error);
        }
        self.0.push_str(part);
        Ok(())
    }
}

/// Reads `count` values at an offset of a file.
fn read_at<T: Pod>(file: &File, offset: u64, count: usize) -> io::Result<Vec<T>> {
    let length = count * size_of::<T>();
    // A buffer of `u64` has a sufficient alignment for all of these types.
    let mut words = vec![0_u64; length.div_ceil(size_of::<u64>())];
    let bytes = bytes_of_slice_mut(&mut words);
    file.read_exact_at(bytes.get_mut(..length).unwrap_or_default(), offset)?;
    let (values, _) =
        slice_from_bytes(bytes_of_slice(&words), count).map_err(|()| io::ErrorKind::InvalidData)?;
    Ok(values.to_vec())
}

fn single<T>(values: Vec<T>) -> io::Result<[T; 1]> {
    values.try_into().map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _, time::Duration};

    use super::{
        super::process::{MappingSearch, mappings},
        *,
    };

    fn names(
        file: &File,
        offsets: impl IntoIterator<Item = u64>,
        deadline: Instant,
    ) -> io::Result<BTreeMap<u64, String>> {
        super::names(file, offsets, deadline, &mut MAX_NAME_BYTES.clone())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    /// Function with a known address. It is not inlined, so that it has a symbol.
    #[inline(never)]
    fn somewhere() -> u64 {
        std::hint::black_box(7)
    }

    #[test]
    fn finds_function_by_file_offset() {
        let address = somewhere as fn() -> u64 as usize as u64;
        somewhere();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let mut search =
            MappingSearch { addresses: vec![address], room: 4096, is_full: false, deadline: soon() };
        let mapping = mappings(maps.as_bytes(), &mut search).unwrap().remove(0);
        let offset = address - mapping.range.start + mapping.offset;
        let program = File::open("/proc/self/exe").unwrap();
        let found = names(&program, [offset, u64::MAX], soon()).unwrap();
        assert_eq!(found.len(), 1);
        assert!(found[&offset].ends_with("elf::tests::somewhere"), "{found:?}");
        assert!(names(&program, [offset], Instant::now()).unwrap().is_empty(), "no time is left");
    }

    #[test]
    fn rejects_corrupt_files() {
        let mut file = tempfile::tempfile().unwrap();
        assert!(names(&file, [1], soon()).is_err(), "it is empty");
        file.write_all(&[b'x'; 4096]).unwrap();
        assert!(names(&file, [1], soon()).unwrap().is_empty(), "it is no program");
        // A program with the largest possible size in every section header.
        let mut program = fs::read("/proc/self/exe").unwrap();
        let sections = usize::try_from(u64::from_le_bytes(program[40..48].try_into().unwrap())).unwrap();
        let count = usize::from(u16::from_le_bytes(program[60..62].try_into().unwrap()));
        for section in 0..count {
            let size = sections + section * 64 + 32;
            program[size..size + 8].fill(0xff);
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&program).unwrap();
        assert!(names(&file, [0x1000], soon()).is_err(), "its tables are truncated");
    }

    #[test]
    fn names_are_demangled() {
        assert_eq!(demangle("main"), "main");
        assert_eq!(demangle("_ZN5alloc3vec3Vec4push17h0123456789abcdefE"), "alloc::vec::Vec::push");
        assert_eq!(demangle("_ZN3foo3barEi"), "foo::bar");
    }

    #[test]
    fn exploding_name_stays_mangled() {
        // f<pair<int, int>, pair<A, A>, pair<B, B>, ...>: each argument contains the previous one twice.
        let bomb = |arguments: u32| {
            let place = |number| char::from_digit(number, 36).unwrap().to_ascii_uppercase();
            let doubled: Vec<_> = (1..arguments).map(|at| format!("S0_IS{0}_S{0}_E", place(at))).collect();
            format!("_Z1fISt4pairIiiE{}Evv", doubled.concat())
        };
        assert_eq!(
            demangle(&bomb(2)),
            "f<std::pair<int, int>, std::pair<std::pair<int, int>, std::pair<int, int> > >"
        );
        let bomb = bomb(30);
        assert!(bomb.len() < MAX_NAME_BYTES);
        assert_eq!(demangle(&bomb), bomb);
    }
}
