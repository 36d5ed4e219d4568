//! The objects of the eBPF programs, if the build had a toolchain for them.

macro_rules! object {
    ($name:ident, $file:literal) => {
        #[cfg(numaward_ebpf)]
        pub(crate) static $name: Result<&[u8], &str> =
            Ok(aya::include_bytes_aligned!(concat!(env!("NUMAWARD_EBPF_DIR"), $file)));
        #[cfg(not(numaward_ebpf))]
        pub(crate) static $name: Result<&[u8], &str> = Err(env!("NUMAWARD_EBPF_MISSING"));
    };
}

object!(ALLOC, "/alloc");
object!(CHAINS, "/chains");
object!(CHARGE, "/charge");
object!(CPU_TIME, "/cpu_time");
object!(FAULTS, "/faults");
object!(TROUBLE, "/trouble");
object!(SWITCH, "/switch");
object!(HARDWARE, "/hardware");
object!(HUGEPAGES, "/hugepages");

#[cfg(all(test, numaward_ebpf))]
mod tests {
    use super::*;

    /// With debug information, the smallest object has 116 KiB. Without it, the largest one has 44 KiB.
    #[test]
    fn objects_have_no_debug_information() {
        for object in [ALLOC, CHAINS, CHARGE, CPU_TIME, FAULTS, TROUBLE, SWITCH, HARDWARE, HUGEPAGES] {
            assert!(object.unwrap().len() < 96 << 10);
        }
    }
}
