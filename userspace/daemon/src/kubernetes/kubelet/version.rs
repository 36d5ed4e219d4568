//! Version of the kubelet for the strategy `kubelet`, which repeats its decisions, if the configuration does not set one.

use std::time::Duration;

use numaward_config::{
    Config,
    policy::{KubeletVersion, StrategyKind},
};
use numaward_kube::api;
use numaward_observe::{DaemonPart, Observer};
use tokio::time::timeout;

/// The maximum time of the request to the API server, during which the container runtime waits.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// Returns the configuration with the version of the kubelet from the status of this Kubernetes node, if the strategy needs a version and
/// none is configured. On an error, the version stays unset: the strategy repeats the newest version then. An unknown version, and one
/// without recorded decisions, is reported as a degraded part.
pub async fn with_kubelet_version(config: &Config, observer: &Observer) -> Config {
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
        let version = KubeletVersion::from_node_version(&reported)
            .ok_or_else(|| format!("{reported:?} is not a version"))?;
        Ok((reported, version))
    });
    let noted = match version {
        Ok((reported, version)) => {
            config.kubelet_version = Some(version);
            if KubeletVersion::is_newer_than_recorded(&reported) {
                Err(format!(
                    "the kubelet {reported} is newer than any with recorded decisions: strategy kubelet repeats the decisions of {version}, and \
                     some may differ. Set strategy: native, or set kubeletVersion to accept this"
                ))
            } else {
                tracing::info!(reported, %version, "the strategy kubelet repeats this version");
                Ok(())
            }
        }
        Err(reason) => Err(format!(
            "the version of the kubelet is unknown: strategy kubelet repeats {}, the newest recorded one. Set kubeletVersion ({reason})",
            KubeletVersion::default()
        )),
    };
    observer.note(DaemonPart::KubeletVersion, noted);
    config
}
