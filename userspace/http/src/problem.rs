//! Errors as problem details (RFC 9457).

use axum::{
    body::{Body, to_bytes},
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::Response,
};
use numaward_api::problem::{CONTENT_TYPE, Problem};

use crate::limits::{MAX_BODY_BYTES, TIME_LIMIT};

/// Status and detail of an error response, which [`layer`] turns into a problem detail.
pub type Failure = (StatusCode, String);

/// Turns every error response into a problem detail; its body becomes the field `detail`.
pub(crate) async fn layer(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let response = next.run(request).await;
    let status = response.status();
    if !status.is_client_error() && !status.is_server_error() {
        return response;
    }
    if response.headers().get(header::CONTENT_TYPE).is_some_and(|value| value == CONTENT_TYPE) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let body = to_bytes(body, 4096).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&body);
    let detail = match status {
        StatusCode::METHOD_NOT_ALLOWED => {
            format!("{path} does not take {method}; the header Allow says what it takes")
        }
        StatusCode::NOT_FOUND if text.is_empty() => {
            format!("there is nothing at {path}; /openapi.json says what there is")
        }
        // The compression layer sends this status with the body of the response that it could not encode.
        StatusCode::NOT_ACCEPTABLE if parts.headers.contains_key(header::VARY) => {
            "the header Accept-Encoding accepts neither gzip nor identity".to_owned()
        }
        StatusCode::PAYLOAD_TOO_LARGE => {
            format!("the body is larger than the {MAX_BODY_BYTES} bytes that are taken")
        }
        StatusCode::SERVICE_UNAVAILABLE if text.is_empty() => {
            format!("no answer within {} seconds", TIME_LIMIT.as_secs())
        }
        _ => text.into_owned(),
    };
    let title = status.canonical_reason().unwrap_or("Error").to_owned();
    let problem = Problem { title, status: status.as_u16(), detail, instance: path };
    let body = serde_json::to_vec(&problem).unwrap_or_default();
    parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    parts.headers.insert(header::CONTENT_LENGTH, body.len().into());
    Response::from_parts(parts, Body::from(body))
}
