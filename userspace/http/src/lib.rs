//! The HTTP server of the daemon: access control, the read-only API of this host and of numaward itself, and the web page.
//!
//! The routes that report and change guarantees are added by the daemon ([`router`], [`control_router`], [`remote_router`]).
//!
//! Requests are limited in size, time and number, so a client can neither exhaust the daemon nor delay its stop.
//! Every error is a problem detail (RFC 9457).

#![forbid(unsafe_code)]

mod accept;
mod blocking;
mod browser;
mod control_socket;
mod credentials;
mod denials;
mod joined_reads;
mod limits;
mod local_users;
mod paced;
mod page;
mod peer;
mod peers;
mod problem;
mod remote;
mod router;
mod routes;
mod samples;
mod scrapes;
mod server;
mod shared_reads;
mod socket_diagnosis;
mod streaming_body;
mod streams;

pub use self::{
    blocking::{BlockingPool, low_priority_runtime},
    browser::HostNames,
    control_socket::ControlListener,
    credentials::CredentialError,
    limits::{MAX_BODY_BYTES, TIME_LIMIT},
    peer::Peer,
    problem::Failure,
    remote::{Gate, RemoteListener},
    router::{control_router, remote_router, router},
    routes::{App, open_api},
    server::{Accept, IncomingConnection, ListenError, OpenedConnection, Stream, listen, serve},
};
