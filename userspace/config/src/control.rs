//! Access to an address over TCP: keys that only make sense together.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::types::ListenAddress;

/// Access to the control address over TCP. The control socket is always available.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Control {
    /// Address and port. Default: allocations are changed only on the control socket.
    pub listen: Option<ListenAddress>,
    /// File with a bearer token; clients that send it may change allocations. Only its owner may have read permission:
    /// `head -c 32 /dev/urandom | base64 | install -m 600 /dev/stdin FILE`.
    pub token_file: Option<PathBuf>,
    /// Accepts the token without TLS on addresses that other hosts can reach. Every host that sees the traffic can
    /// then read it: use this only if the network is encrypted in another way.
    pub allow_unencrypted: bool,
    /// TLS, and the client certificates that may change allocations. Replaced files are read again.
    pub tls: Tls,
}

/// TLS of an address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Tls {
    /// The daemon's certificate and its intermediate certificates, as PEM.
    pub cert_file: Option<PathBuf>,
    /// The private key, as PEM.
    pub key_file: Option<PathBuf>,
    /// Certificate authorities of accepted client certificates, as PEM.
    pub client_ca_file: Option<PathBuf>,
    /// Revocation lists of these authorities (X.509 CRL, RFC 5280), as PEM. If an authority has no list here, none of
    /// its certificates is accepted. An outdated list still applies.
    pub client_crl_file: Option<PathBuf>,
    /// Accepted DNS names in client certificates. Default: any certificate of the authorities is accepted.
    pub client_names: Option<Vec<String>>,
}

impl Tls {
    /// Returns the paths of the certificate and of its key.
    pub fn identity(&self) -> Option<(&Path, &Path)> {
        self.cert_file.as_deref().zip(self.key_file.as_deref())
    }
}

/// The credentials that an address requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessCredentials {
    pub token_file: Option<PathBuf>,
    pub tls: Tls,
    /// The configuration key of the token file.
    pub token_key: &'static str,
    /// The configuration key of TLS.
    pub tls_key: &'static str,
}

impl From<&Control> for AccessCredentials {
    fn from(control: &Control) -> Self {
        Self {
            token_file: control.token_file.clone(),
            tls: control.tls.clone(),
            token_key: "control.tokenFile",
            tls_key: "control.tls",
        }
    }
}

impl AccessCredentials {
    /// Returns the credentials of the read-only address.
    pub(super) fn for_reading(token_file: Option<&Path>, tls: &Tls) -> Self {
        Self {
            token_file: token_file.map(Path::to_owned),
            tls: tls.clone(),
            token_key: "listenTokenFile",
            tls_key: "listenTls",
        }
    }

    /// Returns true if TLS or a credential is configured.
    pub fn is_configured(&self) -> bool {
        self.token_file.is_some() || self.tls != Tls::default()
    }

    /// Returns contradictions between the keys of TLS: the key to change, and the reason.
    pub(super) fn problems(&self) -> Vec<(String, String)> {
        let (mut problems, tls) = (Vec::new(), &self.tls);
        let key = |name: &str| format!("{}.{name}", self.tls_key);
        let given = [
            ("certFile", tls.cert_file.is_some()),
            ("keyFile", tls.key_file.is_some()),
            ("clientCaFile", tls.client_ca_file.is_some()),
            ("clientCrlFile", tls.client_crl_file.is_some()),
            ("clientNames", tls.client_names.is_some()),
        ];
        let [cert, private_key, ca, crl, names] = given;
        for ((name, has), (other, is_there)) in
            [(cert, private_key), (private_key, cert), (ca, cert), (crl, ca), (names, ca)]
        {
            if has && !is_there {
                problems.push((key(name), format!("needs {}, which is not given", key(other))));
            }
        }
        if tls.client_names.as_ref().is_some_and(Vec::is_empty) {
            problems.push((key("clientNames"), "is empty: no client would be accepted".to_owned()));
        }
        problems
    }
}

/// Returns contradictions in the access to the read-only address: the key to change, and the reason.
pub(super) fn reading_problems(
    ListenAddress(address): ListenAddress,
    reading: &AccessCredentials,
) -> Vec<(String, String)> {
    let mut problems = reading.problems();
    if reading.token_file.is_some() && reading.tls.cert_file.is_none() && !address.ip().is_loopback() {
        let message = format!(
            "the token would cross the network to {address} unencrypted: give listenTls, or listen on 127.0.0.1 or \
             [::1]"
        );
        problems.push((reading.token_key.to_owned(), message));
    }
    problems
}

/// Returns contradictions in the access to the control address: the key to change, and the reason.
pub(super) fn problems(control: &Control, read_only: ListenAddress) -> Vec<(String, String)> {
    let Control { listen, token_file, allow_unencrypted, tls } = control;
    let mut problems = AccessCredentials::from(control).problems();
    let cert = tls.cert_file.is_some();
    let Some(ListenAddress(address)) = listen else { return problems };
    let mut wrong = |message| problems.push(("control.listen".to_owned(), message));
    if token_file.is_none() && tls.client_ca_file.is_none() {
        let message = "anyone who reaches this address could change allocations: give control.tokenFile, \
                       control.tls.clientCaFile or both";
        wrong(message.to_owned());
    } else if !cert && !allow_unencrypted && !address.ip().is_loopback() {
        let message = format!(
            "the token would cross the network to {address} unencrypted: give control.tls, listen on 127.0.0.1 or \
             [::1], or set control.allowUnencrypted where the network is encrypted in another way"
        );
        wrong(message);
    }
    if *address == read_only.0 && address.port() != 0 {
        let message = format!("{address} is also the address of \"listen\": choose another port");
        wrong(message);
    }
    problems
}

/// Returns a warning for settings without effect.
pub(super) fn warning(control: &Control) -> Option<String> {
    let has_no_effect = control.listen.is_none() && *control != Control::default();
    has_no_effect.then(|| "control has no effect without control.listen".to_owned())
}
