//! The text as it comes.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    live::Screen,
    tokenizer::{Decoder, Tokenizer},
};

/// Prints what is generated as it comes: whole characters, or ids where there is no tokenizer.
pub(crate) struct TextOut<'a> {
    out: &'a mut dyn Write,
    screen: Screen,
    /// Set during a write, which lasts as long as the reader likes.
    writing: Arc<AtomicBool>,
    tokenizer: Option<&'a Tokenizer>,
    decoder: Decoder,
    text: String,
    count: usize,
}

impl<'a> TextOut<'a> {
    /// Text that goes on after `said`, whose last character may lack bytes.
    pub(crate) fn new(
        out: &'a mut dyn Write,
        (screen, writing): (Screen, Arc<AtomicBool>),
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
            writing,
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
        self.put(piece)
    }

    fn put(&mut self, piece: &str) -> io::Result<()> {
        let Self {
            out,
            screen,
            writing,
            ..
        } = self;
        writing.store(true, Ordering::Relaxed);
        let written = screen.text(piece, || {
            out.write_all(piece.as_bytes())?;
            out.flush()
        });
        writing.store(false, Ordering::Relaxed);
        written
    }

    /// Flush what was held back, unless a saved state `goes_on` with it, and end the line; the text, if there is a tokenizer.
    pub(crate) fn finish(mut self, goes_on: bool) -> io::Result<Option<String>> {
        let rest = if goes_on {
            String::new()
        } else {
            std::mem::take(&mut self.decoder).finish()
        };
        // A reader that is gone has had all it wanted; the report is still to be written.
        match self.write(&rest).and_then(|()| self.put("\n")) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(self.tokenizer.map(|_| self.text)),
        }
    }
}
