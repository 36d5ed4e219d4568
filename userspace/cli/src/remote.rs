//! Connection to a daemon's address: TCP, with TLS for `https`, and the credentials.

use std::{fs, io, net::IpAddr, path::Path, sync::Arc};

use anyhow::{Context, bail};
use hyper::{Uri, header::HeaderValue};
use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    },
};
use tokio_util::either::Either;

use crate::args::{self, UsageError};

/// Address of a daemon, with the credentials for it.
pub(crate) struct Remote {
    pub(crate) url: String,
    host: String,
    port: u16,
    /// Value of the header Authorization.
    pub(crate) authorization: Option<HeaderValue>,
    tls: Option<(ServerName<'static>, TlsConnector)>,
}

impl Remote {
    /// Parses the URL and reads the files of the credentials.
    pub(crate) fn new(url: &str, args: &args::ConnectionArgs) -> anyhow::Result<Self> {
        let examples =
            "write it like https://host.example:9561, http://127.0.0.1:9560 or /run/numaward/control.sock";
        let wrong = |problem: String| UsageError(format!("--server {url:?} {problem}: {examples}"));
        let uri: Uri = url.parse().map_err(|error| wrong(format!("is no URL ({error})")))?;
        let (Some(host), Some(port), "" | "/") = (uri.host(), uri.port_u16(), uri.path()) else {
            return Err(wrong("is not a host and a port".to_owned()).into());
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let tls = match uri.scheme_str() {
            Some("https") => {
                let name = ServerName::try_from(host.clone())
                    .with_context(|| format!("--server {url:?}: no host can have the name {host:?}"))?;
                Some((name, TlsConnector::from(Arc::new(tls(args)?))))
            }
            Some("http") if args.ca.is_some() || args.cert.is_some() => {
                bail!("--ca and --cert have no effect with {url}: TLS requires https://");
            }
            Some("http") => None,
            _ => return Err(wrong("is neither https nor http".to_owned()).into()),
        };
        if args.token_file.is_some() && tls.is_none() && !args.allow_unencrypted && !is_loopback(&host) {
            bail!(
                "the token would cross the network to {url} unencrypted: use https, or --allow-unencrypted if the \
                 network is encrypted in another way"
            );
        }
        let authorization = args.token_file.as_deref().map(authorization).transpose()?;
        Ok(Self { url: url.trim_end_matches('/').to_owned(), host, port, authorization, tls })
    }

    /// Returns the value of the header Host.
    pub(crate) fn authority(&self) -> &str {
        self.url.split_once("://").map_or(&*self.url, |(_, authority)| authority)
    }

    /// Connects to the address.
    pub(crate) async fn connect(&self) -> io::Result<Either<TcpStream, Box<TlsStream<TcpStream>>>> {
        let stream = TcpStream::connect((&*self.host, self.port)).await?;
        Ok(match &self.tls {
            None => Either::Left(stream),
            Some((name, tls)) => Either::Right(Box::new(tls.connect(name.clone(), stream).await?)),
        })
    }
}

/// Returns whether a host is certainly this one. Other names are resolved, and may be anywhere.
fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn read(path: &Path, flag: &str) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("{flag} {}: cannot be read", path.display()))
}

fn authorization(path: &Path) -> anyhow::Result<HeaderValue> {
    let token = read(path, "--token-file")?;
    let mut value = b"Bearer ".to_vec();
    value.extend_from_slice(token.trim_ascii());
    let value = HeaderValue::from_bytes(&value);
    let mut value = value.with_context(|| format!("--token-file {}: not a bearer token", path.display()))?;
    value.set_sensitive(true);
    Ok(value)
}

fn certificates(path: &Path, flag: &str) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path, flag)?).collect();
    let found =
        found.with_context(|| format!("{flag} {}: the certificates are not valid PEM", path.display()))?;
    if found.is_empty() {
        bail!("{flag} {}: the file has no certificate in PEM format", path.display());
    }
    Ok(found)
}

fn tls(args: &args::ConnectionArgs) -> anyhow::Result<ClientConfig> {
    let Some(ca) = &args.ca else {
        bail!(
            "https requires --ca FILE: the certificate of the authority that signed the daemon's certificate"
        );
    };
    let mut roots = RootCertStore::empty();
    for certificate in certificates(ca, "--ca")? {
        roots.add(certificate).with_context(|| format!("--ca {}", ca.display()))?;
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let Some((cert, key)) = args.cert.as_deref().zip(args.key.as_deref()) else {
        return Ok(config.with_no_client_auth());
    };
    let chain = certificates(cert, "--cert")?;
    let private_key = PrivateKeyDer::from_pem_slice(&read(key, "--key")?)
        .with_context(|| format!("--key {}: the file has no private key in PEM format", key.display()))?;
    config
        .with_client_auth_cert(chain, private_key)
        .with_context(|| format!("--cert {} with --key {}", cert.display(), key.display()))
}
