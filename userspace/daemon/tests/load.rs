//! A daemon with many clients at once, most of which read slowly. `cargo xtask bench load` has more clients, and prints figures.

mod support;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use self::support::{
    load::{Load, LoadPlan, resident},
    local_daemon::HostDirectory,
};

/// The duration of the load.
const LOAD_DURATION: Duration = Duration::from_secs(5);
/// A time after which a client fails, far longer than any expected wait.
const CLIENT_TIMEOUT: Duration = Duration::from_mins(1);
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// The maximum growth of the resident memory. According to docs/reliability.md, a thousand slow readers use 12 MiB of the daemon's memory:
/// it has 38 MiB at most, and 26 MiB without them. Here, the daemon and its clients are one process, which grows by 11 to 12 MiB; without
/// limits on connections, scrapes and unread answers, it grows by 18 MiB.
const MAX_GROWTH_KIB: u64 = 16 << 10;

#[tokio::test(flavor = "multi_thread")]
async fn slow_readers_delay_no_client() {
    let dir = tempfile::tempdir().unwrap();
    let host = Arc::new(HostDirectory::new(dir.path()).unwrap());
    // Slow readers have few addresses and use all allowed connections.
    let plan = LoadPlan {
        clients: 4,
        rate: 20,
        scrapers: 10,
        scrape_timeout: CLIENT_TIMEOUT,
        slow: 240,
        slow_peers: 8,
        together: true,
    };
    for client in 0..plan.clients {
        host.cgroup(&format!("w{client}")).unwrap();
    }
    let daemon = host.start(None).await.unwrap();
    let before = resident(std::process::id()).unwrap();
    let started = Instant::now();
    let load = Load::start(&plan, &host, daemon.address);
    let mut peak = before;
    while started.elapsed() < LOAD_DURATION {
        tokio::time::sleep(SAMPLE_INTERVAL).await;
        peak = peak.max(resident(std::process::id()).unwrap());
    }
    let mut results = load.take();
    // Wait until a scraper has got more than one answer while the slow readers were connected.
    while results.scrapes.len() <= plan.scrapers && started.elapsed() < CLIENT_TIMEOUT {
        tokio::time::sleep(LOAD_DURATION / 5).await;
        results.add(load.take());
    }
    peak = peak.max(resident(std::process::id()).unwrap());
    println!("resident: {before} KiB before, {peak} KiB at most");
    results.add(load.end().await);
    assert_eq!((&results.failed_scrapes, &results.errors, results.refused), (&Vec::new(), &Vec::new(), 0));
    assert!(!results.admissions.is_empty() && results.scrapes.len() > plan.scrapers, "{results:?}");
    assert!(results.slow_served > 0, "{results:?}");
    assert!(peak < before + MAX_GROWTH_KIB, "{before} KiB before, {peak} KiB at most");
}
