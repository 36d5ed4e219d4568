//! Checks of the systemd backend, on hosts with systemd as init.

use std::{
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use numaward_enforce::{
    AppliedSettings, EnforceError, Enforcer, Owner, SettingsChange, Systemd, systemd::is_init,
};
use numaward_model::Settings;
use numaward_topology::{Bytes, HugepageSize};

use crate::{
    check::Check,
    checks::{ROOT, apply, bytes, expect, get, mib, options, path, pinned},
};

pub(crate) fn all() -> &'static [Check] {
    const ALL: &[Check] = &[("systemd-unit", unit), ("systemd-refuses", refuses)];
    if is_init(Path::new("/")) { ALL } else { &[] }
}

const UNIT: &str = "check-load.service";
const CGROUP: &str = "/check.slice/check-load.service";

fn systemctl(words: &[&str]) -> Result<()> {
    let output = Command::new("systemctl").args(words).output().context("systemctl")?;
    ensure!(output.status.success(), "systemctl {words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn configure(high_mib: u64) -> Result<()> {
    let text =
        format!("[Service]\nSlice=check.slice\nExecStart=/bin/sleep infinity\nMemoryHigh={high_mib}M\n");
    std::fs::write(format!("/run/systemd/system/{UNIT}"), text)?;
    systemctl(&["daemon-reload"])
}

fn start() -> Result<()> {
    configure(400)?;
    systemctl(&["start", UNIT])
}

fn enforcer(runtime: &tokio::runtime::Runtime) -> Result<Enforcer> {
    Ok(Enforcer::new(ROOT.into(), Some(Systemd::new(runtime.handle().clone(), Path::new("/"))), options()?))
}

fn main_process() -> Result<String> {
    let output = Command::new("systemctl").args(["show", "--value", "-p", "MainPID", UNIT]).output()?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

fn allowed(key: &str) -> Result<String> {
    let pid = main_process()?;
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)).context("no such line")?;
    Ok(line.trim_start_matches(':').trim().to_owned())
}

/// Checks that the kernel's values are those of the settings, which systemd writes with a delay.
fn is_pinned(when: &str) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let found =
            (allowed("Cpus_allowed_list")?, allowed("Mems_allowed_list")?, get(CGROUP, "memory.min")?);
        if found == ("2-3".to_owned(), "1".to_owned(), bytes(32)) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{when}: {found:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn unit() -> Result<String> {
    start()?;
    let runtime = tokio::runtime::Runtime::new()?;
    let enforcer = enforcer(&runtime)?;
    ensure!(enforcer.owner(&path(CGROUP)?) == Owner::Systemd(UNIT.to_owned()), "not systemd's");
    let settings = Settings {
        memory_min: Some(mib(32)),
        memory_high: Some(mib(300)),
        memory_max: Some(mib(350)),
        ..pinned("2-3", "1")?
    };
    let started = Instant::now();
    let (applied, report) = apply(
        &enforcer,
        &AppliedSettings::default(),
        &SettingsChange::Hold(path(CGROUP)?, settings.clone()),
    )?;
    let took = started.elapsed();
    ensure!(report.written.iter().all(|step| step.owner.backend() == "systemd"), "{report:?}");
    is_pinned("held")?;
    expect("the slice's memory.min", &get("/check.slice", "memory.min")?, &bytes(32))?;
    expect("memory.high", &get(CGROUP, "memory.high")?, &bytes(300))?;

    systemctl(&["daemon-reload"])?;
    is_pinned("after daemon-reload")?;
    systemctl(&["restart", UNIT])?;
    is_pinned("after a restart")?;
    // A new cgroup gets the same settings.
    let (applied, _) = apply(&enforcer, &applied, &SettingsChange::Upkeep)?;
    ensure!(enforcer.drift(&applied, &path(CGROUP)?)?.is_empty(), "drift");

    // Another program writes the knob without systemd: it is repaired through systemd.
    std::fs::write(format!("{ROOT}{CGROUP}/cpuset.cpus"), "0")?;
    let drifts = enforcer.drift(&applied, &path(CGROUP)?)?;
    let [drift] = &drifts[..] else { bail!("{drifts:?}") };
    enforcer.repair(&applied, drift)?;
    is_pinned("repaired")?;

    // Hugepages have no property, so they are written directly.
    let huge = [(HugepageSize(Bytes::mib(2)), mib(2))];
    let (applied, report) = apply(
        &enforcer,
        &applied,
        &SettingsChange::Hold(path(CGROUP)?, Settings { hugetlb: huge.into(), ..settings }),
    )?;
    ensure!(report.written.len() == 1, "{report:?}");
    expect("hugetlb", &get(CGROUP, "hugetlb.2MB.max")?, &bytes(2))?;

    let (applied, _) = apply(&enforcer, &applied, &SettingsChange::Release(path(CGROUP)?))?;
    ensure!(applied.is_empty(), "{applied:?}");
    expect("Cpus_allowed_list", &allowed("Cpus_allowed_list")?, "0-3")?;
    expect("Mems_allowed_list", &allowed("Mems_allowed_list")?, "0-1")?;
    expect("memory.min", &get(CGROUP, "memory.min")?, "0")?;
    expect("memory.high", &get(CGROUP, "memory.high")?, &bytes(400))?;
    expect("the slice's memory.min", &get("/check.slice", "memory.min")?, "0")?;
    systemctl(&["restart", UNIT])?;
    expect("Cpus_allowed_list after a restart", &allowed("Cpus_allowed_list")?, "0-3")?;
    expect("memory.high after a restart", &get(CGROUP, "memory.high")?, &bytes(400))?;
    // No drop-in is left that would override an edited unit file.
    let drop_ins = format!("/run/systemd/system.control/{UNIT}.d");
    ensure!(!Path::new(&drop_ins).exists(), "{drop_ins} is left");
    configure(410)?;
    systemctl(&["restart", UNIT])?;
    expect("memory.high after it was edited", &get(CGROUP, "memory.high")?, &bytes(410))?;

    // A stopped unit can be released.
    let (applied, _) = apply(&enforcer, &applied, &SettingsChange::Hold(path(CGROUP)?, pinned("1", "0")?))?;
    systemctl(&["stop", UNIT])?;
    let plan = enforcer.plan(&applied, &SettingsChange::Release(path(CGROUP)?))?;
    enforcer.execute(&plan).map_err(|failure| anyhow!("{failure}"))?;
    ensure!(plan.outcome.is_empty(), "{:?}", plan.outcome);
    systemctl(&["start", UNIT])?;
    expect("Cpus_allowed_list after a stop", &allowed("Cpus_allowed_list")?, "0-3")?;
    systemctl(&["stop", UNIT])?;
    Ok(format!("held in {} ms, through daemon-reload and restart, and back", took.as_millis()))
}

fn refuses() -> Result<String> {
    let runtime = tokio::runtime::Runtime::new()?;
    // A cgroup with the name of a unit that does not exist.
    let dir = Path::new(ROOT).join("check-none.service");
    std::fs::create_dir(&dir)?;
    let none = enforcer(&runtime)?.plan(
        &AppliedSettings::default(),
        &SettingsChange::Hold(path("/check-none.service")?, pinned("1", "0")?),
    );
    let no_bus = Enforcer::new(
        ROOT.into(),
        Some(Systemd::at(runtime.handle().clone(), Path::new("/"), "unix:path=/run/none".to_owned())),
        options()?,
    )
    .plan(
        &AppliedSettings::default(),
        &SettingsChange::Hold(path("/check-none.service")?, pinned("1", "0")?),
    );
    std::fs::remove_dir(&dir)?;
    // A cgroup with the name of a unit that has another cgroup.
    let dir = Path::new(ROOT).join("dbus.service");
    std::fs::create_dir(&dir)?;
    let other = enforcer(&runtime)?
        .plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/dbus.service")?, pinned("1", "0")?));
    std::fs::remove_dir(&dir)?;
    let Err(other @ EnforceError::Systemd { .. }) = other else { bail!("{other:?}") };
    let Err(none @ EnforceError::UnknownUnit { .. }) = none else { bail!("{none:?}") };
    let Err(no_bus @ EnforceError::NoBus { .. }) = no_bus else { bail!("{no_bus:?}") };
    Ok(format!("{none}; {no_bus}; {other}"))
}
