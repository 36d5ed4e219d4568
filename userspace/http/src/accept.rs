//! Which of the media types on offer a client wants (RFC 9110, section 12.5.1).

use axum::http::{HeaderMap, header};

/// A media type on offer.
#[derive(Debug)]
pub(crate) struct Offer<T> {
    /// `TYPE/SUBTYPE`.
    pub(crate) media_type: &'static str,
    /// The value of the parameter `version`; a client that asks for another version does not get this.
    pub(crate) version: Option<&'static str>,
    pub(crate) gives: T,
}

/// The offer that the client prefers; `None` if it takes none. Where it likes several equally, the one
/// that it names more exactly, then the earlier one. Without the header, the first.
pub(crate) fn choose<'a, T>(headers: &HeaderMap, offers: &'a [Offer<T>]) -> Option<&'a T> {
    if !headers.contains_key(header::ACCEPT) {
        return offers.first().map(|offer| &offer.gives);
    }
    // What is no text names no media type, and so accepts none.
    let values = headers.get_all(header::ACCEPT).iter().map(|value| value.to_str().unwrap_or(""));
    let ranges: Vec<Range> = values.flat_map(|value| value.split(',')).filter_map(Range::parse).collect();
    let liked = offers.iter().filter_map(|offer| {
        // The most exact range that matches decides for an offer.
        let matching = ranges.iter().filter_map(|range| Some((range.matches(offer)?, range.quality)));
        let (exactness, quality) = matching.max()?;
        (quality > 0).then_some(((quality, exactness), &offer.gives))
    });
    // Of equals, the last is the maximum.
    liked.rev().max_by_key(|(rank, _)| *rank).map(|(_, gives)| gives)
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
                // A quality that is none makes the range unusable.
                Some(("q", value)) => range.quality = parse_quality(value)?,
                // `charset`, `escaping`: what is served is UTF-8 with names that need no escaping.
                _ => {}
            }
        }
        Some(range)
    }

    /// How exactly the range names the offer; `None` if it does not.
    fn matches<T>(&self, offer: &Offer<T>) -> Option<u8> {
        let exactness = match self.media_type.split_once('/')? {
            ("*", "*") => 0,
            (media_type, "*") if offer.media_type.split('/').next() == Some(media_type) => 1,
            _ if self.media_type == offer.media_type => 2,
            _ => return None,
        };
        match self.version.as_deref() {
            None => Some(exactness),
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
        Offer { media_type: "text/plain", version: Some("0.0.4"), gives: "text" },
        Offer { media_type: "application/openmetrics-text", version: Some("1.0.0"), gives: "openmetrics" },
    ];

    #[test]
    fn the_client_decides() {
        for (accept, expected) in [
            ("*/*", Some("text")),
            ("text/plain", Some("text")),
            ("text/*", Some("text")),
            ("application/openmetrics-text", Some("openmetrics")),
            ("application/openmetrics-text; version=1.0.0; charset=utf-8", Some("openmetrics")),
            ("application/openmetrics-text;version=2.0.0", None),
            ("application/openmetrics-text;version=2.0.0, */*;q=0.1", Some("text")),
            // What Prometheus 3 sends.
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
    fn several_headers_count_as_one_list() {
        let mut headers = HeaderMap::new();
        headers.append(header::ACCEPT, "text/plain;q=0.1".parse().unwrap());
        headers.append(header::ACCEPT, "application/openmetrics-text".parse().unwrap());
        assert_eq!(choose(&headers, &OFFERS).copied(), Some("openmetrics"));
    }
}
