//! Input and output of `numaward claim-template`.

/// Manifests of pods that are to use resource claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestRequest {
    /// The text, in YAML.
    pub text: String,
    /// Name of the `DeviceClass` of the claims.
    pub device_class: String,
    /// Label of the pods that an admission policy changes; `None`: the manifests are changed.
    pub label: Option<(String, String)>,
}

/// Manifests with resource claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimManifests {
    /// The text, in YAML.
    pub text: String,
    /// Documents that are unchanged, and settings without effect.
    pub notes: Vec<String>,
}
