//! The page for people, at `/`: static files that are part of the binary.
//!
//! They need nothing from elsewhere, and the policy that goes with them forbids it
//! (Content Security Policy, <https://www.w3.org/TR/CSP3/>).

use axum::{
    Router,
    extract::Path,
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};

use super::problem::Failure;

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const INDEX: &str = include_str!("../../page/index.html");

macro_rules! files {
    ($($name:literal: $content_type:expr),+ $(,)?) => {
        [$(($name, $content_type, include_str!(concat!("../../page/", $name)))),+]
    };
}

/// The files that the page refers to: name, media type, content.
const FILES: [(&str, &str, &str); 11] = files! {
    "detail.js": SCRIPT,
    "events.js": SCRIPT,
    "format.js": SCRIPT,
    "icon.svg": "image/svg+xml",
    "machine.js": SCRIPT,
    "main.js": SCRIPT,
    "matrix.js": SCRIPT,
    "state.js": SCRIPT,
    "stream.js": SCRIPT,
    "style.css": "text/css; charset=utf-8",
    "workloads.js": SCRIPT,
};

/// Styles of single elements are set by script, which this allows; markup with styles or scripts in it it does not.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(super) fn router() -> Router {
    Router::new().route("/", get(index)).route("/page/{file}", get(file))
}

async fn index() -> Response {
    served(HTML, INDEX)
}

async fn file(Path(name): Path<String>) -> Result<Response, Failure> {
    let found = FILES.iter().find(|(file, ..)| *file == name);
    let (_, content_type, content) =
        found.ok_or_else(|| Failure(StatusCode::NOT_FOUND, format!("the page has no file {name:?}")))?;
    Ok(served(content_type, content))
}

fn served(content_type: &'static str, content: &'static str) -> Response {
    let head: [(HeaderName, &str); 5] = [
        (header::CONTENT_TYPE, content_type),
        // A daemon that was replaced must not be shown by the page of the one before.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (head, content).into_response()
}
