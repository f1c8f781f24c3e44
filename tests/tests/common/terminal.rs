//! A terminal of the test's making: a pseudo-terminal to run something on, and what a screen of its size then shows.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "each test binary uses its own part"
)]
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails it by panicking, as the test does"
)]

use std::{
    fs::File,
    io::Read as _,
    process::{Command, ExitStatus},
    thread,
};

use rustix::{
    fs::{Mode, OFlags},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

/// Rows of the screen: few, so that it scrolls.
const ROWS: u16 = 12;

/// What a process wrote to its terminal.
pub struct Session {
    pub status: ExitStatus,
    pub bytes: Vec<u8>,
}

/// Run `command` with its standard error on a terminal `columns` wide; `also_stdout` with its standard output too.
pub fn run(command: &mut Command, columns: u16, also_stdout: bool) -> Session {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let slave = rustix::fs::open(
        name.as_c_str(),
        OFlags::RDWR | OFlags::NOCTTY,
        Mode::empty(),
    );
    let slave = File::from(slave.unwrap());
    let size = Winsize {
        ws_row: ROWS,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&master, size).unwrap();
    if also_stdout {
        command.stdout(slave.try_clone().unwrap());
    }
    command.stderr(slave).env("TERM", "xterm");
    let mut child = command.spawn().unwrap();
    // The command keeps the other end open for as long as it lives.
    command
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null());
    let mut master = File::from(master);
    let reader = thread::spawn(move || {
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        // The last close of the other end is an error here, not an end.
        while let Ok(count @ 1..) = master.read(&mut buffer) {
            bytes.extend_from_slice(&buffer[..count]);
        }
        bytes
    });
    let status = child.wait().unwrap();
    Session {
        status,
        bytes: reader.join().unwrap(),
    }
}

/// A screen of the kind that everybody has: VT100 cursor movements, erasing, wrapping at the last column.
pub struct Screen {
    columns: usize,
    /// Every line, those that scrolled away first.
    lines: Vec<Vec<char>>,
    row: usize,
    column: usize,
    /// A character was put in the last column, and the next goes to the next line.
    wraps: bool,
    saved: (usize, usize, bool),
}

impl Screen {
    pub fn new(columns: u16) -> Self {
        Self {
            columns: usize::from(columns),
            lines: vec![Vec::new()],
            row: 0,
            column: 0,
            wraps: false,
            saved: (0, 0, false),
        }
    }

    /// The lines without trailing blanks; wrapped ones are two.
    pub fn lines(&self) -> Vec<String> {
        let text = |line: &Vec<char>| line.iter().collect::<String>().trim_end().to_owned();
        self.lines.iter().map(text).collect()
    }

    /// First line of those that are visible: cursor movements end there.
    fn top(&self) -> usize {
        self.lines.len().saturating_sub(usize::from(ROWS))
    }

    pub fn write(&mut self, bytes: &[u8]) {
        let text = std::str::from_utf8(bytes).unwrap();
        let mut rest = text.chars();
        while let Some(c) = rest.next() {
            match c {
                '\r' => self.go(self.row, 0),
                '\n' => self.index(),
                '\x1b' => self.escape(&mut rest),
                c => self.put(c),
            }
        }
    }

    fn go(&mut self, row: usize, column: usize) {
        (self.row, self.column, self.wraps) = (row, column, false);
    }

    /// A line down, the same column; the last line scrolls.
    fn index(&mut self) {
        if self.row + 1 == self.lines.len() {
            // Lines below the last written are blank until the screen is full, then the screen scrolls.
            let scrolls = self.lines.len() >= usize::from(ROWS);
            self.lines.push(Vec::new());
            if scrolls {
                // A saved place is one of the screen: what it held has moved away from it.
                self.saved.0 += 1;
            }
        }
        self.go(self.row + 1, self.column);
    }

    fn put(&mut self, c: char) {
        assert!(!c.is_control(), "{c:?}");
        if self.wraps {
            self.index();
            self.column = 0;
        }
        let line = &mut self.lines[self.row];
        line.resize(line.len().max(self.column + 1), ' ');
        line[self.column] = c;
        self.wraps = self.column + 1 == self.columns;
        self.column += usize::from(!self.wraps);
    }

    fn escape(&mut self, rest: &mut std::str::Chars<'_>) {
        match rest.next() {
            Some('D') => self.index(),
            Some('7') => self.saved = (self.row, self.column, self.wraps),
            Some('8') => (self.row, self.column, self.wraps) = self.saved,
            Some('[') => {
                let number: String = rest.clone().take_while(char::is_ascii_digit).collect();
                let kind = rest.nth(number.len()).unwrap();
                self.control(kind, number.parse().ok());
            }
            other => panic!("escape {other:?}"),
        }
    }

    fn control(&mut self, kind: char, number: Option<usize>) {
        let count = number.unwrap_or(1).max(1);
        match kind {
            'A' => self.go(self.row.saturating_sub(count).max(self.top()), self.column),
            'B' => self.go((self.row + count).min(self.lines.len() - 1), self.column),
            'K' => {
                let from = if number == Some(2) { 0 } else { self.column };
                self.lines[self.row].truncate(from);
            }
            other => panic!("control sequence {number:?} {other:?}"),
        }
    }
}

/// Whether there is no escape sequence and no other control character than the ends of lines.
pub fn is_plain(bytes: &[u8]) -> bool {
    bytes.iter().all(|&b| b >= 0x20 || b == b'\n')
}
