//! Errors as text.

use std::{error::Error, iter::successors};

/// Returns an error and its causes on one line. A cause that the text already contains is not repeated.
pub fn error_chain(error: &dyn Error) -> String {
    let causes = successors(error.source(), |&cause| cause.source()).map(ToString::to_string);
    causes.fold(
        error.to_string(),
        |text, cause| {
            if text.contains(&cause) { text } else { format!("{text}: {cause}") }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Layer(&'static str, #[source] Option<Box<Layer>>);

    #[test]
    fn causes_follow_once() {
        let inner = Layer("refused", None);
        let middle = Layer("cannot connect", Some(Box::new(inner)));
        assert_eq!(error_chain(&middle), "cannot connect: refused");
        let outer = Layer("no answer: cannot connect", Some(Box::new(middle)));
        assert_eq!(error_chain(&outer), "no answer: cannot connect: refused");
    }
}
