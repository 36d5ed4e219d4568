//! Access control over TCP: clients of the control address, and clients of the read-only address if that is configured.
//!
//! # Problem
//! On a Unix socket of this host, the kernel identifies the client; over TCP, a client has to authenticate.
//!
//! # Terms
//! The *credentials* are the contents of the files of [`AccessCredentials`]: a bearer token (RFC 6750), and for TLS
//! the daemon's certificate and the authorities of client certificates. If both a token and client certificates are
//! configured, either is sufficient.
//!
//! # Algorithm
//! Each connection and each request checks the files' stamps and reads the files again if they have changed. If the
//! new files cannot be used, the previous credentials stay in force, and the log reports this once. A client with a
//! certificate of another authority fails the handshake; any other failure is answered with 401 or 403.
//!
//! # Invariants
//! - On the control address, no request passes without a token or certificate, whatever its path.
//! - The token is compared in constant time and never logged.
//! - A slow handshake delays no other connection.

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
    peer::{Authorization, Certificate, Peer},
    server::{Accept, IncomingConnection, OpenedConnection},
};

/// The paths of the kubelet's probes, which have neither token nor certificate.
const HEALTH_PATHS: [&str; 2] = ["/livez", "/readyz"];

/// Access control of one address.
#[derive(Debug)]
pub struct Gate {
    access: AccessCredentials,
    /// The stamps of the files, and the credentials that were read from them.
    current: Mutex<(Vec<Option<FileStamp>>, Arc<Credentials>)>,
    denials: Denials,
}

impl Gate {
    /// Reads the credentials. Returns an error if a file cannot be used.
    pub fn open(access: impl Into<AccessCredentials>) -> Result<Arc<Self>, CredentialError> {
        let access = access.into();
        // The stamps are taken before the files are read, so that a change meanwhile is noticed later.
        let seen = stamps(&access);
        let current = Mutex::new((seen, Arc::new(Credentials::read(&access)?)));
        Ok(Arc::new(Self { access, current, denials: Denials::default() }))
    }

    /// Returns the current credentials; reads the files again if they have changed. Blocks on file I/O.
    fn reload(&self) -> Arc<Credentials> {
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
                    tracing::error!(%error, "the new credentials of an address cannot be used; the previous ones stay in force");
                }
            }
        }
        credentials.clone()
    }

    async fn credentials(self: &Arc<Self>) -> io::Result<Arc<Credentials>> {
        let gate = self.clone();
        tokio::task::spawn_blocking(move || gate.reload()).await.map_err(io::Error::other)
    }
}

/// Listener of an address with credentials, with TLS if that is configured.
#[derive(Debug)]
pub struct RemoteListener {
    listener: TcpListener,
    gate: Arc<Gate>,
}

impl RemoteListener {
    /// Takes a listener of [`listen`](crate::listen). Must be called in the runtime that will serve.
    pub fn new(listener: std::net::TcpListener, gate: Arc<Gate>) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::from_std(listener)?, gate })
    }

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
    peer.checked_with = Some(credentials.clone());
    let Some(tls) = &credentials.tls else { return Ok((Box::new(stream), peer)) };
    let stream = TlsAcceptor::from(tls.clone()).accept(stream).await?;
    let sent = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    if let Some(certificate) = sent {
        peer.certificate = check_names(certificate, credentials.names.as_deref());
    }
    Ok((Box::new(stream), peer))
}

/// Checks the names of a certificate that the handshake has verified.
fn check_names(certificate: &CertificateDer<'_>, names: Option<&[ServerName<'static>]>) -> Certificate {
    let Some(names) = names else { return Certificate::Accepted };
    let parsed = webpki::EndEntityCert::try_from(certificate);
    let has_name =
        |name| parsed.as_ref().is_ok_and(|parsed| parsed.verify_is_valid_for_subject_name(name).is_ok());
    if names.iter().any(has_name) { Certificate::Accepted } else { Certificate::OtherName }
}

/// Response to a request without valid credentials.
#[derive(Clone, Debug)]
struct Denial {
    status: StatusCode,
    challenge: Option<&'static str>,
    reason: Cow<'static, str>,
}

impl IntoResponse for Denial {
    fn into_response(self) -> Response {
        let Self { status, challenge, reason } = self;
        let challenge = challenge.map(|challenge| [(header::WWW_AUTHENTICATE, challenge)]);
        let close = (status == StatusCode::MISDIRECTED_REQUEST).then_some([(header::CONNECTION, "close")]);
        (challenge, close, (status, reason.into_owned())).into_response()
    }
}

/// Checks the credentials of a request. Returns the name of the kind that was accepted, for the log.
fn check_request(
    access: &AccessCredentials,
    credentials: &Credentials,
    certificate: Certificate,
    headers: &HeaderMap,
) -> Result<&'static str, Denial> {
    const BEARER: &str = "Bearer realm=\"numaward\"";
    let AccessCredentials { token_key, tls_key, .. } = access;
    let denied = |status, challenge, reason| Err(Denial { status, challenge, reason });
    let unauthorized =
        |challenge, reason: String| denied(StatusCode::UNAUTHORIZED, Some(challenge), reason.into());
    if certificate == Certificate::Accepted {
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
        _ if certificate == Certificate::Outdated => denied(
            StatusCode::MISDIRECTED_REQUEST,
            None,
            "the credentials have changed since this connection was made: connect again".into(),
        ),
        _ if certificate == Certificate::OtherName => denied(
            StatusCode::FORBIDDEN,
            None,
            format!("the client certificate has none of the names in {tls_key}.clientNames").into(),
        ),
        (_, Some(_)) if credentials.takes_certificates => unauthorized(
            BEARER,
            "this address requires a client certificate or the header Authorization: Bearer TOKEN".to_owned(),
        ),
        (_, Some(_)) => unauthorized(
            BEARER,
            format!(
                "this address requires the header Authorization: Bearer TOKEN, with the token of {token_key}"
            ),
        ),
        // RFC 9110 requires a challenge with each 401; no scheme is registered for certificates.
        (_, None) => unauthorized(
            "Mutual",
            format!(
                "this address requires a client certificate of an authority in {tls_key}.clientCaFile, and accepts no token"
            ),
        ),
    }
}

/// Authorizes each request by token or client certificate.
pub(crate) async fn authorize(State(gate): State<Arc<Gate>>, mut request: Request, next: Next) -> Response {
    let Peer { address, mut certificate, checked_with, .. } =
        request.extensions().get().cloned().unwrap_or_default();
    let credentials = match gate.credentials().await {
        Ok(credentials) => credentials,
        Err(error) => return (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    };
    // The configured authorities and names may have changed. Only a new connection is checked with the new ones.
    let is_old = checked_with.is_some_and(|by| !Arc::ptr_eq(&by, &credentials));
    if is_old && certificate == Certificate::Accepted {
        certificate = Certificate::Outdated;
    }
    match check_request(&gate.access, &credentials, certificate, request.headers()) {
        Ok(by) => {
            if !request.method().is_safe() {
                let peer = address.map(tracing::field::display);
                tracing::info!(peer, by, method = %request.method(), uri = %request.uri(), "a request over TCP was authorized");
            }
            request.extensions_mut().insert(Authorization);
            next.run(request).await
        }
        Err(denied) => {
            gate.denials.log(address, &denied.reason);
            denied.into_response()
        }
    }
}

/// Authorizes each request to the read-only address, except for health checks. Any client may read if no token and no client
/// authority is configured.
pub(crate) async fn authorize_reading(
    State(gate): State<Arc<Gate>>,
    request: Request,
    next: Next,
) -> Response {
    if HEALTH_PATHS.contains(&request.uri().path()) {
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
            tests::{SeparatePeers, TEST_TIMEOUT, head},
        },
    };

    const TOKEN: &str = "correct-horse-battery-staple";
    /// A multiple of the kernel's buffers of a connection, in both directions.
    const UNREAD: usize = 64 << 20;

    /// Behaviour of a client without credentials.
    #[derive(Clone, Copy, Debug)]
    enum UnauthenticatedClient {
        /// It does not begin the handshake.
        Silent,
        HalfHead,
        /// It sends requests without end and does not read the responses.
        Requests,
    }

    /// A server with TLS and a token, for which each address of the loopback is a separate peer.
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
            tokio::spawn(serve_within(
                limits,
                Box::new(SeparatePeers(listener)),
                router,
                CancellationToken::new(),
            ));
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

        /// Sends a request with the token and returns the first bytes of the response, if there is one.
        async fn ask(&self, peer: u8) -> Option<String> {
            let asked = async {
                let mut stream = self.shake_hands(self.connect(peer).await?).await?;
                let request = format!(
                    "GET /secret HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
                );
                stream.write_all(request.as_bytes()).await?;
                io::Result::Ok(head(&mut stream).await)
            };
            timeout(TEST_TIMEOUT, asked).await.ok()?.ok()?
        }

        /// Connects without credentials, waits until the server closes the connection, and returns the number of bytes sent.
        async fn stay(&self, peer: u8, stranger: UnauthenticatedClient) -> io::Result<usize> {
            let mut stream = self.connect(peer).await?;
            if matches!(stranger, UnauthenticatedClient::Silent) {
                stream.read_to_end(&mut Vec::new()).await?;
                return Ok(0);
            }
            let mut stream = self.shake_hands(stream).await?;
            let request = "GET /secret HTTP/1.1\r\nhost: localhost\r\n\r\n";
            if matches!(stranger, UnauthenticatedClient::HalfHead) {
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

    const STRANGERS: [UnauthenticatedClient; 3] =
        [UnauthenticatedClient::Silent, UnauthenticatedClient::HalfHead, UnauthenticatedClient::Requests];

    #[tokio::test(flavor = "multi_thread")]
    async fn strangers_do_not_block_other_peers() {
        // With these limits, no client is disconnected for slowness.
        let limits = Limits {
            connections: 12,
            connections_of_a_peer: 6,
            head: 10 * TEST_TIMEOUT,
            stall: 10 * TEST_TIMEOUT,
            ..Limits::DEFAULT
        };
        for stranger in STRANGERS {
            let address = Arc::new(Address::serve(limits));
            let mut staying = tokio::task::JoinSet::new();
            for number in 0..limits.connections * 3 {
                let (address, peer) = (address.clone(), if number % 2 == 0 { 1 } else { 2 });
                staying.spawn(async move { address.stay(peer, stranger).await });
            }
            // The connections above the limit of a peer are closed.
            for _ in 0..limits.connections * 2 {
                timeout(TEST_TIMEOUT, staying.join_next()).await.expect("no connection is closed");
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
    async fn closes_strangers_in_time() {
        let short = Duration::from_millis(500);
        let limits =
            Limits { connections: 6, connections_of_a_peer: 6, head: short, stall: short, ..Limits::DEFAULT };
        for stranger in STRANGERS {
            let address = Arc::new(Address::serve(limits));
            let mut staying = tokio::task::JoinSet::new();
            for _ in 0..limits.connections {
                let address = address.clone();
                staying.spawn(async move { address.stay(1, stranger).await });
            }
            // All are of the same peer, which has reached its limit.
            let start = Instant::now();
            while !address.ask(1).await.is_some_and(|answer| answer.starts_with("HTTP/1.1 200")) {
                assert!(start.elapsed() < TEST_TIMEOUT, "{stranger:?}: no other client is served");
                sleep(short / 10).await;
            }
            while let Some(ended) = timeout(TEST_TIMEOUT, staying.join_next()).await.expect("it may stay") {
                let sent = ended.unwrap().unwrap_or_default();
                assert!(
                    sent < UNREAD,
                    "{stranger:?}: {sent} bytes were accepted of a client that does not read"
                );
            }
        }
    }
}
