//! The live line of a run on a terminal: what is computed, how fast, and how long it will go on.
//!
//! It is drawn between layers, at most 20 times a second, by the thread that computes: no other thread wakes
//! for it, and where there is nothing to draw on a layer costs one comparison. Text that goes to the same terminal stays whole:
//! see the module `below`.

mod below;
mod line;

use std::{
    env, io,
    io::{IsTerminal as _, Write as _},
    sync::Arc,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use k3_shared::term;

use crate::model::Progress;
use below::Below;
use line::{Phase, View};

/// How often the line changes at most.
const DRAWS_PER_SECOND: u8 = 20;

/// Speeds are those of the last so many seconds, or of the one before while these last.
const WINDOW: Duration = Duration::from_secs(2);

/// How far a run goes, as far as is known before.
#[derive(Clone, Copy, Debug, Default)]
pub struct Goal {
    /// Tokens before the first generated one.
    pub prompt_tokens: usize,
    /// Of these, those that a resumed state has computed.
    pub computed_tokens: usize,
    /// Tokens to generate at most.
    pub num_tokens: usize,
    /// Layers of a step.
    pub num_layers: usize,
    /// What the plan expects of a decoded token.
    pub seconds_per_token: Option<f64>,
}

/// Where the line and the text are drawn: shared by the observer, which draws the line, and the text, which it makes room for.
#[derive(Clone, Debug)]
pub struct Screen {
    bar: ProgressBar,
    /// Where the text goes to the same terminal.
    below: Option<Arc<Below>>,
}

impl Screen {
    /// On standard error, if it is a terminal that can move its cursor and not `quiet`; else nothing is ever drawn.
    pub fn detect(quiet: bool) -> Self {
        let is_dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
        if quiet || is_dumb || !io::stderr().is_terminal() {
            return Self::hidden();
        }
        let below = io::stdout().is_terminal().then(Arc::<Below>::default);
        let target = match &below {
            Some(below) => {
                ProgressDrawTarget::term_like(Box::new(below::Handle(Arc::clone(below))))
            }
            None => ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND),
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let style = ProgressStyle::with_template("{msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        let screen = Self { bar, below };
        let log = screen.clone();
        term::log_through(Some(Arc::new(move |line| log.log(line))));
        screen
    }

    /// Nothing is ever drawn.
    pub fn hidden() -> Self {
        Self {
            bar: ProgressBar::hidden(),
            below: None,
        }
    }

    /// Write a piece of the text with `write`, the line out of its way.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn text(&self, piece: &str, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        // Elsewhere the text is in nobody's way, and a reader that takes none of it must not keep the log from the terminal.
        let Some(below) = &self.below else {
            return write();
        };
        self.bar.suspend(|| {
            write()?;
            below.text(piece);
            Ok(())
        })
    }

    /// Write a line of the log, on a line of its own.
    fn log(&self, line: &str) {
        self.bar.suspend(|| {
            if let Some(below) = &self.below {
                below.end_line();
            }
            let _ = writeln!(io::stderr().lock(), "{line}");
        });
    }

    /// Take the line away for good.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
        term::log_through(None);
    }
}

/// Follows the steps of a run and words the line.
#[derive(Debug)]
pub(crate) struct Live {
    screen: Screen,
    goal: Goal,
    is_hidden: bool,
    /// The steps of the prompt, then those of the tokens.
    phase: Phase,
    /// When the phase began, and what was read before it.
    began: Instant,
    before: Progress,
    /// Tokens of the phase that are computed, and rows of the step in progress.
    done: usize,
    rows: usize,
    speed: Speed,
    drawn: Option<Instant>,
}

impl Live {
    pub(crate) fn new(screen: Screen, goal: Goal) -> Self {
        let now = Instant::now();
        Self {
            is_hidden: screen.bar.is_hidden(),
            screen,
            goal,
            phase: Phase::Prompt,
            began: now,
            before: Progress::default(),
            done: goal.computed_tokens,
            rows: 0,
            speed: Speed::new(now),
            drawn: None,
        }
    }

    /// A step of `rows` tokens from `position` on begins.
    pub(crate) fn begin(&mut self, position: usize, rows: usize) {
        if self.is_hidden {
            return;
        }
        if self.phase == Phase::Prompt && position >= self.goal.prompt_tokens {
            self.phase = Phase::Tokens;
            self.began = Instant::now();
            self.before = self.speed.last;
            self.done = 0;
        }
        self.rows = rows;
    }

    /// The step ended.
    pub(crate) fn end(&mut self) {
        self.done += match self.phase {
            Phase::Prompt => self.rows,
            Phase::Tokens => 1,
        };
        self.rows = 0;
    }

    /// Layer `layer`, from 0, begins; `progress` has been read since the run began.
    pub(crate) fn layer(&mut self, layer: usize, progress: Progress) {
        if self.is_hidden {
            return;
        }
        let now = Instant::now();
        let pause = Duration::from_secs(1) / u32::from(DRAWS_PER_SECOND);
        if self.drawn.is_some_and(|drawn| now < drawn + pause) {
            return;
        }
        self.drawn = Some(now);
        self.speed.add(now, progress);
        let view = self.view(now, layer, progress);
        let width = usize::from(below::columns()).saturating_sub(1);
        self.screen.bar.set_message(view.line(width));
    }

    fn view(&self, now: Instant, layer: usize, progress: Progress) -> View {
        let requests = progress.expert_requests - self.before.expert_requests;
        let hits = progress.expert_hits - self.before.expert_hits;
        let first = match self.phase {
            Phase::Prompt => self.goal.computed_tokens,
            Phase::Tokens => 0,
        };
        let step = match self.phase {
            Phase::Prompt => self.rows as f64,
            Phase::Tokens => 1.0,
        };
        let part = layer as f64 / self.goal.num_layers.max(1) as f64;
        View {
            phase: self.phase,
            goal: self.goal,
            done: self.done,
            computed: (self.done - first) as f64 + step * part,
            layer,
            seconds: now.duration_since(self.began).as_secs_f64(),
            bytes_per_second: self.speed.bytes_per_second,
            hit_rate: (requests > 0).then(|| hits as f64 / requests as f64),
        }
    }

    pub(crate) fn finish(&self) {
        self.screen.finish();
    }
}

/// Bytes a second of late.
#[derive(Debug)]
struct Speed {
    since: Instant,
    bytes: u64,
    last: Progress,
    bytes_per_second: Option<f64>,
}

impl Speed {
    fn new(now: Instant) -> Self {
        Self {
            since: now,
            bytes: 0,
            last: Progress::default(),
            bytes_per_second: None,
        }
    }

    fn add(&mut self, now: Instant, progress: Progress) {
        self.last = progress;
        let seconds = now.duration_since(self.since).as_secs_f64();
        let is_whole = seconds >= WINDOW.as_secs_f64();
        if is_whole || (self.bytes == 0 && seconds > 0.0) {
            let bytes = progress.bytes.saturating_sub(self.bytes);
            self.bytes_per_second = Some(bytes as f64 / seconds);
        }
        if is_whole {
            self.since = now;
            self.bytes = progress.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_that_of_the_last_whole_window() {
        let start = Instant::now();
        let mut speed = Speed::new(start);
        let mut at = |seconds, bytes| {
            let progress = Progress {
                bytes,
                ..Progress::default()
            };
            speed.add(start + Duration::from_secs(seconds), progress);
            speed.bytes_per_second
        };
        assert_eq!(at(1, 100), Some(100.0), "the first window so far");
        assert_eq!(at(2, 400), Some(200.0));
        assert_eq!(at(3, 4_000), Some(200.0), "the window is not over");
        assert_eq!(at(4, 4_400), Some(2_000.0));
    }

    #[test]
    fn a_hidden_screen_passes_text_on_and_draws_nothing() {
        let mut live = Live::new(Screen::hidden(), Goal::default());
        live.begin(0, 1);
        live.layer(0, Progress::default());
        assert!(live.drawn.is_none());
        let mut written = false;
        let outcome = live.screen.text("x", || {
            written = true;
            Ok(())
        });
        assert!(outcome.is_ok() && written);
    }
}
