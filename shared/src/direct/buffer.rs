//! Memory that direct transfers accept.

use std::ops::{Deref, DerefMut};

use super::ALIGN;

/// Bytes that begin at a multiple of [`ALIGN`] in memory; always initialised.
///
/// The capacity is fixed at birth, a multiple of [`ALIGN`], and never grows: what a pool of buffers takes is known when it is
/// made. Fresh memory is zeroed by the system only when it is first touched.
pub struct AlignedBuf {
    /// One [`ALIGN`] more than the capacity, so that an aligned start lies within.
    memory: Vec<u8>,
    start: usize,
    len: usize,
    capacity: usize,
}

impl AlignedBuf {
    /// An empty buffer that can hold `bytes`, rounded up to [`ALIGN`].
    ///
    /// # Panics
    /// If `bytes` is within [`ALIGN`] blocks of the address space's end.
    pub fn with_capacity(bytes: usize) -> Self {
        let capacity = bytes.next_multiple_of(ALIGN);
        let memory = vec![0; capacity + ALIGN];
        let address = memory.as_ptr().addr();
        Self {
            start: address.next_multiple_of(ALIGN) - address,
            memory,
            len: 0,
            capacity,
        }
    }

    /// A buffer of `len` zeros.
    ///
    /// # Panics
    /// As [`Self::with_capacity`].
    pub fn zeroed(len: usize) -> Self {
        let mut buf = Self::with_capacity(len);
        buf.set_len(len);
        buf
    }

    /// Have the system back all of it with memory now.
    pub fn back_with_memory(&mut self) {
        crate::host::back_with_memory(&mut self.memory);
    }

    /// The most bytes it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of memory it takes: the capacity and one block for the alignment.
    pub fn allocated_bytes(&self) -> usize {
        self.memory.len()
    }

    /// What [`Self::allocated_bytes`] will be for a buffer of this capacity.
    pub const fn allocated_bytes_for(capacity: usize) -> usize {
        capacity.next_multiple_of(ALIGN) + ALIGN
    }

    /// Set the length; bytes that come into view are whatever was last stored there, or zero.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(
            len <= self.capacity,
            "{len} bytes in a buffer of {}",
            self.capacity
        );
        self.len = len;
    }

    /// Set the length; bytes past the old one become `value`.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn resize(&mut self, len: usize, value: u8) {
        let old = self.len;
        self.set_len(len);
        if let Some(added) = self.get_mut(old..) {
            added.fill(value);
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf")
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}
