//! The tokenizer's files: what is accepted numbers distinct tokens densely, and encodes any of them to what decodes to it.

use std::collections::HashSet;

use k3_run::tokenizer::{Specials, Tokenizer};

use super::NAME;

/// Tokens that are encoded, of those at the end: the longest merges.
const ENCODED: u32 = 16;

/// A `tiktoken.model`; after a zero byte a `tokenizer_config.json`.
pub fn check(input: &[u8]) {
    let mut parts = input.splitn(2, |&byte| byte == 0);
    let (vocabulary, config) = (parts.next().unwrap_or_default(), parts.next());
    let Ok(tokenizer) = Tokenizer::parse(vocabulary) else {
        return;
    };
    let ids = u32::try_from(tokenizer.vocab_size()).expect("the parser limits it");
    let mut tokens = HashSet::new();
    for id in 0..ids - 256 {
        let token = tokenizer.token_bytes(id).expect("ids are dense");
        assert!(!token.is_empty() && tokens.insert(token), "token {id}");
        assert_eq!(tokenizer.special_name(id), None);
    }
    for id in ids - 256..ids {
        let name = tokenizer
            .special_name(id)
            .expect("the last 256 are special");
        assert_eq!(tokenizer.special_id(name), Some(id));
    }
    assert_eq!(tokenizer.token_bytes(ids), None);
    for id in (ids - 256).saturating_sub(ENCODED)..ids - 256 {
        let token = tokenizer.token_bytes(id).expect("ids are dense");
        let encoded = tokenizer
            .encode(token, Specials::AsText)
            .expect("any bytes encode");
        let bytes = encoded.iter().filter_map(|&id| tokenizer.token_bytes(id));
        assert_eq!(bytes.collect::<Vec<_>>().concat(), token);
    }
    if let Some(config) = config {
        // Whether they agree is theirs to say; that it is said is the property.
        let _ = tokenizer.check_config(NAME.as_ref(), config);
    }
}
