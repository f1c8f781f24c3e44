//! The prompt as token ids, and the way back to text.

use std::{fs, path::Path};

use anyhow::{Context as _, bail};

use crate::{
    cli::{Cli, PromptArgs},
    tokenizer::{Specials, Tokenizer, TokenizerError},
};

/// The prompt's ids, and the tokenizer where there is one.
pub(crate) struct Prompt {
    pub(crate) ids: Vec<u32>,
    pub(crate) tokenizer: Option<Tokenizer>,
}

impl Prompt {
    /// Read the prompt and, from `--tokenizer` or the model folder, the vocabulary.
    ///
    /// # Errors
    /// If text was given without a usable vocabulary, a file cannot be read, or there is no token and no state to go on from.
    pub(crate) fn open(cli: &Cli, model_dir: &Path) -> anyhow::Result<Self> {
        let folder = cli.engine.tokenizer.as_deref().unwrap_or(model_dir);
        let tokenizer = match Tokenizer::open(folder) {
            Ok(tokenizer) => Some(tokenizer),
            Err(TokenizerError::Missing { .. })
                if cli.engine.tokenizer.is_none() && !gives_text(&cli.prompt) =>
            {
                None
            }
            Err(error) => return Err(error.into()),
        };
        if cli.state.resume.is_some() && gives_nothing(&cli.prompt) {
            let ids = Vec::new();
            return Ok(Self { ids, tokenizer });
        }
        let ids = read_ids(&cli.prompt, tokenizer.as_ref())?;
        if ids.is_empty() {
            bail!("the prompt has no token; give at least one");
        }
        Ok(Self { ids, tokenizer })
    }
}

fn gives_text(prompt: &PromptArgs) -> bool {
    prompt.prompt.is_some() || prompt.prompt_file.is_some()
}

fn gives_nothing(prompt: &PromptArgs) -> bool {
    !gives_text(prompt) && prompt.ids.is_none() && prompt.ids_file.is_none()
}

fn read_ids(prompt: &PromptArgs, tokenizer: Option<&Tokenizer>) -> anyhow::Result<Vec<u32>> {
    if let Some(ids) = &prompt.ids {
        return Ok(ids.clone());
    }
    if let Some(path) = &prompt.ids_file {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        return parse_ids(&text).with_context(|| path.display().to_string());
    }
    let text = match (&prompt.prompt, &prompt.prompt_file) {
        (Some(text), _) => text.clone().into_bytes(),
        (None, Some(path)) => fs::read(path).with_context(|| path.display().to_string())?,
        (None, None) => {
            bail!(
                "no prompt: give --prompt, --prompt-file, --ids or --ids-file, or --resume a state"
            )
        }
    };
    let tokenizer = tokenizer.context("text needs a tokenizer; give --tokenizer DIR or --ids")?;
    Ok(tokenizer.encode(&text, Specials::AsText)?)
}

/// Ids separated by commas or white space; anything else is an error that says where.
fn parse_ids(text: &str) -> anyhow::Result<Vec<u32>> {
    let words = text
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|w| !w.is_empty());
    words
        .map(|word| {
            word.parse()
                .with_context(|| format!("{word:?} is not a token id"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_separated_by_commas_or_white_space() {
        assert_eq!(parse_ids("1, 2\n3\t4,,5\n").unwrap(), [1, 2, 3, 4, 5]);
        assert_eq!(parse_ids("").unwrap(), Vec::<u32>::new());
        for bad in ["1;2", "-1", "4294967296", "x"] {
            assert!(parse_ids(bad).is_err(), "{bad}");
        }
    }
}
