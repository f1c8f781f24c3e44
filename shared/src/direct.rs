//! Aligned buffers and `O_DIRECT` reads and writes, with a probe and a buffered fallback.
