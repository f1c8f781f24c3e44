//! Buffers whose contents do not outlive a sublayer, so that mixers and channel mixers of every kind take turns in them.
//!
//! Slots are numbered, not named, because each kind means something else by them; what each kind keeps in which slot is written
//! where it takes them, and once more where the ledger adds them up (`k3_shared::ledger`). Buffers grow to exactly what was
//! asked for and never shrink.

use super::groups::ExpertGroups;
use crate::kernels::Activations;

/// Slots of vectors as wide as a projection.
pub(super) const WIDE: usize = 7;
/// Slots of small vectors.
pub(super) const SMALL: usize = 2;
/// Slots of kernel inputs.
pub(super) const INPUTS: usize = 4;

/// The buffers.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    pub(super) wide: [Vec<f32>; WIDE],
    pub(super) small: [Vec<f32>; SMALL],
    pub(super) inputs: [Activations; INPUTS],
    /// Who takes which expert.
    pub(super) groups: ExpertGroups,
}

impl Workspace {
    /// Bytes of memory the buffers hold, for the ledger.
    pub(super) fn allocated_bytes(&self) -> usize {
        let vectors = self.wide.iter().chain(&self.small).map(vec_bytes);
        let inputs = self.inputs.iter().map(Activations::allocated_bytes);
        vectors.chain(inputs).sum::<usize>() + self.groups.allocated_bytes()
    }
}

/// Bytes of memory a vector holds.
pub(super) fn vec_bytes<T>(vector: &Vec<T>) -> usize {
    vector.capacity() * size_of::<T>()
}

/// The first `len` values of a buffer that only ever grows, and to no more than it must.
pub(super) fn sized<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.reserve_exact(len - buffer.len());
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
