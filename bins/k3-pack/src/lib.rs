//! Copies the always-used weights into a trunk, tile by tile in order of use.
