//! A fake DRA driver of the kubelet: it prepares resource claims with devices that do not exist.
//!
//! The scheduler allocates the devices by a `ResourceSlice`, which the test creates. The driver does not read the claims: the test names
//! the device of each.

use std::{collections::BTreeMap, fs, path::PathBuf, sync::Arc};

use clap::Args;
use futures_util::{FutureExt as _, future::BoxFuture};
use numaward_kube::dra::{
    health::{DeviceState, HealthReporter, HealthSource, INTERVAL},
    messages::{ClaimId, Device},
    plugin::{ClaimHandler, Plugin},
};
use tokio_util::sync::CancellationToken;

use crate::grpc::{CallError, listen};

#[derive(Args)]
pub(crate) struct DraDriver {
    /// Name of the driver in slices and device classes
    name: String,
    /// A claim and its device, `CLAIM=DEVICE`
    #[arg(required = true, value_parser = claim)]
    claims: Vec<(String, String)>,
    /// Name of the pool with the devices
    #[arg(long)]
    pool: String,
    /// The kubelet's folder
    #[arg(long, default_value = "/var/lib/kubelet")]
    folder: PathBuf,
}

fn claim(text: &str) -> Result<(String, String), String> {
    let (claim, device) = text.split_once('=').ok_or_else(|| format!("{text:?} is not CLAIM=DEVICE"))?;
    Ok((claim.to_owned(), device.to_owned()))
}

/// Registers and serves until it is killed.
pub(crate) async fn run(driver: &DraDriver) -> Result<(), CallError> {
    let home = driver.folder.join("plugins").join(&driver.name);
    let endpoint = home.join("dra.sock");
    let registration = driver.folder.join("plugins_registry").join(format!("{}-reg.sock", driver.name));
    fs::create_dir_all(&home).map_err(|source| CallError::Socket { socket: home, source })?;
    let devices = driver.claims.iter().cloned().collect();
    let devices = Arc::new(FakeDevices { pool: driver.pool.clone(), devices });
    let plugin = Plugin {
        driver: driver.name.clone(),
        endpoint: endpoint.display().to_string(),
        handler: devices.clone(),
        health: HealthReporter { source: devices, pool: driver.pool.clone(), interval: INTERVAL },
        report: Arc::new(|registered| match registered {
            Ok(()) => println!("registered: true"),
            Err(error) => println!("registered: false {error}"),
        }),
    };
    // The kubelet connects as soon as it sees the second socket.
    let claims = listen(endpoint)?;
    Ok(plugin.serve(listen(registration)?, claims, CancellationToken::new()).await?)
}

/// Devices by the name of their claim.
struct FakeDevices {
    pool: String,
    devices: BTreeMap<String, String>,
}

impl HealthSource for FakeDevices {
    fn states(&self) -> BoxFuture<'_, Vec<DeviceState>> {
        let state = |device: &String| DeviceState { device: device.clone(), problem: None };
        let states = self.devices.values().map(state).collect();
        async { states }.boxed()
    }
}

impl ClaimHandler for FakeDevices {
    fn prepare<'a>(
        &'a self,
        ClaimId { name, .. }: &'a ClaimId,
    ) -> BoxFuture<'a, Result<Vec<Device>, String>> {
        async move {
            println!("prepare {name}");
            let device_name = self.devices.get(name).ok_or_else(|| format!("{name} has no device"))?.clone();
            Ok(vec![Device { pool_name: self.pool.clone(), device_name, ..Device::default() }])
        }
        .boxed()
    }

    fn unprepare<'a>(&'a self, _: &'a ClaimId) -> BoxFuture<'a, Result<(), String>> {
        async { Ok(()) }.boxed()
    }
}

#[cfg(test)]
mod tests {
    use numaward_kube::dra::fake::{FakeKubelet, Version};
    use tokio::time::{Duration, sleep};

    use super::*;

    #[tokio::test]
    async fn kubelet_can_register_and_prepare() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("plugins_registry")).unwrap();
        let driver = DraDriver {
            name: "d.example".to_owned(),
            claims: vec![claim("mine=near").unwrap()],
            pool: "n1".to_owned(),
            folder: folder.path().to_owned(),
        };
        let registration = folder.path().join("plugins_registry/d.example-reg.sock");
        let serving = tokio::spawn(async move { run(&driver).await });
        while !registration.exists() {
            assert!(!serving.is_finished(), "{:?}", serving.await);
            sleep(Duration::from_millis(10)).await;
        }
        let kubelet = FakeKubelet::connect(&registration).await.unwrap();
        let info = kubelet.register("").await.unwrap();
        assert_eq!((info.kind.as_str(), info.name.as_str()), ("DRAPlugin", "d.example"));
        let kubelet = FakeKubelet::connect(info.endpoint.as_ref()).await.unwrap();
        let claims = ["mine", "other"].map(|name| ClaimId {
            namespace: "default".to_owned(),
            uid: format!("uid-{name}"),
            name: name.to_owned(),
        });
        let prepared = kubelet.prepare(Version::V1, claims.to_vec()).await.unwrap().claims;
        let device =
            Device { pool_name: "n1".to_owned(), device_name: "near".to_owned(), ..Device::default() };
        assert_eq!(prepared["uid-mine"].devices, [device]);
        assert_eq!(prepared["uid-other"].error, "other has no device");
        let unprepared = kubelet.unprepare(Version::V1, claims.to_vec()).await.unwrap().claims;
        assert!(unprepared.keys().eq(["uid-mine", "uid-other"]));
        serving.abort();
    }
}
