//! Identities in a cluster: certificates, and the kubeconfigs that contain them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};

/// File name of the authority's certificate.
pub const CA: &str = "ca.pem";

/// A certificate authority that writes all certificates of a cluster into one folder.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    folder: PathBuf,
}

impl Authority {
    /// Creates an authority and writes its own certificate.
    pub fn new(folder: &Path) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "numaward-tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        fs::write(folder.join(CA), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { issuer: Issuer::new(params, key), folder: folder.to_owned() }
    }

    /// Writes `NAME.pem` and `NAME-key.pem` for a user of a group. A server certificate also has host names and addresses.
    pub fn sign(&self, name: &str, user: &str, group: Option<&str>, hosts: &[&str]) {
        let hosts: Vec<_> = hosts.iter().map(|&host| host.to_owned()).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        params.distinguished_name.push(DnType::CommonName, user);
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        let key = self.key(name);
        fs::write(self.folder.join(certificate(name)), params.signed_by(&key, &self.issuer).unwrap().pem())
            .unwrap();
    }

    /// Writes a key pair without a certificate: `NAME-key.pem`, and the public key `NAME.pem`.
    pub fn key_pair(&self, name: &str) {
        let public = self.key(name).public_key_pem();
        fs::write(self.folder.join(certificate(name)), public).unwrap();
    }

    fn key(&self, name: &str) -> KeyPair {
        let pair = KeyPair::generate().unwrap();
        fs::write(self.folder.join(key(name)), pair.serialize_pem()).unwrap();
        pair
    }
}

/// Returns the file name of a certificate.
pub fn certificate(name: &str) -> String {
    format!("{name}.pem")
}

/// Returns the file name of a key.
pub fn key(name: &str) -> String {
    format!("{name}-key.pem")
}

/// Returns a kubeconfig that refers to the certificate and key in `folder`.
pub fn kubeconfig(server: &str, folder: &str, name: &str) -> Value {
    let file = |name: &str| format!("{folder}/{name}");
    let user = json!({ "client-certificate": file(&certificate(name)), "client-key": file(&key(name)) });
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "test",
            "cluster": { "server": server, "certificate-authority": file(CA) },
        }],
        "users": [{ "name": name, "user": user }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": name } }],
        "current-context": "test",
    })
}
