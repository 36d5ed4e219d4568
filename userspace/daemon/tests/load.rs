//! Many clients at once, of which most hardly read; `cargo xtask bench load` has more of them, and figures.

mod support;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use self::support::{
    load::{Load, Plan, resident},
    whole::Place,
};

const SPAN: Duration = Duration::from_secs(5);
/// Far longer than anybody has to wait.
const LIMIT: Duration = Duration::from_mins(1);
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// By docs/reliability.md, a thousand clients that hardly read take 12 MiB of the daemon's memory: 38 MiB at most, 26 MiB without
/// them. Here the daemon and its clients are one process, which grows by 11 to 12 MiB; without limits on connections, scrapes and
/// unread answers it grows by 18 MiB.
const MAX_GROWTH_KIB: u64 = 16 << 10;

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_hardly_read_keep_nobody_from_an_answer() {
    let dir = tempfile::tempdir().unwrap();
    let place = Arc::new(Place::new(dir.path()).unwrap());
    // Those that hardly read come from few addresses, and take all connections that there may be.
    let plan = Plan {
        clients: 4,
        rate: 20,
        scrapers: 10,
        scrape_limit: LIMIT,
        slow: 240,
        slow_peers: 8,
        together: true,
    };
    for client in 0..plan.clients {
        place.cgroup(&format!("w{client}")).unwrap();
    }
    let daemon = place.start(None).await.unwrap();
    let before = resident(std::process::id()).unwrap();
    let started = Instant::now();
    let load = Load::start(&plan, &place, daemon.address);
    let mut peak = before;
    while started.elapsed() < SPAN {
        tokio::time::sleep(SAMPLE_INTERVAL).await;
        peak = peak.max(resident(std::process::id()).unwrap());
    }
    let mut seen = load.take();
    // So somebody has had an answer more than once, while those that hardly read were there.
    while seen.scrapes.len() <= plan.scrapers && started.elapsed() < LIMIT {
        tokio::time::sleep(SPAN / 5).await;
        seen.add(load.take());
    }
    peak = peak.max(resident(std::process::id()).unwrap());
    println!("resident: {before} KiB before, {peak} KiB at most");
    seen.add(load.end().await);
    assert_eq!((&seen.failed_scrapes, &seen.errors, seen.refused), (&Vec::new(), &Vec::new(), 0));
    assert!(!seen.admissions.is_empty() && seen.scrapes.len() > plan.scrapers, "{seen:?}");
    assert!(seen.slow_served > 0, "{seen:?}");
    assert!(peak < before + MAX_GROWTH_KIB, "{before} KiB before, {peak} KiB at most");
}
