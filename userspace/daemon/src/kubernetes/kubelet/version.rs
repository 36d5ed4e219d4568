//! Version of the kubelet for the strategy `kubelet`, which repeats its decisions, if the configuration does not set one.

use std::time::Duration;

use numaward_config::{
    Config,
    policy::{KubeletVersion, StrategyKind},
};
use numaward_kube::api;
use tokio::time::timeout;

/// The maximum time of the request to the API server, during which the container runtime waits.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns the configuration with the version of the kubelet from the status of this Kubernetes node, if the strategy needs a version and
/// none is configured. On an error, the version stays unset: the strategy repeats the newest version then.
pub async fn with_kubelet_version(config: &Config) -> Config {
    let mut config = config.clone();
    let Some(node) = config.kubernetes.node_name.as_deref() else { return config };
    if config.strategy != StrategyKind::Kubelet || config.kubelet_version.is_some() {
        return config;
    }
    let asking = async {
        let client = api::connect(config.kubernetes.kubeconfig.as_deref()).await;
        api::kubelet_version(client.map_err(|error| error.to_string())?, node).await
    };
    let reported = timeout(REQUEST_TIMEOUT, asking)
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {REQUEST_TIMEOUT:?}")));
    let version = reported.and_then(|reported| {
        let version =
            KubeletVersion::from_node_version(&reported).ok_or_else(|| format!("{reported:?} is not a version"))?;
        if KubeletVersion::is_newer_than_recorded(&reported) {
            let message = "the kubelet is newer than those with recorded decisions: strategy kubelet repeats an older version";
            tracing::warn!(reported, %version, "{message}");
        } else {
            tracing::info!(reported, %version, "the strategy kubelet repeats this version");
        }
        Ok(version)
    });
    match version {
        Ok(version) => config.kubelet_version = Some(version),
        Err(reason) => {
            let assumed = KubeletVersion::default();
            let message = "the version of the kubelet is unknown: the strategy kubelet repeats the newest version; set kubeletVersion to change this";
            tracing::warn!(reason, %assumed, "{message}");
        }
    }
    config
}
