//! Text, which is any bytes: its tokens put together are its bytes, decoded at once or one by one, special tokens or not.

use std::sync::OnceLock;

use k3_run::tokenizer::{Decoder, Specials, Tokenizer};

/// Bytes of text.
pub fn check(text: &[u8]) {
    static TINY: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer = TINY.get_or_init(|| {
        Tokenizer::parse(&k3_tests::tokenizer::tiny()).expect("the tiny vocabulary is one")
    });
    for specials in [Specials::AsText, Specials::Recognized] {
        let ids = tokenizer.encode(text, specials).expect("any bytes encode");
        assert!(ids.len() <= text.len(), "a token has a byte at least");
        let bytes: Vec<&[u8]> = ids
            .iter()
            .map(|&id| tokenizer.token_bytes(id).expect("it was encoded"))
            .collect();
        assert_eq!(bytes.concat(), text);
        let whole = String::from_utf8_lossy(text);
        assert_eq!(tokenizer.decode(&ids), whole);
        let mut decoder = Decoder::default();
        let mut pieces: String = ids.iter().map(|&id| decoder.push(tokenizer, id)).collect();
        pieces += &decoder.finish();
        assert_eq!(pieces, whole);
        let special = ids.iter().any(|&id| tokenizer.special_name(id).is_some());
        assert!(
            specials == Specials::Recognized || !special,
            "text that people wrote became a special token"
        );
    }
}
