//! Decides what stays in memory and what streams, from one ledger.
