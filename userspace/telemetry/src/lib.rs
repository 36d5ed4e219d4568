//! What numaward says about itself to those who collect numbers: one snapshot, several sinks.
//!
//! [`metrics`] serves it in the text formats of Prometheus and OpenMetrics; [`otlp`] sends it, and traces, by OTLP;
//! [`alerts`] holds it against conditions, and posts those that fire to a webhook.

#![forbid(unsafe_code)]

pub mod alerts;
mod http_client;
pub mod metrics;
pub mod otlp;
