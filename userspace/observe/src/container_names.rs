//! Names of the containers of Docker and Podman, from the files in which root's runtimes keep them.
//!
//! # Problem
//! A cgroup's path has the id of a container only. The name is in a file that may be long, or on a disk that does not
//! respond, and cgroups must be followed meanwhile.
//!
//! # Algorithm
//! When cgroups of containers appear, a thread reads the names once. The cgroups are handled as soon as it is done, and
//! after [`READ_TIMEOUT`] at the latest; a container that is known by its id until then is renamed. There is one thread at
//! a time: further containers wait for the next one, at most [`MAX_WAITING`].
//!
//! # Invariants
//! - Only files that root alone can change are read, below the root of the host. Users' own containers have no such files.
//! - At most [`MAX_FILE_BYTES`] of a file are read.
//! - A name has the characters that the runtimes permit, and at most [`MAX_NAME_LENGTH`] of them. Another one is ignored.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupEvent, NameKeeper, classify, open_protected, read_open_text};
use numaward_config::Config;
use serde::Deserialize;

/// Longest time for which new cgroups wait for the names of their containers, except in tests.
const READ_TIMEOUT: Duration = Duration::from_millis(250);

/// Most containers that wait for a thread. The names of further ones are not read.
const MAX_WAITING: usize = 16_384;

/// Longest file that is read. Docker's have some 10 KB each, with the environment of a container; Podman's file has
/// 1 KB for each container.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Longest name: as long as the name of a file.
const MAX_NAME_LENGTH: usize = 255;

/// The storage drivers of Podman that have a directory of containers.
const PODMAN_DRIVERS: [&str; 4] = ["overlay", "vfs", "btrfs", "zfs"];

/// The files with Podman's containers. The second one has those that are removed when they end (`--rm`).
const PODMAN_FILES: [&str; 2] = ["containers.json", "volatile-containers.json"];

/// Names of containers by id.
pub(crate) type Names = HashMap<String, Arc<str>>;

type Wanted = BTreeSet<(NameKeeper, String)>;
type Reader = Arc<dyn Fn(&Wanted) -> Names + Send + Sync>;

/// Reader of the names of new containers.
pub(crate) struct ContainerNames {
    read: Reader,
    /// Longest time for which new cgroups wait for the names.
    timeout: Duration,
    waiting: Wanted,
    running: Option<mpsc::Receiver<Names>>,
}

impl ContainerNames {
    /// Returns the reader of the configured files; `None` if names are disabled.
    pub(crate) fn from_config(config: &Config) -> Option<Self> {
        let keys = &config.observe.container_names;
        let store = |runtime, directory: &Path| Store {
            runtime,
            host_root: config.host_root.clone(),
            directory: config.host_root.join(directory.strip_prefix("/").unwrap_or(directory)),
            has_failed: AtomicBool::new(false),
        };
        let stores =
            [store(NameKeeper::Docker, &keys.docker_root), store(NameKeeper::Podman, &keys.podman_root)];
        let read = move |wanted: &Wanted| stores.iter().flat_map(|store| store.names(wanted)).collect();
        keys.enabled.then(|| Self::new(Arc::new(read), READ_TIMEOUT))
    }

    fn new(read: Reader, timeout: Duration) -> Self {
        Self { read, timeout, waiting: Wanted::new(), running: None }
    }

    /// Returns the names of containers that have become known: those of the containers with new cgroups, unless they take
    /// too long, and of earlier ones.
    pub(crate) fn read(&mut self, events: &[CgroupEvent]) -> Names {
        self.waiting.extend(events.iter().filter_map(new_container));
        while self.waiting.len() > MAX_WAITING {
            self.waiting.pop_last();
        }
        // A thread that was late once is not waited for again.
        let timeout = if self.running.is_some() { Duration::ZERO } else { self.timeout };
        let deadline = Instant::now() + timeout;
        let mut names = Names::new();
        while self.running.is_some() || self.start() {
            let Some(running) = &self.running else { break };
            match running.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(read) => names.extend(read),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => {}
            }
            self.running = None;
        }
        names
    }

    /// Starts a thread for the containers that wait. Returns false if there are none, or without a thread.
    fn start(&mut self) -> bool {
        let wanted = std::mem::take(&mut self.waiting);
        if wanted.is_empty() {
            return false;
        }
        let (read, (sender, receiver)) = (self.read.clone(), mpsc::sync_channel(1));
        let thread = thread::Builder::new().name("container_names".to_owned());
        match thread.spawn(move || drop(sender.send(read(&wanted)))) {
            Ok(_) => self.running = Some(receiver),
            Err(error) => {
                tracing::warn!(%error, "the names of containers are not read: no thread can be started");
            }
        }
        self.running.is_some()
    }
}

impl fmt::Debug for ContainerNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContainerNames").field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

/// Returns the container of a new cgroup, if its runtime keeps its name.
fn new_container(event: &CgroupEvent) -> Option<(NameKeeper, String)> {
    let CgroupEvent::Added(cgroup) = event else { return None };
    let workload = classify(&cgroup.path, |_| false);
    let container = workload.container.filter(|_| workload.root == cgroup.path)?;
    Some((container.name_keeper?, container.id))
}

/// The directory in which a runtime keeps its containers.
struct Store {
    runtime: NameKeeper,
    host_root: PathBuf,
    directory: PathBuf,
    /// True once a failure was logged.
    has_failed: AtomicBool,
}

/// The part of Docker's `config.v2.json` that is used.
#[derive(Deserialize)]
struct DockerContainer {
    #[serde(rename = "Name")]
    name: String,
}

/// The part of an entry of Podman's `containers.json` that is used.
#[derive(Deserialize)]
struct PodmanContainer<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
    #[serde(borrow, default)]
    names: Vec<Cow<'a, str>>,
}

impl Store {
    /// Returns the names of the containers of this runtime, as far as they can be read.
    fn names(&self, wanted: &Wanted) -> Names {
        let ids = wanted.iter().filter(|(runtime, _)| *runtime == self.runtime).map(|(_, id)| id.as_str());
        let ids: BTreeSet<&str> = ids.collect();
        match self.runtime {
            _ if ids.is_empty() => Names::new(),
            NameKeeper::Docker => ids.iter().filter_map(|id| self.docker_name(id)).collect(),
            NameKeeper::Podman => self.podman_names(&ids),
        }
    }

    fn docker_name(&self, id: &str) -> Option<(String, Arc<str>)> {
        let path = self.directory.join("containers").join(id).join("config.v2.json");
        let container: io::Result<DockerContainer> =
            self.text(&path).and_then(|text| Ok(serde_json::from_str(&text)?));
        let container = container.inspect_err(|error| self.log(&path, error)).ok()?;
        Some((id.to_owned(), permitted_name(container.name.strip_prefix('/').unwrap_or(&container.name))?))
    }

    fn podman_names(&self, ids: &BTreeSet<&str>) -> Names {
        let mut names = Names::new();
        let mut is_absent = true;
        for driver in PODMAN_DRIVERS {
            for file in PODMAN_FILES {
                let path = self.directory.join(format!("{driver}-containers")).join(file);
                let read = self.text(&path).and_then(|text| {
                    let containers: Vec<PodmanContainer<'_>> = serde_json::from_str(&text)?;
                    let wanted = containers.iter().filter(|container| ids.contains(&*container.id));
                    names.extend(wanted.filter_map(|container| {
                        let name = container.names.iter().find_map(|name| permitted_name(name))?;
                        Some((container.id.clone().into_owned(), name))
                    }));
                    Ok(())
                });
                match read {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => self.log(&path, &error),
                    Ok(()) => {}
                }
                is_absent = false;
            }
        }
        if is_absent {
            self.log(&self.directory, &io::ErrorKind::NotFound.into());
        }
        names
    }

    /// Returns the text of a file of the host that only root can change.
    fn text(&self, path: &Path) -> io::Result<String> {
        // A link to a path of the host could lead to a file of this process's own root.
        let path = path.canonicalize()?;
        if !path.starts_with(self.host_root.canonicalize()?) {
            let message = format!("it is a link to {}, outside of hostRoot", path.display());
            return Err(io::Error::other(message));
        }
        let file = open_protected(&path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        read_open_text(file, MAX_FILE_BYTES)
    }

    /// Logs the first failure. Without the runtime's directory, such as in a pod, there is no fault.
    fn log(&self, file: &Path, error: &io::Error) {
        if self.has_failed.swap(true, Ordering::Relaxed) {
            return;
        }
        let (runtime, file) = (self.runtime.as_str(), file.display());
        if error.kind() == io::ErrorKind::NotFound {
            tracing::info!(
                runtime, %file,
                "containers of this runtime are counted under their ids: there are no files with their names (observe.containerNames)"
            );
        } else {
            tracing::warn!(
                runtime, %file, %error,
                "containers are counted under their ids: the file with their names cannot be read (observe.containerNames); \
                 further failures are not logged"
            );
        }
    }
}

/// Returns a name of the form that both runtimes permit: `[a-zA-Z0-9][a-zA-Z0-9_.-]*`.
fn permitted_name(name: &str) -> Option<Arc<str>> {
    let is_permitted = name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.len() <= MAX_NAME_LENGTH
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c));
    is_permitted.then(|| name.into())
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::{PermissionsExt as _, symlink},
    };

    use numaward_cgroup::{Cgroup, CgroupId};
    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;
    use crate::observer::Observer;

    const LONG: Duration = Duration::from_mins(1);

    fn id(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    fn added(path: &str) -> CgroupEvent {
        CgroupEvent::Added(Cgroup { id: CgroupId(1), path: path.parse().unwrap() })
    }

    fn docker(digit: char) -> CgroupEvent {
        added(&format!("/system.slice/docker-{}.scope", id(digit)))
    }

    fn podman(digit: char) -> CgroupEvent {
        added(&format!("/machine.slice/libpod-{}.scope", id(digit)))
    }

    struct Host(tempfile::TempDir);

    impl Host {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn docker_file(&self, digit: char) -> PathBuf {
            self.0.path().join("var/lib/docker/containers").join(id(digit)).join("config.v2.json")
        }

        fn podman_file(&self, file: &str) -> PathBuf {
            self.0.path().join("var/lib/containers/storage").join(file)
        }

        fn write(path: &Path, text: impl AsRef<[u8]>) {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
        }

        /// Returns the names by the first digit of the ids.
        fn read(&self, events: &[CgroupEvent]) -> Vec<(char, String)> {
            let config = Config { host_root: self.0.path().into(), ..Config::default() };
            let mut reader = ContainerNames::from_config(&config).unwrap();
            reader.timeout = LONG;
            let names = reader.read(events);
            let mut names: Vec<_> =
                names.iter().map(|(id, name)| (id.chars().next().unwrap(), name.to_string())).collect();
            names.sort_unstable();
            names
        }
    }

    #[test]
    fn reads_names_of_both_runtimes() {
        let host = Host::new();
        let events = [docker('a'), docker('b'), podman('c'), podman('d'), podman('e'), podman('f')];
        assert_eq!(host.read(&events), []);
        Host::write(
            &host.docker_file('a'),
            r#"{"Config":{"Env":["Name=no"],"Labels":{"Name":"/no"}},"Name":"/web"}"#,
        );
        Host::write(&host.docker_file('c'), r#"{"Name":"/not-docker"}"#);
        let of =
            |digit, names: &str| format!(r#"{{"id":"{}","metadata":"{{\"name\":1}}"{names}}}"#, id(digit));
        let stable = format!(
            "[{},{},{}]",
            of('c', r#","names":["db","x"]"#),
            of('e', ""),
            of('b', r#","names":["no"]"#)
        );
        Host::write(&host.podman_file("overlay-containers/containers.json"), stable);
        let volatile = format!("[{}]", of('d', r#","names":["j\u006fb"]"#));
        Host::write(&host.podman_file("overlay-containers/volatile-containers.json"), volatile);
        let others = format!("[{}]", of('f', r#","names":["old"]"#));
        Host::write(&host.podman_file("vfs-containers/containers.json"), others);
        let expected = [('a', "web"), ('c', "db"), ('d', "job"), ('f', "old")];
        assert_eq!(host.read(&events), expected.map(|(digit, name)| (digit, name.to_owned())));
        // Only a container's own cgroup starts a reading.
        let inner = added(&format!("/system.slice/docker-{}.scope/init", id('a')));
        let user = added(&format!("/user.slice/user-1000.slice/user@1000.service/libpod-{}.scope", id('c')));
        assert_eq!(host.read(&[inner, user, added(&format!("/batch/docker-{}.scope", id('a')))]), []);
    }

    #[test]
    fn disabled_names_are_not_read() {
        let mut config = Config::default();
        config.observe.container_names.enabled = false;
        assert!(ContainerNames::from_config(&config).is_none());
    }

    #[test]
    fn hostile_names_and_files_give_no_name() {
        let host = Host::new();
        let file = host.docker_file('a');
        let name = |json: &str| {
            Host::write(&file, json);
            host.read(&[docker('a')]).pop().map(|(_, name)| name)
        };
        let of = |text: &str| format!("{{\"Name\":\"{text}\"}}");
        for permitted in ["nginx.service", "other", "A-1_x.y", &"a".repeat(255)] {
            assert_eq!(name(&of(permitted)).as_deref(), Some(permitted));
        }
        for refused in [
            &*"a".repeat(256),
            &"a".repeat(4096),
            "",
            "/",
            "//web",
            "prod/db/main",
            "../web",
            ".web",
            "-web",
            r"a\n",
            r"a\u0000",
            r"a\u001b[2J",
            r"a\u202eb",
            "a b",
            "wéb",
            "a\\\"} 1",
        ] {
            assert_eq!(name(&of(refused)), None, "{refused}");
        }
        for json in ["", "{", "[]", "null", r#"{"Name":1}"#, r#"{"name":"/web"}"#, "\u{0}"] {
            assert_eq!(name(json), None, "{json}");
        }
        Host::write(&file, [0xff, 0xfe]);
        assert_eq!(host.read(&[docker('a')]), []);
        // Too long by one byte.
        let with_spaces = |more: u64| {
            let json = of("web");
            let spaces = MAX_FILE_BYTES - json.len() as u64 + more;
            json + &" ".repeat(usize::try_from(spaces).unwrap())
        };
        assert_eq!(name(&with_spaces(0)).as_deref(), Some("web"));
        assert_eq!(name(&with_spaces(1)), None);
        // A deep document
        assert_eq!(name(&"[".repeat(100_000)), None);
        let podman_file = host.podman_file("overlay-containers/containers.json");
        for json in [
            r#"{"id":1}"#,
            r#"[{"names":["a"]}]"#,
            "[[]]",
            &format!(r#"[{{"id":"{}","names":"a"}}]"#, id('b')),
        ] {
            Host::write(&podman_file, json);
            assert_eq!(host.read(&[podman('b')]), [], "{json}");
        }
    }

    #[test]
    fn reads_only_protected_files() {
        let (host, elsewhere) = (Host::new(), tempfile::tempdir().unwrap());
        let (file, events) = (host.docker_file('a'), [docker('a')]);
        let web = [('a', "web".to_owned())];
        Host::write(&file, r#"{"Name":"/web"}"#);
        assert_eq!(host.read(&events), web);
        fs::set_permissions(&file, Permissions::from_mode(0o622)).unwrap();
        assert_eq!(host.read(&events), [], "other users can change it");
        fs::remove_file(&file).unwrap();
        mknodat(CWD, &file, FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(host.read(&events), [], "it is a pipe");
        fs::remove_file(&file).unwrap();
        let outside = elsewhere.path().join("config.v2.json");
        Host::write(&outside, r#"{"Name":"/web"}"#);
        symlink(&outside, &file).unwrap();
        assert_eq!(host.read(&events), [], "it is a link to a file outside of the host's root");
        fs::remove_file(&file).unwrap();
        let moved = host.0.path().join("data/config.v2.json");
        Host::write(&moved, r#"{"Name":"/web"}"#);
        symlink(&moved, &file).unwrap();
        assert_eq!(host.read(&events), web, "data roots are moved by links");
    }

    #[test]
    fn hung_file_delays_cgroups_once() {
        let (release, wait) = mpsc::channel::<()>();
        let wait = parking_lot::Mutex::new(Some(wait));
        let read = Arc::new(move |wanted: &Wanted| {
            if let Some(wait) = wait.lock().take() {
                let _ = wait.recv();
            }
            wanted.iter().map(|(_, id)| (id.clone(), "web".into())).collect()
        });
        let mut names = ContainerNames::new(read, Duration::from_millis(20));
        assert_eq!(names.read(&[docker('a')]).len(), 0);
        names.timeout = LONG;
        let start = Instant::now();
        assert_eq!(names.read(&[docker('b'), docker('c')]).len(), 0);
        assert!(start.elapsed() < LONG / 2, "it is not waited for again");
        for digit in 0..40_000 {
            names.waiting.insert((NameKeeper::Podman, format!("{digit:064x}")));
        }
        names.read(&[]);
        assert_eq!(names.waiting.len(), MAX_WAITING);
        drop(release);
        let mut read = 0;
        while read < MAX_WAITING + 1 {
            assert!(start.elapsed() < Duration::from_mins(1), "{read}");
            read += names.read(&[]).len();
            thread::sleep(Duration::from_millis(1));
        }
        assert!(names.running.is_none() && names.waiting.is_empty());
    }

    #[test]
    fn late_name_replaces_the_id() {
        let observer = Observer::new(&Config::default());
        observer.registry.lock_slots().handle(docker('a'));
        let name = || observer.registry.lock().table.name(CgroupId(1)).map(ToString::to_string);
        assert_eq!(name().as_deref(), Some("docker/aaaaaaaaaaaa"));
        let names = Names::from([(id('a'), "web".into())]);
        observer.registry.lock().runtime_names.as_mut().unwrap().extend(names);
        observer.registry.lock_slots().rename();
        assert_eq!(name().as_deref(), Some("docker/web"));
    }

    #[test]
    fn panicking_reader_is_replaced() {
        let read = Arc::new(|wanted: &Wanted| {
            assert!(wanted.len() > 1, "on purpose");
            wanted.iter().map(|(_, id)| (id.clone(), "web".into())).collect()
        });
        let mut names = ContainerNames::new(read, LONG);
        assert_eq!(names.read(&[docker('a')]).len(), 0);
        assert_eq!(names.read(&[docker('b'), docker('c')]).len(), 2);
    }
}
