//! Text of others on a terminal.
//!
//! Problem: names of cgroups, units and processes are chosen by those who make them. A name may hold an escape
//! sequence that moves the cursor, changes the title or hides what follows, a line break, or 10 KiB.
//!
//! What a terminal would obey is written as an escape (`\x1b`) instead: control characters, and those of Unicode that
//! change the direction of text or cannot be seen. All that is shown of others goes through here.

use std::{borrow::Cow, fmt::Write};

use unicode_width::UnicodeWidthChar;

/// Whether a terminal may do something else with it than show it.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// A name or a message, in one line.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    escaped(text, is_unsafe)
}

/// Text of several lines.
pub(crate) fn clean_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c != '\n' && is_unsafe(c))
}

fn escaped(text: &str, must: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&must) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if !must(c) => safe.push(c),
            '\n' => safe.push_str("\\n"),
            '\r' => safe.push_str("\\r"),
            '\t' => safe.push_str("\\t"),
            c if u32::from(c) < 0x100 => drop(write!(safe, "\\x{:02x}", u32::from(c))),
            c => drop(write!(safe, "\\u{{{:x}}}", u32::from(c))),
        }
    }
    Cow::Owned(safe)
}

/// As much as fits, with a mark where something is cut.
pub(crate) fn cut(text: &str, cells: usize) -> Cow<'_, str> {
    // A name of 10 KiB is not measured to its end.
    let mut used = 0;
    let mut fits = 0;
    for (at, c) in text.char_indices() {
        let wide = c.width().unwrap_or(0);
        if used + wide > cells {
            return Cow::Owned(if cells == 0 { String::new() } else { format!("{}~", &text[..fits]) });
        }
        used += wide;
        // With the mark behind it, it must fit as well.
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
    fn what_a_terminal_would_obey_is_escaped() {
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
    fn what_does_not_fit_is_cut_with_a_mark() {
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
