//! Ctrl-C and its like: when to stop, and when at once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals as Incoming,
};

/// How long a write to standard output may go on after a second signal.
const PATIENCE: Duration = Duration::from_secs(1);

/// The numbers of the signals that came, zero while none has.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    /// Stop when the step in progress is complete.
    pub(crate) stop: Arc<AtomicUsize>,
    /// Stop now.
    pub(crate) interrupt: Arc<AtomicUsize>,
    /// Set while text is being written to standard output, whose reader may take nothing.
    pub(crate) writing: Arc<AtomicBool>,
}

impl Signals {
    /// Catch interrupts and terminations. Where a state is saved, the first of them lets the step in progress end and only the
    /// next one stops at once.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn catch(finish_step: bool) -> std::io::Result<Self> {
        let signals = Self {
            stop: Arc::default(),
            interrupt: Arc::default(),
            writing: Arc::default(),
        };
        let mut incoming = Incoming::new([SIGINT, SIGTERM])?;
        let set = signals.clone();
        thread::Builder::new()
            .name("k3-signals".into())
            .stack_size(64 << 10)
            .spawn(move || {
                for signal in incoming.forever() {
                    let number = usize::try_from(signal).unwrap_or(2);
                    let is_first = set.stop.swap(number, Ordering::Relaxed) == 0;
                    if finish_step && is_first {
                        log::warn!("the step in progress ends, then the state is saved; again to drop the step");
                    } else {
                        set.interrupt.store(number, Ordering::Relaxed);
                    }
                    if !is_first {
                        set.leave_a_full_pipe(signal);
                    }
                }
            })?;
        Ok(signals)
    }

    /// End the process if it waits for the reader of its output: nothing else would, a write being begun again after a signal.
    fn leave_a_full_pipe(&self, signal: i32) {
        thread::sleep(PATIENCE);
        if self.writing.load(Ordering::Relaxed) {
            log::error!(
                "standard output takes no more text; of this run only what was saved is kept"
            );
            std::process::exit(128 + signal);
        }
    }

    /// The number of the last signal, or zero.
    pub(crate) fn number(&self) -> usize {
        self.stop.load(Ordering::Relaxed)
    }
}
