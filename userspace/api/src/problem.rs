//! Errors as problem details (RFC 9457).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The media type of problem details.
pub const CONTENT_TYPE: &str = "application/problem+json";

/// The problem of a request (RFC 9457). The type is always `about:blank`, because the status is sufficient.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The HTTP status as text.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// The problem of this request, and what to do.
    pub detail: String,
    /// The path of the request.
    pub instance: String,
}
