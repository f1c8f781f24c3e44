//! The one memory ledger that k3-plan writes and k3-run enforces.
