//! Text in columns of a terminal.

use std::borrow::Cow;

pub(crate) use numaward_api::safe_text::{clean, clean_json, clean_lines};
use serde_json::Value as Json;
use unicode_width::UnicodeWidthChar;

/// Escapes the texts of a value that is written as YAML, which has no escapes for some characters that a terminal interprets.
pub(crate) fn clean_value(value: Json) -> Json {
    let clean = |text: String| clean_lines(&text).into_owned();
    match value {
        Json::String(text) => Json::String(clean(text)),
        Json::Array(items) => items.into_iter().map(clean_value).collect(),
        Json::Object(entries) => {
            entries.into_iter().map(|(key, value)| (clean(key), clean_value(value))).collect()
        }
        other => other,
    }
}

/// Returns the beginning of a text that fits into so many cells, with `~` at the end if it was cut.
pub(crate) fn cut(text: &str, cells: usize) -> Cow<'_, str> {
    // The loop ends at the limit, so that a name of 10 KiB is not measured completely.
    let mut used = 0;
    let mut fits = 0;
    for (at, c) in text.char_indices() {
        let wide = c.width().unwrap_or(0);
        if used + wide > cells {
            return Cow::Owned(if cells == 0 { String::new() } else { format!("{}~", &text[..fits]) });
        }
        used += wide;
        // The character must fit together with the mark.
        if used < cells {
            fits = at + c.len_utf8();
        }
    }
    Cow::Borrowed(text)
}

#[cfg(test)]
mod tests {
    use unicode_width::UnicodeWidthStr;

    use super::*;

    #[test]
    fn yaml_values_are_escaped() {
        let value = serde_json::json!({ "a\u{202e}": ["\u{9b}31m", "a\r\nb", 1], "b": null });
        let safe = serde_json::json!({ "a\\u{202e}": ["\\x9b31m", "a\\r\nb", 1], "b": null });
        assert_eq!(clean_value(value), safe);
    }

    #[test]
    fn cuts_long_text_with_a_mark() {
        for (text, cells, fits) in [
            ("abc", 3, "abc"),
            ("abcd", 3, "ab~"),
            ("abc", 1, "~"),
            ("abc", 0, ""),
            ("", 0, ""),
            ("漢字", 4, "漢字"),
            ("漢字", 3, "漢~"),
            ("漢字", 2, "~"),
            ("e\u{301}x", 2, "e\u{301}x"),
        ] {
            assert_eq!(cut(text, cells), fits, "{text} in {cells}");
            assert!(cut(text, cells).width() <= cells);
        }
        assert_eq!(cut(&"x".repeat(10 << 10), 80).width(), 80);
    }
}
