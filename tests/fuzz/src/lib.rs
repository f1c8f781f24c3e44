//! What the fuzz targets check. The tests of the whole pipeline include the same module and run it on seeds and mutants of them.
#![forbid(unsafe_code)]

pub mod properties;
