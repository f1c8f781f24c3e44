use std::sync::Mutex;

use proptest::prelude::*;
use rustix::io::Errno;

use super::*;

/// How [`Fake`] treats the calls it receives, in turn; the last one repeats.
#[derive(Clone, Copy, Debug)]
enum Turn {
    Whole,
    AtMost(usize),
    Fail(Errno),
}

/// Bytes in memory behind a misbehaving device.
#[derive(Debug)]
struct Fake {
    bytes: Mutex<Vec<u8>>,
    turns: Mutex<Vec<Turn>>,
    calls: Mutex<Vec<(u64, usize)>>,
}

impl Fake {
    fn new(bytes: Vec<u8>, turns: &[Turn]) -> Self {
        let mut turns = turns.to_vec();
        turns.reverse();
        Self {
            bytes: Mutex::new(bytes),
            turns: Mutex::new(turns),
            calls: Mutex::default(),
        }
    }

    fn turn(&self, offset: u64, len: usize) -> io::Result<usize> {
        self.calls.lock().unwrap().push((offset, len));
        let mut turns = self.turns.lock().unwrap();
        let turn = *turns.last().unwrap();
        if turns.len() > 1 {
            turns.pop();
        }
        match turn {
            Turn::Whole => Ok(len),
            Turn::AtMost(n) => Ok(len.min(n)),
            Turn::Fail(errno) => Err(errno.into()),
        }
    }
}

impl Device for &'static Fake {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let bytes = self.bytes.lock().unwrap();
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|o| bytes.get(o..))
            .unwrap_or(&[]);
        let n = self.turn(offset, buf.len())?.min(rest.len());
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }

    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<usize> {
        let n = self.turn(offset, from.len())?;
        let mut bytes = self.bytes.lock().unwrap();
        let at = usize::try_from(offset).unwrap();
        let len = bytes.len().max(at + n);
        bytes.resize(len, 0);
        bytes[at..at + n].copy_from_slice(&from[..n]);
        Ok(n)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).unwrap();
        self.bytes.lock().unwrap().resize(len, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        Ok(Some(offset..Device::len(self)?))
    }

    fn forget(&self, _: u64, _: u64) {}
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| ((i * 31 + i / 251) % 256).try_into().unwrap())
        .collect()
}

fn fake(bytes: Vec<u8>, turns: &[Turn], direct: bool) -> (DirectFile, &'static Fake) {
    let fake: &'static Fake = Box::leak(Box::new(Fake::new(bytes, turns)));
    let file = DirectFile::with_device("some file".into(), Box::new(fake), direct);
    (file, fake)
}

#[test]
fn a_buffer_starts_aligned_and_zeroed_and_never_outgrows_its_capacity() {
    for bytes in [0, 1, ALIGN, 3 * ALIGN + 7, 1 << 20] {
        let mut buf = AlignedBuf::with_capacity(bytes);
        assert_eq!(buf.capacity(), bytes.max(1).next_multiple_of(ALIGN));
        assert!(buf.is_empty());
        buf.set_len(bytes);
        assert!(buf.as_ptr().addr().is_multiple_of(ALIGN));
        assert!(buf.iter().all(|&b| b == 0));
        buf.resize(buf.capacity(), 7);
        assert!(buf[bytes..].iter().all(|&b| b == 7));
        let moved = buf;
        assert!(moved.as_ptr().addr().is_multiple_of(ALIGN));
    }
}

#[test]
#[should_panic(expected = "in a buffer of 4096")]
fn a_length_past_the_capacity_is_a_bug() {
    AlignedBuf::with_capacity(1).set_len(ALIGN + 1);
}

/// Huge pages reach across the ends of neighbours only where the system takes them for one mapping. Linux 6.7 to 6.11 lay large
/// mappings apart, each at the start of a huge page.
#[test]
fn buffers_made_one_after_the_other_lie_side_by_side_or_each_at_a_huge_page() {
    let buffers: Vec<AlignedBuf> = (0..64)
        .map(|_| AlignedBuf::with_capacity(HUGE_PAGE + ALIGN))
        .collect();
    let starts: Vec<usize> = buffers.iter().map(|b| b.as_ptr().addr()).collect();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let holding = maps.lines().filter(|line| {
        let ends = line.split(' ').next().and_then(|span| span.split_once('-'));
        let at = |hex| usize::from_str_radix(hex, 16).unwrap();
        ends.is_some_and(|(from, to)| starts.iter().any(|s| (at(from)..at(to)).contains(s)))
    });
    // Other tests map memory in between.
    let mappings = holding.count();
    let apart = starts.iter().all(|start| start.is_multiple_of(HUGE_PAGE));
    assert!(apart || (1..16).contains(&mappings), "{mappings} mappings");
}

#[test]
fn row_37_single_byte_counts_and_interruptions_still_fill_the_buffer() {
    let bytes = pattern(3 * ALIGN);
    for turns in [
        &[Turn::AtMost(1)][..],
        &[
            Turn::Fail(Errno::INTR),
            Turn::Fail(Errno::INTR),
            Turn::AtMost(777),
        ],
        &[Turn::AtMost(ALIGN), Turn::Fail(Errno::INTR), Turn::Whole],
    ] {
        for direct in [false, true] {
            let (file, _) = fake(bytes.clone(), turns, direct);
            let mut buf = AlignedBuf::zeroed(2 * ALIGN);
            file.read_exact_at(&mut buf, ALIGN as u64).unwrap();
            assert_eq!(buf[..], bytes[ALIGN..]);
            assert_eq!(file.bytes_requested(), 2 * ALIGN as u64);
        }
    }
}

#[test]
fn short_writes_and_interruptions_still_write_everything() {
    let mut buf = AlignedBuf::zeroed(2 * ALIGN);
    buf.copy_from_slice(&pattern(2 * ALIGN));
    let turns = [Turn::AtMost(5), Turn::Fail(Errno::INTR), Turn::AtMost(1000)];
    let (file, fake) = fake(Vec::new(), &turns, true);
    file.write_all_at(&buf, ALIGN as u64).unwrap();
    assert_eq!(fake.bytes.lock().unwrap()[ALIGN..], buf[..]);
}

#[test]
fn a_full_disk_names_the_file_and_the_counts() {
    let turns = [Turn::AtMost(ALIGN), Turn::Fail(Errno::NOSPC)];
    let (file, _) = fake(Vec::new(), &turns, true);
    let error = file
        .write_all_at(&AlignedBuf::zeroed(3 * ALIGN), 8192)
        .unwrap_err();
    assert!(
        matches!(error, DirectError::Full { got: ALIGN, .. }),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains("some file: no space left: 4096 of 12288 bytes written at byte 8192"),
        "{text}"
    );
}

#[test]
fn a_device_that_takes_nothing_is_an_error_not_a_loop() {
    let (file, _) = fake(Vec::new(), &[Turn::AtMost(0)], true);
    let error = file
        .write_all_at(&AlignedBuf::zeroed(ALIGN), 0)
        .unwrap_err();
    assert!(
        matches!(error, DirectError::Write { got: 0, .. }),
        "{error}"
    );
}

#[test]
fn a_read_error_is_passed_on_with_its_place() {
    let turns = [Turn::AtMost(ALIGN), Turn::Fail(Errno::IO)];
    let (file, _) = fake(pattern(4 * ALIGN), &turns, true);
    let error = file
        .read_exact_at(&mut AlignedBuf::zeroed(2 * ALIGN), 4096)
        .unwrap_err();
    assert!(
        matches!(
            error,
            DirectError::Read {
                offset: 8192,
                wanted: ALIGN,
                got: ALIGN,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn row_36_a_file_that_ends_early_is_an_error_with_both_counts() {
    let (file, _) = fake(pattern(ALIGN + 100), &[Turn::Whole], true);
    let mut buf = AlignedBuf::with_capacity(4 * ALIGN);
    let error = file.read_covering(&mut buf, 4000, 300).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("file is shorter than expected: wanted 4300 bytes at byte 0, got 4196"),
        "{text}"
    );
}

/// Specification 4, row 37: Linux moves at most 2,147,479,552 bytes a call, the output head has 2,348,810,240.
#[test]
fn row_37_a_transfer_above_two_gib_is_made_of_smaller_aligned_calls() {
    #[derive(Debug)]
    struct Vast;
    impl Device for Vast {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            assert!(buf.len() < 1 << 30 && buf.len().is_multiple_of(ALIGN));
            assert!(offset.is_multiple_of(ALIGN as u64));
            buf[0] = u8::try_from(offset >> 29).unwrap() + 1;
            Ok(buf.len())
        }
        fn write_at(&self, _: &[u8], _: u64) -> io::Result<usize> {
            unreachable!()
        }
        fn len(&self) -> io::Result<u64> {
            unreachable!()
        }
        fn set_len(&self, _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn sync(&self) -> io::Result<()> {
            unreachable!()
        }
        fn next_data(&self, _: u64) -> io::Result<Option<Range<u64>>> {
            unreachable!()
        }
        fn forget(&self, _: u64, _: u64) {}
    }
    let file = DirectFile::with_device("head".into(), Box::new(Vast), true);
    // Only the first page of each call is ever touched.
    let mut buf = AlignedBuf::zeroed(2_348_810_240);
    file.read_exact_at(&mut buf, 0).unwrap();
    for call in 0..5 {
        assert_eq!(usize::from(buf[call << 29]), call + 1);
    }
}

#[test]
fn row_38_direct_transfers_must_be_aligned_and_buffered_ones_need_not() {
    let (direct, _) = fake(pattern(4 * ALIGN), &[Turn::Whole], true);
    let mut buf = AlignedBuf::zeroed(2 * ALIGN);
    for (range, offset) in [(0..ALIGN, 1), (0..ALIGN - 1, 0), (1..ALIGN + 1, 0)] {
        let error = direct.read_exact_at(&mut buf[range], offset).unwrap_err();
        assert!(matches!(error, DirectError::Misaligned { .. }), "{error}");
    }
    let (buffered, _) = fake(pattern(4 * ALIGN), &[Turn::Whole], false);
    buffered.read_exact_at(&mut buf[3..10], 5).unwrap();
    assert_eq!(buf[3..10], pattern(12)[5..]);
}

#[test]
fn a_range_past_the_last_possible_byte_is_refused() {
    let (file, _) = fake(Vec::new(), &[Turn::Whole], false);
    let mut buf = AlignedBuf::zeroed(ALIGN);
    assert!(file.read_exact_at(&mut buf, u64::MAX - 7).is_err());
    assert!(file.read_covering(&mut buf, u64::MAX - 7, 4).is_err());
}

#[test]
fn a_buffer_below_the_covering_blocks_is_refused_not_grown() {
    let (file, _) = fake(pattern(4 * ALIGN), &[Turn::Whole], true);
    let mut buf = AlignedBuf::with_capacity(ALIGN);
    let error = file.read_covering(&mut buf, 4095, 2).unwrap_err();
    assert!(
        matches!(error, DirectError::BufferTooSmall { .. }),
        "{error}"
    );
    assert_eq!(buf.capacity(), ALIGN);
}

proptest! {
    #[test]
    fn any_range_inside_the_file_is_read_exactly(
        len in 1_usize..4 * ALIGN, start in 0_usize..4 * ALIGN, take in 0_usize..4 * ALIGN, most in 1_usize..9000,
    ) {
        let bytes = pattern(len);
        let start = start.min(len);
        let take = take.min(len - start);
        let (file, fake) = fake(bytes.clone(), &[Turn::AtMost(most)], true);
        let mut buf = AlignedBuf::with_capacity(covering_bytes(take));
        let payload = file.read_covering(&mut buf, start as u64, take).unwrap();
        prop_assert_eq!(&buf[payload], &bytes[start..start + take]);
        let requested: u64 = covering(start as u64, take).map(|r| r.end - r.start).unwrap();
        prop_assert_eq!(file.bytes_requested(), requested);
        if let Some((offset, len)) = fake.calls.lock().unwrap().first() {
            prop_assert!(offset % ALIGN as u64 == 0 && len % ALIGN == 0);
        }
    }
}

#[test]
fn row_38_every_mode_reads_the_same_bytes_up_to_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a file");
    let bytes = pattern(5 * ALIGN + 123);
    std::fs::write(&path, &bytes).unwrap();
    for mode in [Mode::Auto, Mode::Buffered] {
        let file = DirectFile::open(&path, mode).unwrap();
        assert_eq!(
            file.is_direct(),
            mode == Mode::Auto && file.fallback().is_none()
        );
        assert_eq!(file.len().unwrap(), bytes.len() as u64);
        let mut buf = AlignedBuf::with_capacity(8 * ALIGN);
        let payload = file
            .read_covering(&mut buf, 5000, bytes.len() - 5000)
            .unwrap();
        assert_eq!(buf[payload], bytes[5000..]);
        assert!(
            file.read_covering(&mut buf, 5000, bytes.len() - 4999)
                .is_err()
        );
    }
}

#[test]
fn what_is_written_is_read_back_and_a_new_file_starts_empty() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    std::fs::write(&path, b"old contents").unwrap();
    for mode in [Mode::Auto, Mode::Buffered] {
        let file = DirectFile::create(&path, mode).unwrap();
        assert!(file.is_empty().unwrap());
        let mut buf = AlignedBuf::zeroed(2 * ALIGN);
        buf.copy_from_slice(&pattern(2 * ALIGN));
        file.write_all_at(&buf, ALIGN as u64).unwrap();
        file.set_len(4 * ALIGN as u64).unwrap();
        file.sync().unwrap();
        let mut want = vec![0; ALIGN];
        want.extend(pattern(2 * ALIGN));
        want.resize(4 * ALIGN, 0);
        assert_eq!(std::fs::read(&path).unwrap(), want);
        let reopened = DirectFile::open_write(&path, mode).unwrap();
        reopened
            .write_all_at(&AlignedBuf::zeroed(ALIGN), 4096)
            .unwrap();
        want[ALIGN..2 * ALIGN].fill(0);
        assert_eq!(std::fs::read(&path).unwrap(), want);
    }
}

#[test]
fn holes_are_told_from_data() {
    const MIB: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse");
    let file = DirectFile::create(&path, Mode::Buffered).unwrap();
    file.set_len(8 * MIB).unwrap();
    assert!(file.data_ranges(0..8 * MIB).unwrap().is_empty());
    let ones = vec![1; 1 << 20];
    file.write_all_at(&ones, 2 * MIB).unwrap();
    file.write_all_at(&ones, 6 * MIB).unwrap();
    assert_eq!(
        file.data_ranges(0..8 * MIB).unwrap(),
        [2 * MIB..3 * MIB, 6 * MIB..7 * MIB]
    );
    assert_eq!(file.data_ranges(MIB..2 * MIB).unwrap(), []);
    let inside = 2 * MIB + 5..2 * MIB + 9;
    assert_eq!(file.data_ranges(inside.clone()).unwrap(), [inside]);
    assert_eq!(file.data_ranges(7 * MIB..8 * MIB).unwrap(), []);
    let error = file.data_ranges(7 * MIB..9 * MIB).unwrap_err();
    assert!(
        matches!(
            error,
            DirectError::Short {
                wanted: 0x20_0000,
                got: 0x10_0000,
                ..
            }
        ),
        "what is cut off is not a hole: {error}"
    );
}

#[test]
fn a_missing_file_is_named() {
    let error = DirectFile::open("/nonexistent/file".as_ref(), Mode::Auto).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("/nonexistent/file: cannot open"),
        "{error}"
    );
}

#[test]
fn only_the_errors_of_unsupported_direct_io_fall_back() {
    assert!(is_refusal(&Errno::INVAL.into()));
    assert!(!is_refusal(&Errno::IO.into()));
    assert!(!is_refusal(&io::Error::other("x")));
}
