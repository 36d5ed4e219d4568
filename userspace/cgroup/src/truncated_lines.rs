//! Lines of a file that another program can make as long as it likes.
//!
//! Problem: `/proc/PID/maps` and `numa_maps` have the names of files in them. The program chooses how many and how long they are: a path
//! of which no part is longer than 255 bytes may have megabytes. Nor has a name to be UTF-8.
//!
//! Algorithm: of each word [`MAX_WORD`] bytes are kept, and of each line [`MAX_LINE`]. The rest is read and dropped. So what follows a
//! long name in its line is read all the same.

use std::io::{self, BufRead};

/// Bytes that are kept of a word.
const MAX_WORD: usize = 4 << 10;
/// Bytes that are kept of a line: enough for a name, and for the pages on each of the 1024 nodes that a kernel can have.
const MAX_LINE: usize = 32 << 10;

/// The lines of a file, one at a time, each cut to a limited length.
#[derive(Debug)]
pub struct TruncatedLines<R> {
    input: R,
    line: Vec<u8>,
}

impl<R: BufRead> TruncatedLines<R> {
    /// The lines of this.
    pub fn new(input: R) -> Self {
        Self { input, line: Vec::new() }
    }

    /// The next line, without its end; none after the last one.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn next_line(&mut self) -> io::Result<Option<&[u8]>> {
        self.line.clear();
        // Bytes of the word that goes on, also those that were dropped.
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
    fn short_lines_are_as_they_were() {
        let text = b"a  b=1 \n\n\xff\xfe c\n last";
        for chunk in [1, 2, 3, 100] {
            assert_eq!(lines(text, chunk), [&b"a  b=1 "[..], b"", b"\xff\xfe c", b" last"], "{chunk}");
        }
        assert!(lines(b"", 8).is_empty());
    }

    #[test]
    fn what_follows_a_long_word_is_kept() {
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
    fn line_of_many_words_has_an_end() {
        let text = [&"word ".repeat(1 << 20), "\nnext"].concat();
        let [first, next] = &*lines(text.as_bytes(), 1 << 16) else { panic!("two lines") };
        assert!((MAX_LINE - 5..=MAX_LINE).contains(&first.len()), "{}", first.len());
        assert_eq!(next, b"next");
    }
}
