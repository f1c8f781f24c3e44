//! `census.json` (`k3.census/1`).
