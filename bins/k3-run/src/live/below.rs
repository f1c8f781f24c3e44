//! A line below text that goes to the same terminal and may end in the middle of a line.
//!
//! A frame is drawn in the line under the cursor and the cursor put back (DECSC, DECRC), so that the text goes on where it
//! stopped. First the cursor is moved down and up again (IND, CUU), which scrolls where it stands in the last line. The column
//! is followed for one case: text that fills its line to the last column leaves the cursor between two lines, and a terminal
//! forgets that when the cursor moves. There the line is ended, as the next character would have ended it.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use console::Term;
use indicatif::TermLike;

/// Columns of the terminal on standard error.
pub(super) fn columns() -> u16 {
    Term::stderr().size().1
}

/// The text's cursor, and the frame that is being put together.
#[derive(Debug, Default)]
pub(super) struct Below(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Columns of text in the line it stopped in, wrapped lines and all.
    column: usize,
    frame: String,
    is_shown: bool,
}

impl Below {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `piece` of the text was written.
    pub(super) fn text(&self, piece: &str) {
        self.lock().advance(piece);
    }

    /// Go to a line of its own.
    pub(super) fn end_line(&self) {
        let mut state = self.lock();
        if state.column > 0 {
            let _ = io::stderr().lock().write_all(b"\n");
            state.column = 0;
        }
    }
}

impl State {
    fn advance(&mut self, piece: &str) {
        match piece.rsplit_once(['\n', '\r']) {
            Some((_, rest)) => self.column = console::measure_text_width(rest),
            None => self.column += console::measure_text_width(piece),
        }
    }

    /// What draws the frame, or takes away the one that is there.
    fn sequence(&mut self, width: usize) -> String {
        let mut out = String::new();
        let frame = self.frame.trim_end();
        if frame.is_empty() && !self.is_shown {
            return out;
        }
        if width > 0 && self.column > 0 && self.column.is_multiple_of(width) {
            out.push_str("\r\n");
            self.column = 0;
        }
        // Down and up, keep the place, write in the line below, back.
        let _ = write!(out, "\x1bD\x1b[A\x1b7\x1b[B\r\x1b[K{frame}\x1b8");
        self.is_shown = !frame.is_empty();
        out
    }
}

/// What indicatif draws on: one line, kept until it is flushed.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Arc<Below>);

impl TermLike for Handle {
    fn width(&self) -> u16 {
        // A frame never reaches the last column, where the cursor would stand between two lines.
        columns().saturating_sub(1).max(1)
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, s: &str) -> io::Result<()> {
        self.write_str(s)
    }

    fn write_str(&self, s: &str) -> io::Result<()> {
        let mut state = self.0.lock();
        if s == "\r" {
            state.frame.clear();
        } else {
            state.frame.push_str(s);
        }
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.0.lock().frame.clear();
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.0.lock();
        let sequence = state.sequence(usize::from(columns()));
        state.frame.clear();
        let mut stderr = io::stderr().lock();
        stderr.write_all(sequence.as_bytes())?;
        stderr.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_column_follows_the_text() {
        let mut state = State::default();
        for (piece, column) in [("abc", 3), ("de\nf", 1), ("界", 3), ("\n", 0)] {
            state.advance(piece);
            assert_eq!(state.column, column, "{piece:?}");
        }
    }

    #[test]
    fn a_full_line_of_text_is_ended_before_the_cursor_moves() {
        let mut state = State::default();
        state.advance(&"x".repeat(160));
        state.frame.push_str("frame");
        assert!(state.sequence(80).starts_with("\r\n"));
        assert_eq!(state.column, 0);
        assert!(!state.sequence(80).starts_with("\r\n"));
    }

    #[test]
    fn nothing_is_written_to_take_away_what_is_not_there() {
        let mut state = State::default();
        assert_eq!(state.sequence(80), "");
        state.frame.push_str("frame");
        assert!(state.sequence(80).contains("frame"));
        state.frame.clear();
        assert_ne!(state.sequence(80), "");
        assert_eq!(state.sequence(80), "");
    }
}
