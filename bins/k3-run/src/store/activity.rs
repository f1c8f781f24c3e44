//! How long the disk was kept busy: seconds in which at least one read was in flight.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Counts reads in flight and adds up the time in which there are any.
#[derive(Debug, Default)]
pub(super) struct Activity(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    in_flight: usize,
    /// When the first of the reads in flight began, while there are any.
    since: Option<Instant>,
    /// What is over.
    busy: Duration,
}

impl Activity {
    /// Run `read`, which is in flight for as long as it takes.
    pub(super) fn during<T>(&self, read: impl FnOnce() -> T) -> T {
        self.change(|state, now| {
            state.in_flight += 1;
            state.since.get_or_insert(now);
        });
        let result = read();
        self.change(|state, now| {
            state.in_flight -= 1;
            if state.in_flight == 0
                && let Some(since) = state.since.take()
            {
                state.busy += now.duration_since(since);
            }
        });
        result
    }

    /// The time so far in which a read was in flight.
    pub(super) fn busy(&self) -> Duration {
        self.change(|state, now| {
            let open = state.since.map(|since| now.duration_since(since));
            state.busy + open.unwrap_or_default()
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut State, Instant) -> T) -> T {
        // The clock is read with the lock held, so that it does not run backwards from one change to the next.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state, Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use super::*;

    #[test]
    fn time_counts_once_however_many_reads_are_in_flight_and_not_between_them() {
        let activity = Activity::default();
        let pause = Duration::from_millis(20);
        let began = Instant::now();
        let both = Barrier::new(2);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    activity.during(|| {
                        both.wait();
                        thread::sleep(pause);
                    });
                });
            }
        });
        let once = activity.busy();
        assert!(once >= pause && once <= began.elapsed());
        thread::sleep(pause);
        assert_eq!(activity.busy(), once, "nothing is in flight");
        activity.during(|| assert!(activity.busy() >= once));
        assert!(activity.busy() < began.elapsed());
    }
}
