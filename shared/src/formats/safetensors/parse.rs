//! The header's JSON to entries, in one pass, borrowing names from the text.

use std::{borrow::Cow, fmt};

use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use super::{Entry, PREFIX_BYTES, StoredDtype};
use crate::formats::census::Problem;

const METADATA: &str = "__metadata__";

/// Entries in the order of the text, their shapes in one pool.
#[derive(Default)]
pub(super) struct Raw<'a> {
    pub(super) entries: Vec<Entry<'a>>,
    pub(super) dims: Vec<u64>,
    /// The tensor being read, for messages.
    current: Option<Cow<'a, str>>,
}

/// Parse the JSON of `file`.
pub(super) fn header<'a>(text: &'a str, file: &str) -> Result<Raw<'a>, Problem> {
    let mut raw = Raw::default();
    let mut json = serde_json::Deserializer::from_str(text);
    let result = (HeaderSeed { raw: &mut raw })
        .deserialize(&mut json)
        .and_then(|()| json.end());
    result.map_err(|error| Problem {
        file: file.into(),
        tensor: raw.current.take().map(Cow::into_owned),
        offset: Some(PREFIX_BYTES + byte_of(text, &error)),
        message: format!("malformed header: {}", message_of(&error)),
    })?;
    Ok(raw)
}

/// The byte of `text` at which an error was found; the library counts lines and columns from one.
fn byte_of(text: &str, error: &serde_json::Error) -> u64 {
    let line_start = match error.line() {
        0 | 1 => 0,
        line => text
            .bytes()
            .enumerate()
            .filter(|(_, b)| *b == b'\n')
            .nth(line - 2)
            .map_or(0, |(at, _)| at + 1),
    };
    (line_start + error.column().saturating_sub(1)) as u64
}

/// The library's words without its line and column, which a byte offset replaces.
fn message_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(at) => text.get(..at).unwrap_or_default().to_owned(),
        None => text,
    }
}

struct HeaderSeed<'s, 'a> {
    raw: &'s mut Raw<'a>,
}

impl<'a> DeserializeSeed<'a> for HeaderSeed<'_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'a> Visitor<'a> for HeaderSeed<'_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_metadata = false;
        while let Some(name) = map.next_key_seed(Text)? {
            if name == METADATA {
                if has_metadata {
                    return Err(A::Error::custom("__metadata__ appears twice"));
                }
                has_metadata = true;
                map.next_value_seed(Metadata)?;
                continue;
            }
            self.raw.current = Some(name);
            map.next_value_seed(TensorSeed { raw: self.raw })?;
        }
        Ok(())
    }
}

/// A string, borrowed unless it has escapes.
struct Text;

impl<'a> DeserializeSeed<'a> for Text {
    type Value = Cow<'a, str>;

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<Cow<'a, str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'a> Visitor<'a> for Text {
    type Value = Cow<'a, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_borrowed_str<E>(self, text: &'a str) -> Result<Cow<'a, str>, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E>(self, text: &str) -> Result<Cow<'a, str>, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

/// `__metadata__`: strings to strings, all ignored.
struct Metadata;

impl<'a> DeserializeSeed<'a> for Metadata {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'a> Visitor<'a> for Metadata {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("__metadata__ as an object of strings")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(Text)?.is_some() {
            map.next_value_seed(Text)?;
        }
        Ok(())
    }
}

struct TensorSeed<'s, 'a> {
    raw: &'s mut Raw<'a>,
}

impl<'a> DeserializeSeed<'a> for TensorSeed<'_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'a> Visitor<'a> for TensorSeed<'_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        let mut dtype = None;
        let mut shape = None;
        let mut offsets = None;
        while let Some(key) = map.next_key_seed(Text)? {
            match key.as_ref() {
                "dtype" => {
                    let name = map.next_value_seed(Text)?;
                    let parsed = StoredDtype::parse(&name)
                        .ok_or_else(|| A::Error::custom(format!("unknown dtype {name:?}")))?;
                    once::<_, A::Error>(&mut dtype, parsed, "dtype")?;
                }
                "shape" => {
                    let dims = map.next_value_seed(Dims(&mut self.raw.dims))?;
                    once::<_, A::Error>(&mut shape, dims, "shape")?;
                }
                "data_offsets" => {
                    let pair = map.next_value::<(u64, u64)>()?;
                    once::<_, A::Error>(&mut offsets, pair, "data_offsets")?;
                }
                // The format's own reader skips what it does not know here; so do we, or files it takes would be refused.
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let dtype = dtype.ok_or_else(|| A::Error::missing_field("dtype"))?;
        let shape = shape.ok_or_else(|| A::Error::missing_field("shape"))?;
        let (begin, end) = offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?;
        let name = self.raw.current.take().unwrap_or_default();
        self.raw.entries.push(Entry {
            name,
            dtype,
            begin,
            end,
            shape,
        });
        Ok(())
    }
}

fn once<T, E: serde::de::Error>(
    slot: &mut Option<T>,
    value: T,
    field: &'static str,
) -> Result<(), E> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(E::duplicate_field(field)),
    }
}

/// A list of whole numbers appended to a pool; its range there.
struct Dims<'s>(&'s mut Vec<u64>);

impl<'a> DeserializeSeed<'a> for Dims<'_> {
    type Value = (usize, usize);

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(usize, usize), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'a> Visitor<'a> for Dims<'_> {
    type Value = (usize, usize);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut seq: A) -> Result<(usize, usize), A::Error> {
        let start = self.0.len();
        while let Some(dim) = seq.next_element()? {
            self.0.push(dim);
        }
        Ok((start, self.0.len()))
    }
}
