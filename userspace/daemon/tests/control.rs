//! Tests of the control socket and the control address in one process: access, refusals, and guarantees of concurrent clients.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use numaward_config::{Config, Control};
use numaward_daemon::{
    allocations::{ReloadHandle, control_router, remote_router, router},
    socket,
};
use numaward_http::{ControlListener, Gate, HostNames, MAX_BODY_BYTES, RemoteListener, listen, serve};
use numaward_tests_support::skip_outside_ci;
use numaward_topology::{Bytes, CpuSet, Machine};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, IsCa, Issuer, KeyIdMethod, KeyPair,
    RevokedCertParams, SerialNumber, date_time_ymd,
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

use self::support::{GuaranteeDaemon, HttpAnswer, TempHost, ask, request};

const ALLOCATIONS: &str = "/api/v1/allocations";
const PLAN: &str = "/api/v1/plan";
const REBALANCE: &str = "/api/v1/rebalance";
/// The variable with which `tests/page` makes a test serve until its input is closed.
const UNTIL_INPUT_ENDS: &str = "NUMAWARD_TEST_UNTIL_INPUT_ENDS";
const PROBLEM: &str = "content-type: application/problem+json";

/// Returns a host with four CPUs on each of two nodes. CPU 0 is reserved for the system.
fn host() -> TempHost {
    let machine = Machine::builder().nodes(2).sockets(2).cores_per_node(4).memory(Bytes::gib(4)).build();
    TempHost::new(machine.unwrap())
}

/// Serves on a control socket. Returns its path.
fn serve_socket(host: &TempHost, daemon: &GuaranteeDaemon) -> PathBuf {
    let path = host.dir.path().join("run/control.sock");
    let listener = ControlListener::new(socket::listen(&path, "controlSocket").unwrap()).unwrap();
    let router = control_router(daemon.app.clone(), daemon.reconciler.clone(), ReloadHandle::new().0);
    tokio::spawn(serve(listener, router, daemon.stop.clone()));
    path
}

async fn ask_on(socket: &Path, method: &str, path: &str, body: &str) -> HttpAnswer {
    ask(UnixStream::connect(socket).await.unwrap(), method, path, &[], body).await.unwrap()
}

/// Returns the first line of every file below a directory.
fn files(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            // Unlike a knob, a plain file keeps the rest of a longer earlier value.
            let text = fs::read_to_string(&path).unwrap();
            found.insert(path, text.lines().next().unwrap_or_default().to_owned());
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn resizes_guarantee_on_the_socket() {
    let host = host();
    host.cgroup("a.slice");
    host.cgroup("a.slice/b");
    let daemon = host.start();
    let socket = serve_socket(&host, &daemon);
    let held = ask_on(&socket, "POST", ALLOCATIONS, &request("a.slice/b", "/a.slice/b", 1, "1Gi")).await;
    assert_eq!(held.status, 201, "{held:?}");
    let path = format!("{ALLOCATIONS}/a.slice/b");
    let dry = ask_on(&socket, "PATCH", &format!("{path}?dryRun=true"), r#"{"cpus": 3}"#).await;
    assert_eq!((dry.status, dry.body["admitted"].as_bool()), (200, Some(true)), "{dry:?}");
    let refused = ask_on(&socket, "PATCH", &path, r#"{"cpus": 4}"#).await;
    let refusal = &refused.body;
    let shortfall = &refusal["rejection"]["shortfalls"][0];
    let expected = serde_json::json!({"node": 0, "resource": "cpu", "requested": 3, "free": 2});
    assert_eq!((refused.status, shortfall), (409, &expected), "{refused:?}");
    let resized = ask_on(&socket, "PATCH", &path, r#"{"cpus": 3, "memory": "2Gi"}"#).await;
    assert_eq!(resized.status, 200, "{resized:?}");
    assert_eq!(resized.body["cpus"], "1-3");
    assert_eq!(files(&host.root().join("a.slice/b"))[&host.root().join("a.slice/b/cpuset.cpus")], "1-3");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_request_changes_nothing() {
    let host = host();
    for cgroup in ["a", "a/b", "c", "bare", "bare/undelegated"] {
        host.cgroup(cgroup);
    }
    // The controller is not enabled for this cgroup.
    fs::write(host.root().join("bare/cgroup.controllers"), "memory\n").unwrap();
    fs::write(host.root().join("bare/undelegated/cgroup.controllers"), "memory\n").unwrap();
    fs::remove_file(host.root().join("bare/undelegated/cpuset.cpus")).unwrap();
    let daemon = host.start();
    let socket = serve_socket(&host, &daemon);
    let held = ask_on(&socket, "POST", ALLOCATIONS, &request("a", "/a", 1, "1Gi")).await;
    assert_eq!(held.status, 201, "{held:?}");
    // Plain files of effective sets do not follow writes, which the daemon reports as drift.
    let allocations = || {
        let mut all = (*daemon.reconciler.allocations()).clone();
        all.allocations.iter_mut().for_each(|allocation| Arc::make_mut(allocation).drift.clear());
        all
    };
    let (tree, before) = (files(&host.root()), allocations());

    let with = |name: &str, value: Value| {
        let mut json: Value = serde_json::from_str(&request("x", "/c", 1, "1Gi")).unwrap();
        json[name] = value;
        json.to_string()
    };
    let conflict = with("placement", serde_json::json!({"with": ["a"], "apart": ["a"]}));
    let large = with("name", "x".repeat(MAX_BODY_BYTES).into());
    let dry = format!("{ALLOCATIONS}?dryRun=perhaps");
    let unknown = format!("{ALLOCATIONS}/unknown");
    let target = |kind: &str, value: &str| with("target", serde_json::json!({ kind: value }));
    let planned = |cpus: u32, name: &str, value: Value| {
        let request: Value = serde_json::from_str(&request("x", "/c", cpus, "1Gi")).unwrap();
        serde_json::json!({"request": request, name: value}).to_string()
    };
    // Columns: method, path, body, status, field, and words of the detail.
    let (post, patch) = ("POST", "PATCH");
    let (held, held_dry) = (format!("{ALLOCATIONS}/a"), format!("{ALLOCATIONS}/a?dryRun=maybe"));
    let table: &[(&str, &str, String, u16, &str, &str)] = &[
        (post, ALLOCATIONS, String::new(), 400, "", "EOF"),
        (post, ALLOCATIONS, "{\"name\": ".to_owned(), 400, "name", "line 1 column 9"),
        (post, ALLOCATIONS, "{} {}".to_owned(), 400, "", "missing field"),
        (post, ALLOCATIONS, with("cpus", 1.into()) + "x", 400, "", "after the request"),
        (post, ALLOCATIONS, with("colour", 1.into()), 400, "colour", "unknown field `colour`"),
        (post, ALLOCATIONS, with("cpus", "two".into()), 400, "cpus", "not a quantity"),
        (post, ALLOCATIONS, with("cpus", (-1).into()), 400, "cpus", "invalid type"),
        (post, ALLOCATIONS, large, 413, "", "16384 bytes"),
        (post, &dry, with("cpus", 1.into()), 422, "dryRun", "perhaps"),
        (post, ALLOCATIONS, with("cpus", 0.into()), 422, "cpus", "it is 0"),
        (post, ALLOCATIONS, conflict, 422, "placement.apart", "in placement.with as well"),
        (post, ALLOCATIONS, with("memory", "0".into()), 422, "memory", "it is 0"),
        (post, ALLOCATIONS, with("memory", "lots".into()), 422, "memory", "not a quantity"),
        (post, ALLOCATIONS, with("name", "".into()), 422, "name", "not a valid name"),
        (post, ALLOCATIONS, with("hugepages", serde_json::json!({"2M": "2Mi"})), 422, "hugepages.2M", ""),
        (post, ALLOCATIONS, target("cgroup", "/nowhere"), 422, "target.cgroup", "/nowhere does not exist"),
        (post, ALLOCATIONS, target("cgroup", "/"), 422, "target.cgroup", "the whole host"),
        (post, ALLOCATIONS, target("cgroup", "/../etc"), 422, "target.cgroup", "not a path of a cgroup"),
        (post, ALLOCATIONS, target("unit", "nowhere.service"), 422, "target.unit", "has no cgroup"),
        (post, ALLOCATIONS, target("cgroup", "/bare/undelegated"), 422, "target", "cpuset"),
        (post, ALLOCATIONS, request("a", "/c", 1, "1Gi"), 409, "name", "is in use by /a"),
        (post, ALLOCATIONS, request("b", "/a/b", 1, "1Gi"), 409, "target", "overlaps with /a"),
        (post, ALLOCATIONS, with("cpus", 1000.into()), 409, "", "cpu requested 1000"),
        (post, ALLOCATIONS, with("memory", "1Ti".into()), 409, "", "memory requested 1"),
        (patch, &unknown, r#"{"cpus": 1}"#.to_owned(), 404, "", "no guarantee named \"unknown\""),
        (patch, &held, String::new(), 400, "", "EOF"),
        (patch, &held, "{}".to_owned(), 422, "cpus", "nothing is to be changed"),
        (patch, &held, r#"{"cpu": 1}"#.to_owned(), 400, "cpu", "unknown field `cpu`"),
        (patch, &held, r#"{"memory": "none"}"#.to_owned(), 422, "memory", "not a quantity"),
        (patch, &held, r#"{"cpus": "500m"}"#.to_owned(), 422, "cpus", "it has exclusive CPUs"),
        (patch, &held_dry, r#"{"cpus": 2}"#.to_owned(), 422, "dryRun", "maybe"),
        ("DELETE", &unknown, String::new(), 404, "", "no guarantee named \"unknown\""),
        ("PUT", ALLOCATIONS, String::new(), 405, "", "does not take PUT"),
        (post, PLAN, "{\"request\": {}}".to_owned(), 400, "request", "missing field"),
        (post, PLAN, planned(1, "admit", true.into()), 400, "admit", "unknown field"),
        (post, PLAN, planned(1, "maxMoves", 17.into()), 422, "maxMoves", "it is 17"),
        (post, PLAN, planned(1, "maxBytes", "lots".into()), 422, "maxBytes", "not a quantity"),
        (post, PLAN, planned(0, "maxMoves", 1.into()), 422, "cpus", "it is 0"),
        (post, PLAN, planned(1000, "maxMoves", 1.into()), 409, "", "no moves within the limits"),
        (post, REBALANCE, planned(1000, "admit", true.into()), 409, "", "no moves within the limits"),
        (post, REBALANCE, planned(1, "plan", "0".into()), 409, "plan", "is stale"),
        ("GET", REBALANCE, String::new(), 404, "", "no rebalance"),
        ("DELETE", REBALANCE, String::new(), 409, "rebalance", "no rebalance is in progress"),
    ];
    for (method, path, body, status, field, words) in table {
        let answer = ask_on(&socket, method, path, body).await;
        let shown = &body[..body.len().min(200)];
        assert_eq!(answer.status, *status, "{method} {path} {shown}: {answer:?}");
        assert!(answer.head.contains(PROBLEM), "{shown}: {answer:?}");
        assert_eq!(answer.body["status"], *status, "{answer:?}");
        let detail = answer.body["detail"].as_str().unwrap();
        assert!(detail.contains(words), "{shown}: {answer:?}");
        if !field.is_empty() {
            assert_eq!(answer.body["field"], *field, "{shown}: {answer:?}");
            assert!(answer.body["allowed"].as_str().is_some_and(|allowed| !allowed.is_empty()), "{answer:?}");
        }
        if *status == 409 && field.is_empty() {
            let shortfalls = answer.body["rejection"]["shortfalls"].as_array().unwrap();
            assert!(shortfalls.len() >= 2, "of each node: {answer:?}");
        }
    }
    assert_eq!(allocations(), before);
    assert_eq!(files(&host.root()), tree);
    assert_eq!(ask_on(&socket, "DELETE", &format!("{ALLOCATIONS}/a"), "").await.status, 204);
}

/// A request that fits needs no moves, and can be admitted by a rebalance too.
#[tokio::test(flavor = "multi_thread")]
async fn applies_plan_without_moves_at_once() {
    let host = host();
    host.cgroup("c");
    let daemon = host.start();
    let socket = serve_socket(&host, &daemon);
    let planned = |name: &str, value: Value| {
        let request: Value = serde_json::from_str(&request("x", "/c", 1, "1Gi")).unwrap();
        serde_json::json!({"request": request, name: value}).to_string()
    };
    let plan = ask_on(&socket, "POST", PLAN, &planned("maxMoves", 1.into())).await;
    assert_eq!(
        (plan.status, &plan.body["moves"], &plan.body["bytes"]),
        (200, &serde_json::json!([]), &0.into())
    );
    let started = ask_on(&socket, "POST", REBALANCE, &planned("admit", true.into())).await;
    assert_eq!((started.status, &started.body["id"]), (202, &plan.body["id"]), "{started:?}");
    let start = std::time::Instant::now();
    let finished = loop {
        let progress = ask_on(&socket, "GET", REBALANCE, "").await;
        if progress.body["state"] != "running" || start.elapsed().as_secs() > 30 {
            break progress;
        }
    };
    assert_eq!(
        (&finished.body["state"], &finished.body["allocation"]["cgroup"]),
        (&"done".into(), &"/c".into()),
        "{finished:?}"
    );
}

/// Records CPUs of a client. Panics if another client has one of them.
fn record_holder(holders: &Mutex<BTreeMap<u32, String>>, cpus: &CpuSet, name: &str) {
    let mut holders = holders.lock().unwrap();
    for cpu in cpus.iter() {
        if let Some(other) = holders.insert(cpu.0, name.to_owned()) {
            panic!("CPU {cpu} of {name} is still held by {other}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_clients_share_no_cpu() {
    const CLIENTS: usize = 16;
    const ROUNDS: usize = 75;
    let host = host();
    for client in 0..CLIENTS {
        host.cgroup(&format!("c{client}"));
    }
    let daemon = host.start();
    let socket = serve_socket(&host, &daemon);
    let empty = daemon.reconciler.allocations();
    let holders = Arc::new(Mutex::new(BTreeMap::new()));
    let (admitted, refused) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (socket, holders) = (socket.clone(), holders.clone());
            let (admitted, refused) = (admitted.clone(), refused.clone());
            tokio::spawn(async move {
                let name = format!("client-{client}");
                for round in 0..ROUNDS {
                    let cpus = u32::try_from(1 + (client + round) % 3).unwrap();
                    let body = request(&name, &format!("/c{client}"), cpus, "512Mi");
                    let answer = ask_on(&socket, "POST", ALLOCATIONS, &body).await;
                    match answer.status {
                        201 => {
                            admitted.fetch_add(1, Ordering::Relaxed);
                            let got: CpuSet = answer.body["cpus"].as_str().unwrap().parse().unwrap();
                            assert_eq!(got.len(), usize::try_from(cpus).unwrap(), "{answer:?}");
                            assert!(
                                !got.contains(numaward_topology::CpuId(0)),
                                "CPU 0 is reserved for the system"
                            );
                            record_holder(&holders, &got, &name);
                            check_guarantees(&socket).await;
                            // From here on, the daemon may give the CPUs to another client.
                            holders.lock().unwrap().retain(|_, holder| *holder != name);
                            let released =
                                ask_on(&socket, "DELETE", &format!("{ALLOCATIONS}/{name}"), "").await;
                            assert_eq!(released.status, 204, "{released:?}");
                        }
                        409 => {
                            refused.fetch_add(1, Ordering::Relaxed);
                            assert!(answer.body["rejection"]["reason"].is_string(), "{answer:?}");
                        }
                        _ => panic!("{answer:?}"),
                    }
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    let (admitted, refused) = (admitted.load(Ordering::Relaxed), refused.load(Ordering::Relaxed));
    assert_eq!(admitted + refused, CLIENTS * ROUNDS);
    assert!(admitted >= ROUNDS, "{admitted} admitted, {refused} refused");
    assert_eq!(daemon.reconciler.allocations(), empty);
}

/// Checks that the served guarantees share no CPU, and that no node has guaranteed more memory than it has.
async fn check_guarantees(socket: &Path) {
    let held = ask_on(socket, "GET", ALLOCATIONS, "").await;
    let mut used = CpuSet::new();
    for allocation in held.body["allocations"].as_array().unwrap() {
        let cpus: CpuSet = allocation["cpus"].as_str().unwrap().parse().unwrap();
        assert!((&used & &cpus).is_empty(), "{held:?}");
        used = &used | &cpus;
    }
    let shared: CpuSet = held.body["sharedCpus"].as_str().unwrap().parse().unwrap();
    assert!((&used & &shared).is_empty(), "{held:?}");
    for node in held.body["nodes"].as_array().unwrap() {
        for kind in node["memory"].as_array().unwrap() {
            let bytes = |name: &str| kind[name].as_u64().unwrap();
            assert_eq!(bytes("promisedBytes") + bytes("freeBytes"), bytes("allocatableBytes"), "{held:?}");
        }
    }
}

/// The kernel reports the user of the client, so that the mode of the socket does not matter.
#[tokio::test(flavor = "multi_thread")]
async fn socket_refuses_users_but_root() {
    if !rustix::process::geteuid().is_root() {
        return skip_outside_ci("only root can become another user");
    }
    let host = host();
    host.cgroup("c");
    let daemon = host.start();
    let socket = serve_socket(&host, &daemon);
    for open in [host.dir.path(), socket.parent().unwrap(), &socket] {
        fs::set_permissions(open, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let path = socket.clone();
    let text = tokio::task::spawn_blocking(move || {
        // The thread is new, because the kernel keeps the user for each thread.
        let stranger = std::thread::spawn(move || {
            let nobody = rustix::process::Uid::from_raw(65_534);
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
            let mut text = String::new();
            std::io::Read::read_to_string(&mut stream, &mut text).unwrap();
            text
        });
        stranger.join().unwrap()
    });
    let text = text.await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 403 ") && head.contains(PROBLEM), "{text}");
    let problem: Value = serde_json::from_str(body).unwrap();
    assert!(problem["detail"].as_str().unwrap().contains("only root"), "{text}");
    assert!(head.contains(&format!("content-length: {}", body.len())), "{text}");
    assert_eq!(ask_on(&socket, "POST", ALLOCATIONS, &request("c", "/c", 1, "1Gi")).await.status, 201);
}

/// A certificate authority.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    /// Signed certificates, by serial number.
    signed: Mutex<Vec<String>>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem, signed: Mutex::default() }
    }

    /// Returns a certificate for a name, and its key.
    fn sign(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut signed = self.signed.lock().unwrap();
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.serial_number = Some(SerialNumber::from(signed.len() as u64));
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        signed.push(pem.clone());
        (pem, key.serialize_pem())
    }

    /// Returns a revocation list with these certificates.
    fn revoke(&self, certificates: &[&str]) -> String {
        let signed = self.signed.lock().unwrap();
        let revoked = certificates.iter().map(|revoked| {
            let serial = signed.iter().position(|pem| pem == revoked).unwrap();
            RevokedCertParams {
                serial_number: SerialNumber::from(serial as u64),
                revocation_time: date_time_ymd(2026, 1, 1),
                reason_code: None,
                invalidity_date: None,
            }
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(2100, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().pem().unwrap()
    }
}

/// Writes a file that only its owner can read, and replaces an older one atomically.
fn write(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&new, path).unwrap();
}

/// Sends a request on a connection that stays open. Returns the status.
async fn request_status(stream: &mut TlsStream<TcpStream>) -> u16 {
    stream.write_all(b"GET /api/v1/version HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut text = Vec::new();
    while !text.ends_with(b"}") {
        assert_ne!(stream.read_buf(&mut text).await.unwrap(), 0, "{}", String::from_utf8_lossy(&text));
    }
    String::from_utf8(text).unwrap().split(' ').nth(1).unwrap().parse().unwrap()
}

/// Serves on a control address. Returns it.
fn serve_control_address(daemon: &GuaranteeDaemon, control: &Control) -> SocketAddr {
    let gate = Gate::open(control).unwrap();
    let listener = listen("127.0.0.1:0".parse().unwrap(), "control.listen").unwrap();
    let listener = RemoteListener::new(listener, gate.clone()).unwrap();
    let address = listener.local_addr().unwrap();
    let names = HostNames::new(&[CONFIGURED_NAME.to_owned()]);
    let router = remote_router(daemon.app.clone(), daemon.reconciler.clone(), gate, names);
    tokio::spawn(serve(listener, router, daemon.stop.clone()));
    address
}

const TOKEN: &str = "correct-horse-battery-staple";
/// A name of this host in the configuration.
const CONFIGURED_NAME: &str = "numaward.example";

#[tokio::test(flavor = "multi_thread")]
async fn only_the_token_allows_control() {
    let host = host();
    host.cgroup("c");
    let daemon = host.start();
    let file = host.dir.path().join("token");
    write(&file, &format!("{TOKEN}\n"));
    let control = Control { token_file: Some(file.clone()), ..Control::default() };
    let address = serve_control_address(&daemon, &control);
    let ask = async |method, path, authorization: Option<&str>| {
        let stream = TcpStream::connect(address).await.unwrap();
        let headers: Vec<_> = authorization.map(|value| ("authorization", value)).into_iter().collect();
        let body = if method == "POST" { request("c", "/c", 1, "1Gi") } else { String::new() };
        ask(stream, method, path, &headers, &body).await.unwrap()
    };
    let (right, lower) = (format!("Bearer {TOKEN}"), format!("bearer {TOKEN}"));
    let (longer, shorter) = (format!("{right}x"), right[..right.len() - 1].to_owned());
    for wrong in [
        None,
        Some("Bearer "),
        Some("Bearer"),
        Some("Basic cm9vdDo="),
        Some(TOKEN),
        Some(&*longer),
        Some(&*shorter),
    ] {
        for (method, path) in [
            ("POST", ALLOCATIONS),
            ("DELETE", "/api/v1/allocations/c"),
            ("GET", ALLOCATIONS),
            ("GET", "/metrics"),
            ("GET", "/nowhere"),
        ] {
            let answer = ask(method, path, wrong).await;
            assert_eq!(answer.status, 401, "{method} {path} {wrong:?}: {answer:?}");
            assert!(answer.head.contains(PROBLEM), "{answer:?}");
            let challenge =
                answer.head.lines().find_map(|line| line.strip_prefix("www-authenticate: ")).unwrap();
            assert!(challenge.starts_with("Bearer realm=\"numaward\""), "{answer:?}");
            // HTTP removes the trailing space of a value: the result is not a token.
            let is_wrong = wrong.is_some_and(|wrong| wrong.len() > 7 && wrong.starts_with("Bearer "));
            assert_eq!(challenge.contains("invalid_token"), is_wrong, "{wrong:?}: {answer:?}");
            assert!(!format!("{answer:?}").contains(TOKEN), "{answer:?}");
        }
    }
    assert_eq!(daemon.reconciler.allocations().allocations, []);
    assert_eq!(ask("POST", ALLOCATIONS, Some(&right)).await.status, 201);
    assert_eq!(ask("GET", "/metrics", Some(&lower)).await.status, 200);
    assert_eq!(ask("DELETE", "/api/v1/allocations/c", Some(&right)).await.status, 204);

    // After a rotation, the new token is accepted at once, and the old one is refused.
    write(&file, "another-token-of-some-length");
    assert_eq!(ask("GET", ALLOCATIONS, Some(&right)).await.status, 401);
    assert_eq!(ask("GET", ALLOCATIONS, Some("Bearer another-token-of-some-length")).await.status, 200);
    // With an invalid file, the last token stays valid.
    write(&file, "short");
    assert_eq!(ask("GET", ALLOCATIONS, Some("Bearer short")).await.status, 401);
    assert_eq!(ask("GET", ALLOCATIONS, Some("Bearer another-token-of-some-length")).await.status, 200);
}

#[test]
fn invalid_credentials_name_their_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str, mode| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let authority = Authority::new();
    let (cert, key) = authority.sign("localhost");
    let other = authority.sign("localhost").1;
    let (good_cert, good_key) = (file("cert", &cert, 0o644), file("key", &key, 0o640));
    let with_token = |path| Control { token_file: Some(path), ..Control::default() };
    let with_tls = |cert: &Path, key: &Path, ca: Option<PathBuf>, names: Option<Vec<String>>| {
        let mut control = Control::default();
        control.tls.cert_file = Some(cert.to_owned());
        control.tls.key_file = Some(key.to_owned());
        control.tls.client_ca_file = ca;
        control.tls.client_names = names;
        control
    };
    let ca = file("ca", &authority.pem, 0o644);
    Gate::open(&with_token(file("good", TOKEN, 0o600))).unwrap();
    Gate::open(&with_tls(&good_cert, &good_key, Some(ca.clone()), None)).unwrap();
    for (control, name, words) in [
        (with_token(dir.path().join("missing")), "missing", "cannot be read"),
        (with_token(dir.path().to_owned()), "", "it is not a regular file"),
        (with_token(file("group", TOKEN, 0o640)), "group", "its mode is 0640"),
        (with_token(file("world", TOKEN, 0o604)), "world", "chmod 600"),
        (with_token(file("empty", "\n", 0o600)), "empty", "can be guessed"),
        (with_token(file("two", &format!("{TOKEN}\n{TOKEN}\n"), 0o600)), "two", "one line"),
        (with_tls(&file("nocert", "x", 0o644), &good_key, None, None), "nocert", "no certificate"),
        (with_tls(&good_cert, &file("nokey", "x", 0o600), None, None), "nokey", "no private key"),
        (with_tls(&good_cert, &file("open", &key, 0o644), None, None), "open", "its mode is 0644"),
        (with_tls(&good_cert, &file("other", &other, 0o600), None, None), "cert", "with the key"),
        (with_tls(&good_cert, &good_key, Some(file("noca", "", 0o644)), None), "noca", "no certificate"),
        (with_tls(&good_cert, &good_key, Some(ca), Some(vec!["a b".to_owned()])), "ca", "not a DNS name"),
    ] {
        let error = Gate::open(&control).unwrap_err().to_string();
        let path = dir.path().join(name).display().to_string();
        assert!(error.starts_with(path.trim_end_matches('/')) && error.contains(words), "{name}: {error}");
    }
}

/// Connects a client that trusts an authority and presents a certificate, if any.
async fn tls(
    address: SocketAddr,
    trusted: &str,
    identity: Option<&(String, String)>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(trusted.as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match identity {
        None => config.with_no_client_auth(),
        Some((cert, key)) => config
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            )
            .unwrap(),
    };
    let stream = TcpStream::connect(address).await?;
    TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), stream).await
}

#[tokio::test(flavor = "multi_thread")]
async fn client_certificate_allows_control() {
    let host = host();
    let daemon = host.start();
    let path = |name: &str| host.dir.path().join(name);
    let (server, clients, foreign) = (Authority::new(), Authority::new(), Authority::new());
    let (cert, key) = server.sign("localhost");
    write(&path("cert"), &cert);
    write(&path("key"), &key);
    write(&path("ca"), &clients.pem);
    write(&path("token"), TOKEN);
    let mut control = Control::default();
    control.tls.cert_file = Some(path("cert"));
    control.tls.key_file = Some(path("key"));
    control.tls.client_ca_file = Some(path("ca"));
    let address = serve_control_address(&daemon, &control);
    let get = async |address, authority: &Authority, identity: Option<&(String, String)>, headers: &[_]| {
        ask(tls(address, &authority.pem, identity).await?, "GET", ALLOCATIONS, headers, "").await
    };
    let client = clients.sign("ops.example");
    assert_eq!(get(address, &server, Some(&client), &[]).await.unwrap().status, 200);
    // No certificate, and one of a foreign authority.
    let answer = get(address, &server, None, &[]).await.unwrap();
    assert_eq!(answer.status, 401, "{answer:?}");
    assert!(answer.body["detail"].as_str().unwrap().contains("accepts no token"), "{answer:?}");
    assert!(get(address, &server, Some(&foreign.sign("ops.example")), &[]).await.is_err());
    // A client without TLS, and one that does not trust the daemon.
    let plain = TcpStream::connect(address).await.unwrap();
    assert!(ask(plain, "GET", ALLOCATIONS, &[], "").await.is_err());
    assert!(get(address, &foreign, Some(&client), &[]).await.is_err());

    // Names of clients are configured, and a token too.
    control.tls.client_names = Some(vec!["admin.example".to_owned(), "ops.example".to_owned()]);
    control.token_file = Some(path("token"));
    let named = serve_control_address(&daemon, &control);
    assert_eq!(get(named, &server, Some(&client), &[]).await.unwrap().status, 200);
    let stranger = clients.sign("dev.example");
    let answer = get(named, &server, Some(&stranger), &[]).await.unwrap();
    assert_eq!(answer.status, 403, "{answer:?}");
    assert!(answer.head.contains(PROBLEM), "{answer:?}");
    let bearer = format!("Bearer {TOKEN}");
    let bearer = [("authorization", &*bearer)];
    assert_eq!(get(named, &server, Some(&stranger), &bearer).await.unwrap().status, 200);
    assert_eq!(get(named, &server, None, &bearer).await.unwrap().status, 200);
    assert_eq!(get(named, &server, None, &[("authorization", "Bearer x")]).await.unwrap().status, 401);

    // A revocation also applies to an open connection.
    let mut open = tls(named, &server.pem, Some(&client)).await.unwrap();
    assert_eq!(request_status(&mut open).await, 200);
    write(&path("crl"), &clients.revoke(&[]));
    control.tls.client_crl_file = Some(path("crl"));
    let listed = serve_control_address(&daemon, &control);
    let mut open = tls(listed, &server.pem, Some(&client)).await.unwrap();
    assert_eq!((request_status(&mut open).await, request_status(&mut open).await), (200, 200));
    write(&path("crl"), &clients.revoke(&[&client.0]));
    assert_eq!(request_status(&mut open).await, 421);
    assert!(get(listed, &server, Some(&client), &[]).await.is_err());
    let other = clients.sign("ops.example");
    assert_eq!(get(listed, &server, Some(&other), &[]).await.unwrap().status, 200);

    // All files are replaced: another authority signs both sides. With only one of two files replaced, the old ones stay valid.
    let (cert, key) = foreign.sign("localhost");
    write(&path("cert"), &cert);
    assert_eq!(get(address, &server, Some(&client), &[]).await.unwrap().status, 200);
    write(&path("key"), &key);
    write(&path("ca"), &foreign.pem);
    assert!(get(address, &server, Some(&client), &[]).await.is_err());
    assert!(get(address, &foreign, Some(&client), &[]).await.is_err());
    assert_eq!(get(address, &foreign, Some(&foreign.sign("a.example")), &[]).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn read_only_address_checks_credentials() {
    let host = host();
    let daemon = host.start();
    let path = |name: &str| host.dir.path().join(name);
    let (server, clients) = (Authority::new(), Authority::new());
    let (cert, key) = server.sign("localhost");
    write(&path("cert"), &cert);
    write(&path("key"), &key);
    write(&path("ca"), &clients.pem);
    write(&path("token"), TOKEN);
    let serving = |config: &Config| {
        let gate = Gate::open(config.read_access()).unwrap();
        let listener = listen("127.0.0.1:0".parse().unwrap(), "listen").unwrap();
        let listener = RemoteListener::new(listener, gate.clone()).unwrap();
        let address = listener.local_addr().unwrap();
        let router = router(daemon.app.clone(), None, Some(gate), HostNames::new(&[]));
        tokio::spawn(serve(listener, router, daemon.stop.clone()));
        address
    };
    let bearer = format!("Bearer {TOKEN}");
    let bearer = [("authorization", &*bearer)];

    // A token without TLS.
    let mut config = Config { listen_token_file: Some(path("token")), ..Config::default() };
    let address = serving(&config);
    let get = async |path, headers: &[_]| {
        let stream = TcpStream::connect(address).await.unwrap();
        ask(stream, "GET", path, headers, "").await.unwrap()
    };
    for path in ["/metrics", "/api/v1/topology", "/", "/runbooks/NumawardDown", "/livez/"] {
        let answer = get(path, &[]).await;
        assert_eq!(answer.status, 401, "{path}: {answer:?}");
        assert!(
            answer.head.contains(PROBLEM) && answer.head.contains("www-authenticate: Bearer"),
            "{answer:?}"
        );
    }
    assert!(get("/metrics", &[]).await.body["detail"].as_str().unwrap().contains("listenTokenFile"));
    assert_eq!(get("/metrics", &[("authorization", "Bearer x")]).await.status, 401);
    assert_eq!(get("/metrics", &bearer).await.status, 200);
    for path in ["/livez", "/readyz"] {
        assert_ne!(get(path, &[]).await.status, 401, "{path}");
    }

    // TLS without credentials.
    config.listen_token_file = None;
    config.listen_tls.cert_file = Some(path("cert"));
    config.listen_tls.key_file = Some(path("key"));
    let get = async |address, identity: Option<&(String, String)>, path, headers: &[_]| {
        ask(tls(address, &server.pem, identity).await.unwrap(), "GET", path, headers, "")
            .await
            .unwrap()
            .status
    };
    let address = serving(&config);
    assert_eq!(get(address, None, "/metrics", &[]).await, 200);
    let plain = TcpStream::connect(address).await.unwrap();
    assert!(ask(plain, "GET", "/metrics", &[], "").await.is_err());

    // A client certificate or the token.
    config.listen_tls.client_ca_file = Some(path("ca"));
    config.listen_token_file = Some(path("token"));
    let address = serving(&config);
    let client = clients.sign("prometheus.example");
    assert_eq!(get(address, Some(&client), "/metrics", &[]).await, 200);
    assert_eq!(get(address, None, "/metrics", &bearer).await, 200);
    assert_eq!(get(address, None, "/metrics", &[]).await, 401);
    assert_ne!(get(address, None, "/readyz", &[]).await, 401);
    // No credentials allow a change on this address.
    let stream = tls(address, &server.pem, Some(&client)).await.unwrap();
    let answer = ask(stream, "POST", ALLOCATIONS, &bearer, &request("c", "/c", 1, "1Gi")).await.unwrap();
    assert!([404, 405].contains(&answer.status), "{answer:?}");
}

/// A request for a change that a foreign page makes a browser send is refused.
#[tokio::test(flavor = "multi_thread")]
async fn foreign_page_changes_nothing() {
    let host = host();
    host.cgroup("c");
    let daemon = host.start();
    write(&host.dir.path().join("token"), TOKEN);
    let control = Control { token_file: Some(host.dir.path().join("token")), ..Control::default() };
    let address = serve_control_address(&daemon, &control);
    let bearer = format!("Bearer {TOKEN}");
    let post = async |headers: &[(&'static str, &str)]| {
        let stream = TcpStream::connect(address).await.unwrap();
        let headers: Vec<_> = headers.iter().copied().chain([("authorization", &*bearer)]).collect();
        ask(stream, "POST", ALLOCATIONS, &headers, &request("c", "/c", 1, "1Gi")).await.unwrap()
    };
    for (headers, status) in [
        (&[("content-type", "text/plain")][..], 415),
        (&[("content-type", "application/x-www-form-urlencoded")], 415),
        (&[("origin", "https://evil.example")], 403),
        (&[("origin", "null")], 403),
        (&[("sec-fetch-site", "cross-site")], 403),
    ] {
        let answer = post(headers).await;
        assert_eq!(answer.status, status, "{headers:?}: {answer:?}");
        assert!(answer.head.contains(PROBLEM), "{answer:?}");
    }
    assert_eq!(daemon.reconciler.allocations().allocations, []);
    assert_eq!(post(&[("origin", "http://localhost")]).await.status, 201);
}

/// DNS rebinding: the name of a foreign page resolves to a loopback address.
#[tokio::test(flavor = "multi_thread")]
async fn loopback_answers_own_names_only() {
    let host = host();
    let daemon = host.start();
    let read_address = serve_read_address(&daemon).await;
    write(&host.dir.path().join("token"), TOKEN);
    let control = Control { token_file: Some(host.dir.path().join("token")), ..Control::default() };
    let control_address = serve_control_address(&daemon, &control);
    let bearer = format!("Bearer {TOKEN}");
    let get = async |address: SocketAddr, name: &str| {
        let stream = TcpStream::connect(address).await.unwrap();
        let headers = [("host", name), ("authorization", &*bearer)];
        ask(stream, "GET", "/api/v1/version", &headers, "").await.unwrap().status
    };
    for (name, status) in [
        ("evil.example", 421),
        ("evil.example:9560", 421),
        ("localhost.evil.example", 421),
        ("what is this", 400),
        ("localhost:9560", 200),
        ("127.0.0.1:1234", 200),
        (CONFIGURED_NAME, 200),
    ] {
        assert_eq!(get(read_address, name).await, status, "{name}");
        assert_eq!(get(control_address, name).await, status, "{name} on the control address");
    }
}

/// Serves on a read-only address. Returns it.
async fn serve_read_address(daemon: &GuaranteeDaemon) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = router(
        daemon.app.clone(),
        Some(daemon.reconciler.view()),
        None,
        HostNames::new(&[CONFIGURED_NAME.to_owned()]),
    );
    tokio::spawn(serve(listener, router, daemon.stop.clone()));
    address
}

/// With the variable [`UNTIL_INPUT_ENDS`], this test is also the daemon that the foreign pages of `tests/page/doors.test.mjs` try to reach.
/// It has two cgroups: `/held` with a guarantee, and `/free`.
#[tokio::test(flavor = "multi_thread")]
async fn both_addresses_serve() {
    let host = host();
    host.cgroup("held");
    host.cgroup("free");
    let daemon = host.start();
    let held = serve_socket(&host, &daemon);
    let held = ask_on(&held, "POST", ALLOCATIONS, &request("held", "/held", 1, "1Gi")).await;
    assert_eq!(held.status, 201, "{held:?}");
    write(&host.dir.path().join("token"), TOKEN);
    let control = Control { token_file: Some(host.dir.path().join("token")), ..Control::default() };
    let (reading, changing) = (serve_read_address(&daemon).await, serve_control_address(&daemon, &control));
    for (address, path, status) in
        [(reading, "/livez", 200), (changing, ALLOCATIONS, 401), (reading, ALLOCATIONS, 200)]
    {
        let stream = TcpStream::connect(address).await.unwrap();
        let answer = ask(stream, "GET", path, &[], "").await.unwrap();
        assert_eq!(answer.status, status, "{path}: {answer:?}");
    }
    if std::env::var_os(UNTIL_INPUT_ENDS).is_none() {
        return;
    }
    let addresses = serde_json::json!({"reading": reading, "changing": changing, "token": TOKEN, "known": CONFIGURED_NAME});
    // The test harness has printed the start of a line.
    println!("\n{addresses}");
    let input = || std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    tokio::task::spawn_blocking(input).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn serves_kubelet_state_files() {
    let host = host();
    host.cgroup("a");
    let daemon = host.start();
    let socket = serve_socket(&host, &daemon);
    let held = ask_on(&socket, "POST", ALLOCATIONS, &request("batch", "/a", 2, "1Gi")).await;
    assert_eq!(held.status, 201, "{held:?}");
    let exported = ask_on(&socket, "GET", "/api/v1/kubelet-state", "").await;
    assert_eq!(exported.status, 200, "{exported:?}");
    assert_eq!(exported.body["others"], serde_json::json!(["batch"]));
    let file = |name: &str| serde_json::from_str::<Value>(exported.body[name].as_str().unwrap()).unwrap();
    let (cpus, memory) = (file("cpuManagerState"), file("memoryManagerState"));
    assert_eq!(
        (&cpus["defaultCpuSet"], &cpus["entries"]["batch"]["batch"]),
        (&"0,3-7".into(), &"1-2".into())
    );
    assert_eq!(memory["entries"]["batch"]["batch"][0]["numaAffinity"], serde_json::json!([0]));
}
