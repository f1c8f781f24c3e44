//! Read-only maps of file headers: the one place that maps, and the only unsafe code in this crate.
//!
//! Headers are parsed once, front to back, and dropped; a map spares the copy and is returned to the system at once. Weights are
//! never mapped: they are read with [`crate::direct`], whose errors say what happened.

use std::{fs::File, io};

use memmap2::{Mmap, MmapOptions};

/// Map the first `len` bytes of `file`, which must have as many.
///
/// # Errors
/// If the file is shorter, or the system refuses.
#[expect(
    unsafe_code,
    reason = "a map is only as constant as the file beneath it"
)]
pub fn map_start(file: &File, len: usize) -> io::Result<Mmap> {
    if file.metadata()?.len() < len as u64 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // SAFETY: the map is private and read-only, and its length was checked against the file just now. Should another process
    // rewrite the file meanwhile, the parser reads other bytes, all of which it checks, or the process ends by SIGBUS; a
    // checkpoint that is written to while it is read is refused either way.
    unsafe { MmapOptions::new().len(len).map_copy_read_only(file) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn a_map_holds_the_start_and_a_short_file_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"header and data").unwrap();
        assert_eq!(&map_start(&file, 6).unwrap()[..], b"header");
        let error = map_start(&file, 16).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
