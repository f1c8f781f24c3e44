//! Checkpoint tensor names, their roles, and the dtype and shape each must have.
