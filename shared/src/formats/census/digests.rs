//! `k3-experts.sha256`: one digest per routed expert, so that k3-run can check each block it reads.
//!
//! Text in the manner of `sha256sum`. The first line is `# k3.experts/1 IDENTITY LAYERS`: the checkpoint's identity, and how
//! many layers were opened for it. Then for each expert, by layer and number, `HEX  layers.L.experts.E`, the SHA-256 of its
//! block as stored. Layers without experts have no lines.

use std::{
    io::{self, BufRead as _, BufReader, Write},
    path::{Path, PathBuf},
};

use crate::{
    checkpoint::hex,
    ids::{ExpertId, ExpertIdx, LayerIdx},
};

/// Name of the file beside the shards.
pub const FILE_NAME: &str = "k3-experts.sha256";
const TAG: &str = "# k3.experts/1";
/// More lines than any model has experts; a file that goes on past it is refused.
const MAX_EXPERTS: usize = 5_000_000;

/// SHA-256 of a block.
pub type Digest = [u8; 32];

/// The digests of a checkpoint's experts, 32 bytes each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertDigests {
    /// Identity of the checkpoint.
    pub identity: String,
    /// Opened layers, of which the identity is.
    pub layers: usize,
    /// By layer, then by expert; empty for layers without experts.
    digests: Vec<Vec<Digest>>,
}

/// Why a file of digests could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DigestsError {
    /// It could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line is not what it should be.
    #[error("{}: line {line}: {reason}; make it again with `k3-census MODEL_DIR --hash --experts`", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from one.
        line: usize,
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl ExpertDigests {
    /// Digests that were computed, in any order; `None` if an expert between two others has none.
    pub fn new(
        identity: String,
        layers: usize,
        mut computed: Vec<(ExpertId, Digest)>,
    ) -> Option<Self> {
        computed.sort_unstable_by_key(|(id, _)| *id);
        let mut digests = Self {
            identity,
            layers,
            digests: vec![Vec::new(); layers],
        };
        computed
            .into_iter()
            .all(|(id, digest)| digests.push(id, digest))
            .then_some(digests)
    }

    /// Append the next expert; false if it is not the next.
    fn push(&mut self, id: ExpertId, digest: Digest) -> bool {
        let later = id.layer.get() + 1;
        if self.digests.iter().skip(later).any(|l| !l.is_empty()) {
            return false;
        }
        match self.digests.get_mut(id.layer.get()) {
            Some(layer) if layer.len() == id.expert.get() => {
                layer.push(digest);
                true
            }
            _ => false,
        }
    }

    /// The digest of an expert's block.
    pub fn get(&self, id: ExpertId) -> Option<&Digest> {
        self.digests.get(id.layer.get())?.get(id.expert.get())
    }

    /// How many experts have one.
    pub fn len(&self) -> usize {
        self.digests.iter().map(Vec::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every expert with its digest, by layer and number.
    pub fn iter(&self) -> impl Iterator<Item = (ExpertId, &Digest)> {
        (0..)
            .map(LayerIdx)
            .zip(&self.digests)
            .flat_map(|(layer, digests)| {
                let numbered = (0..).map(ExpertIdx).zip(digests);
                numbered.map(move |(expert, digest)| (ExpertId { layer, expert }, digest))
            })
    }

    /// Write the file.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{TAG} {} {}", self.identity, self.layers)?;
        for (id, digest) in self.iter() {
            let (layer, expert) = (id.layer, id.expert);
            writeln!(out, "{}  layers.{layer}.experts.{expert}", hex(digest))?;
        }
        Ok(())
    }

    /// Read the file at `path`.
    ///
    /// # Errors
    /// If it cannot be read, or a line is malformed, out of order or twice there.
    pub fn open(path: &Path) -> Result<Self, DigestsError> {
        let io = |source| DigestsError::Io {
            path: path.into(),
            source,
        };
        let file = std::fs::File::open(path).map_err(io)?;
        let mut digests = Self::default();
        let mut num_lines = 0;
        for (number, line) in (1..).zip(BufReader::new(file).lines()) {
            let line = line.map_err(io)?;
            num_lines = number;
            digests
                .take(number, &line)
                .map_err(|reason| DigestsError::Line {
                    path: path.into(),
                    line: number,
                    reason,
                })?;
        }
        if num_lines == 0 {
            return Err(DigestsError::Line {
                path: path.into(),
                line: 1,
                reason: "the file is empty",
            });
        }
        Ok(digests)
    }

    fn take(&mut self, number: usize, line: &str) -> Result<(), &'static str> {
        if number == 1 {
            let mut words = line
                .strip_prefix(TAG)
                .ok_or("not `# k3.experts/1`")?
                .split_whitespace();
            let (identity, layers) = (words.next(), words.next().map(str::parse));
            let (Some(identity), Some(Ok(layers)), None) = (identity, layers, words.next()) else {
                return Err("not `# k3.experts/1 IDENTITY LAYERS`");
            };
            if layers > MAX_EXPERTS {
                return Err("more layers than any model has");
            }
            self.identity = identity.into();
            self.layers = layers;
            self.digests = vec![Vec::new(); layers];
            return Ok(());
        }
        if number > MAX_EXPERTS {
            return Err("more experts than any model has");
        }
        let (digest, name) = line.split_once("  ").ok_or("not `HEX  NAME`")?;
        let digest = parse_hex(digest).ok_or("not 64 hex digits")?;
        let id = parse_name(name).ok_or("not `layers.L.experts.E`")?;
        if self.push(id, digest) {
            Ok(())
        } else {
            Err("not the next expert")
        }
    }
}

fn parse_name(name: &str) -> Option<ExpertId> {
    let (layer, expert) = name.strip_prefix("layers.")?.split_once(".experts.")?;
    Some(ExpertId {
        layer: LayerIdx(layer.parse().ok()?),
        expert: ExpertIdx(expert.parse().ok()?),
    })
}

/// 64 hex digits of either case to a digest.
pub fn parse_hex(text: &str) -> Option<Digest> {
    let mut digest = [0; 32];
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, at) in digest.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(layer: u32, expert: u32) -> ExpertId {
        ExpertId {
            layer: LayerIdx(layer),
            expert: ExpertIdx(expert),
        }
    }

    fn written(digests: &ExpertDigests) -> String {
        let mut text = Vec::new();
        digests.write(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    fn read(text: &str) -> Result<ExpertDigests, DigestsError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        ExpertDigests::open(file.path())
    }

    #[test]
    fn digests_read_back_whatever_order_they_came_in() {
        let computed = vec![
            (id(2, 0), [7; 32]),
            (id(1, 1), [1; 32]),
            (id(1, 0), [0xab; 32]),
        ];
        let digests = ExpertDigests::new("x".into(), 3, computed).unwrap();
        let text = written(&digests);
        assert!(text.starts_with("# k3.experts/1 x 3\nabab"), "{text}");
        assert!(text.contains("  layers.1.experts.1\n"));
        let back = read(&text).unwrap();
        assert_eq!(back, digests);
        assert_eq!(back.get(id(2, 0)), Some(&[7; 32]));
        assert_eq!(back.get(id(2, 1)), None);
        assert_eq!(back.get(id(9, 0)), None);
        assert_eq!(back.len(), 3);
    }

    #[test]
    fn gaps_and_malformed_lines_are_refused_by_number() {
        assert!(ExpertDigests::new("x".into(), 2, vec![(id(1, 1), [0; 32])]).is_none());
        assert!(ExpertDigests::new("x".into(), 1, vec![(id(1, 0), [0; 32])]).is_none());
        let hex = "00".repeat(32);
        for (text, line) in [
            (String::new(), "line 1"),
            ("k3.experts/1 x 2\n".into(), "line 1"),
            ("# k3.experts/1 x\n".into(), "line 1"),
            (
                format!("# k3.experts/1 x 2\n{hex} layers.0.experts.0\n"),
                "line 2",
            ),
            (
                format!("# k3.experts/1 x 2\n{hex}  layers.0.experts.1\n"),
                "line 2",
            ),
            (
                format!("# k3.experts/1 x 2\n{hex}  layers.2.experts.0\n"),
                "line 2",
            ),
            (
                "# k3.experts/1 x 2\n+1  layers.0.experts.0\n".into(),
                "line 2",
            ),
            (
                format!(
                    "# k3.experts/1 x 2\n{hex}  layers.1.experts.0\n{hex}  layers.0.experts.0\n"
                ),
                "line 3",
            ),
        ] {
            let error = read(&text).unwrap_err().to_string();
            assert!(
                error.contains(line) && error.contains("k3-census"),
                "{text}: {error}"
            );
        }
    }
}
