//! Small binary bodies: the only place that names bincode.
