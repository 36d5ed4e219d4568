//! A fake API server with the pods of a file.

use std::{fs, path::PathBuf, time::Duration};

use clap::Args;
use numaward_kube::api::fake::FakeApiServer;
use serde_json::Value;

use crate::grpc::CallError;

/// The interval of checks for new events.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(crate) struct ApiServer {
    /// File with a list of pods as JSON
    pods: PathBuf,
    /// Path at which a kubeconfig for the server is written
    #[arg(long)]
    kubeconfig: PathBuf,
}

/// Serves until it is killed, and prints each received event as a line of JSON.
pub(crate) async fn run(ApiServer { pods, kubeconfig }: &ApiServer) -> Result<(), CallError> {
    let unread = |error: &dyn std::fmt::Display| CallError::Manifest(format!("{}: {error}", pods.display()));
    let text = fs::read_to_string(pods).map_err(|error| unread(&error))?;
    let pods: Vec<Value> = serde_json::from_str(&text).map_err(|error| unread(&error))?;
    let failed = |source| CallError::Socket { socket: kubeconfig.clone(), source };
    let server = FakeApiServer::start().await.map_err(failed)?;
    for pod in pods {
        server.put_pod(pod);
    }
    fs::write(kubeconfig, server.kubeconfig()).map_err(failed)?;
    let mut shown = 0;
    loop {
        for event in server.events().iter().skip(shown) {
            println!("{event}");
            shown += 1;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
