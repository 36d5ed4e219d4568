//! The fake container runtime, and the daemon's answers to it.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, anyhow, ensure};
use numaward_kube::nri::{
    fake::{ContainerSpec, FakeRuntime, FakeRuntimeConfig, PodSpec},
    types::{Container, Online},
};
use numaward_topology::{Bytes, CpuSet, NodeSet};
use serde_json::{Value, json};

/// Number of containers that are created in each phase.
pub(crate) const CALLS: usize = 50;
/// Mount point of cgroups.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";
const PLUGIN: &str = "90-numaward";
const CALL: &str = "CreateContainer";
/// Number of containers that exist at the same time, with one CPU each.
const MAX_CONTAINERS: usize = 3;

pub(crate) struct Runtime {
    fake: FakeRuntime,
    pod: PodSpec,
    shared: PodSpec,
    created: usize,
    times: Vec<Duration>,
}

impl Runtime {
    pub(crate) fn start(socket: &Path) -> Result<Self> {
        let online = Online {
            cpus: read("/sys/devices/system/cpu/online")?.parse()?,
            mems: read("/sys/devices/system/node/has_memory")?.parse()?,
        };
        let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_2_1(online));
        runtime.listen(socket)?;
        let pod = |uid: &str, parent: &str| PodSpec {
            id: format!("sandbox-{uid}"),
            name: uid.to_owned(),
            namespace: "default".to_owned(),
            uid: uid.to_owned(),
            cgroup_parent: format!("{parent}/pod{uid}"),
            ..PodSpec::default()
        };
        let (pod, shared) = (pod("exclusive", "/kubepods"), pod("shared", "/kubepods/burstable"));
        for dir in ["", "/kubepods", "/kubepods/burstable", &pod.cgroup_parent, &shared.cgroup_parent] {
            let dir = format!("{CGROUPS}{dir}");
            fs::create_dir_all(&dir)?;
            fs::write(format!("{dir}/cgroup.subtree_control"), "+cpuset +memory").context(dir)?;
        }
        Ok(Self { fake: runtime, pod, shared, created: 0, times: Vec::new() })
    }

    pub(crate) async fn is_connected(&self) -> Result<()> {
        ensure!(self.fake.has_plugins(&[PLUGIN]).await, "the daemon does not come: {:?}", self.fake.log());
        Ok(())
    }

    /// Runs a container without exclusive CPUs: whenever another container gets some, it has to leave them.
    pub(crate) async fn run_shared(&mut self) -> Result<()> {
        for pod in [&self.pod, &self.shared] {
            self.fake.run_pod(pod).await.map_err(|error| anyhow!(error))?;
        }
        let spec =
            ContainerSpec { cpu_shares: Some(100), memory_limit: None, ..Self::spec(&self.shared, "shared") };
        self.fake.create_container(&spec).await.map_err(|error| anyhow!(error))?;
        self.begin(&spec).await
    }

    /// Runs a phase without another operation.
    pub(crate) async fn idle(&mut self, name: &str) -> Result<()> {
        self.calls(CALLS, true, || true).await?;
        self.print(name, &[])
    }

    /// Creates up to this many containers while the operation lasts, and removes them. Returns the number of calls that
    /// count.
    ///
    /// The `whole` containers are started in between, with cgroups as runc makes them.
    pub(crate) async fn calls(
        &mut self,
        calls: usize,
        whole: bool,
        goes_on: impl Fn() -> bool,
    ) -> Result<usize> {
        let before = self.times.len();
        while self.times.len() < before + calls && goes_on() {
            let mut batch: Vec<(ContainerSpec, CpuSet)> = Vec::new();
            while batch.len() < MAX_CONTAINERS && self.times.len() < before + calls && goes_on() {
                self.created += 1;
                let spec = Self::spec(&self.pod, &format!("c{}", self.created));
                let asked = self.fake.reply_times(CALL).len();
                let made = self.fake.create_container(&spec).await.map_err(|error| anyhow!(error))?;
                let cpus = pinned(&made, &self.fake).with_context(|| spec.name.clone())?;
                for (other, taken) in &batch {
                    ensure!(
                        (taken & &cpus).is_empty(),
                        "{} and {} are both on {cpus}",
                        other.name,
                        spec.name
                    );
                }
                if goes_on() {
                    let times = self.fake.reply_times(CALL);
                    ensure!(times.len() == asked + 1, "{} creations instead of {}", times.len(), asked + 1);
                    self.times.extend(times.last());
                }
                if whole {
                    self.begin(&spec).await?;
                }
                batch.push((spec, cpus));
            }
            for (spec, _) in batch {
                self.end(&spec, whole).await?;
            }
        }
        Ok(self.times.len() - before)
    }

    /// Returns true while the phase has fewer than [`CALLS`] measured calls.
    pub(crate) fn is_short_of_calls(&self) -> bool {
        self.times.len() < CALLS
    }

    /// Prints the durations of the calls since the last line, and other values of the phase.
    pub(crate) fn print(&mut self, name: &str, figures: &[(&str, Value)]) -> Result<()> {
        let mut times = std::mem::take(&mut self.times);
        times.sort();
        let latest = *times.last().context("no calls")?;
        let median = times[(times.len() - 1) / 2];
        let mut line = json!({"calls": times.len(), "medianMs": millis(median), "maxMs": millis(latest)});
        for (key, value) in figures {
            line[*key] = value.clone();
        }
        println!("{name}: {line}");
        let log = self.fake.log();
        ensure!(
            !log.iter().any(|line| line.contains("closing")),
            "the runtime has thrown the daemon out: {log:?}"
        );
        Ok(())
    }

    fn spec(pod: &PodSpec, name: &str) -> ContainerSpec {
        ContainerSpec {
            id: format!("{name}-{}", pod.uid),
            pod_id: pod.id.clone(),
            name: name.to_owned(),
            cgroups_path: format!("{}/{name}-{}", pod.cgroup_parent, pod.uid),
            cpu_shares: Some(1024),
            memory_limit: Some(Bytes::mib(16)),
            ..ContainerSpec::default()
        }
    }

    /// Creates the container's cgroup with the daemon's answer, and starts the container.
    async fn begin(&self, spec: &ContainerSpec) -> Result<()> {
        let made = self.fake.container(&spec.id).context("was made")?.resources;
        let dir = format!("{CGROUPS}{}", spec.cgroups_path);
        fs::create_dir(&dir)?;
        let sets = [
            ("cpuset.cpus", made.cpus.map(|set| set.to_string())),
            ("cpuset.mems", made.mems.map(|set| set.to_string())),
        ];
        for (knob, value) in sets {
            let Some(value) = value else { continue };
            fs::write(format!("{dir}/{knob}"), &value).with_context(|| format!("{dir}/{knob}: {value}"))?;
            let found = read(format!("{dir}/{knob}.effective"))?;
            ensure!(found == value, "{dir}: {knob} is {found}, was to be {value}");
        }
        self.fake.start_container(&spec.id).await.map_err(|error| anyhow!(error))
    }

    /// Ends a container, and removes it.
    async fn end(&self, spec: &ContainerSpec, has_cgroup: bool) -> Result<()> {
        self.fake.stop_container(&spec.id).await.map_err(|error| anyhow!(error))?;
        if has_cgroup {
            fs::remove_dir(format!("{CGROUPS}{}", spec.cgroups_path))?;
        }
        self.fake.remove_container(&spec.id).await.map_err(|error| anyhow!(error))
    }
}

/// Formats milliseconds with one decimal place.
pub(crate) fn millis(time: Duration) -> Value {
    json!((time.as_secs_f64() * 10_000.0).round() / 10.0)
}

/// Returns the CPU of a container, which must have exactly one, and nodes.
fn pinned(made: &Container, runtime: &FakeRuntime) -> Result<CpuSet> {
    let log = || format!("{:?}", runtime.log());
    let cpus = made.resources.cpus.clone().with_context(log).context("is not pinned to CPUs")?;
    let mems = made.resources.mems.clone().context("is not pinned to nodes")?;
    ensure!(cpus.len() == 1 && mems != NodeSet::new(), "is pinned to CPUs {cpus} and nodes {mems}");
    Ok(cpus)
}

fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(text.trim().to_owned())
}
