//! The runbooks of the alerts, at `/runbooks/ALERT`: an alert leads to a page without anything else having to be there.
//!
//! They are the pages of the book, as text.

use axum::{
    Router,
    extract::Path,
    http::{HeaderName, StatusCode, header},
    routing::get,
};

use super::problem::Failure;

macro_rules! runbooks {
    ($($alert:literal),+ $(,)?) => {
        [$(($alert, include_str!(concat!("../../../../docs/runbooks/", $alert, ".md")))),+]
    };
}

/// By alert.
const RUNBOOKS: [(&str, &str); 11] = runbooks![
    "NumawardAdmissionStorm",
    "NumawardDown",
    "NumawardDriftReturns",
    "NumawardHeadroomLow",
    "NumawardIntruders",
    "NumawardNumaMisses",
    "NumawardPinCausedOomKill",
    "NumawardPinningErrors",
    "NumawardProbeAbsent",
    "NumawardScrapeSlow",
    "NumawardUnpinnedStarts",
];

pub(super) fn router() -> Router {
    Router::new().route("/runbooks/{alert}", get(runbook))
}

async fn runbook(
    Path(alert): Path<String>,
) -> Result<([(HeaderName, &'static str); 2], &'static str), Failure> {
    let found = RUNBOOKS.iter().find(|(name, _)| *name == alert);
    let (_, text) =
        found.ok_or_else(|| Failure(StatusCode::NOT_FOUND, format!("there is no alert {alert:?}")))?;
    // Browsers show this; what says that it is Markdown they offer to save.
    let head =
        [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    Ok((head, *text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alert_has_one() {
        const RULES: &str = include_str!("../../../../dashboards/prometheus/rules.yaml");
        let alerts: Vec<&str> =
            RULES.lines().filter_map(|line| line.trim_start().strip_prefix("- alert: ")).collect();
        assert_eq!(alerts.len(), RUNBOOKS.len());
        for alert in alerts {
            let (_, text) = RUNBOOKS.iter().find(|(name, _)| *name == alert).expect(alert);
            assert!(text.starts_with(&format!("# {alert}\n")), "{alert}");
            // Each says where to look.
            assert!(text.contains("**Look.**"), "{alert}");
            let link = format!("/runbooks/{alert}");
            assert!(RULES.contains(&link), "the rules do not link to {link}");
        }
    }

    #[tokio::test]
    async fn it_is_served_as_text_and_nothing_else_is() {
        let (head, text) = runbook(Path("NumawardDown".to_owned())).await.ok().unwrap();
        assert!(head.contains(&(header::CONTENT_TYPE, "text/plain; charset=utf-8")));
        assert!(text.starts_with("# NumawardDown"));
        for name in ["", "README", "../limits", "numawarddown"] {
            let Failure(status, detail) = runbook(Path(name.to_owned())).await.err().unwrap();
            assert_eq!(status, StatusCode::NOT_FOUND);
            assert_eq!(detail, format!("there is no alert {name:?}"));
        }
    }
}
