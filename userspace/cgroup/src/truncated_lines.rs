//! Lines of files that another program can make arbitrarily long.
//!
//! # Problem
//! `/proc/PID/maps` and `numa_maps` contain names of files. The program chooses their number and length: each component
//! of a path has at most 255 bytes, but a path may have megabytes. A name need not be UTF-8.
//!
//! # Algorithm
//! [`MAX_WORD`] bytes of each word and [`MAX_LINE`] bytes of each line are kept. The rest is read and dropped, so the
//! words after a long name are still available.

use std::io::{self, BufRead};

/// The number of bytes that are kept of a word.
const MAX_WORD: usize = 4 << 10;
/// The number of bytes that are kept of a line: enough for a name and the pages on each of the kernel's up to 1024
/// nodes.
const MAX_LINE: usize = 32 << 10;

/// The lines of a file, one at a time, each truncated to a limited length.
#[derive(Debug)]
pub struct TruncatedLines<R> {
    input: R,
    line: Vec<u8>,
}

impl<R: BufRead> TruncatedLines<R> {
    pub fn new(input: R) -> Self {
        Self { input, line: Vec::new() }
    }

    /// Returns the next line without its line end; `None` after the last one.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn next_line(&mut self) -> io::Result<Option<&[u8]>> {
        self.line.clear();
        // The number of bytes of the current word, including dropped ones.
        let (mut word, mut has_begun) = (0_usize, false);
        loop {
            let chunk = self.input.fill_buf()?;
            if chunk.is_empty() {
                return Ok(has_begun.then_some(&self.line));
            }
            has_begun = true;
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let part = chunk.get(..end.unwrap_or(chunk.len())).unwrap_or_default();
            for piece in part.split_inclusive(|byte| *byte == b' ') {
                let (text, ends) = piece.strip_suffix(b" ").map_or((piece, false), |text| (text, true));
                let room = MAX_WORD.saturating_sub(word).min(MAX_LINE.saturating_sub(self.line.len()));
                self.line.extend_from_slice(text.get(..room).unwrap_or(text));
                word += text.len();
                if ends {
                    word = 0;
                    if self.line.len() < MAX_LINE {
                        self.line.push(b' ');
                    }
                }
            }
            let used = part.len() + usize::from(end.is_some());
            self.input.consume(used);
            if end.is_some() {
                return Ok(Some(&self.line));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    fn lines(text: &[u8], chunk: usize) -> Vec<Vec<u8>> {
        let mut lines = TruncatedLines::new(BufReader::with_capacity(chunk, text));
        std::iter::from_fn(|| lines.next_line().unwrap().map(<[u8]>::to_vec)).collect()
    }

    #[test]
    fn short_lines_are_unchanged() {
        let text = b"a  b=1 \n\n\xff\xfe c\n last";
        for chunk in [1, 2, 3, 100] {
            assert_eq!(lines(text, chunk), [&b"a  b=1 "[..], b"", b"\xff\xfe c", b" last"], "{chunk}");
        }
        assert!(lines(b"", 8).is_empty());
    }

    #[test]
    fn words_after_a_long_word_are_kept() {
        let text = ["7f00 file=", &"x".repeat(1 << 20), " N0=5\n", "next\n"].concat();
        for chunk in [100, 1 << 16] {
            let [first, next] = &*lines(text.as_bytes(), chunk) else { panic!("two lines") };
            assert_eq!(
                (first.len(), &first[first.len() - 5..]),
                (5 + MAX_WORD + 5, &b" N0=5"[..]),
                "{chunk}"
            );
            assert_eq!(next, b"next");
        }
    }

    #[test]
    fn long_line_is_truncated() {
        let text = [&"word ".repeat(1 << 20), "\nnext"].concat();
        let [first, next] = &*lines(text.as_bytes(), 1 << 16) else { panic!("two lines") };
        assert!((MAX_LINE - 5..=MAX_LINE).contains(&first.len()), "{}", first.len());
        assert_eq!(next, b"next");
    }
}
