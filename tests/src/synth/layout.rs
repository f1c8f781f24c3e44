//! Where every byte of a shard comes from: the header, and the tensors packed after it (specification 2.1).

use std::{fmt::Write as _, ops::Range};

use k3_shared::{
    config::Config,
    names::{Dtype, TensorRole, TensorSpec},
};

use super::{SynthError, rule::Rule, stream::Stream};

/// The header length is a multiple of this; with tensors in order of element size, no element straddles such a boundary.
const HEADER_ALIGN: usize = 8;

/// One tensor of a shard.
#[derive(Clone, Debug)]
pub struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    rule: Rule,
    /// Relative to the end of the header.
    data: Range<u64>,
}

impl Tensor {
    /// A tensor of the text model, stored F32 instead of BF16 with `store_f32`.
    pub(super) fn of_role(role: TensorRole, config: &Config, store_f32: bool) -> Self {
        let TensorSpec { dtype, shape } = role.spec(config);
        let dtype = match dtype {
            Dtype::Bf16 if store_f32 => Dtype::F32,
            other => other,
        };
        Self::new(role.name(), dtype, shape, Rule::of(role, config))
    }

    /// A tensor that the text model ignores; its values follow the rule of norms.
    pub(super) fn foreign(name: &str, shape: Vec<usize>) -> Self {
        Self::new(name.to_owned(), Dtype::Bf16, shape, Rule::Norm)
    }

    fn new(name: String, dtype: Dtype, shape: Vec<usize>, rule: Rule) -> Self {
        Self {
            name,
            dtype,
            shape,
            rule,
            data: 0..0,
        }
    }

    /// Its full name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Row-major shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Bytes of its data.
    pub fn bytes(&self) -> u64 {
        self.data.end - self.data.start
    }

    /// Fill `out` with the stored bytes of the elements from `first_element` on; no other element is looked at.
    ///
    /// # Panics
    /// If `out` holds a fraction of an element.
    pub fn fill(&self, first_element: u64, out: &mut [u8]) {
        assert!(out.len().is_multiple_of(self.dtype.bytes()));
        self.rule
            .fill(Stream::of(&self.name), self.dtype, first_element, out);
    }

    fn checked_bytes(&self) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(self.dtype.bytes() as u64, |bytes, &d| {
                bytes.checked_mul(d as u64)
            })
    }
}

/// One shard file: its name, its header, and its tensors in file order.
#[derive(Clone, Debug)]
pub struct Shard {
    file: String,
    /// The length word and the padded JSON.
    header: Vec<u8>,
    tensors: Vec<Tensor>,
    data_bytes: u64,
}

impl Shard {
    /// Lay `tensors` out by the rule of the release: element size descending, then names in byte order, without gaps.
    pub(super) fn new(file: String, mut tensors: Vec<Tensor>) -> Result<Self, SynthError> {
        tensors.sort_by(|a, b| {
            let size = b.dtype.bytes().cmp(&a.dtype.bytes());
            size.then_with(|| a.name.cmp(&b.name))
        });
        let mut at: u64 = 0;
        for tensor in &mut tensors {
            let end = tensor.checked_bytes().and_then(|n| at.checked_add(n));
            let end = end.ok_or_else(|| SynthError::TooLarge {
                tensor: tensor.name.clone(),
            })?;
            tensor.data = at..end;
            at = end;
        }
        Ok(Self {
            header: header(&tensors),
            file,
            tensors,
            data_bytes: at,
        })
    }

    /// Its file name.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The bytes before the data.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// The tensors, in file order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Bytes of tensor data.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.header.len() as u64 + self.data_bytes
    }

    /// Fill `out` with the bytes of the file from `offset` on, and with zeros past its end.
    ///
    /// # Panics
    /// If `offset` is not a multiple of 8: an element would be cut.
    pub fn fill(&self, offset: u64, out: &mut [u8]) {
        assert!(offset.is_multiple_of(HEADER_ALIGN as u64));
        let mut out = out;
        let mut data_at = offset.saturating_sub(self.header.len() as u64);
        if let Some(rest) = usize::try_from(offset)
            .ok()
            .and_then(|at| self.header.get(at..))
        {
            let (now, later) = out.split_at_mut(rest.len().min(out.len()));
            now.copy_from_slice(&rest[..now.len()]);
            out = later;
        }
        let first = self.tensors.partition_point(|t| t.data.end <= data_at);
        for tensor in &self.tensors[first..] {
            let left = usize::try_from(tensor.data.end - data_at).unwrap_or(usize::MAX);
            let (now, later) = out.split_at_mut(left.min(out.len()));
            let width = tensor.dtype.bytes() as u64;
            tensor.fill((data_at - tensor.data.start) / width, now);
            data_at += now.len() as u64;
            out = later;
            if out.is_empty() {
                return;
            }
        }
        out.fill(0);
    }
}

/// The length word, then compact JSON padded with spaces. Names and dtypes need no escapes.
fn header(tensors: &[Tensor]) -> Vec<u8> {
    // Longest entries of the release are 170 bytes.
    let mut json = String::with_capacity(8 + 180 * tensors.len());
    for (index, tensor) in tensors.iter().enumerate() {
        json.push(if index == 0 { '{' } else { ',' });
        let (name, dtype) = (&tensor.name, tensor.dtype.name());
        // Writing to a string cannot fail.
        let _ = write!(json, r#""{name}":{{"dtype":"{dtype}","shape":["#);
        for (axis, size) in tensor.shape.iter().enumerate() {
            let comma = if axis == 0 { "" } else { "," };
            let _ = write!(json, "{comma}{size}");
        }
        let Range { start, end } = tensor.data;
        let _ = write!(json, r#"],"data_offsets":[{start},{end}]}}"#);
    }
    json.push('}');
    let length = json.len().next_multiple_of(HEADER_ALIGN);
    let mut bytes = Vec::with_capacity(8 + length);
    bytes.extend_from_slice(&(length as u64).to_le_bytes());
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(8 + length, b' ');
    bytes
}
