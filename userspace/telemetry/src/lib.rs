//! Export of the daemon's figures: one snapshot, several sinks.
//!
//! - [`metrics`] serves them in the text formats of Prometheus and OpenMetrics.
//! - [`otlp`] sends them, and traces, by OTLP.
//! - [`alerts`] evaluates conditions and posts alerts to a webhook.

#![forbid(unsafe_code)]

pub mod alerts;
mod http_client;
pub mod metrics;
pub mod otlp;
