//! What the probes learn of the running kernel's data.

use std::{cell::LazyCell, path::Path};

use aya::Btf;

use crate::{
    btf::{BtfError, Structures},
    error::Refusal,
};

/// What the families need of the kernel, each part read once, when it is needed first.
pub(crate) struct Kernel {
    pub(crate) structures: LazyCell<Result<Structures, BtfError>>,
    btf: LazyCell<Option<Btf>>,
}

impl Kernel {
    pub(crate) fn new() -> Self {
        Self {
            structures: LazyCell::new(|| Structures::read(Path::new("/"))),
            btf: LazyCell::new(|| Btf::from_sys_fs().ok()),
        }
    }

    /// The kernel's types, where it has them.
    pub(crate) fn btf(&self) -> Option<&Btf> {
        self.btf.as_ref()
    }

    /// What one of the structures' answers is.
    pub(crate) fn get<T: Clone>(
        &self,
        of: impl FnOnce(&Structures) -> &Result<T, BtfError>,
    ) -> Result<T, Refusal> {
        let structures = self.structures.as_ref().map_err(|error| Refusal::Btf(error.clone()))?;
        Ok(of(structures).clone()?)
    }

    /// The way from a task to its cgroup, and from that to its parent: see `ebpf/src/ancestors.rs`.
    pub(crate) fn ancestors(&self) -> Result<([u32; 4], u32), Refusal> {
        Ok((
            self.get(|structures| &structures.cgroup_path)?,
            self.get(|structures| &structures.kernfs_parent)?,
        ))
    }
}
