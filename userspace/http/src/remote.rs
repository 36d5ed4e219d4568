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
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use numaward_config::Access;
use subtle::ConstantTimeEq;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{
    TlsAcceptor,
    rustls::pki_types::{CertificateDer, ServerName},
    server::TlsStream,
};
use tokio_util::either::Either;

use crate::{
    credentials::{CredentialError, Credentials, Stamp, Token, stamps},
    denials::Denials,
    peer::{Certificate, Peer},
    server::Accept,
};

/// What the kubelet's probes ask for, which have neither token nor certificate.
const HEALTH: [&str; 2] = ["/livez", "/readyz"];

/// Decides who may reach an address.
#[derive(Debug)]
pub struct Gate {
    access: Access,
    /// What the files hold, and which versions of them.
    current: Mutex<(Vec<Stamp>, Arc<Credentials>)>,
    denials: Denials,
}

impl Gate {
    /// Reads the credentials.
    pub fn open(access: impl Into<Access>) -> Result<Arc<Self>, CredentialError> {
        let access = access.into();
        // Before the files are read: a change meanwhile is seen later.
        let seen = stamps(&access);
        let current = Mutex::new((seen, Arc::new(Credentials::read(&access)?)));
        Ok(Arc::new(Self { access, current, denials: Denials::default() }))
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

    fn source((_, address, _): &Self::Accepted) -> Option<IpAddr> {
        Some(address.ip())
    }

    async fn accept(&self) -> io::Result<Self::Accepted> {
        let (stream, address) = self.listener.accept().await?;
        Ok((stream, address, self.gate.clone()))
    }

    async fn open((stream, address, gate): Self::Accepted) -> io::Result<(Self::Stream, Peer)> {
        let mut peer = Peer { address: Some(address), ..Peer::default() };
        let credentials = gate.credentials().await?;
        peer.judged_by = Some(credentials.clone());
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
        let close = (status == StatusCode::MISDIRECTED_REQUEST).then_some([(header::CONNECTION, "close")]);
        (challenge, close, (status, reason.into_owned())).into_response()
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
pub(crate) async fn authorize(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
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
    let Access { token_file, tls, .. } = &gate.access;
    if token_file.is_none() && tls.client_ca_file.is_none() {
        return next.run(request).await;
    }
    authorize(State(gate), request, next).await
}
