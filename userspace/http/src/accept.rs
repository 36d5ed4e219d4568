//! Content negotiation by the header Accept (RFC 9110, section 12.5.1).

use axum::http::{HeaderMap, header};

/// A media type that a resource offers.
#[derive(Debug)]
pub(crate) struct Offer<T> {
    /// `TYPE/SUBTYPE`.
    pub(crate) media_type: &'static str,
    /// The value of the parameter `version`. A client that requests another version does not get this offer.
    pub(crate) version: Option<&'static str>,
    pub(crate) value: T,
}

/// Returns the offer that the client prefers; `None` if it accepts none. Of several with the same quality, the one
/// with the more specific range wins, then the earlier one. Without the header, the first offer.
pub(crate) fn choose<'a, T>(headers: &HeaderMap, offers: &'a [Offer<T>]) -> Option<&'a T> {
    if !headers.contains_key(header::ACCEPT) {
        return offers.first().map(|offer| &offer.value);
    }
    // A value that is not text matches no media type.
    let values = headers.get_all(header::ACCEPT).iter().map(|value| value.to_str().unwrap_or(""));
    let ranges: Vec<Range> = values.flat_map(|value| value.split(',')).filter_map(Range::parse).collect();
    let accepted = offers.iter().filter_map(|offer| {
        // The most specific range that matches an offer determines its quality.
        let matching = ranges.iter().filter_map(|range| Some((range.matches(offer)?, range.quality)));
        let (specificity, quality) = matching.max()?;
        (quality > 0).then_some(((quality, specificity), &offer.value))
    });
    // `max_by_key` returns the last of several maxima.
    accepted.rev().max_by_key(|(rank, _)| *rank).map(|(_, value)| value)
}

struct Range {
    /// `TYPE/SUBTYPE`, `TYPE/*` or `*/*`.
    media_type: String,
    version: Option<String>,
    /// In thousandths: quality values have at most three decimals.
    quality: u16,
}

impl Range {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(';').map(|part| part.trim().to_ascii_lowercase());
        let mut range = Self { media_type: parts.next()?, version: None, quality: 1000 };
        for part in parts {
            match part.split_once('=') {
                Some(("version", value)) => range.version = Some(value.trim_matches('"').to_owned()),
                // A range with an invalid quality is ignored.
                Some(("q", value)) => range.quality = parse_quality(value)?,
                // `charset`, `escaping`: responses are UTF-8, with names that need no escaping.
                _ => {}
            }
        }
        Some(range)
    }

    /// Returns the specificity with which the range matches the offer; `None` if it does not match.
    fn matches<T>(&self, offer: &Offer<T>) -> Option<u8> {
        let specificity = match self.media_type.split_once('/')? {
            ("*", "*") => 0,
            (media_type, "*") if offer.media_type.split('/').next() == Some(media_type) => 1,
            _ if self.media_type == offer.media_type => 2,
            _ => return None,
        };
        match self.version.as_deref() {
            None => Some(specificity),
            version if version == offer.version => Some(3),
            Some(_) => None,
        }
    }
}

fn parse_quality(text: &str) -> Option<u16> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    if !matches!(whole, "0" | "1") || decimals.len() > 3 {
        return None;
    }
    let quality: u16 = format!("{whole}{decimals:0<3}").parse().ok()?;
    (quality <= 1000).then_some(quality)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFERS: [Offer<&str>; 2] = [
        Offer { media_type: "text/plain", version: Some("0.0.4"), value: "text" },
        Offer { media_type: "application/openmetrics-text", version: Some("1.0.0"), value: "openmetrics" },
    ];

    #[test]
    fn chooses_preferred_offer() {
        for (accept, expected) in [
            ("*/*", Some("text")),
            ("text/plain", Some("text")),
            ("text/*", Some("text")),
            ("application/openmetrics-text", Some("openmetrics")),
            ("application/openmetrics-text; version=1.0.0; charset=utf-8", Some("openmetrics")),
            ("application/openmetrics-text;version=2.0.0", None),
            ("application/openmetrics-text;version=2.0.0, */*;q=0.1", Some("text")),
            // The header of Prometheus 3.
            (
                "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                 application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,\
                 text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
                Some("openmetrics"),
            ),
            ("application/openmetrics-text;q=0.3, text/plain;q=0.30001", Some("openmetrics")),
            ("application/openmetrics-text;q=0.3, text/plain;q=0.4", Some("text")),
            ("application/openmetrics-text, */*", Some("openmetrics")),
            ("application/openmetrics-text;q=0, */*", Some("text")),
            ("text/plain;q=0, */*;q=0.5", Some("openmetrics")),
            ("TEXT/PLAIN; Version=\"0.0.4\"", Some("text")),
            ("text/html,application/xhtml+xml,*/*;q=0.8", Some("text")),
            ("application/json", None),
            ("*/*;q=0", None),
            ("", None),
            ("nonsense", None),
            ("text/plain;q=2", None),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT, accept.parse().unwrap())]);
            assert_eq!(choose(&headers, &OFFERS).copied(), expected, "{accept:?}");
        }
        assert_eq!(choose(&HeaderMap::new(), &OFFERS).copied(), Some("text"));
    }

    #[test]
    fn joins_repeated_headers() {
        let mut headers = HeaderMap::new();
        headers.append(header::ACCEPT, "text/plain;q=0.1".parse().unwrap());
        headers.append(header::ACCEPT, "application/openmetrics-text".parse().unwrap());
        assert_eq!(choose(&headers, &OFFERS).copied(), Some("openmetrics"));
    }
}
