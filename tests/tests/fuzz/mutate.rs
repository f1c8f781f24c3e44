//! Mutants of seeds, by a generator with a fixed seed.

/// Numbers that parsers get wrong.
const NUMBERS: [u64; 10] = [
    0,
    1,
    127,
    255,
    4096,
    1 << 31,
    u32::MAX as u64,
    1 << 53,
    i64::MAX as u64,
    u64::MAX,
];

/// Longest mutant.
const LONGEST: usize = 1 << 16;

pub(crate) struct Mutator<'s> {
    seeds: &'s [Vec<u8>],
    state: u64,
}

impl<'s> Mutator<'s> {
    pub(crate) fn new(seeds: &'s [Vec<u8>]) -> Self {
        Self { seeds, state: 7 }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.state >> 33).unwrap() % bound.max(1)
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap()
    }

    /// A seed after one to four changes.
    pub(crate) fn next_mutant(&mut self) -> Vec<u8> {
        let seed = self.below(self.seeds.len());
        let mut bytes = self.seeds[seed].clone();
        for _ in 0..=self.below(4) {
            self.change(&mut bytes);
        }
        bytes.truncate(LONGEST);
        bytes
    }

    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.below(len + 1);
        let most = (len - start).min(64);
        start..start + self.below(most + 1)
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len());
        let number = NUMBERS[self.below(NUMBERS.len())];
        match self.below(9) {
            0 => {
                let bit = self.below(8);
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << bit;
                }
            }
            1 => {
                let value = self.byte();
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            2 => {
                let value = self.byte();
                bytes.insert(at, value);
            }
            3 => {
                let range = self.range(bytes.len());
                bytes.drain(range);
            }
            4 => {
                let range = self.range(bytes.len());
                let copy = bytes[range].to_vec();
                bytes.splice(at..at, copy);
            }
            5 => bytes.truncate(at),
            6 => {
                let raw = number.to_le_bytes();
                let width = [1, 2, 4, 8][self.below(4)];
                if let Some(place) = bytes.get_mut(at..at + width) {
                    place.copy_from_slice(&raw[..width]);
                }
            }
            7 => self.write_number(bytes, number),
            _ => {
                let other = self.below(self.seeds.len());
                let range = self.range(self.seeds[other].len());
                bytes.splice(at..at, self.seeds[other][range].iter().copied());
            }
        }
    }

    /// Put another number in the place of one that is written in digits.
    fn write_number(&mut self, bytes: &mut Vec<u8>, number: u64) {
        let start = self.below(bytes.len());
        let is_digit = |byte: &u8| byte.is_ascii_digit();
        let Some(first) = bytes[start..].iter().position(is_digit) else {
            return;
        };
        let first = start + first;
        let digits = bytes[first..].iter().take_while(|b| is_digit(b)).count();
        bytes.splice(first..first + digits, number.to_string().into_bytes());
    }
}
