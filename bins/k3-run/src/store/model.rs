//! For tests: channels and queues whose every interleaving is tried, and the smallest files and stores to try them with.

use std::{cell::Cell, collections::VecDeque, io, ops::Range};

use k3_shared::{
    cache::PolicyKind,
    direct::{ALIGN, Device, DirectFile, Interpose, Mode},
    ledger::TileSet,
};
use loom::sync::{Arc, Condvar, Mutex};

use super::{StoreOptions, Verify};

thread_local! {
    /// Whether a model is being checked; all threads of a model run on the thread that checks it.
    static CHECKING: Cell<bool> = const { Cell::new(false) };
}

/// Whether what is made now is part of a model.
pub(super) fn is_checking() -> bool {
    CHECKING.get()
}

/// Run `model` through every order in which its threads can meet, with at most `preemptions` switches away from a thread that
/// could have gone on. Fails if any order fails, or ends with all threads waiting.
pub(super) fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    struct Guard;
    impl Drop for Guard {
        fn drop(&mut self) {
            CHECKING.set(false);
        }
    }
    CHECKING.set(true);
    let _guard = Guard;
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

struct Shared<T> {
    state: Mutex<T>,
    changed: Condvar,
}

impl<T> Shared<T> {
    /// Change the state and wake whoever waits for that.
    fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
        result
    }

    /// Wait until `ready` gives something.
    fn wait<R>(&self, mut ready: impl FnMut(&mut T) -> Option<R>) -> R {
        let mut state = self.state.lock().unwrap();
        loop {
            if let Some(result) = ready(&mut state) {
                return result;
            }
            state = self.changed.wait(state).unwrap();
        }
    }
}

/// A channel.
pub(super) struct Channel<T>(Arc<Shared<VecDeque<T>>>);

impl<T> Default for Channel<T> {
    fn default() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::new(VecDeque::new()),
            changed: Condvar::new(),
        }))
    }
}

impl<T> Clone for Channel<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Channel<T> {
    pub(super) fn send(&self, message: T) {
        self.0.change(|queue| queue.push_back(message));
    }

    pub(super) fn recv(&self) -> T {
        self.0.wait(VecDeque::pop_front)
    }

    pub(super) fn try_recv(&self) -> Option<T> {
        self.0.change(VecDeque::pop_front)
    }
}

struct Entries<T> {
    queues: [VecDeque<T>; 2],
    closed: bool,
}

/// Two queues, the first served first.
pub(super) struct Queues<T>(Arc<Shared<Entries<T>>>);

impl<T> Default for Queues<T> {
    fn default() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::new(Entries {
                queues: [VecDeque::new(), VecDeque::new()],
                closed: false,
            }),
            changed: Condvar::new(),
        }))
    }
}

impl<T> Clone for Queues<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Queues<T> {
    pub(super) fn push(&self, which: usize, entry: T) {
        self.0
            .change(|entries| entries.queues[which].push_back(entry));
    }

    pub(super) fn close(&self) {
        self.0.change(|entries| entries.closed = true);
    }

    pub(super) fn take(&self) -> Option<T> {
        self.0.wait(|entries| {
            if entries.closed {
                return Some(None);
            }
            let next = entries.queues.iter_mut().find_map(VecDeque::pop_front);
            next.map(Some)
        })
    }
}

/// A file whose blocks of 4096 bytes each hold their own number, read from memory.
pub(super) fn numbered_file() -> std::sync::Arc<DirectFile> {
    std::sync::Arc::new(DirectFile::with_device(
        "numbered".into(),
        Box::new(Numbered),
        false,
    ))
}

/// The number of the block at `offset` in [`numbered_file`].
pub(super) fn number_at(offset: u64) -> u8 {
    u8::try_from(offset / ALIGN as u64).unwrap()
}

/// Options of the smallest store: no digests, nothing pinned.
pub(super) fn options(num_tiles: usize, ring_slots: usize, expert_slots: usize) -> StoreOptions {
    StoreOptions {
        model_dir: "model".into(),
        pinned: TileSet::none(num_tiles),
        ring_slots,
        ring_slot_bytes: ALIGN,
        expert_slots,
        policy: PolicyKind::LayerDistance,
        queue_depth: 2,
        read_bytes: ALIGN,
        mode: Mode::Buffered,
        interpose: Interpose::default(),
        verify: Verify::Never,
        expert_digests: None,
        interrupt: std::sync::Arc::default(),
    }
}

#[derive(Debug)]
struct Numbered;

impl Device for Numbered {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        for (block, bytes) in buf.chunks_mut(ALIGN).enumerate() {
            bytes.fill(number_at(offset + (block * ALIGN) as u64));
        }
        Ok(buf.len())
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(256 * ALIGN as u64)
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        Ok(Some(offset..self.len()?))
    }

    fn forget(&self, _: u64, _: u64) {}
}
