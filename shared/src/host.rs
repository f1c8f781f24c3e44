//! Memory, cgroup limits, cores and peak resident size of this machine and process.
