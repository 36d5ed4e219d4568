//! What the probes learn of the running kernel's data.

use std::{cell::LazyCell, fs, path::Path};

use aya::{Btf, EbpfLoader, sys::BpfHelper};

use crate::{
    btf::{BtfError, Structures},
    error::Refusal,
    kernel_features,
};

/// What the families need of the kernel, each part read once, when it is needed first.
pub(crate) struct Kernel {
    pub(crate) structures: LazyCell<Result<Structures, BtfError>>,
    btf: LazyCell<Option<Btf>>,
    has_ancestors: LazyCell<bool>,
    gives_task: LazyCell<bool>,
}

/// The way from the current task to the slot of its workload: see `ebpf/src/current.rs`.
pub(crate) struct ToSlot {
    has_ancestors: u32,
    pub(crate) path: [u32; 4],
    parent: u32,
    /// Whether the current task's structures may be read directly.
    reads_task: u32,
}

impl ToSlot {
    /// The same, but the current task's structures are read directly, or not.
    pub(crate) fn reading_task(self, reads_task: u32) -> Self {
        Self { reads_task, ..self }
    }

    /// Lets the programs of an object go that way.
    pub(crate) fn show<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        loader
            .override_global("HAS_ANCESTORS", &self.has_ancestors, true)
            .override_global("CGROUP_PATH", &self.path, true)
            .override_global("KERNFS_PARENT", &self.parent, true)
            .override_global("READS_TASK", &self.reads_task, true);
    }
}

impl Kernel {
    pub(crate) fn new() -> Self {
        Self {
            structures: LazyCell::new(|| Structures::read(Path::new("/"))),
            btf: LazyCell::new(|| Btf::from_sys_fs().ok()),
            has_ancestors: LazyCell::new(|| has(BpfHelper::BPF_FUNC_get_current_ancestor_cgroup_id)),
            gives_task: LazyCell::new(|| has(BpfHelper::BPF_FUNC_get_current_task_btf)),
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

    /// Whether programs may have the current task as a structure (Linux 5.11).
    pub(crate) fn gives_task(&self) -> bool {
        *self.gives_task
    }

    /// The way from the current task to its slot: by a helper (Linux 5.14), else by the kernel's structures.
    pub(crate) fn to_slot(&self) -> Result<ToSlot, Refusal> {
        if *self.has_ancestors {
            let reads_task = u32::from(self.gives_task() && self.ancestors().is_ok());
            let (path, parent) = self.ancestors().unwrap_or_default();
            return Ok(ToSlot { has_ancestors: 1, path, parent, reads_task });
        }
        // Reading would yield nothing but zeros there, without an error.
        if is_confidential(Path::new("/")) {
            return Err(Refusal::NoAncestors("lockdown=confidentiality".to_owned()));
        }
        let (path, parent) = self.ancestors().map_err(|refusal| Refusal::NoAncestors(refusal.to_string()))?;
        Ok(ToSlot { has_ancestors: 0, path, parent, reads_task: 0 })
    }
}

/// Whether the kernel has a helper. Where the question has no answer, the verifier will have one.
fn has(helper: BpfHelper) -> bool {
    kernel_features::has(helper).unwrap_or(true)
}

/// Whether programs may not read the kernel's memory. `root` is `/` in production.
fn is_confidential(root: &Path) -> bool {
    let modes = fs::read_to_string(root.join("sys/kernel/security/lockdown")).unwrap_or_default();
    modes.contains("[confidentiality]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lockdown_is_the_mode_in_brackets() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_confidential(root.path()), "securityfs is not mounted");
        let folder = root.path().join("sys/kernel/security");
        fs::create_dir_all(&folder).unwrap();
        for (modes, expected) in
            [("none [integrity] confidentiality\n", false), ("none integrity [confidentiality]\n", true)]
        {
            fs::write(folder.join("lockdown"), modes).unwrap();
            assert_eq!(is_confidential(root.path()), expected, "{modes}");
        }
    }
}
