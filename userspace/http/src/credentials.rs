//! The contents of the files of [`AccessCredentials`]: a bearer token, the daemon's certificate, and the authorities of client certificates.

use std::{
    fmt, fs,
    io::{self, Read},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use numaward_config::{AccessCredentials, Tls};
use numaward_model::FileStamp;
use tokio_rustls::rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::{NoClientAuth, WebPkiClientVerifier},
};

/// Number of bytes that are read of a file at most.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Minimum length of a token: a shorter one could be guessed.
const MIN_TOKEN_BYTES: usize = 16;

/// Error of a file of credentials that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    #[error("{path}: cannot be read: {1}", path = .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// The contents or the permissions are invalid. The text names the problem and the remedy.
    #[error("{path}: {1}", path = .0.display())]
    Invalid(PathBuf, String),
}

pub(crate) struct Token(pub(crate) Vec<u8>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// The contents of the files when they were last read.
#[derive(Debug)]
pub(crate) struct Credentials {
    pub(crate) token: Option<Token>,
    pub(crate) tls: Option<Arc<ServerConfig>>,
    pub(crate) takes_certificates: bool,
    pub(crate) names: Option<Vec<ServerName<'static>>>,
}

/// Returns the current stamps of the configured files; `None` for a missing file.
pub(crate) fn stamps(access: &AccessCredentials) -> Vec<Option<FileStamp>> {
    let Tls { cert_file, key_file, client_ca_file, client_crl_file, client_names: _ } = &access.tls;
    let files = [&access.token_file, cert_file, key_file, client_ca_file, client_crl_file];
    let stamp = |path| fs::metadata(path).ok().as_ref().map(FileStamp::new);
    files.into_iter().flatten().map(stamp).collect()
}

impl Credentials {
    pub(crate) fn read(access: &AccessCredentials) -> Result<Self, CredentialError> {
        let Tls { client_ca_file, client_names, .. } = &access.tls;
        let name = |name: &String| {
            ServerName::try_from(name.clone()).map_err(|_| {
                let file = client_ca_file.as_deref().unwrap_or(Path::new(""));
                invalid(file, format_args!("{}.clientNames: {name:?} is not a DNS name", access.tls_key))
            })
        };
        let names = client_names.as_ref().map(|names| names.iter().map(name).collect()).transpose()?;
        let token = access.token_file.as_deref().map(token).transpose()?;
        let tls = access.tls.identity().map(|(cert, key)| tls(cert, key, &access.tls));
        Ok(Self { token, tls: tls.transpose()?, takes_certificates: client_ca_file.is_some(), names })
    }
}

fn invalid(path: &Path, problem: impl fmt::Display) -> CredentialError {
    CredentialError::Invalid(path.to_owned(), problem.to_string())
}

fn token(path: &Path) -> Result<Token, CredentialError> {
    let text = private(path, 0o077, "the token")?;
    let text = text.trim_ascii();
    if text.len() < MIN_TOKEN_BYTES {
        let has = text.len();
        let problem = format_args!("a token of {has} bytes can be guessed: it must have {MIN_TOKEN_BYTES}");
        return Err(invalid(path, problem));
    }
    // The characters that RFC 6750, section 2.1, allows in the header.
    if !text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(byte)) {
        return Err(invalid(path, "a token has one line of letters, digits and -._~+/= only"));
    }
    Ok(Token(text.to_owned()))
}

fn tls(cert: &Path, key: &Path, clients: &Tls) -> Result<Arc<ServerConfig>, CredentialError> {
    let chain = certificates(cert)?;
    // Groups that hold keys (Debian's ssl-cert) are common.
    let text = private(key, 0o007, "the private key")?;
    let private_key = PrivateKeyDer::from_pem_slice(&text)
        .map_err(|error| invalid(key, format_args!("no private key as PEM: {error}")))?;
    let provider = Arc::new(ring::default_provider());
    let verifier = match clients.client_ca_file.as_deref() {
        None => Arc::new(NoClientAuth),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| invalid(path, error))?;
            }
            // A client without a certificate may have the token; otherwise the response explains the missing credentials.
            let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
                .allow_unauthenticated();
            if let Some(path) = &clients.client_crl_file {
                verifier = verifier.with_crls(revocations(path)?).only_check_end_entity_revocation();
            }
            verifier.build().map_err(|error| invalid(path, error))?
        }
    };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_client_cert_verifier(verifier).with_single_cert(chain, private_key))
        .map_err(|error| invalid(cert, format_args!("with the key {}: {error}", key.display())))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialError> {
    let (text, _) = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| invalid(path, format_args!("no certificates as PEM: {error}")))?;
    if found.is_empty() {
        return Err(invalid(path, "has no certificate as PEM"));
    }
    Ok(found)
}

fn revocations(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, CredentialError> {
    let (text, _) = read(path)?;
    let found: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| invalid(path, format_args!("no revocation lists as PEM: {error}")))?;
    if found.is_empty() {
        return Err(invalid(path, "has no revocation list (X509 CRL) as PEM"));
    }
    Ok(found)
}

/// Reads a secret. Returns an error if the mode of its file has one of the `forbidden` bits or if it belongs to another user.
fn private(path: &Path, forbidden: u32, what: &str) -> Result<Vec<u8>, CredentialError> {
    let (text, found) = read(path)?;
    let mode = found.mode() & 0o777;
    let problem = if mode & forbidden != 0 {
        format!("its mode is {mode:04o}, so that other users can read or change {what}: chmod 600 it")
    } else if found.uid() != 0 && found.uid() != rustix::process::geteuid().as_raw() {
        format!("it belongs to user {}, so that this user can change {what}: chown it to root", found.uid())
    } else {
        return Ok(text);
    };
    Err(invalid(path, problem))
}

fn read(path: &Path) -> Result<(Vec<u8>, fs::Metadata), CredentialError> {
    let fail = |error| CredentialError::Read(path.to_owned(), error);
    // Opening a pipe would wait for its writer.
    if !fs::metadata(path).map_err(fail)?.is_file() {
        return Err(fail(io::Error::other("it is not a regular file")));
    }
    let file = fs::File::open(path).map_err(fail)?;
    let found = file.metadata().map_err(fail)?;
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut text).map_err(fail)?;
    Ok((text, found))
}
