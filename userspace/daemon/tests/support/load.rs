//! Clients of a daemon: those that are admitted and released, those that read the metrics, and those that hardly read.
//!
//! Readers stand for other machines, which know nothing of each other: each begins at a moment of its own within a second,
//! as Prometheus spreads its targets over the interval, unless the plan has them come together. They have threads of their own, so that an admission is not
//! timed while its client waits behind them.

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

use super::{request, whole::Place};

/// What the clients do.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Clients that are admitted and released, each with a cgroup of its own.
    pub(crate) clients: usize,
    /// Admissions a second of all of them.
    pub(crate) rate: u32,
    /// Clients that read the metrics each second, each from an address of its own.
    pub(crate) scrapers: usize,
    /// A scrape that takes longer has failed.
    pub(crate) scrape_limit: Duration,
    /// Clients that read a byte a second, of the metrics or of the stream, and come again.
    pub(crate) slow: usize,
    /// From so many addresses.
    pub(crate) slow_peers: usize,
    /// Readers begin in the same moment.
    pub(crate) together: bool,
}

impl Plan {
    /// When one of so many readers begins, within the first second.
    fn phase(&self, number: usize, of: usize) -> Duration {
        let number = if self.together { 0 } else { u32::try_from(number).unwrap_or_default() };
        Duration::from_secs(1) * number / u32::try_from(of.max(1)).unwrap_or(u32::MAX)
    }
}

/// What came of it since it was taken last.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// How long admissions took until the answer.
    pub(crate) admissions: Vec<Duration>,
    pub(crate) refused: u64,
    pub(crate) scrapes: Vec<Duration>,
    pub(crate) failed_scrapes: Vec<String>,
    /// Slow readers that got something, and that were turned away.
    pub(crate) slow_served: u64,
    pub(crate) slow_closed: u64,
    /// Whatever else went wrong.
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

/// Of a hundred, so many took no longer.
pub(crate) fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort();
    let index = (times.len() * percent).div_ceil(100).max(1) - 1;
    times.get(index).copied().unwrap_or_default()
}

/// Clients that run until this is dropped.
pub(crate) struct Load {
    figures: Arc<Mutex<Figures>>,
    over: Arc<AtomicBool>,
    admitted: JoinSet<()>,
    /// Dropped with its tasks.
    readers: Option<Runtime>,
}

impl Load {
    pub(crate) fn start(plan: &Plan, place: &Arc<Place>, address: SocketAddr) -> Self {
        let (figures, mut admitted) = (Arc::<Mutex<Figures>>::default(), JoinSet::new());
        let readers = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let due = Arc::new(AtomicU64::new(0));
        let (started, rate) = (Instant::now(), plan.rate);
        for client in 0..plan.clients {
            let (place, figures, over, due) = (place.clone(), figures.clone(), over.clone(), due.clone());
            admitted.spawn(async move {
                let client = Client { name: format!("w{client}"), place, figures: figures.clone() };
                let ran = client.run(|| due.fetch_add(1, Relaxed), started, rate, &over).await;
                if let Err(error) = ran {
                    figures.lock().unwrap().errors.push(error.to_string());
                }
            });
        }
        for scraper in 0..plan.scrapers {
            let (figures, limit) = (figures.clone(), plan.scrape_limit);
            let begins = plan.phase(scraper, plan.scrapers);
            readers.spawn(async move {
                sleep(begins).await;
                scrape(from(1, scraper), address, limit, &figures).await;
            });
        }
        for slow in 0..plan.slow {
            let (figures, peer) = (figures.clone(), from(2, slow % plan.slow_peers.max(1)));
            let path = if slow % 2 == 0 { "/metrics" } else { "/api/v1/stream" };
            let begins = plan.phase(slow, plan.slow);
            readers.spawn(async move {
                sleep(begins).await;
                crawl(peer, address, path, &figures).await;
            });
        }
        Self { figures, over, admitted, readers: Some(readers) }
    }

    /// What came of it since the last time.
    pub(crate) fn take(&self) -> Figures {
        std::mem::take(&mut self.figures.lock().unwrap())
    }

    /// Lets those who hold something release it.
    pub(crate) async fn end(mut self) -> Figures {
        self.over.store(true, Relaxed);
        while self.admitted.join_next().await.is_some() {}
        self.take()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // A runtime may not be waited for where tasks run.
        if let Some(readers) = self.readers.take() {
            readers.shutdown_background();
        }
    }
}

/// An address of a group of clients.
pub(crate) fn from(group: u8, number: usize) -> Ipv4Addr {
    let [.., high, low] = u32::try_from(number + 1).unwrap_or_default().to_be_bytes();
    Ipv4Addr::new(127, group, high, low)
}

struct Client {
    name: String,
    place: Arc<Place>,
    figures: Arc<Mutex<Figures>>,
}

impl Client {
    async fn run(
        &self,
        next: impl Fn() -> u64,
        started: Instant,
        rate: u32,
        over: &AtomicBool,
    ) -> io::Result<()> {
        let mut stream = BufReader::new(UnixStream::connect(self.place.socket()).await?);
        let body = request(&self.name, &format!("/{}", self.name), 1, "64Mi");
        let path = format!("/api/v1/allocations/{}", self.name);
        while !over.load(Relaxed) {
            // A client that comes late goes on at once, as all others do.
            let due = started + Duration::from_secs(1) * u32::try_from(next()).unwrap_or(u32::MAX) / rate;
            sleep(due.saturating_duration_since(Instant::now())).await;
            let asked = Instant::now();
            let status = exchange(&mut stream, "POST", "/api/v1/allocations", &body).await?;
            let took = asked.elapsed();
            if status != 201 {
                self.figures.lock().unwrap().refused += 1;
                continue;
            }
            self.figures.lock().unwrap().admissions.push(took);
            self.place.obey(&self.name)?;
            let status = exchange(&mut stream, "DELETE", &path, "").await?;
            if status != 204 {
                return Err(io::Error::other(format!("a release was answered with {status}")));
            }
        }
        Ok(())
    }
}

/// Asks on a connection that stays, and says with which status it was answered.
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

/// The metrics, all of them.
pub(crate) async fn metrics(stream: &mut TcpStream) -> io::Result<String> {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let is_whole = answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(b"\r\n0\r\n\r\n");
    let text = String::from_utf8_lossy(&answer).into_owned();
    let start = || text.lines().next().unwrap_or_default().to_owned();
    if is_whole { Ok(text) } else { Err(io::Error::other(format!("{} bytes: {}", answer.len(), start()))) }
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

/// Reads a byte a second; comes again when it is turned away.
async fn crawl(from: Ipv4Addr, to: SocketAddr, path: &str, figures: &Mutex<Figures>) {
    loop {
        let mut is_served = false;
        if let Ok(mut stream) = connect(from, to, Some(4096)).await {
            let asked = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
            let mut byte = [0];
            if stream.write_all(asked.as_bytes()).await.is_ok() {
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

/// The memory of a process that is resident, in KiB.
pub(crate) fn resident(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

/// CPU time that a process, or its thread of this name, has taken, if there is one.
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
        let of_second = rustix::param::clock_ticks_per_second();
        thread.is_none_or(|thread| thread == name).then(|| Duration::from_millis(ticks * 1000 / of_second))
    })
}
