//! The text as it comes.

use std::io::{self, Write};

use crate::{
    live::Screen,
    tokenizer::{Decoder, Tokenizer},
};

/// Prints what is generated as it comes: whole characters, or ids where there is no tokenizer.
pub(crate) struct TextOut<'a> {
    out: &'a mut dyn Write,
    screen: Screen,
    tokenizer: Option<&'a Tokenizer>,
    decoder: Decoder,
    text: String,
    count: usize,
}

impl<'a> TextOut<'a> {
    /// Text that goes on after `said`, whose last character may lack bytes.
    pub(crate) fn new(
        out: &'a mut dyn Write,
        screen: Screen,
        tokenizer: Option<&'a Tokenizer>,
        said: &[u32],
    ) -> Self {
        let mut decoder = Decoder::default();
        if let Some(tokenizer) = tokenizer {
            for &id in said {
                decoder.push(tokenizer, id);
            }
        }
        Self {
            out,
            screen,
            tokenizer,
            decoder,
            text: String::new(),
            count: 0,
        }
    }

    pub(crate) fn push(&mut self, id: u32) -> io::Result<()> {
        let piece = match self.tokenizer {
            Some(tokenizer) => self.decoder.push(tokenizer, id),
            None if self.count == 0 => id.to_string(),
            None => format!(",{id}"),
        };
        self.count += 1;
        self.write(&piece)
    }

    fn write(&mut self, piece: &str) -> io::Result<()> {
        self.text.push_str(piece);
        let out = &mut self.out;
        self.screen.text(piece, || {
            out.write_all(piece.as_bytes())?;
            out.flush()
        })
    }

    /// Flush what was held back, unless a saved state `goes_on` with it, and end the line; the text, if there is a tokenizer.
    pub(crate) fn finish(mut self, goes_on: bool) -> io::Result<Option<String>> {
        let rest = if goes_on {
            String::new()
        } else {
            std::mem::take(&mut self.decoder).finish()
        };
        // A reader that is gone has had all it wanted; the report is still to be written.
        let written = self.write(&rest).and_then(|()| self.out.write_all(b"\n"));
        match written.and_then(|()| self.out.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(self.tokenizer.map(|_| self.text)),
        }
    }
}
