//! Shard headers: the safetensors rules, checked to the byte.
//!
//! A file is an 8-byte little-endian length `h`, `h` bytes of JSON, then tensor data. The JSON maps each name to `dtype`,
//! `shape` and `data_offsets` `[begin, end]`, relative to byte `8 + h`; `__metadata__` maps strings to strings. Sorted by
//! offset, the tensors tile the data exactly: no hole, no overlap, nothing missing and nothing left over at the end.
//!
//! The header is read, not mapped, so that a file that shrinks under us is an error and not a signal. It is parsed in one
//! pass that borrows names from the text; a file of the release costs its header and about 0.4 MB, freed with the [`Header`].

mod parse;

use std::{borrow::Cow, collections::HashSet, fs::File, os::unix::fs::FileExt as _};

use memmap2::Mmap;

use crate::{
    formats::census::{Problem, ProblemList},
    mapping::map_start,
};

/// Longest JSON header that is read: the limit of the safetensors library (decimal).
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the length in front of the JSON.
pub const PREFIX_BYTES: u64 = 8;

macro_rules! dtypes {
    ($($variant:ident $name:literal $bits:literal;)*) => {
        /// Element type as a header names it: everything the format knows, not only what this model uses.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum StoredDtype { $(#[doc = concat!("`", $name, "`.")] $variant,)* }

        impl StoredDtype {
            /// Every element type.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The type a header calls `name`.
            pub fn parse(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }

            /// Its name in a header.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Bits of one element.
            pub fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits,)* }
            }
        }
    };
}

dtypes! {
    Bool "BOOL" 8;
    F4 "F4" 4;
    F6E2M3 "F6_E2M3" 6;
    F6E3M2 "F6_E3M2" 6;
    U8 "U8" 8;
    I8 "I8" 8;
    F8E5M2 "F8_E5M2" 8;
    F8E4M3 "F8_E4M3" 8;
    F8E8M0 "F8_E8M0" 8;
    I16 "I16" 16;
    U16 "U16" 16;
    F16 "F16" 16;
    Bf16 "BF16" 16;
    I32 "I32" 32;
    U32 "U32" 32;
    F32 "F32" 32;
    C64 "C64" 64;
    F64 "F64" 64;
    I64 "I64" 64;
    U64 "U64" 64;
}

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its name, unescaped.
    pub name: Cow<'a, str>,
    /// Element type.
    pub dtype: StoredDtype,
    /// First byte, relative to the data.
    pub begin: u64,
    /// One past the last byte, relative to the data.
    pub end: u64,
    shape: (usize, usize),
}

/// A header that obeys every rule of the format.
#[derive(Debug)]
pub struct Header<'a> {
    /// Bytes before the data: the length prefix and the JSON.
    pub header_bytes: u64,
    /// Bytes of tensor data.
    pub data_bytes: u64,
    /// The tensors in file order.
    pub entries: Vec<Entry<'a>>,
    dims: Vec<u64>,
}

impl<'a> Header<'a> {
    /// The row-major shape of one of this header's entries.
    pub fn shape(&self, entry: &Entry<'_>) -> &[u64] {
        self.dims
            .get(entry.shape.0..entry.shape.1)
            .unwrap_or_default()
    }

    /// Parse and check a header.
    ///
    /// `bytes` is the file's beginning up to the data (as [`map_header`] leaves it), `file_bytes` the size of the whole file, `file`
    /// its name for messages.
    ///
    /// # Errors
    /// With every broken rule, each naming the tensor and the byte; text that is not JSON is one problem.
    pub fn parse(bytes: &'a [u8], file_bytes: u64, file: &str) -> Result<Self, Vec<Problem>> {
        let header_bytes = bytes.len() as u64;
        let json = bytes.get(8..).unwrap_or_default();
        let text = std::str::from_utf8(json).map_err(|e| {
            let offset = PREFIX_BYTES + e.valid_up_to() as u64;
            vec![Problem::at(file, offset, "the header is not UTF-8")]
        })?;
        if !text.starts_with('{') {
            let message = "the header does not begin with '{'; this is not a safetensors file";
            return Err(vec![Problem::at(file, PREFIX_BYTES, message)]);
        }
        let raw = parse::header(text, file).map_err(|problem| vec![problem])?;
        let mut header = Self {
            header_bytes,
            data_bytes: file_bytes.saturating_sub(header_bytes),
            entries: raw.entries,
            dims: raw.dims,
        };
        let mut problems = ProblemList::new(file);
        header.check_names(&mut problems);
        header.entries.sort_unstable_by_key(|e| (e.begin, e.end));
        header.check_sizes(&mut problems);
        header.check_tiling(&mut problems);
        let problems = problems.into_vec();
        if problems.is_empty() {
            Ok(header)
        } else {
            Err(problems)
        }
    }

    fn check_names(&self, problems: &mut ProblemList<'_>) {
        let mut seen = HashSet::with_capacity(self.entries.len());
        for entry in &self.entries {
            if !seen.insert(entry.name.as_ref()) {
                let message = "the name appears twice in the header";
                problems.tensor(&entry.name, self.offset(entry), message);
            }
        }
    }

    fn check_sizes(&self, problems: &mut ProblemList<'_>) {
        for entry in &self.entries {
            let shape = self.shape(entry);
            let bits = shape
                .iter()
                .try_fold(1u64, |n, &d| n.checked_mul(d))
                .and_then(|n| n.checked_mul(entry.dtype.bits()));
            let dtype = entry.dtype.name();
            let message = match (bits, entry.end.checked_sub(entry.begin)) {
                (None, _) => format!("{dtype} {shape:?} is more bytes than 64 bits count"),
                (Some(bits), _) if bits % 8 != 0 => {
                    format!("{dtype} {shape:?} is {bits} bits, not whole bytes")
                }
                (_, None) => format!(
                    "data_offsets [{}, {}] end before they begin",
                    entry.begin, entry.end
                ),
                (Some(bits), Some(stored)) if bits / 8 != stored => format!(
                    "{dtype} {shape:?} is {} bytes, but data_offsets [{}, {}] hold {stored}",
                    bits / 8,
                    entry.begin,
                    entry.end
                ),
                _ => continue,
            };
            problems.tensor(&entry.name, self.offset(entry), message);
        }
    }

    /// `entries` are sorted by offset.
    fn check_tiling(&self, problems: &mut ProblemList<'_>) {
        let mut expected = 0u64;
        for entry in &self.entries {
            let (begin, end) = (entry.begin, entry.end);
            if begin > expected {
                let hole = begin - expected;
                let message = format!("{hole} bytes before it belong to no tensor");
                problems.tensor(&entry.name, self.offset(entry), message);
            } else if begin < expected {
                let message = format!(
                    "begins {} bytes inside the tensor before it",
                    expected - begin
                );
                problems.tensor(&entry.name, self.offset(entry), message);
            }
            if end > self.data_bytes {
                let message = format!(
                    "ends at byte {} but the file has {} bytes; it is truncated, download it again",
                    self.header_bytes.saturating_add(end),
                    self.header_bytes + self.data_bytes
                );
                problems.tensor(&entry.name, self.offset(entry), message);
            }
            expected = expected.max(end);
        }
        if expected < self.data_bytes {
            let rest = self.data_bytes - expected;
            let message = format!("{rest} bytes after the last tensor belong to none");
            problems.at(self.header_bytes + expected, message);
        }
    }

    /// Absolute offset of an entry, for messages.
    fn offset(&self, entry: &Entry<'_>) -> u64 {
        self.header_bytes.saturating_add(entry.begin)
    }
}

/// Map everything before the data of `file`, which has `file_bytes` bytes.
///
/// # Errors
/// If the file cannot be read, is no safetensors file (a Git-LFS pointer is called one), or announces a header longer than
/// itself or than [`MAX_HEADER_BYTES`]; nothing is mapped for such a header.
pub fn map_header(file: &File, file_bytes: u64, name: &str) -> Result<Mmap, Problem> {
    let io = |offset: u64| {
        move |e: std::io::Error| Problem::at(name, offset, format!("cannot be read: {e}"))
    };
    if file_bytes < PREFIX_BYTES {
        let message =
            format!("has {file_bytes} bytes, too few for a safetensors header; download it again");
        return Err(Problem::of(name, message));
    }
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0).map_err(io(0))?;
    if is_lfs_pointer(&prefix) {
        let message = "is a Git-LFS pointer, not the file itself; run `git lfs pull` in the folder";
        return Err(Problem::of(name, message));
    }
    let total = header_len(prefix, file_bytes, name)?;
    map_start(file, total).map_err(io(PREFIX_BYTES))
}

/// Bytes before the data of a file of `file_bytes` bytes that begins with `prefix`.
///
/// # Errors
/// If that is longer than the file, than [`MAX_HEADER_BYTES`], or than this machine can address.
pub fn header_len(prefix: [u8; 8], file_bytes: u64, name: &str) -> Result<usize, Problem> {
    let length = u64::from_le_bytes(prefix);
    let problem = |message: String| Err(Problem::at(name, 0, message));
    if length > MAX_HEADER_BYTES {
        return problem(format!(
            "announces a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed"
        ));
    }
    if length > file_bytes.saturating_sub(PREFIX_BYTES) {
        return problem(format!(
            "announces a header of {length} bytes, but the file has {file_bytes}; download it again"
        ));
    }
    usize::try_from(PREFIX_BYTES + length)
        .map_err(|_| Problem::of(name, "the header is longer than this machine can address"))
}

/// Whether a file that begins with `start` is a Git-LFS pointer.
pub fn is_lfs_pointer(start: &[u8]) -> bool {
    // The full first line is "version https://git-lfs.github.com/spec/v1"; as a length these eight bytes are far out of range.
    start.starts_with(b"version ")
}

#[cfg(test)]
mod tests;
