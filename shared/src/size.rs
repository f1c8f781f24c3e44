//! Byte sizes as people write and read them.
