//! Programs of Debian packages that are unpacked but not installed: `CACHE/tools/NAME`.
//!
//! An installed server would start as a service, and not every release of Debian has all programs. A program of a later
//! release than the system's runs if the libc that it needs is unpacked too.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use numaward_vm::Cache;

use super::apt::{Suite, unpack};
use super::steps::{Steps, say};
use super::{sources, store};

const LOADER: &str = "ld-linux-x86-64.so.2";

/// Files of packages with a program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DebianTool {
    name: &'static str,
    /// Release of the packages; `None` for that of the system.
    release: Option<&'static str>,
    packages: &'static [&'static str],
    /// Needed files of the packages, by folder.
    files: &'static [(&'static str, &'static [&'static str])],
}

impl DebianTool {
    /// Programs that a Kubernetes cluster needs besides those of Kubernetes: its database, its client, and the network
    /// of pods.
    pub(crate) const CLUSTER: Self = Self {
        name: "cluster",
        release: Some("sid"),
        packages: &["etcd-server", "kubectl", "containernetworking-plugins"],
        files: &[("usr/bin", &["etcd", "kubectl"]), ("usr/lib/cni", &["bridge", "host-local", "loopback"])],
    };

    /// irqbalance, which moves interrupts in virtual machines.
    pub(crate) const IRQBALANCE: Self = Self {
        name: "irqbalance",
        release: Some("bookworm"),
        packages: &[
            "irqbalance",
            "libc6",
            "libcap-ng0",
            "libcap2",
            "libgcrypt20",
            "libglib2.0-0",
            "libgpg-error0",
            "liblz4-1",
            "liblzma5",
            "libnuma1",
            "libpcre2-8-0",
            "libsystemd0",
            "libzstd1",
        ],
        files: &[
            ("usr/sbin", &["irqbalance"]),
            (
                "lib/x86_64-linux-gnu",
                &[
                    LOADER,
                    "libc.so.6",
                    "libcap-ng.so.0",
                    "libcap.so.2",
                    "libgpg-error.so.0",
                    "liblzma.so.5",
                    "libm.so.6",
                ],
            ),
            (
                "usr/lib/x86_64-linux-gnu",
                &[
                    "libgcrypt.so.20",
                    "libglib-2.0.so.0",
                    "liblz4.so.1",
                    "libnuma.so.1",
                    "libpcre2-8.so.0",
                    "libsystemd.so.0",
                    "libzstd.so.1",
                ],
            ),
        ],
    };

    /// jq for the commands of the documentation, in machines with Debian 12.
    pub(crate) const JQ: Self = Self {
        name: "jq",
        release: Some("bookworm"),
        packages: &["jq", "libjq1", "libonig5"],
        files: &[("usr/bin", &["jq"]), ("usr/lib/x86_64-linux-gnu", &["libjq.so.1", "libonig.so.5"])],
    };

    /// kustomize, which renders the manifests.
    pub(crate) const KUSTOMIZE: Self = Self {
        name: "kustomize",
        release: Some("trixie"),
        packages: &["kustomize"],
        files: &[("usr/bin", &["kustomize"])],
    };

    /// mdbook, which builds the documentation. It needs a newer libc than Debian 12 has.
    pub(crate) const MDBOOK: Self = Self {
        name: "mdbook",
        release: Some("trixie"),
        packages: &["mdbook", "libc6", "libgcc-s1"],
        files: &[
            ("usr/bin", &["mdbook"]),
            ("usr/lib/x86_64-linux-gnu", &[LOADER, "libc.so.6", "libgcc_s.so.1", "libm.so.6"]),
        ],
    };

    /// numactl with weighted interleave, which is compared with `numaward numactl` in virtual machines.
    pub(crate) const NUMACTL: Self = Self {
        name: "numactl",
        release: Some("trixie"),
        packages: &["numactl", "libnuma1", "libc6"],
        files: &[
            ("usr/bin", &["numactl"]),
            ("usr/lib/x86_64-linux-gnu", &[LOADER, "libc.so.6", "libnuma.so.1"]),
        ],
    };

    /// Prometheus with promtool. Its web pages are links to packages that are not unpacked.
    pub(crate) const PROMETHEUS: Self = Self {
        name: "prometheus",
        release: None,
        packages: &["prometheus"],
        files: &[("usr/bin", &["prometheus", "promtool"])],
    };

    /// amtool of Alertmanager, which reads its configuration.
    pub(crate) const ALERTMANAGER: Self = Self {
        name: "alertmanager",
        release: None,
        packages: &["prometheus-alertmanager"],
        files: &[("usr/bin", &["amtool"])],
    };

    /// Receiver of OTLP with the API of Prometheus, which Debian builds without OTLP.
    pub(crate) const VICTORIA_METRICS: Self = Self {
        name: "victoria-metrics",
        release: Some("trixie"),
        packages: &["victoria-metrics"],
        files: &[("usr/bin", &["victoria-metrics"])],
    };

    /// Returns the command that runs the program with this name, after setup.
    pub(crate) fn command(&self, cache: &Cache, program: &str) -> Command {
        let folder = self.folder(cache);
        let program = folder.join(program);
        let loader = folder.join(LOADER);
        if !loader.exists() {
            return Command::new(program);
        }
        let mut command = Command::new(loader);
        command.arg("--library-path").arg(folder).arg(program);
        command
    }

    fn folder(&self, cache: &Cache) -> PathBuf {
        cache.root().join("tools").join(self.name)
    }
}

/// Ensures that the files are in the cache.
pub(crate) fn ensure(steps: &Steps, tool: &DebianTool) -> Result<()> {
    let system = Path::new("/");
    let release = match tool.release {
        Some(release) => release.to_owned(),
        None => sources::debian_codename(system)
            .with_context(|| format!("{}: only Debian's package is known; run this on Debian", tool.name))?,
    };
    let folder = tool.folder(&steps.cache);
    let recipe = format!("{} of {release}\n", tool.packages.join(" "));
    if store::state(&folder, &recipe) == store::EntryState::Whole && !steps.update {
        steps.found(tool.name, &folder.display().to_string());
        return Ok(());
    }
    let suite = Suite::fetch(&steps.cache, &sources::mirror(system)?, &release)?;
    store::replace(&folder, &recipe, |folder| {
        let download = tempfile::Builder::new().prefix("numaward-tool-").tempdir()?;
        let root = download.path().join("root");
        for package in tool.packages {
            unpack(&suite.download(&suite.newest(package)?, download.path())?, &root)?;
        }
        for (from, names) in tool.files {
            for name in *names {
                let from = root.join(from).join(name);
                fs::copy(&from, folder.join(name))
                    .with_context(|| format!("cannot copy {}", from.display()))?;
            }
        }
        Ok(())
    })?;
    say(tool.name, "ready");
    Ok(())
}
