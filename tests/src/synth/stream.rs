//! The stream of random words behind a tensor, counter-based so that any range can be made by itself.

/// Words made at a time: the block and what is made of it stay in the first-level cache.
const BLOCK_WORDS: usize = 512;
const BLOCK_BYTES: usize = 8 * BLOCK_WORDS;

/// FNV-1a-64 of the UTF-8 bytes of `name`.
pub fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The words of one tensor: splitmix64 of the counter, seeded by the tensor's name (test-checkpoint specification 1.3).
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    seed: u64,
}

impl Stream {
    /// The stream of the tensor `name`.
    pub fn of(name: &str) -> Self {
        Self { seed: fnv1a(name) }
    }

    /// Word `index`, counted from zero.
    #[inline]
    pub fn word(self, index: u64) -> u64 {
        let counter = index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut z = self.seed.wrapping_add(counter);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Walk `out` in blocks beside the stream bytes, words in little-endian order, that each block is made of.
    ///
    /// `out` has `out_per_byte` bytes for each byte of the stream, which is taken from `first_byte` on.
    pub(super) fn blocks(
        self,
        first_byte: u64,
        out_per_byte: usize,
        mut out: &mut [u8],
        mut make: impl FnMut(&[u8], &mut [u8]),
    ) {
        let mut word = first_byte / 8;
        // At most 7, so no bits are lost.
        let mut skip = (first_byte % 8) as usize;
        let mut block = [0; BLOCK_BYTES];
        while !out.is_empty() {
            let wanted = (skip + out.len() / out_per_byte).min(BLOCK_BYTES);
            let num_words = wanted.div_ceil(8);
            for (index, bytes) in (word..).zip(block[..8 * num_words].chunks_exact_mut(8)) {
                bytes.copy_from_slice(&self.word(index).to_le_bytes());
            }
            let (now, later) = out.split_at_mut((wanted - skip) * out_per_byte);
            make(&block[skip..wanted], now);
            out = later;
            word += num_words as u64;
            skip = 0;
        }
    }
}

/// Stream bytes as elements of a float tensor: signed 16-bit lanes, exact in f32, in [-1, 1).
#[inline]
pub(super) fn lanes(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes
        .chunks_exact(2)
        .map(|b| f32::from(i16::from_le_bytes([b[0], b[1]])) * (1.0 / 32768.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NORM: &str = "language_model.model.norm.weight";

    #[test]
    fn seeds_are_the_published_ones() {
        assert_eq!(fnv1a(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(NORM), 0x4ef4_b031_da40_6a34);
    }

    #[test]
    fn words_and_lanes_are_the_published_ones() {
        let stream = Stream::of(NORM);
        assert_eq!(
            [0, 1, 2].map(|i| stream.word(i)),
            [
                0xd206_34d1_cd29_d00b,
                0xd136_728b_de9d_06fe,
                0x6a06_b475_3d76_429d
            ]
        );
        let mut out = [0; 12];
        stream.blocks(0, 1, &mut out, |bytes, out| out.copy_from_slice(bytes));
        let found: Vec<f32> = lanes(&out).collect();
        assert_eq!(
            found,
            [
                -0.374_664_3,
                -0.397_186_28,
                0.412_628_17,
                -0.359_191_9,
                0.054_626_465,
                -0.260_833_74
            ]
        );
    }

    #[test]
    fn a_block_may_begin_and_end_inside_a_word() {
        let stream = Stream::of("x");
        let mut whole = vec![0; 3 * BLOCK_BYTES];
        stream.blocks(0, 1, &mut whole, |bytes, out| out.copy_from_slice(bytes));
        for (first, len) in [(0, 1), (3, 2), (7, 2), (5, BLOCK_BYTES + 1), (4095, 4099)] {
            let mut part = vec![0; len];
            stream.blocks(first as u64, 1, &mut part, |b, out| out.copy_from_slice(b));
            assert_eq!(part, whole[first..first + len], "{len} bytes from {first}");
        }
    }
}
