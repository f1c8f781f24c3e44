//! What the store's threads share: the readers' two queues, the channel of answers, the threads.
//!
//! Channels are crossbeam's. In this crate's own tests they can also be those of a model checker, which runs the ring and the
//! slots through every order in which threads can meet (`model.rs`).

use std::thread;

use crossbeam_channel as real;

#[cfg(test)]
use super::model;

/// Sends; clones send into the same channel.
pub(super) enum Sender<T> {
    Real(real::Sender<T>),
    #[cfg(test)]
    Model(model::Channel<T>),
}

/// Receives.
pub(super) enum Receiver<T> {
    Real(real::Receiver<T>),
    #[cfg(test)]
    Model(model::Channel<T>),
}

/// A channel with room for `capacity` messages.
pub(super) fn channel<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    #[cfg(test)]
    if model::is_checking() {
        let channel = model::Channel::default();
        return (Sender::Model(channel.clone()), Receiver::Model(channel));
    }
    let (sender, receiver) = real::bounded(capacity.max(1));
    (Sender::Real(sender), Receiver::Real(receiver))
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        match self {
            Self::Real(sender) => Self::Real(sender.clone()),
            #[cfg(test)]
            Self::Model(channel) => Self::Model(channel.clone()),
        }
    }
}

impl<T> Sender<T> {
    /// Send; the message is dropped if nobody will ever receive it.
    pub(super) fn send(&self, message: T) {
        match self {
            Self::Real(sender) => {
                let _ = sender.send(message);
            }
            #[cfg(test)]
            Self::Model(channel) => channel.send(message),
        }
    }
}

impl<T> Receiver<T> {
    /// The next message, waiting for it; `None` when nobody is left to send one.
    pub(super) fn recv(&self) -> Option<T> {
        match self {
            Self::Real(receiver) => receiver.recv().ok(),
            #[cfg(test)]
            Self::Model(channel) => Some(channel.recv()),
        }
    }

    /// The next message if it is there.
    pub(super) fn try_recv(&self) -> Option<T> {
        match self {
            Self::Real(receiver) => receiver.try_recv().ok(),
            #[cfg(test)]
            Self::Model(channel) => channel.try_recv(),
        }
    }
}

/// Two queues that many threads take from, of which the first is served first.
pub(super) enum Queues<T> {
    Real {
        /// Absent once closed.
        senders: Option<[real::Sender<T>; 2]>,
        receivers: [real::Receiver<T>; 2],
    },
    #[cfg(test)]
    Model(model::Queues<T>),
}

/// One thread's end of [`Queues`].
pub(super) enum Taker<T> {
    Real([real::Receiver<T>; 2]),
    #[cfg(test)]
    Model(model::Queues<T>),
}

impl<T> Queues<T> {
    /// Queues with room for so many entries each.
    pub(super) fn new(capacities: [usize; 2]) -> Self {
        #[cfg(test)]
        if model::is_checking() {
            return Self::Model(model::Queues::default());
        }
        let [(a, from_a), (b, from_b)] = capacities.map(|capacity| real::bounded(capacity.max(1)));
        Self::Real {
            senders: Some([a, b]),
            receivers: [from_a, from_b],
        }
    }

    /// Queue an entry: `which` is 0 or 1.
    pub(super) fn push(&self, which: usize, entry: T) {
        match self {
            Self::Real { senders, .. } => {
                if let Some(sender) = senders.as_ref().and_then(|all| all.get(which)) {
                    // The receivers live as long as `self`.
                    let _ = sender.send(entry);
                }
            }
            #[cfg(test)]
            Self::Model(queues) => queues.push(which, entry),
        }
    }

    /// An end for one more thread.
    pub(super) fn taker(&self) -> Taker<T> {
        match self {
            Self::Real { receivers, .. } => Taker::Real(receivers.clone()),
            #[cfg(test)]
            Self::Model(queues) => Taker::Model(queues.clone()),
        }
    }

    /// Let every thread that takes go.
    pub(super) fn close(&mut self) {
        match self {
            Self::Real { senders, .. } => *senders = None,
            #[cfg(test)]
            Self::Model(queues) => queues.close(),
        }
    }
}

impl<T> Taker<T> {
    /// The next entry, waiting for one; `None` once the queues are closed.
    pub(super) fn take(&self) -> Option<T> {
        match self {
            Self::Real([first, second]) => real::select_biased! {
                recv(first) -> entry => entry.ok(),
                recv(second) -> entry => entry.ok(),
            },
            #[cfg(test)]
            Self::Model(queues) => queues.take(),
        }
    }
}

/// A thread to wait for.
pub(super) enum Thread {
    Real(thread::JoinHandle<()>),
    #[cfg(test)]
    Model(loom::thread::JoinHandle<()>),
}

impl Thread {
    /// Start a thread of this name.
    ///
    /// # Errors
    /// If the system refuses.
    pub(super) fn spawn(
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<Self> {
        #[cfg(test)]
        if model::is_checking() {
            return Ok(Self::Model(loom::thread::spawn(run)));
        }
        let builder = thread::Builder::new().name(name).stack_size(256 << 10);
        builder.spawn(run).map(Self::Real)
    }

    /// Wait for its end.
    pub(super) fn join(self) {
        match self {
            Self::Real(thread) => {
                let _ = thread.join();
            }
            #[cfg(test)]
            Self::Model(thread) => {
                let _ = thread.join();
            }
        }
    }
}
