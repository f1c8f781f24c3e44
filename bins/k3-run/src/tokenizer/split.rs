//! Cutting text into the pieces that merges cannot cross. Source: specification 5.2 and 5.3.

use std::ops::Range;

use fancy_regex::Regex;

/// The published pattern: eight alternatives, tried in order.
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

/// Code points that are split at a time.
const SLICE_CHARS: usize = 400_000;
/// Longest run of one class, white space or not, in code points. It also keeps the pattern's backtracking within its limit.
const RUN_CHARS: usize = 25_000;

/// Compile the pattern.
pub(super) fn pattern() -> Result<Regex, fancy_regex::Error> {
    Regex::new(PATTERN)
}

/// Python's `str.isspace`: the characters of `\s` and the four separators U+001C to U+001F.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// The outer cuts of `text`: slices of 400,000 code points, in each a cut wherever a run of one class goes on past 25,000.
pub(super) fn outer_cuts(text: &str) -> Vec<Range<usize>> {
    let mut cuts = Vec::new();
    let mut start = 0;
    let mut slice = 0;
    let mut run = 0;
    let mut class = false;
    for (at, c) in text.char_indices() {
        let same = is_space(c) == class;
        if slice == SLICE_CHARS || (same && run == RUN_CHARS) {
            cuts.push(start..at);
            start = at;
            run = 0;
        }
        slice = if slice == SLICE_CHARS { 1 } else { slice + 1 };
        run = if same { run + 1 } else { 1 };
        class = is_space(c);
    }
    if start < text.len() {
        cuts.push(start..text.len());
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Vec<usize> {
        outer_cuts(text)
            .into_iter()
            .map(|cut| text[cut].chars().count())
            .collect()
    }

    #[test]
    fn white_space_of_the_cuts_is_29_code_points() {
        assert_eq!(('\0'..=char::MAX).filter(|&c| is_space(c)).count(), 29);
    }

    #[test]
    fn text_without_long_runs_is_cut_every_400_000_code_points() {
        assert!(outer_cuts("").is_empty());
        assert_eq!(lengths("a b"), [3]);
        assert_eq!(lengths(&"é ".repeat(200_000)), [400_000]);
        assert_eq!(lengths(&"é ".repeat(500_001)), [400_000, 400_000, 200_002]);
    }

    #[test]
    fn runs_of_one_class_are_cut_every_25_000_code_points() {
        assert_eq!(lengths(&"é".repeat(25_000)), [25_000]);
        assert_eq!(lengths(&"é".repeat(50_001)), [25_000, 25_000, 1]);
        // The class, not the character, makes a run; one of the other class ends it.
        assert_eq!(lengths(&" \u{1c}".repeat(12_501)), [25_000, 2]);
        let text = format!(
            "{}{} {}",
            " ".repeat(25_000),
            "a".repeat(25_000),
            "b".repeat(25_001)
        );
        assert_eq!(lengths(&text), [75_001, 1]);
        // A slice that begins inside a run begins a new run.
        let text = format!("{}{}", "a ".repeat(195_000), "c".repeat(40_000));
        assert_eq!(lengths(&text), [400_000, 25_000, 5_000]);
    }
}
