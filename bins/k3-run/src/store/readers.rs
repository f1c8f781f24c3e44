//! The reader threads: two queues, expert reads first.

use std::{ops::Range, sync::Arc, time::Duration};

use k3_shared::direct::{AlignedBuf, DirectError, DirectFile};
use sha2::{Digest as _, Sha256};

use super::{
    activity::Activity,
    sync::{Queues, Sender, Thread},
};
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
    Experts = 0,
    /// Read-ahead.
    Trunk = 1,
}

/// A fixed number of threads that read what they are told to.
pub(super) struct Readers {
    queues: Queues<Job>,
    activity: Arc<Activity>,
    threads: Vec<Thread>,
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
        let queues = Queues::new([expert_reads, trunk_reads]);
        let activity = Arc::new(Activity::default());
        let mut threads = Vec::new();
        for index in 0..count.max(1) {
            let jobs = queues.taker();
            let activity = Arc::clone(&activity);
            let serve = move || {
                while let Some(job) = jobs.take() {
                    run(job, &activity);
                }
            };
            let thread = Thread::spawn(format!("k3-read-{index}"), serve)
                .map_err(|e| SourceError::Other(format!("reader thread {index}: {e}")))?;
            threads.push(thread);
        }
        Ok(Self {
            queues,
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
        self.queues.push(queue as usize, job);
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.queues.close();
        for thread in self.threads.drain(..) {
            thread.join();
        }
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
    done.send(Done {
        tag,
        buffer,
        payload,
        digest,
    });
}
