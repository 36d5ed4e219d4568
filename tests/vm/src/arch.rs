//! The processors of guests, and their differences.

use std::{fmt, str::FromStr};

/// Processor of a guest, by the name that Debian and container images use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arch {
    /// x86-64.
    #[default]
    Amd64,
    /// 64-bit Arm.
    Arm64,
}

/// Names of a guest's serial ports in its kernel.
pub(crate) struct SerialPorts {
    pub(crate) console: &'static str,
    pub(crate) output: &'static str,
    pub(crate) status: &'static str,
}

impl Arch {
    /// All processors.
    pub const ALL: [Self; 2] = [Self::Amd64, Self::Arm64];

    /// Returns the processor of this host; `None` if guests cannot have it.
    pub fn of_host() -> Option<Self> {
        Self::ALL.into_iter().find(|arch| arch.kernel_name() == std::env::consts::ARCH)
    }

    /// Returns the name in Debian and in container images.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Returns the name in the kernel and in compilers.
    pub const fn kernel_name(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// Returns Rust's name of the target with this system.
    pub const fn rust_target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// Returns the program that emulates the processor, and its Debian package.
    pub const fn emulator(self) -> (&'static str, &'static str) {
        match self {
            Self::Amd64 => ("qemu-system-x86_64", "qemu-system-x86"),
            Self::Arm64 => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    pub(crate) const fn ports(self) -> SerialPorts {
        match self {
            Self::Amd64 => SerialPorts { console: "ttyS0", output: "ttyS1", status: "ttyS2" },
            // The board has one port; the other ones are on a card.
            Self::Arm64 => SerialPorts { console: "ttyAMA0", output: "ttyS0", status: "ttyS1" },
        }
    }

    /// Returns QEMU's arguments for three character devices as serial ports.
    pub(crate) fn port_args(self, console: &str, output: &str, status: &str) -> Vec<String> {
        let port = |chardev: &str| ["-serial".to_owned(), format!("chardev:{chardev}")];
        match self {
            Self::Amd64 => [console, output, status].into_iter().flat_map(port).collect(),
            Self::Arm64 => {
                let card = format!("pci-serial-2x,chardev1={output},chardev2={status}");
                port(console).into_iter().chain(["-device".to_owned(), card]).collect()
            }
        }
    }

    /// Returns QEMU's arguments for the board and the processor.
    pub(crate) const fn board_args(self) -> &'static [&'static str] {
        match self {
            // Without `-cx16`, kernel 6.12 panics at boot under the emulation of QEMU 7.2. Without `-erms`, the kernel
            // clears and copies memory byte by byte: an emulated CPU then takes twice as long to fill files.
            Self::Amd64 => &["-M", "q35", "-cpu", "max,-cx16,-erms"],
            Self::Arm64 => &["-M", "virt,gic-version=3", "-cpu", "neoverse-n1"],
        }
    }

    /// Returns arguments of the kernel.
    pub(crate) const fn kernel_arguments(self) -> &'static str {
        match self {
            // The emulation keeps the counters of all CPUs in step. The kernel's check of this fails if instructions
            // are counted, and the
            // clock that it would use instead is slow.
            Self::Amd64 => "no_timer_check tsc=reliable",
            Self::Arm64 => "",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Arch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|arch| arch.name() == text);
        found.ok_or_else(|| format!("`{text}` is neither {} nor {}", Self::Amd64, Self::Arm64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for arch in Arch::ALL {
            assert_eq!(arch.to_string().parse(), Ok(arch));
        }
        assert_eq!("aarch64".parse::<Arch>().unwrap_err(), "`aarch64` is neither amd64 nor arm64");
    }

    #[test]
    fn every_guest_has_three_ports() {
        for arch in Arch::ALL {
            let args = arch.port_args("a", "b", "c").join(" ");
            for chardev in ["chardev:a", "b", "c"] {
                assert!(args.contains(chardev), "{args}");
            }
            let SerialPorts { console, output, status } = arch.ports();
            assert!(console != output && output != status && console != status);
        }
    }
}
