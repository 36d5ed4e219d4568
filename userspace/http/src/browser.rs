//! Protection against requests that a foreign web page makes a browser send.
//!
//! # Problem
//! A web page from any server can make a browser send requests to addresses that only its host reaches. With DNS
//! rebinding, where the name of the page's server later resolves to a loopback address, the page can also read the
//! responses.
//!
//! # Algorithm
//! A request over the loopback must name, in the header Host, an IP address, `localhost`, this host, or a name from
//! the configuration; a page cannot set that header. A request that changes something must not come from another
//! origin (header Origin), and its body must be JSON, whatever credentials the browser adds.
//!
//! Sources: RFC 9110 section 7.2 (Host), RFC 6454 section 7 (Origin), Fetch Metadata (Sec-Fetch-Site).

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use axum::{
    body::HttpBody as _,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, StatusCode, Uri, header, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};

use crate::peer::Peer;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The names of this host that the header Host may have.
#[derive(Clone, Debug)]
pub struct HostNames(Arc<[String]>);

impl HostNames {
    /// Collects the host name, the names of loopback addresses in `/etc/hosts`, and `more`.
    pub fn new(more: &[String]) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let first = host.split('.').next().unwrap_or_default().to_owned();
        let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
        Self(more.iter().cloned().chain([host, first]).chain(loopback_names(&hosts)).collect())
    }

    fn has(&self, host: &str) -> bool {
        let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        host.parse::<Ipv4Addr>().is_ok()
            || bare.is_some_and(|host| host.parse::<Ipv6Addr>().is_ok())
            || host == "localhost"
            || host.ends_with(".localhost")
            || self.0.iter().any(|name| name.eq_ignore_ascii_case(&host))
    }
}

/// Returns the names of loopback addresses in a file in the format of hosts(5).
fn loopback_names(hosts: &str) -> impl Iterator<Item = String> {
    hosts.lines().flat_map(|line| {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let address = words.next().and_then(|word| word.parse().ok());
        let names = address.is_some_and(|address: IpAddr| address.is_loopback()).then_some(words);
        names.into_iter().flatten().map(str::to_owned)
    })
}

/// Returns the host and port that a request is for. `None` if there is no header Host (HTTP/1.0): no browser sends that.
fn authority(uri: &Uri, headers: &HeaderMap) -> Option<Result<Authority, ()>> {
    let named = headers.get(header::HOST).map(|host| Authority::try_from(host.as_bytes()).map_err(drop));
    uri.authority().cloned().map(Ok).or(named)
}

/// Refuses a request over the loopback if its header Host is not a name of this host.
pub(crate) async fn check_host(State(names): State<HostNames>, request: Request, next: Next) -> Response {
    let address = request.extensions().get::<Peer>().and_then(|peer| peer.address);
    let is_loopback = address.is_some_and(|address| address.ip().to_canonical().is_loopback());
    match authority(request.uri(), request.headers()) {
        Some(Ok(authority)) if is_loopback && !names.has(authority.host()) => {
            let detail = format!(
                "the header Host names {:?}, which is not a known name of this host: add it to listenNames if it is one",
                authority.host()
            );
            (StatusCode::MISDIRECTED_REQUEST, detail).into_response()
        }
        Some(Err(())) => (StatusCode::BAD_REQUEST, "the header Host is not a host and port").into_response(),
        _ => next.run(request).await,
    }
}

/// Refuses changes that a page of another origin makes a browser send. The body must be JSON, because a browser sends
/// other media types to another origin without a preflight request.
pub(crate) async fn check_change(request: Request, next: Next) -> Response {
    if request.method().is_safe() {
        return next.run(request).await;
    }
    if !is_same_origin(request.uri(), request.headers()) {
        return (StatusCode::FORBIDDEN, "changes are not taken from pages of another origin").into_response();
    }
    if request.body().size_hint().exact() != Some(0) && !is_json(request.headers()) {
        let detail = "changes are JSON: send the header Content-Type: application/json";
        return (StatusCode::UNSUPPORTED_MEDIA_TYPE, detail).into_response();
    }
    next.run(request).await
}

fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let media_type = value.and_then(|value| value.split(';').next()).map(str::trim);
    media_type.is_some_and(|media_type| media_type.eq_ignore_ascii_case("application/json"))
}

fn is_same_origin(uri: &Uri, headers: &HeaderMap) -> bool {
    let is_foreign = headers.get(SEC_FETCH_SITE).is_some_and(|site| site != "same-origin" && site != "none");
    let Some(origin) = headers.get(header::ORIGIN) else { return !is_foreign };
    let origin = Uri::try_from(origin.as_bytes()).ok().and_then(|origin| origin.into_parts().authority);
    let asked = authority(uri, headers).and_then(Result::ok);
    !is_foreign && origin.is_some() && origin == asked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_only_own_names_as_host() {
        let names = HostNames(["monitor.example".to_owned(), "host-1".to_owned()].into());
        for host in [
            "127.0.0.1",
            "10.0.0.7",
            "[::1]",
            "localhost",
            "LocalHost.",
            "a.localhost",
            "HOST-1",
            "monitor.example",
        ] {
            assert!(names.has(host), "{host}");
        }
        for host in [
            "evil.example",
            "host-1.evil.example",
            "localhost.evil.example",
            "::1",
            "127.0.0.1.evil.example",
            "",
        ] {
            assert!(!names.has(host), "{host}");
        }
        let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
        assert!(HostNames::new(&[]).has(&own));
    }

    #[test]
    fn reads_loopback_names_of_hosts_file() {
        let hosts = "127.0.0.1 localhost\n127.0.1.1\thost-1.example host-1 # own\n\n# 127.0.0.1 gone\n\
                     10.0.0.2 other.example\n::1 ip6-localhost\nnonsense evil.example\n";
        let names: Vec<_> = loopback_names(hosts).collect();
        assert_eq!(names, ["localhost", "host-1.example", "host-1", "ip6-localhost"]);
    }

    #[test]
    fn recognizes_json_media_type() {
        for (value, expected) in [
            ("application/json", true),
            ("Application/JSON ; charset=utf-8", true),
            ("text/plain", false),
            ("application/x-www-form-urlencoded", false),
            ("text/plain; application/json", false),
            ("", false),
        ] {
            let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, value.parse().unwrap())]);
            assert_eq!(is_json(&headers), expected, "{value:?}");
        }
        assert!(!is_json(&HeaderMap::new()));
    }

    #[test]
    fn refuses_change_from_other_origin() {
        let is_allowed = |pairs: &[(HeaderName, &str)]| {
            let pairs = pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap()));
            is_same_origin(&Uri::from_static("/api/v1/plan"), &pairs.collect())
        };
        let host = (header::HOST, "host:9561");
        assert!(is_allowed(std::slice::from_ref(&host)));
        assert!(is_allowed(&[host.clone(), (header::ORIGIN, "https://host:9561")]));
        assert!(is_allowed(&[host.clone(), (SEC_FETCH_SITE, "none")]));
        for origin in ["https://evil.example", "null", "https://host:9562", "https://host", "", "/"] {
            assert!(!is_allowed(&[host.clone(), (header::ORIGIN, origin)]), "{origin:?}");
        }
        for site in ["cross-site", "same-site", "anything"] {
            assert!(!is_allowed(&[host.clone(), (SEC_FETCH_SITE, site)]), "{site}");
            let same = (header::ORIGIN, "https://host:9561");
            assert!(!is_allowed(&[host.clone(), same, (SEC_FETCH_SITE, site)]), "{site}");
        }
        assert!(
            !is_allowed(&[(header::ORIGIN, "https://host:9561")]),
            "without a host there is nothing to compare"
        );
    }
}
