//! Whose decisions the strategy `kubelet` repeats, where the configuration leaves it to the host.

use std::time::Duration;

use numaward_config::{
    Config,
    policy::{KubeletVersion, StrategyKind},
};
use numaward_kube::api;
use tokio::time::timeout;

/// How long the API server may take. The container runtime waits meanwhile.
const LIMIT: Duration = Duration::from_secs(3);

/// The configuration with the version that the Kubernetes node reports of its kubelet, where it matters and is not
/// configured. Where the node cannot be asked, it stays open, which is the newest.
pub async fn with_version(config: &Config) -> Config {
    let mut config = config.clone();
    let Some(node) = config.kubernetes.node_name.as_deref() else { return config };
    if config.strategy != StrategyKind::Kubelet || config.kubelet_version.is_some() {
        return config;
    }
    let asking = async {
        let client = api::connect(config.kubernetes.kubeconfig.as_deref()).await;
        api::kubelet_version(client.map_err(|error| error.to_string())?, node).await
    };
    let reported =
        timeout(LIMIT, asking).await.unwrap_or_else(|_| Err(format!("no answer within {LIMIT:?}")));
    let version = reported.and_then(|reported| {
        let version =
            KubeletVersion::from_node_version(&reported).ok_or_else(|| format!("{reported:?} is no version"))?;
        if KubeletVersion::is_newer_than_recorded(&reported) {
            let message = "the kubelet is newer than those with recorded decisions: strategy kubelet repeats an older version";
            tracing::warn!(reported, %version, "{message}");
        } else {
            tracing::info!(reported, %version, "decisions are those of this kubelet");
        }
        Ok(version)
    });
    match version {
        Ok(version) => config.kubelet_version = Some(version),
        Err(reason) => {
            let assumed = KubeletVersion::default();
            let message = "the version of this host's kubelet is not known: the newest is assumed, unless kubeletVersion is set";
            tracing::warn!(reason, %assumed, "{message}");
        }
    }
    config
}
