//! A fake device plugin of the kubelet: its devices have names and nodes, but do not exist.
//!
//! Source: k8s.io/kubelet, `pkg/apis/deviceplugin/v1beta1`: the fields' numbers.

use std::{
    convert::Infallible,
    future::ready,
    path::PathBuf,
    pin::Pin,
    task::{Context, Poll},
};

use clap::Args;
use prost::Message;
use tokio_stream::{Stream, StreamExt as _, wrappers::UnixListenerStream};
use tonic::{
    Request, Response, Status,
    body::Body,
    server::{Grpc, NamedService, ServerStreamingService},
    transport::Server,
};
use tonic_prost::ProstCodec;
use tower::Service;

use crate::{
    grpc::{CallError, GrpcClient, MethodFuture, listen, method},
    messages::Empty,
};

const VERSION: &str = "v1beta1";
const REGISTRATION: &str = "v1beta1.Registration";
/// Name of the plugin's socket, which is beside the kubelet's.
const ENDPOINT: &str = "numaward-test.sock";

#[derive(Args)]
pub(crate) struct Plugin {
    /// Resource that pods request
    resource: String,
    /// A device and its node, `ID=NODE`; the first named are allocated first
    #[arg(required = true, value_parser = device)]
    devices: Vec<(String, i64)>,
    /// The kubelet's folder of device plugins
    #[arg(long, default_value = "/var/lib/kubelet/device-plugins")]
    folder: PathBuf,
}

fn device(text: &str) -> Result<(String, i64), String> {
    let wrong = || format!("{text:?} is not ID=NODE");
    let (id, node) = text.split_once('=').ok_or_else(wrong)?;
    Ok((id.to_owned(), node.parse().map_err(|_| wrong())?))
}

#[derive(Clone, PartialEq, Message)]
struct Register {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(string, tag = "2")]
    endpoint: String,
    #[prost(string, tag = "3")]
    resource_name: String,
    #[prost(message, optional, tag = "4")]
    options: Option<PluginOptions>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct PluginOptions {
    #[prost(bool, tag = "2")]
    prefers: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Devices {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Device>,
}

#[derive(Clone, PartialEq, Message)]
struct Device {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    health: String,
    #[prost(message, optional, tag = "3")]
    topology: Option<Topology>,
}

#[derive(Clone, PartialEq, Message)]
struct Topology {
    /// Each node is a message with the id as field 1, which has the same encoding as a number.
    #[prost(message, repeated, tag = "1")]
    nodes: Vec<i64>,
}

/// Lists of lists of ids, or of empty messages: the requests and responses of both calls.
#[derive(Clone, PartialEq, Message)]
struct Containers {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Ids>,
}

#[derive(Clone, PartialEq, Message)]
struct Ids {
    #[prost(string, repeated, tag = "1")]
    ids: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Preferences {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Preference>,
}

#[derive(Clone, PartialEq, Message)]
struct Preference {
    #[prost(string, repeated, tag = "1")]
    available: Vec<String>,
    #[prost(int32, tag = "3")]
    size: i32,
}

/// Registers and serves until it is killed.
pub(crate) async fn run(plugin: &Plugin) -> Result<(), CallError> {
    let socket = plugin.folder.join(ENDPOINT);
    let listener = listen(socket)?;
    let devices = FakeDevices(plugin.devices.clone());
    let incoming = UnixListenerStream::new(listener);
    let serving = tokio::spawn(Server::builder().add_service(devices).serve_with_incoming(incoming));
    let mut kubelet = GrpcClient::connect(&plugin.folder.join("kubelet.sock")).await?;
    let register = Register {
        version: VERSION.to_owned(),
        endpoint: ENDPOINT.to_owned(),
        resource_name: plugin.resource.clone(),
        options: Some(PluginOptions { prefers: true }),
    };
    let _: Empty = kubelet.call_of(REGISTRATION, "Register", register).await?;
    match serving.await {
        Ok(ended) => Ok(ended?),
        Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
    }
}

/// The devices with their nodes.
#[derive(Clone)]
struct FakeDevices(Vec<(String, i64)>);

impl NamedService for FakeDevices {
    const NAME: &'static str = "v1beta1.DevicePlugin";
}

impl ServerStreamingService<Empty> for FakeDevices {
    type Response = Devices;
    type ResponseStream = Pin<Box<dyn Stream<Item = Result<Devices, Status>> + Send>>;
    type Future = MethodFuture<Self::ResponseStream>;

    fn call(&mut self, _: Request<Empty>) -> Self::Future {
        let devices = self.0.iter().map(|(id, node)| Device {
            id: id.clone(),
            health: "Healthy".to_owned(),
            topology: Some(Topology { nodes: vec![*node] }),
        });
        let all = tokio_stream::once(Ok(Devices { devices: devices.collect() }));
        // The devices never change. The end of the stream would mean that the plugin has ended.
        ready(Ok(Response::new(Box::pin(all.chain(tokio_stream::pending())))))
    }
}

impl FakeDevices {
    /// Returns the first of the available devices.
    fn prefer(&self, preferences: Preferences) -> Containers {
        let containers = preferences.containers.into_iter().map(|of| {
            let known = self.0.iter().map(|(id, _)| id).filter(|id| of.available.contains(id));
            Ids { ids: known.take(usize::try_from(of.size).unwrap_or(0)).cloned().collect() }
        });
        Containers { containers: containers.collect() }
    }
}

impl Service<http::Request<Body>> for FakeDevices {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let plugged = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/v1beta1.DevicePlugin/GetDevicePluginOptions" => {
                    let options = method(|_: Empty| PluginOptions { prefers: true });
                    Grpc::new(ProstCodec::default()).unary(options, request).await
                }
                "/v1beta1.DevicePlugin/ListAndWatch" => {
                    Grpc::new(ProstCodec::default()).server_streaming(plugged, request).await
                }
                "/v1beta1.DevicePlugin/GetPreferredAllocation" => {
                    let prefer = method(|preferences| plugged.prefer(preferences));
                    Grpc::new(ProstCodec::default()).unary(prefer, request).await
                }
                "/v1beta1.DevicePlugin/Allocate" => {
                    let nothing = |asked: Containers| Containers {
                        containers: vec![Ids::default(); asked.containers.len()],
                    };
                    Grpc::new(ProstCodec::default()).unary(method(nothing), request).await
                }
                path => Status::unimplemented(path).into_http(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefers_first_named_devices() {
        let plugged = FakeDevices(["b", "a", "c"].map(|id| (id.to_owned(), 0)).into());
        let asked = |size| Preference { available: vec!["a".to_owned(), "c".to_owned()], size };
        let given = plugged.prefer(Preferences { containers: vec![asked(1), asked(2), asked(-1)] });
        let given: Vec<_> = given.containers.into_iter().map(|of| of.ids).collect();
        assert_eq!(given, [vec!["a"], vec!["a", "c"], vec![]]);
    }

    /// Encodes a node as a message with its id as field 1.
    #[test]
    fn device_has_published_field_numbers() {
        let topology = Some(Topology { nodes: vec![1] });
        let device = Device { id: "d".to_owned(), health: "h".to_owned(), topology };
        assert_eq!(device.encode_to_vec(), b"\x0a\x01d\x12\x01h\x1a\x04\x0a\x02\x08\x01");
    }
}
