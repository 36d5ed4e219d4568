//! Properties of the running kernel that the probes need.

use std::{
    cell::{LazyCell, RefCell},
    fs,
    path::Path,
};

use aya::{Btf, Ebpf, sys::BpfHelper};
use bumpalo::Bump;

use crate::{
    btf::{BtfError, Structures, read_structures},
    error::ProbeError,
    kernel_features,
    loader::{ObjectLoader, ObjectSettings},
};

/// Properties of the kernel, each of which is read when it is first needed.
pub(crate) struct KernelInfo<'a> {
    pub(crate) structures: LazyCell<Result<Structures, BtfError>>,
    btf: LazyCell<Option<Btf>>,
    has_ancestors: LazyCell<bool>,
    has_task_helper: LazyCell<bool>,
    values: &'a Bump,
    loader: RefCell<Option<ObjectLoader<'a>>>,
}

/// The parameters of the path from the current task to the slot of its workload: see `ebpf/src/current.rs`.
pub(crate) struct SlotPath {
    has_ancestors: u32,
    pub(crate) path: [u32; 4],
    parent: u32,
    /// 1 if the current task's structures may be read directly.
    reads_task: u32,
}

impl SlotPath {
    /// Changes the setting for direct reads of the current task's structures.
    pub(crate) fn with_direct_reads(self, reads_task: u32) -> Self {
        Self { reads_task, ..self }
    }

    /// Returns the global variables of an object's programs.
    pub(crate) fn settings(&self) -> ObjectSettings {
        ObjectSettings::default()
            .global("HAS_ANCESTORS", self.has_ancestors)
            .global("CGROUP_PATH", self.path)
            .global("KERNFS_PARENT", self.parent)
            .global("READS_TASK", self.reads_task)
    }

    /// Returns the global variables of programs that find the slot of a memory cgroup, by its path and its parent.
    pub(crate) fn charge_settings(&self, path: [u32; 4], parent: u32) -> ObjectSettings {
        // The guard of Linux 5.12 is older than the helper of Linux 5.14.
        ObjectSettings::default()
            .global("CGROUP_PATH", path)
            .global("KERNFS_PARENT", parent)
            .global("IS_EXCLUSIVE", self.has_ancestors)
    }
}

impl<'a> KernelInfo<'a> {
    /// Returns the properties of this kernel. The arena holds the settings of objects.
    pub(crate) fn new(values: &'a Bump) -> Self {
        Self {
            structures: LazyCell::new(|| read_structures(Path::new("/"))),
            btf: LazyCell::new(|| Btf::from_sys_fs().ok()),
            has_ancestors: LazyCell::new(|| has(BpfHelper::BPF_FUNC_get_current_ancestor_cgroup_id)),
            has_task_helper: LazyCell::new(|| has(BpfHelper::BPF_FUNC_get_current_task_btf)),
            values,
            loader: RefCell::new(None),
        }
    }

    /// Creates the maps of an object, and returns it with programs that are not loaded.
    pub(crate) fn load(&self, object: &[u8], settings: &ObjectSettings) -> Result<Ebpf, ProbeError> {
        let mut loader = self.loader.borrow_mut();
        loader.get_or_insert_with(|| ObjectLoader::new(self.values)).load(object, settings)
    }

    /// Returns the kernel's types, if it has BTF.
    pub(crate) fn btf(&self) -> Option<&Btf> {
        self.btf.as_ref()
    }

    /// Returns a value of the structures.
    pub(crate) fn get<T: Clone>(
        &self,
        of: impl FnOnce(&Structures) -> &Result<T, BtfError>,
    ) -> Result<T, ProbeError> {
        let structures = self.structures.as_ref().map_err(|error| ProbeError::Btf(error.clone()))?;
        Ok(of(structures).clone()?)
    }

    /// Returns the offsets of the path from a task to its cgroup, and of a cgroup's parent: see
    /// `ebpf/src/ancestors.rs`.
    pub(crate) fn ancestors(&self) -> Result<([u32; 4], u32), ProbeError> {
        Ok((
            self.get(|structures| &structures.cgroup_path)?,
            self.get(|structures| &structures.kernfs_parent)?,
        ))
    }

    /// Returns true if programs can get the current task as a structure (Linux 5.11).
    pub(crate) fn has_task_helper(&self) -> bool {
        *self.has_task_helper
    }

    /// Returns the path from the current task to its slot: by a helper (Linux 5.14), else by the kernel's structures.
    pub(crate) fn slot_path(&self) -> Result<SlotPath, ProbeError> {
        if *self.has_ancestors {
            let reads_task = u32::from(self.has_task_helper() && self.ancestors().is_ok());
            let (path, parent) = self.ancestors().unwrap_or_default();
            return Ok(SlotPath { has_ancestors: 1, path, parent, reads_task });
        }
        // With confidentiality lockdown, reads return zeros without an error.
        if is_confidential() {
            return Err(ProbeError::NoAncestors("lockdown=confidentiality".to_owned()));
        }
        let (path, parent) =
            self.ancestors().map_err(|refusal| ProbeError::NoAncestors(refusal.to_string()))?;
        Ok(SlotPath { has_ancestors: 0, path, parent, reads_task: 0 })
    }
}

/// Returns true if the kernel has a helper. If that is unknown, the verifier will decide.
fn has(helper: BpfHelper) -> bool {
    kernel_features::has(helper).unwrap_or(true)
}

/// Returns true if programs must not read the kernel's memory.
pub(crate) fn is_confidential() -> bool {
    is_confidential_in(Path::new("/"))
}

fn is_confidential_in(root: &Path) -> bool {
    let modes = fs::read_to_string(root.join("sys/kernel/security/lockdown")).unwrap_or_default();
    modes.contains("[confidentiality]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lockdown_mode() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_confidential_in(root.path()), "securityfs is not mounted");
        let folder = root.path().join("sys/kernel/security");
        fs::create_dir_all(&folder).unwrap();
        for (modes, expected) in
            [("none [integrity] confidentiality\n", false), ("none integrity [confidentiality]\n", true)]
        {
            fs::write(folder.join("lockdown"), modes).unwrap();
            assert_eq!(is_confidential_in(root.path()), expected, "{modes}");
        }
    }
}
