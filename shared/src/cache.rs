//! Replacement policies over expert keys: no I/O, no clock. k3-run and k3-simcache run this same code.
