//! Cutting text into the pieces that byte pairs are merged in (specification 5.2 and 5.3).

use std::sync::LazyLock;

use fancy_regex::Regex;

use super::error::EncodeError;

/// The published pattern, alternative by alternative.
const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Text is worked on in slices of this many code points.
const SLICE_CHARS: usize = 400_000;
/// A run of white space, or of anything else, is cut after this many code points.
const RUN_CHARS: usize = 25_000;

static REGEX: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(PATTERN).expect("the pattern is a constant that compiles"));

/// Call `piece` with each piece of `text`, in order. None is empty, and their concatenation is the text.
///
/// # Errors
/// If a search is given up, which happens after 10^6 steps back; the outer cuts keep every search far below that.
pub(super) fn split<'t>(text: &'t str, mut piece: impl FnMut(&'t str)) -> Result<(), EncodeError> {
    for part in OuterCuts::new(text) {
        let mut end = 0;
        for found in REGEX.find_iter(part) {
            let found = found.map_err(|source| EncodeError {
                source: Box::new(source),
            })?;
            assert_eq!(found.start(), end, "some alternative fits every character");
            end = found.end();
            piece(found.as_str());
        }
        assert_eq!(end, part.len(), "some alternative fits every character");
    }
    Ok(())
}

/// The official limits on what one search sees: parts of `rest`, which no piece may span.
struct OuterCuts<'t> {
    rest: &'t str,
    /// Code points left in the slice being cut.
    slice_left: usize,
}

impl<'t> OuterCuts<'t> {
    fn new(text: &'t str) -> Self {
        Self {
            rest: text,
            slice_left: SLICE_CHARS,
        }
    }
}

impl<'t> Iterator for OuterCuts<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        let mut run_is_space = self.rest.chars().next().map(is_space)?;
        let mut run = 0;
        for (chars, (at, char)) in self.rest.char_indices().enumerate() {
            let space = is_space(char);
            run = if space == run_is_space { run + 1 } else { 1 };
            run_is_space = space;
            let slice_is_full = chars == self.slice_left;
            if slice_is_full || run > RUN_CHARS {
                let (part, rest) = self.rest.split_at(at);
                self.rest = rest;
                self.slice_left = if slice_is_full {
                    SLICE_CHARS
                } else {
                    self.slice_left - chars
                };
                return Some(part);
            }
        }
        Some(std::mem::take(&mut self.rest))
    }
}

/// Python's `str.isspace`: white space, and the four separators of ASCII.
fn is_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\u{1C}'..='\u{1F}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(text: &str) -> Vec<&str> {
        let mut pieces = Vec::new();
        split(text, |piece| pieces.push(piece)).unwrap();
        pieces
    }

    fn part_lengths(text: &str) -> Vec<usize> {
        OuterCuts::new(text)
            .map(|part| part.chars().count())
            .collect()
    }

    #[test]
    fn each_alternative_takes_what_it_should() {
        for (text, want) in [
            ("你好World", &["你好", "World"][..]),
            ("々〇a", &["々〇", "a"]),
            ("helloWorld HTTPServer", &["hello", "World", " HTTPServer"]),
            (
                "don't we'LL I'd x'q",
                &["don't", " we'LL", " I'd", " x", "'q"],
            ),
            ("I'\u{17F} I'\u{212A}", &["I'\u{17F}", " I", "'\u{212A}"]),
            ("12345 6", &["123", "45", " ", "6"]),
            (" --!\r\n\nx", &[" --!\r\n\n", "x"]),
            ("a \n \n  b", &["a", " \n \n", " ", " b"]),
            ("a   b   ", &["a", "  ", " b", "   "]),
            ("e\u{301}A\u{301}", &["e\u{301}", "A\u{301}"]),
            ("}\n///", &["}\n", "///"]),
            ("\u{1C}a", &["\u{1C}a"]),
        ] {
            assert_eq!(pieces(text), want, "{text:?}");
        }
    }

    #[test]
    fn white_space_has_29_code_points_here_and_25_in_the_pattern() {
        assert_eq!(('\0'..=char::MAX).filter(|&c| is_space(c)).count(), 29);
        let all: String = ('\0'..=char::MAX).collect();
        let count = Regex::new(r"\s").unwrap().find_iter(&all).count();
        assert_eq!(count, 25);
    }

    #[test]
    fn every_code_point_is_in_some_piece() {
        let all: String = ('\0'..=char::MAX).collect();
        assert_eq!(pieces(&all).concat(), all);
    }

    #[test]
    fn runs_are_cut_every_25_000_and_what_stands_before_them_stays() {
        assert!(part_lengths("").is_empty());
        assert_eq!(part_lengths(&"a".repeat(25_000)), [25_000]);
        assert_eq!(part_lengths(&"a".repeat(25_001)), [25_000, 1]);
        assert_eq!(
            part_lengths(&("b ".to_owned() + &"é".repeat(50_001))),
            [25_002, 25_000, 1]
        );
        assert_eq!(part_lengths(&(" ".repeat(30_000) + "end")), [25_000, 5_003]);
        let separators = " \u{1C}\u{2003}\u{85}".repeat(6_251);
        assert_eq!(part_lengths(&separators), [25_000, 4]);
    }

    #[test]
    fn slices_end_after_400_000_code_points_wherever_the_runs_were_cut() {
        assert_eq!(part_lengths(&"é ".repeat(300_000)), [400_000, 200_000]);
        let text = "a".repeat(390_000) + &" b".repeat(10_000);
        let lengths = part_lengths(&text);
        assert_eq!(lengths[..15], [25_000; 15]);
        // 375,000 are gone; the slice ends in the middle of the words, after 25,000 more.
        assert_eq!(lengths[15..], [25_000, 10_000]);
    }

    #[test]
    fn the_longest_runs_the_cuts_leave_are_searched_without_giving_up() {
        for run in [
            " ", "\t", "\n", "\u{1C}", "A", "a", "中", "1", "!", "\u{301}", "ʰ", "ǅ", "😀", " \n",
        ] {
            for tail in ["", "x", "\n", "!", "1", "中"] {
                let text = run.repeat(30_000) + tail;
                assert_eq!(pieces(&text).concat(), text, "{run:?} {tail:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn pieces_concatenate_to_the_text(text in any::<String>()) {
            let pieces = pieces(&text);
            prop_assert!(pieces.iter().all(|piece| !piece.is_empty()));
            prop_assert_eq!(pieces.concat(), text);
        }
    }
}
