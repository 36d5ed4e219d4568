//! Clients of a daemon: clients that request and release guarantees, scrapers of the metrics, and slow readers.
//!
//! Readers represent other machines, which do not coordinate: each starts at a different time within the first second, as Prometheus
//! spreads its targets over the interval, unless the plan starts them together. They have threads of their own, so that the measured time
//! of an admission does not include a wait of its client for the readers.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader},
    net::{TcpSocket, TcpStream, UnixStream},
    runtime::{Builder, Runtime},
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use super::{local_daemon::HostDirectory, request};

/// Numbers and rates of the clients.
#[derive(Clone, Debug)]
pub(crate) struct LoadPlan {
    /// The number of clients that request and release a guarantee, each for a cgroup of its own.
    pub(crate) clients: usize,
    /// Admissions per second of all these clients.
    pub(crate) rate: u32,
    /// The number of clients that read the metrics each second, each from an address of its own.
    pub(crate) scrapers: usize,
    /// The time after which a scrape fails.
    pub(crate) scrape_timeout: Duration,
    /// The number of clients that read one byte of the metrics or of the stream per second, and connect again after an end.
    pub(crate) slow: usize,
    /// The number of addresses of the slow clients.
    pub(crate) slow_peers: usize,
    /// True if all readers start at the same time.
    pub(crate) together: bool,
}

impl LoadPlan {
    /// Returns the delay of a reader's start within the first second. `count` is the number of readers of its kind.
    fn phase(&self, number: usize, count: usize) -> Duration {
        let number = if self.together { 0 } else { u32::try_from(number).unwrap_or_default() };
        Duration::from_secs(1) * number / u32::try_from(count.max(1)).unwrap_or(u32::MAX)
    }
}

/// Results since they were last taken.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// Times of admissions from the request to the answer.
    pub(crate) admissions: Vec<Duration>,
    pub(crate) refused: u64,
    pub(crate) scrapes: Vec<Duration>,
    pub(crate) failed_scrapes: Vec<String>,
    /// Connections of slow readers that got data.
    pub(crate) slow_served: u64,
    /// Connections of slow readers that were refused or closed without data.
    pub(crate) slow_closed: u64,
    /// Other errors.
    pub(crate) errors: Vec<String>,
}

impl Figures {
    pub(crate) fn add(&mut self, more: Self) {
        self.admissions.extend(more.admissions);
        self.refused += more.refused;
        self.scrapes.extend(more.scrapes);
        self.failed_scrapes.extend(more.failed_scrapes);
        self.slow_served += more.slow_served;
        self.slow_closed += more.slow_closed;
        self.errors.extend(more.errors);
    }
}

/// Returns a percentile of times; sorts them.
pub(crate) fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort();
    let index = (times.len() * percent).div_ceil(100).max(1) - 1;
    times.get(index).copied().unwrap_or_default()
}

/// Running clients, which stop on drop.
pub(crate) struct Load {
    figures: Arc<Mutex<Figures>>,
    has_ended: Arc<AtomicBool>,
    admitted: JoinSet<()>,
    /// The runtime of the readers, which is dropped with its tasks.
    readers: Option<Runtime>,
}

impl Load {
    pub(crate) fn start(plan: &LoadPlan, host: &Arc<HostDirectory>, address: SocketAddr) -> Self {
        let (figures, mut admitted) = (Arc::<Mutex<Figures>>::default(), JoinSet::new());
        let readers = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let has_ended = Arc::new(AtomicBool::new(false));
        let due = Arc::new(AtomicU64::new(0));
        let (started, rate) = (Instant::now(), plan.rate);
        for client in 0..plan.clients {
            let (host, figures, due) = (host.clone(), figures.clone(), due.clone());
            let has_ended = has_ended.clone();
            admitted.spawn(async move {
                let client = Client { name: format!("w{client}"), host, figures: figures.clone() };
                let ran = client.run(|| due.fetch_add(1, Relaxed), started, rate, &has_ended).await;
                if let Err(error) = ran {
                    figures.lock().unwrap().errors.push(error.to_string());
                }
            });
        }
        for scraper in 0..plan.scrapers {
            let (figures, limit) = (figures.clone(), plan.scrape_timeout);
            let delay = plan.phase(scraper, plan.scrapers);
            readers.spawn(async move {
                sleep(delay).await;
                scrape(loopback_address(1, scraper), address, limit, &figures).await;
            });
        }
        for slow in 0..plan.slow {
            let (figures, peer) = (figures.clone(), loopback_address(2, slow % plan.slow_peers.max(1)));
            let path = if slow % 2 == 0 { "/metrics" } else { "/api/v1/stream" };
            let delay = plan.phase(slow, plan.slow);
            readers.spawn(async move {
                sleep(delay).await;
                read_slowly(peer, address, path, &figures).await;
            });
        }
        Self { figures, has_ended, admitted, readers: Some(readers) }
    }

    /// Takes the results since the last call.
    pub(crate) fn take(&self) -> Figures {
        std::mem::take(&mut self.figures.lock().unwrap())
    }

    /// Stops the clients after they have released their guarantees. Returns the last results.
    pub(crate) async fn end(mut self) -> Figures {
        self.has_ended.store(true, Relaxed);
        while self.admitted.join_next().await.is_some() {}
        self.take()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Code inside a runtime must not wait for the end of another one.
        if let Some(readers) = self.readers.take() {
            readers.shutdown_background();
        }
    }
}

/// Returns the loopback address of a client in a group.
pub(crate) fn loopback_address(group: u8, number: usize) -> Ipv4Addr {
    let [.., high, low] = u32::try_from(number + 1).unwrap_or_default().to_be_bytes();
    Ipv4Addr::new(127, group, high, low)
}

struct Client {
    name: String,
    host: Arc<HostDirectory>,
    figures: Arc<Mutex<Figures>>,
}

impl Client {
    async fn run(
        &self,
        next: impl Fn() -> u64,
        started: Instant,
        rate: u32,
        has_ended: &AtomicBool,
    ) -> io::Result<()> {
        let mut stream = BufReader::new(UnixStream::connect(self.host.socket()).await?);
        let body = request(&self.name, &format!("/{}", self.name), 1, "64Mi");
        let path = format!("/api/v1/allocations/{}", self.name);
        while !has_ended.load(Relaxed) {
            // A client that is late continues at once.
            let due = started + Duration::from_secs(1) * u32::try_from(next()).unwrap_or(u32::MAX) / rate;
            sleep(due.saturating_duration_since(Instant::now())).await;
            let sent = Instant::now();
            let status = exchange(&mut stream, "POST", "/api/v1/allocations", &body).await?;
            let took = sent.elapsed();
            if status != 201 {
                self.figures.lock().unwrap().refused += 1;
                continue;
            }
            self.figures.lock().unwrap().admissions.push(took);
            self.host.apply_cpuset(&self.name)?;
            let status = exchange(&mut stream, "DELETE", &path, "").await?;
            if status != 204 {
                return Err(io::Error::other(format!("a release was answered with {status}")));
            }
        }
        Ok(())
    }
}

/// Sends a request on a connection that stays open. Returns the status.
async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut BufReader<S>,
    method: &str,
    path: &str,
    body: &str,
) -> io::Result<u16> {
    use tokio::io::AsyncBufReadExt as _;

    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.get_mut().write_all(head.as_bytes()).await?;
    let (mut status, mut length, mut line) = (None, 0, String::new());
    loop {
        line.clear();
        if stream.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let field = line.trim_end().to_ascii_lowercase();
        match (status, field.strip_prefix("content-length: ")) {
            (None, _) => status = field.split(' ').nth(1).and_then(|code| code.parse().ok()),
            (Some(_), Some(bytes)) => length = bytes.parse().map_err(io::Error::other)?,
            (Some(status), None) if field.is_empty() => {
                stream.read_exact(&mut vec![0; length]).await?;
                return Ok(status);
            }
            (Some(_), None) => {}
        }
    }
}

pub(crate) async fn connect(from: Ipv4Addr, to: SocketAddr, window: Option<u32>) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((from, 0).into())?;
    if let Some(bytes) = window {
        socket.set_recv_buffer_size(bytes)?;
    }
    socket.connect(to).await
}

/// Reads all metrics. Fails if the answer is truncated or has another status than 200.
pub(crate) async fn metrics(stream: &mut TcpStream) -> io::Result<String> {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let is_complete = answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(b"\r\n0\r\n\r\n");
    let text = String::from_utf8_lossy(&answer).into_owned();
    let start = || text.lines().next().unwrap_or_default().to_owned();
    if is_complete { Ok(text) } else { Err(io::Error::other(format!("{} bytes: {}", answer.len(), start()))) }
}

/// Reads the metrics each second.
async fn scrape(from: Ipv4Addr, to: SocketAddr, limit: Duration, figures: &Mutex<Figures>) {
    let mut ticks = interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let began = Instant::now();
        let read = async { metrics(&mut connect(from, to, None).await?).await };
        let read = timeout(limit, read).await.map_err(io::Error::from).flatten();
        let mut figures = figures.lock().unwrap();
        match read {
            Ok(_) => figures.scrapes.push(began.elapsed()),
            Err(error) => figures.failed_scrapes.push(error.to_string()),
        }
    }
}

/// Reads one byte per second; connects again when the connection is closed.
async fn read_slowly(from: Ipv4Addr, to: SocketAddr, path: &str, figures: &Mutex<Figures>) {
    loop {
        let mut is_served = false;
        if let Ok(mut stream) = connect(from, to, Some(4096)).await {
            let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
            let mut byte = [0];
            if stream.write_all(request.as_bytes()).await.is_ok() {
                while matches!(stream.read(&mut byte).await, Ok(1)) {
                    figures.lock().unwrap().slow_served += u64::from(!is_served);
                    is_served = true;
                    sleep(Duration::from_secs(1)).await;
                }
            }
        }
        figures.lock().unwrap().slow_closed += u64::from(!is_served);
        sleep(Duration::from_secs(1)).await;
    }
}

/// Returns the resident memory of a process in KiB.
pub(crate) fn resident(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

/// Returns the CPU time of a process, or of its thread with this name; `None` if it does not exist.
pub(crate) fn cpu_time(process: u32, thread: Option<&str>) -> Option<Duration> {
    let own = std::path::PathBuf::from(format!("/proc/{process}"));
    let dirs = match thread {
        None => vec![own],
        Some(_) => {
            std::fs::read_dir(own.join("task")).ok()?.filter_map(|task| Some(task.ok()?.path())).collect()
        }
    };
    dirs.into_iter().find_map(|dir| {
        let stat = std::fs::read_to_string(dir.join("stat")).ok()?;
        let (head, fields) = stat.rsplit_once(')')?;
        let (_, name) = head.split_once('(')?;
        // The state is the third field of all, the times in userspace and in the kernel are 14 and 15.
        let mut times = fields.split_whitespace().skip(11).map_while(|field| field.parse::<u64>().ok());
        let ticks = times.next()? + times.next()?;
        let ticks_per_second = rustix::param::clock_ticks_per_second();
        thread
            .is_none_or(|thread| thread == name)
            .then(|| Duration::from_millis(ticks * 1000 / ticks_per_second))
    })
}
