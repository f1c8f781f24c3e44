//! Says what a checkpoint folder holds, and whether it is whole.
