//! `trunk.json` (`k3.trunk/1`): tile records of a packed trunk.
