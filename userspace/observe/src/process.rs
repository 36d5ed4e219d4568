//! Resource usage of the daemon's own process, in the metrics of Prometheus client libraries
//! (<https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics>). Sources: proc(5).

use std::{
    fs, io,
    path::Path,
    time::{Duration, SystemTime},
};

use numaward_model::snapshot::ProcessFigures;
use numaward_topology::Bytes;

/// Units of the kernel's figures for a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Units {
    pub(crate) ticks_per_second: u64,
    pub(crate) page_size: u64,
}

/// Reads the figures below `proc`, which is `/proc` in production. Unreadable figures are absent.
pub(crate) fn read(proc: &Path, units: Units) -> Option<ProcessFigures> {
    let stat = fs::read_to_string(proc.join("self/stat")).ok()?;
    // The name, in brackets, may contain any character.
    let (_, rest) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // The state, which follows the name, is the third field.
    let field = |number: usize| fields.get(number.checked_sub(3)?)?.parse::<u64>().ok();
    let time = |ticks: u64| Duration::from_millis(ticks.saturating_mul(1000) / units.ticks_per_second.max(1));
    let limits = fs::read_to_string(proc.join("self/limits")).unwrap_or_default();
    Some(ProcessFigures {
        cpu: time(field(14)?.saturating_add(field(15)?)),
        virtual_memory: Bytes(field(23)?),
        resident_memory: Bytes(field(24)?.saturating_mul(units.page_size)),
        start: boot(proc).and_then(|boot| boot.checked_add(time(field(22)?))),
        open_fds: open_fds(&proc.join("self/fd")).ok(),
        max_fds: max_fds(&limits),
    })
}

/// Returns the boot time of the host.
fn boot(proc: &Path) -> Option<SystemTime> {
    let stat = fs::read_to_string(proc.join("stat")).ok()?;
    let seconds = stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

/// Counts the open file descriptors, except the one used for listing them.
fn open_fds(dir: &Path) -> io::Result<u64> {
    let mut listed = 0_u64;
    for entry in fs::read_dir(dir)? {
        entry?;
        listed += 1;
    }
    Ok(listed.saturating_sub(1))
}

/// Returns the soft limit; `unlimited` is the largest number.
fn max_fds(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        limit => limit.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: Units = Units { ticks_per_second: 100, page_size: 4096 };
    const STAT: &str =
        "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 150 50 0 0 20 0 9 0 1234 104857600 2048 184467 1 1\n";

    fn proc(stat: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("self/fd")).unwrap();
        for fd in 0..4 {
            fs::write(dir.path().join(format!("self/fd/{fd}")), "").unwrap();
        }
        fs::write(dir.path().join("self/stat"), stat).unwrap();
        fs::write(
            dir.path().join("self/limits"),
            "Limit Soft Hard\nMax open files      1024   524288  files\n",
        )
        .unwrap();
        fs::write(dir.path().join("stat"), "cpu 1 2\nbtime 1000\n").unwrap();
        dir
    }

    #[test]
    fn figures_are_in_base_units() {
        let dir = proc(STAT);
        let expected = ProcessFigures {
            cpu: Duration::from_secs(2),
            virtual_memory: Bytes(104_857_600),
            resident_memory: Bytes(2048 * 4096),
            start: Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_012_340)),
            open_fds: Some(3),
            max_fds: Some(1024),
        };
        assert_eq!(read(dir.path(), UNITS), Some(expected));
        fs::remove_file(dir.path().join("stat")).unwrap();
        fs::remove_file(dir.path().join("self/limits")).unwrap();
        fs::remove_dir_all(dir.path().join("self/fd")).unwrap();
        let rest = ProcessFigures { start: None, open_fds: None, max_fds: None, ..expected };
        assert_eq!(read(dir.path(), UNITS), Some(rest));
    }

    #[test]
    fn corrupt_stat_has_no_figures() {
        for stat in ["", "7 (a", "7 (a) S 1 2", &STAT.replace("150", "x"), &STAT.replace("2048", "-1")] {
            assert_eq!(read(proc(stat).path(), UNITS), None, "{stat}");
        }
        assert_eq!(read(Path::new("/nowhere"), UNITS), None);
        assert_eq!(max_fds("Max open files unlimited unlimited files\n"), Some(u64::MAX));
    }

    #[test]
    fn reads_this_process() {
        let units = Units {
            ticks_per_second: rustix::param::clock_ticks_per_second(),
            page_size: rustix::param::page_size() as u64,
        };
        let found = read(Path::new("/proc"), units).unwrap();
        assert!(
            found.resident_memory.0 > 1 << 20 && found.virtual_memory >= found.resident_memory,
            "{found:?}"
        );
        assert!(found.start.unwrap() <= SystemTime::now() + Duration::from_secs(1), "{found:?}");
        assert!(found.open_fds.unwrap() >= 3 && found.open_fds <= found.max_fds, "{found:?}");
    }
}
