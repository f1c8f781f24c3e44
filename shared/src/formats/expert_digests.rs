//! `k3-experts.sha256`: one digest per routed expert, as `sha256sum` writes them.
//!
//! Each line is the hex SHA-256 of an expert's block of six tensors, two spaces, and `layers.L.experts.E`.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use crate::ids::{ExpertId, ExpertIdx, LayerIdx};

/// The file's usual name, beside the shards.
pub const FILE_NAME: &str = "k3-experts.sha256";

/// Digests read from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertDigestFile {
    /// SHA-256 of the file itself, hex.
    pub sha256: String,
    /// The digest of each expert.
    pub experts: BTreeMap<ExpertId, [u8; 32]>,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExpertDigestError {
    /// The file cannot be read.
    #[error("{}: {source} (make it with: k3-census --hash --experts MODEL_DIR)", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line is not a digest and an expert.
    #[error("{}: line {line}: {text:?} is not `SHA256  layers.L.experts.E` (make it again: k3-census --hash --experts MODEL_DIR)", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from one.
        line: usize,
        /// The line.
        text: String,
    },
}

impl ExpertDigestFile {
    /// Read the file at `path`.
    ///
    /// # Errors
    /// If it cannot be read, or a line is not a digest and an expert named once.
    pub fn open(path: &Path) -> Result<Self, ExpertDigestError> {
        let bytes = std::fs::read(path).map_err(|source| ExpertDigestError::Io {
            path: path.to_owned(),
            source,
        })?;
        let mut experts = BTreeMap::new();
        for (index, line) in String::from_utf8_lossy(&bytes).lines().enumerate() {
            let parsed = parse_line(line).filter(|(id, _)| !experts.contains_key(id));
            let (id, digest) = parsed.ok_or_else(|| ExpertDigestError::Line {
                path: path.to_owned(),
                line: index + 1,
                text: line.to_owned(),
            })?;
            experts.insert(id, digest);
        }
        Ok(Self {
            sha256: hex(&Sha256::digest(&bytes)),
            experts,
        })
    }
}

/// One line of the file, with its line end.
pub fn line(id: ExpertId, digest: &[u8; 32]) -> String {
    format!(
        "{}  layers.{}.experts.{}\n",
        hex(digest),
        id.layer,
        id.expert
    )
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

fn parse_line(line: &str) -> Option<(ExpertId, [u8; 32])> {
    let (digest, name) = line.split_once("  ")?;
    let (layer, expert) = name.strip_prefix("layers.")?.split_once(".experts.")?;
    let id = ExpertId {
        layer: LayerIdx(layer.parse().ok()?),
        expert: ExpertIdx(expert.parse().ok()?),
    };
    if digest.len() != 64 || !digest.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&digest[at..at + 2], 16).ok()?;
    }
    Some((id, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_read_back_and_bad_ones_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let id = ExpertId {
            layer: LayerIdx(3),
            expert: ExpertIdx(895),
        };
        let text = line(id, &[0xab; 32]);
        std::fs::write(&path, &text).unwrap();
        assert_eq!(
            ExpertDigestFile::open(&path).unwrap().experts,
            BTreeMap::from([(id, [0xab; 32])])
        );
        for bad in [
            format!("{text}{text}"),
            format!("{text}x"),
            text.replace("ab", "zz"),
            "\n".into(),
        ] {
            std::fs::write(&path, bad).unwrap();
            let error = ExpertDigestFile::open(&path).unwrap_err().to_string();
            assert!(error.contains("line "), "{error}");
        }
    }
}
