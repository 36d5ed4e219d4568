//! Untrusted text in logs, on terminals and in JSON for people.
//!
//! # Problem
//! Other programs choose the names of cgroups, units, processes and files. A name may contain an escape sequence that moves the
//! cursor, changes the title or hides the following text, a line break that begins a forged line of a log, or characters that change
//! the direction of text.
//!
//! # Algorithm
//! Control characters (C0, C1, delete), and Unicode characters that are invisible or change the direction of text, are written as
//! escapes (`\x1b`). In JSON they are written as JSON's own escape of the same character (`\u009b`).

use std::{borrow::Cow, fmt::Write as _};

/// Returns true if a terminal may interpret the character instead of showing it.
pub(crate) fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Escapes a name or a message in one line.
pub fn clean(text: &str) -> Cow<'_, str> {
    escaped(text, is_unsafe, write_escape)
}

/// Escapes text of several lines.
pub fn clean_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c != '\n' && is_unsafe(c), write_escape)
}

/// Escapes serialized JSON without changing its values. Line breaks and tabs between values stay.
pub fn clean_json(json: &str) -> Cow<'_, str> {
    escaped(json, |c| c >= '\x7f' && is_unsafe(c), write_json_escape)
}

fn escaped(text: &str, must: impl Fn(char) -> bool, write: impl Fn(&mut String, char)) -> Cow<'_, str> {
    if !text.contains(&must) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if must(c) {
            write(&mut safe, c);
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

fn write_escape(text: &mut String, c: char) {
    match c {
        '\n' => text.push_str("\\n"),
        '\r' => text.push_str("\\r"),
        '\t' => text.push_str("\\t"),
        c if u32::from(c) < 0x100 => drop(write!(text, "\\x{:02x}", u32::from(c))),
        c => drop(write!(text, "\\u{{{:x}}}", u32::from(c))),
    }
}

fn write_json_escape(text: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        // Writing to a String cannot fail.
        let _ = write!(text, "\\u{unit:04x}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_controls_are_escaped() {
        for (name, safe) in [
            ("a.service", "a.service"),
            ("dev-disk-by\\x2dlabel", "dev-disk-by\\x2dlabel"),
            ("a\x1b[2Jb", "a\\x1b[2Jb"),
            ("\u{9b}31m", "\\x9b31m"),
            ("a\r\nb\tc\0\x7f", "a\\r\\nb\\tc\\x00\\x7f"),
            ("evil\u{202e}txt", "evil\\u{202e}txt"),
            ("no\u{200b}thing", "no\\u{200b}thing"),
            ("größe 漢字 🦀", "größe 漢字 🦀"),
        ] {
            assert_eq!(clean(name), safe);
            assert_eq!(clean(&clean(name)), safe, "once is enough");
        }
        assert_eq!(clean_lines("a\n\x1bb\n"), "a\n\\x1bb\n");
    }

    #[test]
    fn escaped_json_keeps_values() {
        let value =
            serde_json::json!({ "a\u{202e}": ["\u{9b}31m", "\r\n\t\x1b\x7f", "\u{e0041}", "größe 🦀"] });
        let pretty = serde_json::to_string_pretty(&value).unwrap();
        let safe = clean_json(&pretty);
        assert!(!safe.chars().any(|c| c != '\n' && is_unsafe(c)), "{safe}");
        assert!(safe.contains("größe 🦀") && safe.contains("\\u009b31m"), "{safe}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).unwrap(), value);
    }
}
