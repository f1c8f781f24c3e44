//! The words of the line, and what is left out where it is narrow.

use super::Goal;

/// What a run is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The prompt.
    Prompt,
    /// One token after the other.
    Tokens,
}

/// A moment of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) phase: Phase,
    pub(super) goal: Goal,
    /// Tokens of the phase that are computed; of the prompt, with those computed before the run.
    pub(super) done: usize,
    /// Tokens of the phase computed in this run, with the part of the step in progress that is.
    pub(super) computed: f64,
    /// The layer in progress, from 0.
    pub(super) layer: usize,
    /// Since the phase began.
    pub(super) seconds: f64,
    pub(super) bytes_per_second: Option<f64>,
    pub(super) hit_rate: Option<f64>,
}

/// Cells of the bar at most and at least; a shorter one says nothing.
const BAR: (usize, usize) = (30, 5);

impl View {
    /// At most `width` columns, all ASCII. The bar goes first where there is no room, then hits, speed, layer.
    pub(super) fn line(&self, width: usize) -> String {
        let mut parts = self.parts();
        let length = |parts: &[String]| -> usize {
            let words = parts.iter().filter(|part| !part.is_empty());
            words
                .map(|part| part.len() + 2)
                .sum::<usize>()
                .saturating_sub(2)
        };
        for droppable in [3, 2, 1, 5, 4] {
            if length(&parts) <= width {
                break;
            }
            parts[droppable].clear();
        }
        // The bar, its brackets and the space that sets it apart.
        let room = width.saturating_sub(length(&parts) + 4).min(BAR.0);
        if room >= BAR.1 {
            parts[1].push_str(if parts[1].is_empty() { "" } else { "  " });
            parts[1].push_str(&bar(self.fraction(), room));
        }
        let words: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        let mut line = words.join("  ");
        line.truncate(width);
        line
    }

    /// What, layer, speed, hits, seconds a token, time left; empty where not known.
    fn parts(&self) -> [String; 6] {
        let what = match self.phase {
            Phase::Prompt => format!("prompt {}/{}", self.done, self.goal.prompt_tokens),
            // The prompt gave the first.
            Phase::Tokens => format!("token {}/{}", self.done + 2, self.goal.num_tokens),
        };
        let layer = format!("layer {}/{}", self.layer + 1, self.goal.num_layers);
        let speed = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
        let hits = |rate: f64| format!("hits {:.0} %", 100.0 * rate);
        let each = |seconds: f64| {
            if seconds < 9.9995 {
                format!("{seconds:.3} s/token")
            } else {
                format!("{seconds:.1} s/token")
            }
        };
        let left = |seconds: f64| format!("{} left", duration(seconds));
        [
            what,
            layer,
            self.bytes_per_second.map(speed).unwrap_or_default(),
            self.hit_rate.map(hits).unwrap_or_default(),
            self.seconds_each().map(each).unwrap_or_default(),
            self.seconds_left().map(left).unwrap_or_default(),
        ]
    }

    /// Tokens of the phase that this run computes.
    fn wanted(&self) -> f64 {
        let wanted = match self.phase {
            Phase::Prompt => self.goal.prompt_tokens - self.goal.computed_tokens,
            Phase::Tokens => self.goal.num_tokens.saturating_sub(1),
        };
        wanted.max(1) as f64
    }

    fn fraction(&self) -> f64 {
        (self.computed / self.wanted()).clamp(0.0, 1.0)
    }

    fn seconds_each(&self) -> Option<f64> {
        (self.computed > 0.0).then(|| self.seconds / self.computed)
    }

    /// To the end of the run: of the prompt alone, where nothing is known of the tokens.
    fn seconds_left(&self) -> Option<f64> {
        let here = self.seconds_each()? * (self.wanted() - self.computed).max(0.0);
        let after = match self.phase {
            Phase::Prompt => self.goal.seconds_per_token.unwrap_or_default(),
            Phase::Tokens => 0.0,
        };
        Some(here + after * self.goal.num_tokens.saturating_sub(1) as f64)
    }
}

fn bar(fraction: f64, width: usize) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a fraction of a small number"
    )]
    let full = ((fraction * width as f64) as usize).min(width);
    format!("[{}{}]", "#".repeat(full), "-".repeat(width - full))
}

/// Two units of time are enough: 2h05m, 39m58s, 12s.
fn duration(seconds: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "seconds ahead are not negative, and a cast saturates"
    )]
    let seconds = seconds.ceil() as u64;
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{:02}s", seconds % 60),
        (..48, _) => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{}d{:02}h", hours / 24, hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view() -> View {
        View {
            phase: Phase::Tokens,
            goal: Goal {
                prompt_tokens: 12,
                num_tokens: 64,
                num_layers: 93,
                ..Goal::default()
            },
            done: 10,
            computed: 10.5,
            layer: 46,
            seconds: 483.0,
            bytes_per_second: Some(2.96e9),
            hit_rate: Some(0.123),
        }
    }

    #[test]
    fn a_wide_line_has_everything_and_a_bar() {
        assert_eq!(
            view().line(119),
            "token 12/64  layer 47/93  [#####-------------------------]  2.96 GB/s  hits 12 %  46.0 s/token  40m15s left"
        );
    }

    #[test]
    fn no_line_is_wider_than_its_terminal() {
        for width in 0..200 {
            let line = view().line(width);
            assert!(line.len() <= width, "{width}: {line}");
        }
        let line = view().line(79);
        assert!(
            line.starts_with("token 12/64") && line.ends_with("40m15s left"),
            "{line}"
        );
        assert!(
            line.contains("s/token") && line.contains("GB/s") && line.contains("hits"),
            "{line}"
        );
    }

    #[test]
    fn the_prompt_counts_what_was_computed_before_and_knows_what_follows() {
        let mut view = view();
        view.phase = Phase::Prompt;
        view.goal.prompt_tokens = 100;
        view.goal.computed_tokens = 20;
        (view.done, view.computed, view.seconds) = (60, 40.0, 80.0);
        assert!(view.line(79).starts_with("prompt 60/100"));
        assert_eq!(view.seconds_left(), Some(80.0));
        view.goal.seconds_per_token = Some(2.0);
        assert_eq!(view.seconds_left(), Some(80.0 + 63.0 * 2.0));
        view.computed = 0.0;
        assert_eq!(view.seconds_left(), None, "nothing is known yet");
    }

    #[test]
    fn times_have_two_units() {
        let cases = [
            (0.2, "1s"),
            (59.0, "59s"),
            (60.0, "1m00s"),
            (2398.0, "39m58s"),
            (7500.0, "2h05m"),
            (4.0 * 86_400.0, "4d00h"),
        ];
        for (seconds, text) in cases {
            assert_eq!(duration(seconds), text);
        }
    }
}
