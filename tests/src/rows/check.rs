//! The same ids in every row: no budget, split, thread count or read size changes a token.

use super::Row;

/// Two rows that should have generated the same tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{row}: token {place} is {found}, not {want} as in {other}")]
pub struct Difference {
    /// The row that differs.
    pub row: String,
    /// The first of its checkpoint and prompt.
    pub other: String,
    /// Which generated token, from 1.
    pub place: usize,
    /// What the row has there.
    pub found: u32,
    /// What the other has there.
    pub want: u32,
}

/// Compare every row with the first of the same checkpoint and prompt, over the tokens that both generated.
///
/// # Errors
/// The first difference.
pub fn same_ids(rows: &[Row]) -> Result<(), Difference> {
    for (at, row) in rows.iter().enumerate() {
        let of_prompt = |other: &&Row| {
            other.report.identity == row.report.identity
                && other.report.prompt_sha256 == row.report.prompt_sha256
        };
        // Ladders generate different numbers of tokens, so a longer row can differ where the first has already ended.
        for other in rows[..at].iter().filter(of_prompt) {
            let pairs = row
                .report
                .generated_ids
                .iter()
                .zip(&other.report.generated_ids);
            if let Some((place, (&found, &want))) = (1..).zip(pairs).find(|(_, (a, b))| a != b) {
                return Err(Difference {
                    row: row.label(),
                    other: other.label(),
                    place,
                    found,
                    want,
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{super::make::tests::row, *};

    #[test]
    fn equal_beginnings_of_one_prompt_agree() {
        let mut long = row("b", 1);
        long.report.generated_ids.push(9);
        assert_eq!(same_ids(&[row("a", 1), long]), Ok(()));
    }

    #[test]
    fn a_row_with_another_token_is_named() {
        let mut other = row("b", 2);
        other.report.generated_ids[1] += 1;
        let difference = same_ids(&[row("a", 1), other]).unwrap_err();
        let text = difference.to_string();
        assert!(
            text.contains("\"b\", round 2: token 2 is") && text.contains("\"a\", round 1"),
            "{text}"
        );
    }

    #[test]
    fn a_difference_past_the_end_of_the_first_row_is_found() {
        let (mut second, mut third) = (row("b", 1), row("c", 1));
        second.report.generated_ids.push(1);
        third.report.generated_ids.push(2);
        assert!(same_ids(&[row("a", 1), second, third]).is_err());
    }

    #[test]
    fn other_prompts_and_checkpoints_are_not_compared() {
        let (mut prompt, mut model) = (row("b", 1), row("c", 1));
        prompt.report.prompt_sha256 = "other".to_owned();
        prompt.report.generated_ids = vec![7];
        model.report.identity = "other".to_owned();
        model.report.generated_ids = vec![8];
        assert_eq!(same_ids(&[row("a", 1), prompt, model]), Ok(()));
    }
}
