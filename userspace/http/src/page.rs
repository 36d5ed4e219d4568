//! The web page, at `/`, and the runbooks of the alerts, at `/runbooks/ALERT`, which are pages of the book as text.
//! All are static files that are part of the binary.
//!
//! The files of the page load nothing from other servers, and their Content Security Policy forbids it
//! (<https://www.w3.org/TR/CSP3/>).

use axum::{
    Router,
    extract::Path,
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};

use crate::problem::Failure;

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const INDEX: &str = include_str!("../page/index.html");

macro_rules! files {
    ($($name:literal: $content_type:expr),+ $(,)?) => {
        [$(($name, $content_type, include_str!(concat!("../page/", $name)))),+]
    };
}

/// The files that the page loads: name, media type, content.
const FILES: [(&str, &str, &str); 15] = files! {
    "chart.js": SCRIPT,
    "detail.js": SCRIPT,
    "events.js": SCRIPT,
    "format.js": SCRIPT,
    "icon.svg": "image/svg+xml",
    "machine.js": SCRIPT,
    "main.js": SCRIPT,
    "matrix.js": SCRIPT,
    "route.js": SCRIPT,
    "stacks.js": SCRIPT,
    "state.js": SCRIPT,
    "stream.js": SCRIPT,
    "style.css": "text/css; charset=utf-8",
    "verdict.js": SCRIPT,
    "workloads.js": SCRIPT,
};

/// The Content Security Policy of the page. It allows scripts to set styles of elements, but no inline styles or scripts in markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

macro_rules! runbooks {
    ($($alert:literal),+ $(,)?) => {
        [$(($alert, include_str!(concat!("../../../docs/runbooks/", $alert, ".md")))),+]
    };
}

/// The runbooks by alert. They are part of the binary, so that a link in an alert works without any other server.
const RUNBOOKS: [(&str, &str); 20] = runbooks![
    "NumawardAdmissionStorm",
    "NumawardBudgetExceeded",
    "NumawardCountersShared",
    "NumawardCountsDisagree",
    "NumawardCpusOffline",
    "NumawardDegraded",
    "NumawardDown",
    "NumawardDriftReturns",
    "NumawardHeadroomLow",
    "NumawardIntruders",
    "NumawardNumaMisses",
    "NumawardMemoryMisplaced",
    "NumawardMemoryMissing",
    "NumawardPinCausedOomKill",
    "NumawardPinningErrors",
    "NumawardProbeAbsent",
    "NumawardProbeEventsLost",
    "NumawardRuntimeDisconnected",
    "NumawardScrapeSlow",
    "NumawardUnpinnedStarts",
];

pub(crate) fn router() -> Router {
    let page = Router::new().route("/", get(index)).route("/page/{file}", get(file));
    page.route("/runbooks/{alert}", get(runbook))
}

async fn index() -> Response {
    page_response(HTML, INDEX)
}

async fn file(Path(name): Path<String>) -> Result<Response, Failure> {
    let found = FILES.iter().find(|(file, ..)| *file == name);
    let (_, content_type, content) =
        found.ok_or_else(|| (StatusCode::NOT_FOUND, format!("the page has no file {name:?}")))?;
    Ok(page_response(content_type, content))
}

fn page_response(content_type: &'static str, content: &'static str) -> Response {
    let head: [(HeaderName, &str); 5] = [
        (header::CONTENT_TYPE, content_type),
        // After an upgrade, the browser must not show the new daemon with the page of the old one.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (head, content).into_response()
}

async fn runbook(
    Path(alert): Path<String>,
) -> Result<([(HeaderName, &'static str); 2], &'static str), Failure> {
    let found = RUNBOOKS.iter().find(|(name, _)| *name == alert);
    let (_, text) = found.ok_or_else(|| (StatusCode::NOT_FOUND, format!("there is no alert {alert:?}")))?;
    // Browsers show plain text, but offer to save Markdown.
    let head =
        [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    Ok((head, *text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_alert_has_a_runbook() {
        const RULES: &str = include_str!("../../../dashboards/prometheus/rules.yaml");
        let alerts: Vec<&str> =
            RULES.lines().filter_map(|line| line.trim_start().strip_prefix("- alert: ")).collect();
        assert_eq!(alerts.len(), RUNBOOKS.len());
        for alert in alerts {
            let (_, text) = RUNBOOKS.iter().find(|(name, _)| *name == alert).expect(alert);
            assert!(text.starts_with(&format!("# {alert}\n")), "{alert}");
            // Each runbook has a section with the first checks.
            assert!(text.contains("**Look.**"), "{alert}");
            let link = format!("/runbooks/{alert}");
            assert!(RULES.contains(&link), "the rules do not link to {link}");
        }
    }

    #[tokio::test]
    async fn runbooks_are_served_as_text() {
        let (head, text) = runbook(Path("NumawardDown".to_owned())).await.ok().unwrap();
        assert!(head.contains(&(header::CONTENT_TYPE, "text/plain; charset=utf-8")));
        assert!(text.starts_with("# NumawardDown"));
        for name in ["", "README", "../limits", "numawarddown"] {
            let (status, detail) = runbook(Path(name.to_owned())).await.err().unwrap();
            assert_eq!(status, StatusCode::NOT_FOUND);
            assert_eq!(detail, format!("there is no alert {name:?}"));
        }
    }
}
