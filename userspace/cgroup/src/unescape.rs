//! Decodes escape sequences that consist of a prefix and the digits of a byte.

/// Decodes each escape sequence of `prefix` and `digits` digits into a byte. Malformed sequences are kept.
pub fn unescape(text: &[u8], prefix: &[u8], digits: usize, radix: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = rest.strip_prefix(prefix).and_then(|rest| {
            let (number, rest) = rest.split_at_checked(digits)?;
            Some((u8::from_str_radix(std::str::from_utf8(number).ok()?, radix).ok()?, rest))
        });
        let (byte, after) = escaped.unwrap_or((first, tail));
        bytes.push(byte);
        rest = after;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_escapes_and_keeps_the_rest() {
        for (text, plain) in [
            (r"", ""),
            (r"a\x2db", "a-b"),
            (r"\x2d\x2d", "--"),
            (r"a\x2", r"a\x2"),
            (r"a\x2g", r"a\x2g"),
            (r"a\y2d", r"a\y2d"),
            (r"a\", r"a\"),
        ] {
            assert_eq!(unescape(text.as_bytes(), br"\x", 2, 16), plain.as_bytes(), "{text}");
        }
        assert_eq!(unescape(br"a\040b\134\777", br"\", 3, 8), br"a b\\777");
    }
}
