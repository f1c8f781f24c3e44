//! `--expect`: an earlier census, or `sha256sum` lines, to compare with.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::Path,
};

use anyhow::{Context as _, bail};
use k3_shared::formats::census::{Census, Problem, digests::parse_hex};

use crate::{hash, survey::Survey};

/// What the folder is compared with.
#[derive(Debug)]
pub(crate) enum Expectation {
    /// A census taken earlier.
    Census(Box<Census>, String),
    /// File names and their SHA-256 in lower-case hex.
    Digests {
        files: BTreeMap<String, String>,
        source: String,
    },
}

impl Expectation {
    /// Read the file.
    ///
    /// # Errors
    /// If it is neither.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let source = path.display().to_string();
        let bytes = fs::read(path).with_context(|| source.clone())?;
        if bytes.first() == Some(&b'{') {
            let census = Census::parse(&bytes, path)?;
            return Ok(Self::Census(Box::new(census), source));
        }
        let text = String::from_utf8(bytes)
            .with_context(|| format!("{source}: neither a census nor lines of sha256sum"))?;
        let mut files = BTreeMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let Some((name, digest)) = parse_line(line) else {
                bail!("{source}: line {number}: {line:?} is not `SHA256  NAME`");
            };
            files.insert(name, digest);
        }
        if files.is_empty() {
            bail!("{source}: names no file");
        }
        Ok(Self::Digests { files, source })
    }

    /// Add every difference to the survey's problems.
    pub(crate) fn compare(&self, dir: &Path, survey: &mut Survey) {
        let problems = match self {
            Self::Census(census, source) => compare_census(census, source, survey),
            Self::Digests { files, source } => compare_digests(files, source, dir, survey),
        };
        survey.problems.extend(problems);
    }
}

/// `HEX  NAME` or `HEX *NAME`; a name may have folders, of which the last part counts.
fn parse_line(line: &str) -> Option<(String, String)> {
    let (digest, name) = line.trim_end().split_once(' ')?;
    parse_hex(digest)?;
    let name = name.strip_prefix([' ', '*'])?;
    let name = Path::new(name).file_name()?.to_str()?;
    Some((name.into(), digest.to_ascii_lowercase()))
}

fn compare_census(census: &Census, source: &str, survey: &Survey) -> Vec<Problem> {
    let mut problems = Vec::new();
    let same_part = census.first_layers == survey.first_layers;
    let identities = (&census.identity, &survey.assembly.identity);
    if let (true, (Some(expected), Some(found))) = (same_part, identities)
        && expected != found
    {
        let message = format!("the identity is {found}, but {expected} in {source}");
        problems.push(Problem::of("config.json", message));
    }
    if survey.assembly.checkpoint.config.to_canonical() != census.config {
        let message = format!("describes another model than the one in {source}");
        problems.push(Problem::of("config.json", message));
    }
    let mut seen = HashSet::new();
    for expected in &census.shards {
        let file = &expected.file;
        seen.insert(file.as_str());
        let Some(shard) = survey.shards.iter().find(|s| s.record.file == *file) else {
            if same_part && is_needed(file, survey) {
                problems.push(Problem::of(file, format!("is not here, but in {source}")));
            }
            continue;
        };
        let found = &shard.record;
        if found.bytes != expected.bytes {
            let message = format!(
                "has {} bytes, but {} in {source}",
                found.bytes, expected.bytes
            );
            problems.push(Problem::of(file, message));
        } else if let (Some(a), Some(b)) = (&found.sha256, &expected.sha256)
            && a != b
        {
            problems.push(Problem::of(file, digest_message(a, b, source)));
        }
    }
    if same_part && census.shards.iter().any(|s| s.sha256.is_some()) && no_digests(survey) {
        log::info!("{source} has digests; with --hash they would be compared too");
    }
    for shard in &survey.shards {
        if same_part && !seen.contains(shard.record.file.as_str()) {
            let message = format!("is here, but not in {source}");
            problems.push(Problem::of(&shard.record.file, message));
        }
    }
    problems
}

/// Whether a file that is not here should be: a text-only download goes without those that hold no text tensor.
fn is_needed(file: &str, survey: &Survey) -> bool {
    let reported = survey.problems.iter().any(|p| p.file == file);
    !reported && survey.assembly.identity.is_none() && !survey.optional.iter().any(|o| o == file)
}

fn no_digests(survey: &Survey) -> bool {
    survey.shards.iter().all(|s| s.record.sha256.is_none())
}

fn compare_digests(
    files: &BTreeMap<String, String>,
    source: &str,
    dir: &Path,
    survey: &Survey,
) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (name, expected) in files {
        let shard = survey.shards.iter().find(|s| s.record.file == *name);
        let found = match shard {
            Some(shard) => shard.record.sha256.clone(),
            // Shards that this run leaves out: vision in a text-only download, later layers with --layers.
            None if name.ends_with(".safetensors") => {
                if survey.first_layers.is_none() && is_needed(name, survey) {
                    problems.push(Problem::of(name, format!("is not here, but in {source}")));
                }
                continue;
            }
            None => match hash::file_sha256(&dir.join(name)) {
                Ok(digest) => Some(digest),
                Err(e) => {
                    problems.push(Problem::of(name, e.to_string()));
                    continue;
                }
            },
        };
        if let Some(found) = found.filter(|found| found != expected) {
            problems.push(Problem::of(name, digest_message(&found, expected, source)));
        }
    }
    let unlisted: Vec<&str> = survey
        .shards
        .iter()
        .map(|s| s.record.file.as_str())
        .filter(|file| !files.contains_key(*file))
        .collect();
    if !unlisted.is_empty() {
        log::warn!("{source} has no digest of {}", unlisted.join(", "));
    }
    problems
}

fn digest_message(found: &str, expected: &str, source: &str) -> String {
    format!("its SHA-256 is {found}, but {expected} in {source}; download it again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_sha256sum_are_read_in_text_and_binary_form() {
        let hex = "AB".repeat(32);
        let want = Some(("b c".to_owned(), "ab".repeat(32)));
        assert_eq!(parse_line(&format!("{hex}  b c")), want);
        assert_eq!(parse_line(&format!("{hex} *a/b c")), want);
        for line in ["", "x  y", &hex, &format!("{hex} y"), &format!("{hex}  ")] {
            assert_eq!(parse_line(line), None, "{line}");
        }
    }
}
