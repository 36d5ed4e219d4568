//! Check that a program is static: it names no interpreter, so nothing is loaded before it runs. Also determines its
//! processor.
//!
//! Source: elf(5).

use anyhow::{Context as _, Result, bail};
use numaward_vm::Arch;

const MAGIC: &[u8] = b"\x7fELF";
/// 64 bits, least significant byte first.
const CLASS_AND_ORDER: [u8; 2] = [2, 1];
/// Offsets of the program headers' position, of the size of one and of their number.
const HEADERS_AT: usize = 0x20;
const HEADER_SIZE_AT: usize = 0x36;
const HEADERS_COUNT_AT: usize = 0x38;
const PT_INTERP: u32 = 3;
/// Offset of the processor, and the numbers of the supported ones.
const MACHINE_AT: usize = 0x12;
const MACHINES: [(u16, Arch); 2] = [(62, Arch::Amd64), (183, Arch::Arm64)];

/// Returns the processor of a static program. Fails for other programs and files.
pub(crate) fn check_static(program: &[u8]) -> Result<Arch> {
    if !program.starts_with(MAGIC) || program.get(4..6) != Some(&CLASS_AND_ORDER) {
        bail!("this is no 64-bit program");
    }
    let headers = types(program).context("its headers are cut off")?;
    anyhow::ensure!(!headers.contains(&PT_INTERP), "it is not static: it names an interpreter");
    let machine =
        program.get(MACHINE_AT..).and_then(|rest| rest.first_chunk().copied()).map(u16::from_le_bytes);
    let known = MACHINES.into_iter().find(|(number, _)| Some(*number) == machine);
    known
        .map(|(_, arch)| arch)
        .with_context(|| format!("it is for another processor: ELF calls it {machine:?}"))
}

fn types(program: &[u8]) -> Option<Vec<u32>> {
    let start = usize::try_from(u64::from_le_bytes(*program.get(HEADERS_AT..)?.first_chunk()?)).ok()?;
    let half = |at: usize| Some(usize::from(u16::from_le_bytes(*program.get(at..)?.first_chunk()?)));
    let (size, count) = (half(HEADER_SIZE_AT)?, half(HEADERS_COUNT_AT)?);
    let kind = |number: usize| {
        let at = start.checked_add(number.checked_mul(size)?)?;
        Some(u32::from_le_bytes(*program.get(at..)?.first_chunk()?))
    };
    (0..count).map(kind).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(types: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..4].copy_from_slice(MAGIC);
        bytes[4..6].copy_from_slice(&CLASS_AND_ORDER);
        bytes[MACHINE_AT] = 183;
        bytes[HEADERS_AT] = 64;
        bytes[HEADER_SIZE_AT] = 56;
        bytes[HEADERS_COUNT_AT] = u8::try_from(types.len()).unwrap();
        for kind in types {
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0; 52]);
        }
        bytes
    }

    #[test]
    fn finds_interpreter() {
        assert_eq!(check_static(&program(&[1, 2, 6])).unwrap(), Arch::Arm64);
        let error = check_static(&program(&[6, PT_INTERP, 1])).unwrap_err().to_string();
        assert!(error.contains("not static"), "{error}");
        // Like every program, this test is linked dynamically by default.
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(check_static(&own).is_ok(), cfg!(target_feature = "crt-static"));
    }

    #[test]
    fn refuses_other_processors() {
        let mut other = program(&[1]);
        other[MACHINE_AT] = 243;
        let error = check_static(&other).unwrap_err().to_string();
        assert!(error.contains("another processor"), "{error}");
    }

    #[test]
    fn refuses_other_files() {
        let whole = program(&[1, 2]);
        for length in 0..whole.len() - 52 {
            assert!(check_static(&whole[..length]).is_err(), "{length}");
        }
        assert!(check_static(b"#!/bin/sh\n").is_err());
    }
}
