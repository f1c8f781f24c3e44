//! A checkpoint folder opened for reading: config, index, shard headers, where every tensor and expert lies, and its identity.
