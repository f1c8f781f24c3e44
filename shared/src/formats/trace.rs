//! The expert trace: which experts each row of each step asked for.
