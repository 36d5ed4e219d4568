//! What each kind of package calls the processors that a program is for.

/// The names of one kind of processor.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Arch {
    /// As in `uname -m`, and in the names of archives.
    pub(crate) kernel: &'static str,
    pub(crate) debian: &'static str,
    pub(crate) rpm: &'static str,
    pub(crate) oci: &'static str,
}

pub(crate) const X86_64: Arch = Arch { kernel: "x86_64", debian: "amd64", rpm: "x86_64", oci: "amd64" };
