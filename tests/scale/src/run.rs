//! A run: a control plane of its own, its hosts, and the load.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::{
    core::v1::{Node, ServiceAccount},
    resource::v1::{DeviceClass, ResourceClaimTemplate},
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, PostParams},
};
use numaward_control_plane::{
    authority::Authority,
    control_plane::{self, ControlPlane},
};
use numaward_engine::{claims::devices::DRIVER, policy::Tiers, quantity::Quantity};
use numaward_kube::{
    api::{ApiMetrics, connect},
    dra::slices::{Publication, SlicePublisher},
};
use numaward_simulation::{
    fleet::{Deciders, Fleet, Outcome, RefusalPolicy, SchedulerPlugin},
    variant::Variant,
};
use serde_json::{Value, json};
use tokio::{task::JoinSet, time::sleep};
use tokio_util::sync::CancellationToken;

use crate::{
    figures::{Figures, SimulatedFigures, allocated_twice, consumed, has_room},
    host::{DeviceOrder, Host, HostKind},
    kubelet::{HostSlot, Kubelets, NAMESPACE, PodState, TrackedPod},
    load::{CLASS, Claiming, GROUP, LoadPod, Templates, Totals, pods, totals_json},
};

/// Interval at which the daemon computes its devices.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of looks at all claims.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// Time in which each part of the cluster has to come up.
const START_TIMEOUT: Duration = Duration::from_mins(5);
/// Interval of checks of the harness itself.
const PACE: Duration = Duration::from_millis(200);
/// Time without a newly bound pod after which the end of the load counts: longer than the longest backoff of the scheduler (10 s), and
/// the time between two writes of a slice.
const QUIET_TIME: Duration = Duration::from_secs(20);
/// Longest wait for that.
const QUIET_TIMEOUT: Duration = Duration::from_mins(3);
/// Longest delay of the end of a pod's time.
const LATENESS: Duration = Duration::from_secs(30);
/// Maximum number of pods on a Kubernetes node: no limit here, as in the simulation.
const MAX_PODS: &str = "10000";

/// Settings of a run.
pub(crate) struct Run<'a> {
    pub(crate) kubernetes: &'a Path,
    pub(crate) etcd: &'a Path,
    pub(crate) fleet: &'a Fleet<'a>,
    pub(crate) claiming: Claiming,
    pub(crate) order: DeviceOrder,
    pub(crate) tick: Duration,
    pub(crate) interval: Duration,
    pub(crate) qps: u32,
}

/// Counts of the slices.
#[derive(Default)]
struct SliceCounts {
    written: AtomicU64,
    failed: AtomicU64,
}

/// Looks at all claims.
#[derive(Default)]
struct Looks {
    count: usize,
    twice: std::collections::BTreeSet<String>,
}

impl Run<'_> {
    /// Starts a control plane, replays the load, and returns the figures.
    pub(crate) fn start(&self) -> Result<Figures> {
        let simulated = self.simulate()?;
        let folder = tempfile::Builder::new().prefix("numaward-scale-").tempdir()?;
        let programs = folder.path().join("programs");
        std::fs::create_dir(&programs)?;
        control_plane::unpack(self.kubernetes, &programs, control_plane::PROGRAMS);
        let authority = Authority::new(folder.path());
        // On this thread, which outlives the run: the programs end with the thread that started them.
        let mut plane = ControlPlane::start(&programs, self.etcd, folder.path(), &authority);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let result = runtime.block_on(self.replay(&mut plane));
        let ended = plane.ended().map(str::to_owned);
        runtime.shutdown_timeout(Duration::from_secs(1));
        if let Some(ended) = ended {
            let logs = folder.keep();
            bail!("{ended} has ended: see its log in {}", logs.display());
        }
        result.map(|figures| Figures { simulated, ..figures })
    }

    /// Returns the outcome of the simulation for the same pods and hosts. `None` if some of the Guaranteed pods have no claims, or if the
    /// devices are in another order.
    fn simulate(&self) -> Result<Option<SimulatedFigures>> {
        let plugin = match (self.claiming, self.order) {
            (Claiming::Nothing, _) => SchedulerPlugin::None,
            (Claiming::All, DeviceOrder::LeastFree) => {
                SchedulerPlugin::ResourceClaims { has_host_device: false }
            }
            (Claiming::All, DeviceOrder::Fixed) | (Claiming::Half, _) => return Ok(None),
        };
        let host = Some(Variant::Native { tiers: Tiers::default() });
        let deciders = Deciders { host, refused: RefusalPolicy::Wait, plugin };
        let mut all = Outcome::default();
        for group in &self.fleet.groups {
            all.add(&group.run(deciders).map_err(anyhow::Error::msg)?);
        }
        Ok(Some(SimulatedFigures { admitted: all.sums.memory_mib_ticks, refusals: all.refusals }))
    }

    async fn replay(&self, plane: &mut ControlPlane) -> Result<Figures> {
        let kubeconfig = plane.kubeconfig("admin");
        let client = connect(Some(&kubeconfig)).await?;
        until("the API server is ready", async || client.apiserver_version().await.is_ok()).await?;
        let qps = [format!("--kube-api-qps={}", self.qps), format!("--kube-api-burst={}", self.qps)];
        // The hosts renew nothing: they are not lost.
        let of_manager = [&qps[..], &["--node-monitor-grace-period=24h".to_owned()]].concat();
        plane.complete_with(&of_manager, &qps);
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
        until("there is a service account", async || accounts.get("default").await.is_ok()).await?;
        let kubelets = Arc::new(self.hosts(&client).await?);
        let mut tasks = JoinSet::new();
        let stop = CancellationToken::new();
        let _stopped = stop.clone().drop_guard();
        let slices = Arc::new(SliceCounts::default());
        if self.claiming != Claiming::Nothing {
            self.publish(&kubelets, &kubeconfig, (&slices, &stop), &mut tasks).await?;
        }
        let (pods, templates) = self.load(&client).await?;
        let longest = pods.iter().map(|pod| pod.retry_after).max().unwrap_or(0);
        tasks.spawn(kubelets.clone().follow());
        let looks = Arc::new(parking_lot::Mutex::new(Looks::default()));
        tasks.spawn(look_often(kubelets.clone(), looks.clone()));

        let (started, written) = (Instant::now(), slices.written.load(Ordering::Relaxed));
        let mut figures = Figures {
            pods: pods.len(),
            claiming: templates.iter().flatten().count(),
            raised: pods.iter().filter(|pod| pod.is_raised()).count(),
            ..Figures::default()
        };
        let holding = tokio::spawn(hold_clock(kubelets.clone())).abort_handle();
        let mut tick = 0;
        for (pod, template) in pods.into_iter().zip(templates) {
            let ticks = u32::try_from(pod.at - tick).unwrap_or(u32::MAX);
            tick = pod.at;
            if ticks > 0 {
                kubelets.clock.sleep(self.tick.saturating_mul(ticks)).await;
            }
            if let Some(ended) = plane.ended() {
                bail!("{ended} has ended");
            }
            tasks.spawn(kubelets.clone().create(pod, template));
        }
        sleep(PACE).await;
        until("the scheduler has tried all pods", async || !kubelets.is_behind()).await?;
        holding.abort();
        figures.slice_writes = slices.written.load(Ordering::Relaxed) - written;
        figures.written_within = started.elapsed();
        kubelets.clock.stop(true);
        wait_until_quiet(&kubelets).await;
        count_pending(&kubelets, &mut figures).await?;
        kubelets.clock.stop(false);
        let rest = self.tick.saturating_mul(u32::try_from(longest).unwrap_or(u32::MAX)) + LATENESS;
        wait_until_decided(&kubelets, rest).await;
        count_memory_time(&kubelets, &mut figures);
        let failed = slices.failed.load(Ordering::Relaxed);
        if failed > 0 {
            kubelets.failures.lock().push(format!("{failed} writes of slices failed"));
        }
        figures.failures.clone_from(&kubelets.failures.lock());
        figures.reasons.clone_from(&kubelets.reasons.lock());
        let looks = std::mem::take(&mut *looks.lock());
        (figures.looks, figures.twice) = (looks.count, looks.twice);
        Ok(figures)
    }

    /// Creates the Kubernetes nodes.
    async fn hosts(&self, client: &Client) -> Result<Kubelets> {
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<Node>(&()));
        let mut hosts = Vec::new();
        for (group, of) in self.fleet.groups.iter().enumerate() {
            let kind = Arc::new(HostKind::new(of)?);
            for _ in 0..of.hosts {
                let name = format!("host-{}", hosts.len());
                let node = serde_json::from_value(node_json(&name, group, &kind.totals()))?;
                api.create(&PostParams::default(), &node).await.with_context(|| format!("create {name}"))?;
                hosts.push(HostSlot::new((name, group), Host::new(kind.clone()), client.clone()));
            }
        }
        Ok(Kubelets::new(client.clone(), hosts, self.tick))
    }

    /// Starts a publisher for each host, with a client of its own, and waits until all have written.
    async fn publish(
        &self,
        kubelets: &Arc<Kubelets>,
        kubeconfig: &Path,
        (counts, stop): (&Arc<SliceCounts>, &CancellationToken),
        tasks: &mut JoinSet<()>,
    ) -> Result<()> {
        for host in &kubelets.hosts {
            let counts = counts.clone();
            let publisher = SlicePublisher {
                client: connect(Some(kubeconfig)).await?,
                node: host.name.clone(),
                interval: self.interval,
                has_node_allocatable: true,
                metrics: ApiMetrics::default(),
                report: Arc::new(move |result| {
                    let count = if result.is_ok() { &counts.written } else { &counts.failed };
                    count.fetch_add(1, Ordering::Relaxed);
                }),
                publication: Publication::default(),
            };
            tasks.spawn(publisher.run(host.latest.subscribe(), stop.clone()));
        }
        let (updated, order) = (kubelets.clone(), self.order);
        tasks.spawn(async move {
            let mut ticks = tokio::time::interval(UPDATE_INTERVAL);
            loop {
                ticks.tick().await;
                for host in &updated.hosts {
                    host.publish(order);
                }
            }
        });
        let all = kubelets.hosts.len() as u64;
        until("all slices are written", async || counts.written.load(Ordering::Relaxed) >= all).await
    }

    /// Creates the class and the templates of the claims. Returns the pods with their templates.
    async fn load(&self, client: &Client) -> Result<(Vec<Arc<LoadPod>>, Vec<Option<String>>)> {
        let pods = pods(&self.fleet.groups, self.claiming)?;
        ensure!(!pods.is_empty(), "no pod arrives in these ticks: give more --ticks");
        let mut all = Templates::default();
        let templates = pods.iter().map(|pod| pod.claim.as_ref().map(|claim| all.name(claim)).transpose());
        let templates = templates.collect::<Result<Vec<_>>>()?;
        let classes: Api<DynamicObject> =
            Api::all_with(client.clone(), &ApiResource::erase::<DeviceClass>(&()));
        let expression =
            format!("device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].kind == 'node'");
        let class = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": { "name": CLASS },
            "spec": { "selectors": [{ "cel": { "expression": expression } }] },
        });
        classes.create(&PostParams::default(), &serde_json::from_value(class)?).await?;
        let api: Api<DynamicObject> = Api::namespaced_with(
            client.clone(),
            NAMESPACE,
            &ApiResource::erase::<ResourceClaimTemplate>(&()),
        );
        for template in all.objects()? {
            let object = serde_json::from_value(template)?;
            api.create(&PostParams::default(), &object).await.context("create a template of claims")?;
        }
        Ok((pods.into_iter().map(Arc::new).collect(), templates))
    }
}

/// Counts the pods that are not bound, and looks for room for them.
async fn count_pending(kubelets: &Kubelets, figures: &mut Figures) -> Result<()> {
    let claims = kubelets.claims().await.context("the claims cannot be listed after the load")?;
    let (consumed, _) = consumed(claims.iter());
    let pods = kubelets.pods.lock();
    let mut requested = vec![Totals::new(); kubelets.hosts.len()];
    for tracked in pods.values() {
        let is_bound = matches!(tracked.state, PodState::Bound | PodState::Running);
        for (name, amount) in tracked.pod.totals.iter().filter(|_| is_bound) {
            if let Some(host) = tracked.host {
                *requested[host].entry(name.clone()).or_default() += amount;
            }
        }
    }
    let first = pods.values().map(|tracked| tracked.created).min();
    let last = pods.values().filter_map(|tracked| tracked.bound).max();
    figures.bound_within = last.zip(first).map(|(last, first)| last - first).unwrap_or_default();
    for tracked in pods.values() {
        figures.bound_after.extend(tracked.bound.map(|bound| bound - tracked.created));
        figures.waiting += usize::from(tracked.state == PodState::Bound);
        if tracked.state != PodState::Pending {
            continue;
        }
        let has_room = |(number, host): (usize, &HostSlot)| {
            let books = host.books.lock();
            let latest = host.latest.borrow().as_ref().map(|latest| latest.devices.clone());
            host.group == tracked.pod.group
                && has_room(
                    (&books.kind().totals(), &requested[number]),
                    &tracked.pod.totals,
                    (latest.unwrap_or_default(), tracked.pod.claim.as_ref()),
                    (&host.name, &consumed),
                )
        };
        let is_possible = kubelets.hosts.iter().enumerate().any(has_room);
        figures.pending[0] += 1;
        figures.pending[1] += usize::from(is_possible);
    }
    Ok(())
}

/// Counts the memory time by the states of the pods, and the refusals.
fn count_memory_time(kubelets: &Kubelets, figures: &mut Figures) {
    for tracked in kubelets.pods.lock().values() {
        let times = &mut figures.memory_time;
        let of_state = match tracked.state {
            PodState::Running | PodState::Ended => &mut times.admitted,
            PodState::GivenUp => &mut times.given_up,
            PodState::Pending | PodState::Bound => &mut times.undecided,
        };
        *of_state += tracked.pod.counted_mib.saturating_mul(tracked.pod.life);
        figures.refused[usize::from(tracked.pod.claim.is_none())] += usize::from(tracked.is_refused);
    }
}

/// Waits until a condition holds.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) -> Result<()> {
    let started = Instant::now();
    while !holds().await {
        ensure!(started.elapsed() < START_TIMEOUT, "{what}: not within {} s", START_TIMEOUT.as_secs());
        sleep(PACE).await;
    }
    Ok(())
}

/// Stops the clock while the scheduler has not tried all pods: else its speed would determine what pods have room.
async fn hold_clock(kubelets: Arc<Kubelets>) {
    let mut on_time = Instant::now();
    loop {
        let is_behind = kubelets.is_behind();
        if !is_behind {
            on_time = Instant::now();
        }
        // A scheduler that tries no pods at all does not stop the run.
        kubelets.clock.stop(is_behind && on_time.elapsed() < START_TIMEOUT);
        sleep(PACE).await;
    }
}

/// Waits until no pod has been bound for a while.
async fn wait_until_quiet(kubelets: &Kubelets) {
    let started = Instant::now();
    loop {
        let last = kubelets.pods.lock().values().filter_map(|tracked| tracked.bound).max();
        let quiet_since = last.map_or(started, |last| last.max(started));
        if quiet_since.elapsed() >= QUIET_TIME || started.elapsed() >= QUIET_TIMEOUT {
            return;
        }
        sleep(PACE).await;
    }
}

/// Waits until each pod has run or is given up.
async fn wait_until_decided(kubelets: &Kubelets, timeout: Duration) {
    let started = Instant::now();
    let is_undecided = |tracked: &TrackedPod| matches!(tracked.state, PodState::Pending | PodState::Bound);
    while started.elapsed() < timeout && kubelets.pods.lock().values().any(is_undecided) {
        sleep(PACE).await;
    }
}

/// Looks at all claims again and again.
async fn look_often(kubelets: Arc<Kubelets>, looks: Arc<parking_lot::Mutex<Looks>>) {
    let limits: Vec<_> = kubelets.hosts.iter().map(|host| host.books.lock().limits()).collect();
    let limit = |host: &str, device: &str, name: &str| -> Option<Quantity> {
        limits.get(*kubelets.by_name.get(host)?)?.get(device)?.get(name).copied()
    };
    loop {
        if let Some(claims) = kubelets.claims().await {
            let (consumed, problems) = consumed(claims.iter());
            let mut looks = looks.lock();
            looks.count += 1;
            looks.twice.extend(problems.into_iter().chain(allocated_twice(&consumed, limit)));
        }
        sleep(LOOK_INTERVAL).await;
    }
}

fn node_json(name: &str, group: usize, totals: &Totals) -> Value {
    let mut amounts = totals_json(totals);
    amounts["pods"] = json!(MAX_PODS);
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": name, "labels": { GROUP: group.to_string() } },
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady" }],
        },
    })
}
