//! Replays an expert trace against the cache policies k3-run uses.
