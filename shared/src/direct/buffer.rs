//! Memory that direct transfers accept.

use std::ops::{Deref, DerefMut};

use memmap2::{Advice, MmapMut};

use super::ALIGN;

/// Bytes of a huge page. Smaller buffers are not worth asking for any.
pub const HUGE_PAGE: usize = 2 << 20;

/// Bytes that begin at a multiple of [`ALIGN`] in memory; always initialised.
///
/// The capacity is fixed at birth, a multiple of [`ALIGN`], and never grows: what a pool of buffers takes is known when it is
/// made. Memory is pages of its own from the system, zeroed when they are first touched, huge ones where the host gives them.
///
/// Huge pages begin at multiples of [`HUGE_PAGE`]. A buffer whose capacity is one begins there too (Linux 6.7 and later) and lies in
/// huge pages alone. Any other has small pages at both ends, unless its neighbours were made before it was touched: buffers made
/// one after the other lie side by side, and the system takes them for one (Linux 6.7 to 6.11 begin each at a huge page instead). So
/// make all of them first. None takes more memory than its own for it.
pub struct AlignedBuf {
    memory: MmapMut,
    len: usize,
}

impl AlignedBuf {
    /// An empty buffer that can hold `bytes`, rounded up to [`ALIGN`] and at least that.
    ///
    /// # Panics
    /// If the system has no address space for it.
    pub fn with_capacity(bytes: usize) -> Self {
        let capacity = bytes.max(1).next_multiple_of(ALIGN);
        let memory = MmapMut::map_anon(capacity)
            .unwrap_or_else(|e| panic!("a buffer of {capacity} bytes: {e}"));
        if capacity >= HUGE_PAGE {
            // Advice: a host without huge pages gives small ones.
            let _ = memory.advise(Advice::HugePage);
        }
        Self { memory, len: 0 }
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
        self.memory.len()
    }

    /// Set the length; bytes that come into view are whatever was last stored there, or zero.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(
            len <= self.capacity(),
            "{len} bytes in a buffer of {}",
            self.capacity()
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
        &self.memory[..self.len]
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf")
            .field("len", &self.len)
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}
