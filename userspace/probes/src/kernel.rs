//! What the probes learn of the running kernel's data.

use aya::Btf;

use crate::{
    btf::{BtfError, Structures},
    error::Refusal,
};

/// What the families need of the kernel, read once.
pub(crate) struct Kernel {
    pub(crate) structures: Result<Structures, BtfError>,
    pub(crate) btf: Option<Btf>,
}

impl Kernel {
    /// What one of the structures' answers is.
    pub(crate) fn get<T: Clone>(
        &self,
        of: impl FnOnce(&Structures) -> &Result<T, BtfError>,
    ) -> Result<T, Refusal> {
        let structures = self.structures.as_ref().map_err(|error| Refusal::Btf(error.clone()))?;
        Ok(of(structures).clone()?)
    }
}
