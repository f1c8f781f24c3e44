//! How the trunk is cut into tiles, in order of use.
