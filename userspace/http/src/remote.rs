//! TCP: who may change allocations from elsewhere, and who may read, where that is asked.
//!
//! Problem: on a socket of this host the kernel says who asks; over TCP a client has to prove that it may.
//!
//! Terms: the *credentials* are what the files of [`Access`] hold: a bearer token (RFC 6750), and for TLS the
//! daemon's certificate and the authorities of client certificates. Where both are configured, either will do.
//!
//! Algorithm: with each connection and each request the files are looked at, and read anew if they changed.
//! Files that cannot be used leave those before them in force, and are reported in the log, once. A client whose
//! certificate is of another authority fails the handshake; all else is answered with 401 or 403.
//!
//! Invariants: on the control address no request passes without token or certificate, whatever it asks for; the token is
//! compared in constant time and never logged; a slow handshake holds up nobody else.

use std::{
    borrow::Cow,
    fmt, fs,
    io::{self, Read},
    net::SocketAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use numaward_config::{Access, Tls};
use subtle::ConstantTimeEq;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
        server::{NoClientAuth, WebPkiClientVerifier},
    },
    server::TlsStream,
};
use tokio_util::either::Either;

use crate::{
    peer::{Certificate, Peer},
    server::Accept,
};

/// No file of credentials is larger.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// What the kubelet's probes ask for, which have neither token nor certificate.
const HEALTH: [&str; 2] = ["/livez", "/readyz"];
/// A shorter token could be guessed.
const MIN_TOKEN_BYTES: usize = 16;

/// A file of credentials cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// It cannot be read.
    #[error("{path}: cannot be read: {1}", path = .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// What it holds, or who else may read it, is wrong, and what to do.
    #[error("{path}: {1}", path = .0.display())]
    Unfit(PathBuf, String),
}

struct Token(Vec<u8>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

#[derive(Debug)]
struct Credentials {
    token: Option<Token>,
    tls: Option<Arc<ServerConfig>>,
    takes_certificates: bool,
    names: Option<Vec<ServerName<'static>>>,
}

/// What distinguishes one version of a file from another: device, inode, size, time of change. None: it is not there.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// Decides who may reach an address.
#[derive(Debug)]
pub struct Gate {
    access: Access,
    /// What the files hold, and which versions of them.
    current: Mutex<(Vec<Stamp>, Arc<Credentials>)>,
}

impl Gate {
    /// Reads the credentials.
    pub fn open(access: impl Into<Access>) -> Result<Arc<Self>, CredentialError> {
        let access = access.into();
        // Before the files are read: a change meanwhile is seen later.
        let seen = stamps(&access);
        let current = Mutex::new((seen, Arc::new(Credentials::read(&access)?)));
        Ok(Arc::new(Self { access, current }))
    }

    /// The credentials as the files hold them now. Blocks for as long as it takes to look at the files.
    fn look(&self) -> Arc<Credentials> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
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

fn stamps(access: &Access) -> Vec<Stamp> {
    let Tls { cert_file, key_file, client_ca_file, client_names: _ } = &access.tls;
    let files = [&access.token_file, cert_file, key_file, client_ca_file];
    files
        .into_iter()
        .flatten()
        .map(|path| {
            let found = fs::metadata(path).ok()?;
            Some((found.dev(), found.ino(), found.size(), found.ctime(), found.ctime_nsec()))
        })
        .collect()
}

impl Credentials {
    fn read(access: &Access) -> Result<Self, CredentialError> {
        let Tls { client_ca_file, client_names, .. } = &access.tls;
        let name = |name: &String| {
            ServerName::try_from(name.clone()).map_err(|_| {
                let file = client_ca_file.as_deref().unwrap_or(Path::new(""));
                unfit(file, format_args!("{}.clientNames: {name:?} is no DNS name", access.tls_key))
            })
        };
        let names = client_names.as_ref().map(|names| names.iter().map(name).collect()).transpose()?;
        let token = access.token_file.as_deref().map(token).transpose()?;
        let tls = access.tls.identity().map(|(cert, key)| tls(cert, key, client_ca_file.as_deref()));
        Ok(Self { token, tls: tls.transpose()?, takes_certificates: client_ca_file.is_some(), names })
    }
}

fn unfit(path: &Path, problem: impl fmt::Display) -> CredentialError {
    CredentialError::Unfit(path.to_owned(), problem.to_string())
}

fn token(path: &Path) -> Result<Token, CredentialError> {
    let text = private(path, 0o077, "the token")?;
    let text = text.trim_ascii();
    if text.len() < MIN_TOKEN_BYTES {
        let has = text.len();
        let problem = format_args!("a token of {has} bytes can be guessed: it must have {MIN_TOKEN_BYTES}");
        return Err(unfit(path, problem));
    }
    // RFC 6750, section 2.1: what can be sent in the header.
    if !text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(byte)) {
        return Err(unfit(path, "a token has one line of letters, digits and -._~+/= only"));
    }
    Ok(Token(text.to_owned()))
}

fn tls(cert: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Arc<ServerConfig>, CredentialError> {
    let chain = certificates(cert)?;
    // Groups that hold keys (Debian's ssl-cert) are common.
    let text = private(key, 0o007, "the private key")?;
    let private_key = PrivateKeyDer::from_pem_slice(&text)
        .map_err(|error| unfit(key, format_args!("no private key as PEM: {error}")))?;
    let provider = Arc::new(ring::default_provider());
    let verifier = match client_ca {
        None => Arc::new(NoClientAuth),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| unfit(path, error))?;
            }
            // A client without a certificate may have the token, and else learns from the answer what is missing.
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
                .allow_unauthenticated()
                .build()
                .map_err(|error| unfit(path, error))?
        }
    };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_client_cert_verifier(verifier).with_single_cert(chain, private_key))
        .map_err(|error| unfit(cert, format_args!("with the key {}: {error}", key.display())))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialError> {
    let (text, _) = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| unfit(path, format_args!("no certificates as PEM: {error}")))?;
    if found.is_empty() {
        return Err(unfit(path, "has no certificate as PEM"));
    }
    Ok(found)
}

/// Reads a secret, unless its file has one of the bits of `others` in its mode or belongs to another user.
fn private(path: &Path, others: u32, what: &str) -> Result<Vec<u8>, CredentialError> {
    let (text, found) = read(path)?;
    let mode = found.mode() & 0o777;
    let problem = if mode & others != 0 {
        format!("its mode is {mode:04o}, so that others can reach {what}: chmod 600 it")
    } else if found.uid() != 0 && found.uid() != rustix::process::geteuid().as_raw() {
        format!("it belongs to user {}, who can change {what}: chown it to root", found.uid())
    } else {
        return Ok(text);
    };
    Err(unfit(path, problem))
}

fn read(path: &Path) -> Result<(Vec<u8>, fs::Metadata), CredentialError> {
    let fail = |error| CredentialError::Read(path.to_owned(), error);
    // Opening a pipe would wait for its writer.
    if !fs::metadata(path).map_err(fail)?.is_file() {
        return Err(fail(io::Error::other("it is no file")));
    }
    let file = fs::File::open(path).map_err(fail)?;
    let found = file.metadata().map_err(fail)?;
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut text).map_err(fail)?;
    Ok((text, found))
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
    type Accepted = (TcpStream, SocketAddr, Arc<Gate>);
    type Stream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

    async fn accept(&self) -> io::Result<Self::Accepted> {
        let (stream, address) = self.listener.accept().await?;
        Ok((stream, address, self.gate.clone()))
    }

    async fn open((stream, address, gate): Self::Accepted) -> io::Result<(Self::Stream, Peer)> {
        let mut peer = Peer { address: Some(address), certificate: Certificate::None };
        let credentials = gate.credentials().await?;
        let Some(tls) = &credentials.tls else { return Ok((Either::Left(stream), peer)) };
        let stream = TlsAcceptor::from(tls.clone()).accept(stream).await?;
        let sent = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        if let Some(certificate) = sent {
            peer.certificate = judge(certificate, credentials.names.as_deref());
        }
        Ok((Either::Right(Box::new(stream)), peer))
    }
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
        (challenge, (status, reason.into_owned())).into_response()
    }
}

/// By what a client may reach an address.
fn judge_request(
    access: &Access,
    credentials: &Credentials,
    certificate: Certificate,
    headers: &HeaderMap,
) -> Result<&'static str, Denied> {
    const BEARER: &str = "Bearer realm=\"numaward\"";
    let Access { token_key, tls_key, .. } = access;
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
pub(crate) async fn authorize(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let Peer { address, certificate } = request.extensions().get().copied().unwrap_or_default();
    let credentials = match gate.credentials().await {
        Ok(credentials) => credentials,
        Err(error) => return (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    };
    let peer = address.map(tracing::field::display);
    match judge_request(&gate.access, &credentials, certificate, request.headers()) {
        Ok(by) => {
            if !request.method().is_safe() {
                tracing::info!(peer, by, method = %request.method(), uri = %request.uri(), "asked over TCP");
            }
            next.run(request).await
        }
        Err(denied) => {
            tracing::warn!(peer, reason = %denied.reason, "turned away");
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
    let Access { token_file, tls, .. } = &gate.access;
    if token_file.is_none() && tls.client_ca_file.is_none() {
        return next.run(request).await;
    }
    authorize(State(gate), request, next).await
}
