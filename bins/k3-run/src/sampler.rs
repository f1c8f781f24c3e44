//! Choosing the next token.
