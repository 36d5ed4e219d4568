//! Errors as problem details (RFC 9457).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The media type of problem details.
pub const CONTENT_TYPE: &str = "application/problem+json";

/// What went wrong with a request (RFC 9457). The type is always `about:blank`: the status says it all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The status as words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What was wrong with this request, and what to do.
    pub detail: String,
    /// The path that was asked for.
    pub instance: String,
}
