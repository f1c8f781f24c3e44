//! Ctrl-C and its like: when to stop, and when at once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals as Incoming,
};

/// The numbers of the signals that came, zero while none has.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    /// Stop when the step in progress is complete.
    pub(crate) stop: Arc<AtomicUsize>,
    /// Stop now.
    pub(crate) interrupt: Arc<AtomicUsize>,
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
                }
            })?;
        Ok(signals)
    }

    /// The number of the last signal, or zero.
    pub(crate) fn number(&self) -> usize {
        self.stop.load(Ordering::Relaxed)
    }
}
