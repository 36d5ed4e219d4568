//! The token of a service account, or of a kubeconfig's `tokenFile`, that goes with each request.
//!
//! The kubelet replaces it before it expires, so it is read again. A file that was made by hand ends with a newline,
//! which no header may hold: as in Kubernetes' own clients, what is around the token does not belong to it.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use kube::config::AuthInfo;

/// A token is read again after this time.
const AGE: Duration = Duration::from_mins(1);

/// A token cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the token of this client, {path}: {problem}", path = .path.display())]
pub struct TokenError {
    path: PathBuf,
    problem: String,
}

/// A file with a token.
#[derive(Debug)]
pub(super) struct TokenFile {
    path: PathBuf,
    held: Mutex<(HeaderValue, Instant)>,
}

impl TokenFile {
    /// Takes the token's file over, if it is by this that we say who we are.
    pub(super) fn take(from: &mut AuthInfo) -> Result<Option<Self>, TokenError> {
        let has_other = from.auth_provider.is_some()
            || from.token.is_some()
            || (from.username.is_some() && from.password.is_some());
        let Some(path) = from.token_file.take_if(|_| !has_other).map(PathBuf::from) else { return Ok(None) };
        // It comes after the file.
        from.exec = None;
        let held = Mutex::new((read(&path)?, Instant::now()));
        Ok(Some(Self { path, held }))
    }

    /// Says who we are. While the file cannot be read, what was read last counts.
    pub(super) fn add_to(&self, headers: &mut HeaderMap, now: Instant) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(held.1) >= AGE {
            held.1 = now;
            match read(&self.path) {
                Ok(token) => held.0 = token,
                Err(error) => tracing::warn!(%error, "the token that was read before is used"),
            }
        }
        headers.insert(AUTHORIZATION, held.0.clone());
    }
}

fn read(path: &Path) -> Result<HeaderValue, TokenError> {
    let fail = |problem: String| TokenError { path: path.to_owned(), problem };
    let text = fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
    let token = text.trim();
    if token.is_empty() {
        return Err(fail("it is empty".to_owned()));
    }
    let header = HeaderValue::try_from(format!("Bearer {token}"));
    let mut header = header
        .map_err(|_| fail("it holds more than one token: a line end or a control character".to_owned()))?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auth(path: &Path) -> AuthInfo {
        AuthInfo { token_file: Some(path.display().to_string()), ..AuthInfo::default() }
    }

    fn sent(token: &TokenFile, now: Instant) -> HeaderValue {
        let mut headers = HeaderMap::new();
        token.add_to(&mut headers, now);
        headers[AUTHORIZATION].clone()
    }

    #[test]
    fn what_is_around_a_token_does_not_belong_to_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for text in ["abc.def", "abc.def\n", "  abc.def\r\n\n"] {
            fs::write(file.path(), text).unwrap();
            let token = TokenFile::take(&mut auth(file.path())).unwrap().unwrap();
            assert_eq!(sent(&token, Instant::now()), "Bearer abc.def", "{text:?}");
        }
        for (text, words) in
            [(b"\n".as_slice(), "it is empty"), (b"abc\ndef", "more than one token"), (b"\xff\xfe", "UTF-8")]
        {
            fs::write(file.path(), text).unwrap();
            let error = TokenFile::take(&mut auth(file.path())).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(file.path().to_str().unwrap()), "{error}");
        }
        let error = TokenFile::take(&mut auth(Path::new("/nowhere/token"))).unwrap_err().to_string();
        assert!(error.contains("/nowhere/token: No such file"), "{error}");
    }

    #[test]
    fn a_token_is_read_again_and_not_lost() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "first").unwrap();
        let token = TokenFile::take(&mut auth(file.path())).unwrap().unwrap();
        let start = Instant::now();
        fs::write(file.path(), "second\n").unwrap();
        assert_eq!(sent(&token, start), "Bearer first");
        assert_eq!(sent(&token, start + AGE), "Bearer second");
        fs::write(file.path(), "").unwrap();
        assert_eq!(sent(&token, start + 2 * AGE), "Bearer second");
        fs::write(file.path(), "third").unwrap();
        assert_eq!(sent(&token, start + 3 * AGE), "Bearer third");
    }

    #[test]
    fn other_ways_to_say_who_we_are_come_first() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "token").unwrap();
        let mut inline = AuthInfo { token: Some("inline".to_owned().into()), ..auth(file.path()) };
        assert!(TokenFile::take(&mut inline).unwrap().is_none());
        assert!(TokenFile::take(&mut AuthInfo::default()).unwrap().is_none());
        let mut file = auth(file.path());
        assert!(TokenFile::take(&mut file).unwrap().is_some());
        assert_eq!(file.token_file, None, "it is not added a second time");
    }
}
