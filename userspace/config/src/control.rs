//! Control over TCP: keys that only make sense together.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::types::ListenAddress;

/// Who may change allocations over TCP. The control socket is served in any case.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Control {
    /// Address and port. Default: allocations are changed on the control socket only.
    pub listen: Option<ListenAddress>,
    /// File with a bearer token; clients that send it may change allocations. Nobody but its owner may read the
    /// file: `head -c 32 /dev/urandom | base64 | install -m 600 /dev/stdin FILE`.
    pub token_file: Option<PathBuf>,
    /// Takes the token without TLS on other addresses than those of this host. Anyone who listens on the network
    /// then knows it: only for networks that are encrypted in another way.
    pub allow_unencrypted: bool,
    /// TLS, and who may do so by a client certificate. Files that are replaced are read again.
    pub tls: Tls,
}

/// TLS of the control address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Tls {
    /// The daemon's certificate and those between it and its authority, as PEM.
    pub cert_file: Option<PathBuf>,
    /// Its private key, as PEM.
    pub key_file: Option<PathBuf>,
    /// Authorities whose client certificates are taken, as PEM.
    pub client_ca_file: Option<PathBuf>,
    /// Names of which a client certificate must carry one as a DNS name. Default: any certificate of the
    /// authorities will do.
    pub client_names: Option<Vec<String>>,
}

impl Tls {
    /// The certificate and its key.
    pub fn identity(&self) -> Option<(&Path, &Path)> {
        self.cert_file.as_deref().zip(self.key_file.as_deref())
    }
}

/// What is wrong between the keys, and with the address of the read-only server: the key that is to be changed, and why.
pub(super) fn problems(control: &Control, read_only: ListenAddress) -> Vec<(&'static str, String)> {
    let Control { listen, token_file, allow_unencrypted, tls } = control;
    let mut problems = Vec::new();
    let mut needs = |key: &'static str, has: bool, other: &str, is_there: bool| {
        if has && !is_there {
            problems.push((key, format!("needs {other}, which is not given")));
        }
    };
    let (cert, key) = (tls.cert_file.is_some(), tls.key_file.is_some());
    needs("control.tls.certFile", cert, "control.tls.keyFile", key);
    needs("control.tls.keyFile", key, "control.tls.certFile", cert);
    needs("control.tls.clientCaFile", tls.client_ca_file.is_some(), "control.tls.certFile", cert);
    let names = tls.client_names.is_some();
    needs("control.tls.clientNames", names, "control.tls.clientCaFile", tls.client_ca_file.is_some());
    if tls.client_names.as_ref().is_some_and(Vec::is_empty) {
        problems.push(("control.tls.clientNames", "is empty: no client could control".to_owned()));
    }
    let Some(ListenAddress(address)) = listen else { return problems };
    if token_file.is_none() && tls.client_ca_file.is_none() {
        let message = "anyone who reaches this address could change allocations: give control.tokenFile, \
                       control.tls.clientCaFile or both";
        problems.push(("control.listen", message.to_owned()));
    } else if !cert && !allow_unencrypted && !address.ip().is_loopback() {
        let message = format!(
            "the token would cross the network to {address} unencrypted: give control.tls, listen on 127.0.0.1 or \
             [::1], or set control.allowUnencrypted where the network is encrypted in another way"
        );
        problems.push(("control.listen", message));
    }
    if *address == read_only.0 && address.port() != 0 {
        let message = format!("{address} is also the address of \"listen\": choose another port");
        problems.push(("control.listen", message));
    }
    problems
}

/// What is odd but no error.
pub(super) fn warnings(control: &Control) -> Vec<String> {
    if control.listen.is_none() && *control != Control::default() {
        return vec!["control has no effect without control.listen".to_owned()];
    }
    Vec::new()
}
