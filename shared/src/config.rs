//! `config.json` to `Config`: every missing or contradictory field in one message, none defaulted.
