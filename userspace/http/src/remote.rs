//! TCP: who may change allocations from elsewhere, and who may read, where that is asked.
//!
//! Problem: on a socket of this host the kernel says who asks; over TCP a client has to prove that it may.
//!
//! Terms: the *credentials* are what the files of [`AccessCredentials`] hold: a bearer token (RFC 6750), and for TLS the
//! daemon's certificate and the authorities of client certificates. Where both are configured, either will do.
//!
//! Algorithm: with each connection and each request the files are looked at, and read anew if they changed.
//! Files that cannot be used leave those before them in force, and are reported in the log, once. A client whose
//! certificate is of another authority fails the handshake; all else is answered with 401 or 403.
//!
//! Invariants: on the control address no request passes without token or certificate, whatever it asks for; the token is
//! compared in constant time and never logged; a slow handshake holds up nobody else.

use std::{borrow::Cow, io, net::SocketAddr, sync::Arc};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::{FutureExt as _, future::BoxFuture};
use numaward_config::AccessCredentials;
use numaward_model::FileStamp;
use parking_lot::Mutex;
use subtle::ConstantTimeEq;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{
    TlsAcceptor,
    rustls::pki_types::{CertificateDer, ServerName},
};

use crate::{
    credentials::{CredentialError, Credentials, Token, stamps},
    denials::Denials,
    peer::{Authorized, Certificate, Peer},
    server::{Accept, IncomingConnection, OpenedConnection},
};

/// What the kubelet's probes ask for, which have neither token nor certificate.
const HEALTH: [&str; 2] = ["/livez", "/readyz"];

/// Decides who may reach an address.
#[derive(Debug)]
pub struct Gate {
    access: AccessCredentials,
    /// What the files hold, and which versions of them.
    current: Mutex<(Vec<Option<FileStamp>>, Arc<Credentials>)>,
    denials: Denials,
}

impl Gate {
    /// Reads the credentials.
    pub fn open(access: impl Into<AccessCredentials>) -> Result<Arc<Self>, CredentialError> {
        let access = access.into();
        // Before the files are read: a change meanwhile is seen later.
        let seen = stamps(&access);
        let current = Mutex::new((seen, Arc::new(Credentials::read(&access)?)));
        Ok(Arc::new(Self { access, current, denials: Denials::default() }))
    }

    /// The credentials as the files hold them now. Blocks for as long as it takes to look at the files.
    fn look(&self) -> Arc<Credentials> {
        let mut current = self.current.lock();
        let (seen, credentials) = &mut *current;
        let now = stamps(&self.access);
        if *seen != now {
            *seen = now;
            match Credentials::read(&self.access) {
                Ok(read) => {
                    tracing::info!(of = self.access.tls_key, "the credentials of an address were read again");
                    *credentials = Arc::new(read);
                }
                Err(error) => {
                    tracing::error!(%error, "the credentials of an address stay as they were");
                }
            }
        }
        credentials.clone()
    }

    async fn credentials(self: &Arc<Self>) -> io::Result<Arc<Credentials>> {
        let gate = self.clone();
        tokio::task::spawn_blocking(move || gate.look()).await.map_err(io::Error::other)
    }
}

/// Accepts connections on an address with credentials, with TLS where that is configured.
#[derive(Debug)]
pub struct RemoteListener {
    listener: TcpListener,
    gate: Arc<Gate>,
}

impl RemoteListener {
    /// Takes a listener made by [`listen`](crate::listen). Call it in the runtime that is to serve.
    pub fn new(listener: std::net::TcpListener, gate: Arc<Gate>) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::from_std(listener)?, gate })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl Accept for RemoteListener {
    fn accept(&self) -> BoxFuture<'_, io::Result<IncomingConnection>> {
        async {
            let (stream, address) = self.listener.accept().await?;
            let local = stream.local_addr().ok();
            let open = open(stream, address, self.gate.clone()).boxed();
            Ok(IncomingConnection { source: Some(address), local, open })
        }
        .boxed()
    }
}

async fn open(stream: TcpStream, address: SocketAddr, gate: Arc<Gate>) -> io::Result<OpenedConnection> {
    let mut peer = Peer { address: Some(address), ..Peer::default() };
    let credentials = gate.credentials().await?;
    peer.judged_by = Some(credentials.clone());
    let Some(tls) = &credentials.tls else { return Ok((Box::new(stream), peer)) };
    let stream = TlsAcceptor::from(tls.clone()).accept(stream).await?;
    let sent = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    if let Some(certificate) = sent {
        peer.certificate = judge(certificate, credentials.names.as_deref());
    }
    Ok((Box::new(stream), peer))
}

/// A certificate that the handshake has verified.
fn judge(certificate: &CertificateDer<'_>, names: Option<&[ServerName<'static>]>) -> Certificate {
    let Some(names) = names else { return Certificate::Taken };
    let parsed = webpki::EndEntityCert::try_from(certificate);
    let carries =
        |name| parsed.as_ref().is_ok_and(|parsed| parsed.verify_is_valid_for_subject_name(name).is_ok());
    if names.iter().any(carries) { Certificate::Taken } else { Certificate::OtherName }
}

/// Why a request is turned away, and with which challenge.
#[derive(Clone, Debug)]
struct Denied {
    status: StatusCode,
    challenge: Option<&'static str>,
    reason: Cow<'static, str>,
}

impl IntoResponse for Denied {
    fn into_response(self) -> Response {
        let Self { status, challenge, reason } = self;
        let challenge = challenge.map(|challenge| [(header::WWW_AUTHENTICATE, challenge)]);
        let close = (status == StatusCode::MISDIRECTED_REQUEST).then_some([(header::CONNECTION, "close")]);
        (challenge, close, (status, reason.into_owned())).into_response()
    }
}

/// By what a client may reach an address.
fn judge_request(
    access: &AccessCredentials,
    credentials: &Credentials,
    certificate: Certificate,
    headers: &HeaderMap,
) -> Result<&'static str, Denied> {
    const BEARER: &str = "Bearer realm=\"numaward\"";
    let AccessCredentials { token_key, tls_key, .. } = access;
    let denied = |status, challenge, reason| Err(Denied { status, challenge, reason });
    let unauthorized =
        |challenge, reason: String| denied(StatusCode::UNAUTHORIZED, Some(challenge), reason.into());
    if certificate == Certificate::Taken {
        return Ok("certificate");
    }
    let sent = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|value| {
        let (scheme, token) = value.split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
    });
    match (sent, &credentials.token) {
        (Some(sent), Some(Token(token))) if bool::from(sent.ct_eq(token)) => Ok("token"),
        (Some(_), Some(_)) => unauthorized(
            "Bearer realm=\"numaward\", error=\"invalid_token\"",
            format!("this is not the token of {token_key}"),
        ),
        _ if certificate == Certificate::Old => denied(
            StatusCode::MISDIRECTED_REQUEST,
            None,
            "the credentials have changed since this connection was made: connect again".into(),
        ),
        _ if certificate == Certificate::OtherName => denied(
            StatusCode::FORBIDDEN,
            None,
            format!("the client certificate carries none of the names in {tls_key}.clientNames").into(),
        ),
        (_, Some(_)) if credentials.takes_certificates => unauthorized(
            BEARER,
            "this address wants a client certificate or the header Authorization: Bearer TOKEN".to_owned(),
        ),
        (_, Some(_)) => unauthorized(
            BEARER,
            format!(
                "this address wants the header Authorization: Bearer TOKEN, with the token of {token_key}"
            ),
        ),
        // RFC 9110 wants a challenge with each 401; there is no scheme for certificates.
        (_, None) => unauthorized(
            "Mutual",
            format!(
                "this address wants a client certificate of an authority in {tls_key}.clientCaFile, and takes no token"
            ),
        ),
    }
}

/// Lets through those who may.
pub(crate) async fn authorize(State(gate): State<Arc<Gate>>, mut request: Request, next: Next) -> Response {
    let Peer { address, mut certificate, judged_by, .. } =
        request.extensions().get().cloned().unwrap_or_default();
    let credentials = match gate.credentials().await {
        Ok(credentials) => credentials,
        Err(error) => return (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    };
    // The authorities and names may be others by now. A new connection is judged by those.
    let is_old = judged_by.is_some_and(|by| !Arc::ptr_eq(&by, &credentials));
    if is_old && certificate == Certificate::Taken {
        certificate = Certificate::Old;
    }
    match judge_request(&gate.access, &credentials, certificate, request.headers()) {
        Ok(by) => {
            if !request.method().is_safe() {
                let peer = address.map(tracing::field::display);
                tracing::info!(peer, by, method = %request.method(), uri = %request.uri(), "asked over TCP");
            }
            request.extensions_mut().insert(Authorized);
            next.run(request).await
        }
        Err(denied) => {
            gate.denials.log(address, &denied.reason);
            denied.into_response()
        }
    }
}

/// Lets through those who may read: all where nothing but TLS is configured, and to all whether the daemon is well.
pub(crate) async fn authorize_reading(
    State(gate): State<Arc<Gate>>,
    request: Request,
    next: Next,
) -> Response {
    if HEALTH.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    let AccessCredentials { token_file, tls, .. } = &gate.access;
    if token_file.is_none() && tls.client_ca_file.is_none() {
        return next.run(request).await;
    }
    authorize(State(gate), request, next).await
}

#[cfg(test)]
mod tests {
    use std::{fs, net::Ipv4Addr, os::unix::fs::PermissionsExt as _, time::Duration};

    use axum::{Router, middleware, routing::get};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpSocket,
        time::{Instant, sleep, timeout},
    };
    use tokio_rustls::{
        TlsConnector, client,
        rustls::{ClientConfig, RootCertStore, crypto::ring},
    };
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::{
        limits::Limits,
        router::layered,
        server::{
            serve_within,
            tests::{PATIENCE, Peers, head},
        },
    };

    const TOKEN: &str = "correct-horse-battery-staple";
    /// Far more than the kernel keeps of a connection, in both directions.
    const UNREAD: usize = 64 << 20;

    /// What somebody sends who proves nothing.
    #[derive(Clone, Copy, Debug)]
    enum Stranger {
        /// Not even a handshake.
        Nothing,
        HalfAHead,
        /// Requests without end, whose answers it does not read.
        Requests,
    }

    /// An address with TLS and a token, on which each address of the loopback is a peer.
    struct Address {
        at: SocketAddr,
        client: Arc<ClientConfig>,
        _dir: tempfile::TempDir,
    }

    impl Address {
        fn serve(limits: Limits) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let key = rcgen::KeyPair::generate().unwrap();
            let cert =
                rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
            let file = |name: &str, text: &str| {
                let path = dir.path().join(name);
                fs::write(&path, text).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
                Some(path)
            };
            let mut control =
                numaward_config::Control { token_file: file("token", TOKEN), ..Default::default() };
            control.tls.cert_file = file("cert", &cert.pem());
            control.tls.key_file = file("key", &key.serialize_pem());
            let gate = Gate::open(&control).unwrap();
            let listener = crate::listen("127.0.0.1:0".parse().unwrap(), "control.listen").unwrap();
            let listener = RemoteListener::new(listener, gate.clone()).unwrap();
            let at = listener.local_addr().unwrap();
            let router = Router::new().route("/secret", get(|| async { "for clients with the token\n" }));
            let router = layered(router.layer(middleware::from_fn_with_state(gate, authorize)));
            tokio::spawn(serve_within(limits, Box::new(Peers(listener)), router, CancellationToken::new()));
            let mut roots = RootCertStore::empty();
            roots.add(cert.der().clone()).unwrap();
            let client = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            Self { at, client: Arc::new(client), _dir: dir }
        }

        async fn connect(&self, peer: u8) -> io::Result<TcpStream> {
            let socket = TcpSocket::new_v4()?;
            socket.bind((Ipv4Addr::new(127, 0, 1, peer), 0).into())?;
            socket.connect(self.at).await
        }

        async fn shake_hands(&self, stream: TcpStream) -> io::Result<client::TlsStream<TcpStream>> {
            let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
            TlsConnector::from(self.client.clone()).connect(name, stream).await
        }

        /// The first bytes of the answer to a client with the token, if it has one.
        async fn ask(&self, peer: u8) -> Option<String> {
            let asked = async {
                let mut stream = self.shake_hands(self.connect(peer).await?).await?;
                let request = format!(
                    "GET /secret HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
                );
                stream.write_all(request.as_bytes()).await?;
                io::Result::Ok(head(&mut stream).await)
            };
            timeout(PATIENCE, asked).await.ok()?.ok()?
        }

        /// Connects and stays until it is closed; gives how many bytes it could send.
        async fn stay(&self, peer: u8, stranger: Stranger) -> io::Result<usize> {
            let mut stream = self.connect(peer).await?;
            if matches!(stranger, Stranger::Nothing) {
                stream.read_to_end(&mut Vec::new()).await?;
                return Ok(0);
            }
            let mut stream = self.shake_hands(stream).await?;
            let request = "GET /secret HTTP/1.1\r\nhost: localhost\r\n\r\n";
            if matches!(stranger, Stranger::HalfAHead) {
                stream.write_all(&request.as_bytes()[..request.len() / 2]).await?;
                stream.read_to_end(&mut Vec::new()).await?;
                return Ok(request.len() / 2);
            }
            let (requests, mut sent) = (request.repeat(100), 0);
            while sent < UNREAD && stream.write_all(requests.as_bytes()).await.is_ok() {
                sent += requests.len();
            }
            Ok(sent)
        }
    }

    const STRANGERS: [Stranger; 3] = [Stranger::Nothing, Stranger::HalfAHead, Stranger::Requests];

    #[tokio::test(flavor = "multi_thread")]
    async fn who_proves_nothing_keeps_out_nobody_who_can() {
        // They could stay as long as they like.
        let limits = Limits {
            connections: 12,
            connections_of_a_peer: 6,
            head: 10 * PATIENCE,
            stall: 10 * PATIENCE,
            ..Limits::USUAL
        };
        for stranger in STRANGERS {
            let address = Arc::new(Address::serve(limits));
            let mut staying = tokio::task::JoinSet::new();
            for number in 0..limits.connections * 3 {
                let (address, peer) = (address.clone(), if number % 2 == 0 { 1 } else { 2 });
                staying.spawn(async move { address.stay(peer, stranger).await });
            }
            // Those who are more than a peer may have are closed.
            for _ in 0..limits.connections * 2 {
                timeout(PATIENCE, staying.join_next()).await.expect("all have a place");
            }
            for peer in 3..8 {
                let answer = address.ask(peer).await;
                assert!(
                    answer.as_ref().is_some_and(|answer| answer.starts_with("HTTP/1.1 200")),
                    "{stranger:?}: {answer:?}"
                );
            }
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_proves_nothing_is_closed_in_time() {
        let short = Duration::from_millis(500);
        let limits =
            Limits { connections: 6, connections_of_a_peer: 6, head: short, stall: short, ..Limits::USUAL };
        for stranger in STRANGERS {
            let address = Arc::new(Address::serve(limits));
            let mut staying = tokio::task::JoinSet::new();
            for _ in 0..limits.connections {
                let address = address.clone();
                staying.spawn(async move { address.stay(1, stranger).await });
            }
            // Each is of the same peer, and has as many connections as it may.
            let start = Instant::now();
            while !address.ask(1).await.is_some_and(|answer| answer.starts_with("HTTP/1.1 200")) {
                assert!(start.elapsed() < PATIENCE, "{stranger:?}: nobody else is served");
                sleep(short / 10).await;
            }
            while let Some(ended) = timeout(PATIENCE, staying.join_next()).await.expect("it may stay") {
                let sent = ended.unwrap().unwrap_or_default();
                assert!(sent < UNREAD, "{stranger:?}: {sent} bytes were taken of who does not read");
            }
        }
    }
}
