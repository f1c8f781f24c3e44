//! Shard headers: the safetensors rules, checked to the byte.
