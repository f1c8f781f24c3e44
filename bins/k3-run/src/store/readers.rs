//! The reader threads: two queues, expert reads first.

use std::{
    ops::Range,
    sync::Arc,
    thread::{Builder, JoinHandle},
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use k3_shared::direct::{AlignedBuf, DirectError, DirectFile};
use sha2::{Digest as _, Sha256};

use super::activity::Activity;
use crate::model::SourceError;

/// One read: where from, into what, and who is told.
pub(super) struct Job {
    /// The file.
    pub(super) file: Arc<DirectFile>,
    /// First payload byte.
    pub(super) offset: u64,
    /// Payload bytes.
    pub(super) len: usize,
    /// Filled; its capacity covers the widened read.
    pub(super) buffer: AlignedBuf,
    /// Whether to hash the payload.
    pub(super) hash: bool,
    /// The asker's own number for the read.
    pub(super) tag: u64,
    /// Where the answer goes.
    pub(super) done: Sender<Done>,
}

/// A finished read.
pub(super) struct Done {
    /// The job's tag.
    pub(super) tag: u64,
    /// The buffer, filled or not.
    pub(super) buffer: AlignedBuf,
    /// Where the payload lies in it, or why it does not.
    pub(super) payload: Result<Range<usize>, DirectError>,
    /// SHA-256 of the payload, if it was asked for.
    pub(super) digest: Option<[u8; 32]>,
}

/// Which queue a read joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    /// Served first.
    Experts,
    /// Read-ahead.
    Trunk,
}

/// A fixed number of threads that read what they are told to.
pub(super) struct Readers {
    experts: Option<Sender<Job>>,
    trunk: Option<Sender<Job>>,
    activity: Arc<Activity>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    /// Start `count` threads, at least one, on queues with room for so many reads of experts and of the trunk.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(super) fn start(
        count: usize,
        expert_reads: usize,
        trunk_reads: usize,
    ) -> Result<Self, SourceError> {
        // Senders are bounded by the buffers they own, so a queue with room for all of them never stops one, and never grows.
        let (experts, from_experts) = bounded(expert_reads.max(1));
        let (trunk, from_trunk) = bounded(trunk_reads.max(1));
        let activity = Arc::new(Activity::default());
        let mut threads = Vec::new();
        for index in 0..count.max(1) {
            let (experts, trunk) = (from_experts.clone(), from_trunk.clone());
            let activity = Arc::clone(&activity);
            let thread = Builder::new()
                .name(format!("k3-read-{index}"))
                .stack_size(256 << 10)
                .spawn(move || serve(&experts, &trunk, &activity))
                .map_err(|e| SourceError::Other(format!("reader thread {index}: {e}")))?;
            threads.push(thread);
        }
        Ok(Self {
            experts: Some(experts),
            trunk: Some(trunk),
            activity,
            threads,
        })
    }

    /// The time so far in which at least one read was in flight.
    pub(super) fn busy(&self) -> Duration {
        self.activity.busy()
    }

    /// Queue a read. Its answer comes on the job's own channel.
    pub(super) fn submit(&self, queue: Queue, job: Job) {
        let sender = match queue {
            Queue::Experts => &self.experts,
            Queue::Trunk => &self.trunk,
        };
        if let Some(sender) = sender {
            // The receivers live as long as `self`.
            let _ = sender.send(job);
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.experts = None;
        self.trunk = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A channel on which up to `buffers` answers can wait without stopping a reader.
pub(super) fn answers(buffers: usize) -> (Sender<Done>, Receiver<Done>) {
    bounded(buffers.max(1))
}

fn serve(experts: &Receiver<Job>, trunk: &Receiver<Job>, activity: &Activity) {
    loop {
        let job = select_biased! {
            recv(experts) -> job => job,
            recv(trunk) -> job => job,
        };
        // Either queue closes only when the store is dropped.
        let Ok(job) = job else { return };
        run(job, activity);
    }
}

fn run(job: Job, activity: &Activity) {
    let Job {
        file,
        offset,
        len,
        mut buffer,
        hash,
        tag,
        done,
    } = job;
    let payload = activity.during(|| file.read_covering(&mut buffer, offset, len));
    let digest = match &payload {
        Ok(range) if hash => Some(Sha256::digest(&buffer[range.clone()]).into()),
        _ => None,
    };
    // The asker may be gone when a run ends early.
    let _ = done.send(Done {
        tag,
        buffer,
        payload,
        digest,
    });
}
