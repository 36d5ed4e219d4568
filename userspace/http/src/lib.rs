//! The HTTP server: who may connect, what may be read of this host and of numaward itself, and the page for people.
//!
//! What is promised, and how that is changed, are routes that the daemon adds ([`router`], [`control_router`],
//! [`remote_router`]): this crate does not know who decides.
//!
//! Requests are bounded in size, in time and in number: a client can neither exhaust the daemon nor
//! keep it from stopping. Every error is a problem detail (RFC 9457).

#![forbid(unsafe_code)]

mod accept;
mod blocking;
mod browser;
mod control_socket;
mod credentials;
mod denials;
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
mod streaming_body;

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
