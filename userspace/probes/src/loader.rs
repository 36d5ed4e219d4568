//! The loader of all objects.
//!
//! # Problem
//! aya reads and parses all types of the kernel for each new [`EbpfLoader`], even if it gets them from its caller: with a loader for each
//! object, that is a third of the time in which the probes start. But the settings of a loader cannot be taken back, and it
//! borrows their values.
//!
//! # Algorithm
//! One loader loads all objects. An arena holds the values. Global variables of earlier objects may be missing in later ones. A size of a
//! map must not reach another object's map of that name, so such an object is refused unless it sets its own.

use std::collections::{BTreeMap, BTreeSet};

use aya::{Ebpf, EbpfLoader};
use bumpalo::Bump;

use crate::error::ProbeError;

/// Global variables and sizes of maps of one object.
#[derive(Default)]
pub(crate) struct ObjectSettings {
    globals: BTreeMap<&'static str, Vec<u8>>,
    entries: BTreeMap<&'static str, u32>,
}

impl ObjectSettings {
    /// Sets a global variable, which the object must have.
    pub(crate) fn global(mut self, name: &'static str, value: impl GlobalValue) -> Self {
        self.globals.insert(name, value.bytes());
        self
    }

    /// Sets the maximum number of entries of a map; for a ring buffer, its size in bytes.
    pub(crate) fn entries(mut self, map: &'static str, entries: u32) -> Self {
        self.entries.insert(map, entries);
        self
    }
}

/// Type of a global variable.
pub(crate) trait GlobalValue {
    /// Returns the value as it lies in memory.
    fn bytes(self) -> Vec<u8>;
}

impl GlobalValue for u8 {
    fn bytes(self) -> Vec<u8> {
        vec![self]
    }
}

impl GlobalValue for u32 {
    fn bytes(self) -> Vec<u8> {
        self.to_ne_bytes().to_vec()
    }
}

impl GlobalValue for u64 {
    fn bytes(self) -> Vec<u8> {
        self.to_ne_bytes().to_vec()
    }
}

impl<const N: usize> GlobalValue for [u32; N] {
    fn bytes(self) -> Vec<u8> {
        self.into_iter().flat_map(u32::to_ne_bytes).collect()
    }
}

pub(crate) struct ObjectLoader<'a> {
    loader: EbpfLoader<'a>,
    values: &'a Bump,
    /// Global variables of earlier objects.
    globals: BTreeMap<&'static str, &'a [u8]>,
    /// Maps that an earlier object has sized.
    sized: BTreeSet<&'static str>,
}

impl<'a> ObjectLoader<'a> {
    /// Creates a loader that keeps the values of settings in an arena.
    pub(crate) fn new(values: &'a Bump) -> Self {
        Self { loader: EbpfLoader::new(), values, globals: BTreeMap::new(), sized: BTreeSet::new() }
    }

    /// Creates the maps of an object, and returns it with programs that are not loaded.
    pub(crate) fn load(&mut self, object: &[u8], settings: &ObjectSettings) -> Result<Ebpf, ProbeError> {
        for (name, value) in &self.globals {
            self.loader.override_global(name, *value, false);
        }
        for (name, value) in &settings.globals {
            let value: &'a [u8] = self.values.alloc_slice_copy(value);
            self.loader.override_global(name, value, true);
            self.globals.insert(name, value);
        }
        for (map, entries) in &settings.entries {
            self.loader.map_max_entries(map, *entries);
            self.sized.insert(map);
        }
        let loaded = self.loader.load(object).map_err(|error| ProbeError::kernel(&error))?;
        let is_inherited = |map: &&&str| !settings.entries.contains_key(**map) && loaded.map(map).is_some();
        match self.sized.iter().find(is_inherited) {
            Some(map) => Err(ProbeError::Unsized(map)),
            None => Ok(loaded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_layout_in_memory() {
        let settings = ObjectSettings::default().global("A", 1_u8).global("B", [1_u32, 2]).global("C", 3_u64);
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        assert_eq!(settings.globals["A"], [1]);
        assert_eq!(settings.globals["B"], words(&[1, 2]));
        assert_eq!(settings.globals["C"], 3_u64.to_ne_bytes());
    }
}
