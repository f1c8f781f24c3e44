//! Where the time of a step goes, and how many bytes it touches.
//!
//! One clock reading at each boundary between parts, and two at each tile and expert to tell waiting from arithmetic: always on,
//! because a few hundred readings of 30 ns vanish in a step of any size.

use std::time::{Duration, Instant};

use serde::{Serialize, Serializer, ser::SerializeMap as _};

/// A part of a step. What a part waits for is not in it but in [`Part::Waiting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Part {
    /// Reading and widening the rows of the embedding, whose reads are not waited for apart.
    Embedding,
    /// Widening a layer's norms, taps and biases.
    LayerVectors,
    /// Scoring and mixing the snapshots and the stream.
    AttentionResiduals,
    /// The norms before mixer and channel mixer, and the layout of their results for the kernels.
    Norms,
    /// Every matrix of a KDA layer, the low-rank gates included.
    KdaProjections,
    /// The convolutions before the recurrence.
    KdaConvolution,
    /// Norms of queries and keys, decay gates, and the norm and gate of the outputs.
    KdaGates,
    /// The delta rule.
    KdaRecurrence,
    /// Every matrix of an MLA layer but `kv_b_proj`, with the low-rank norms and the output gate.
    MlaProjections,
    /// Absorbing keys, attending, expanding values: everything that reads `kv_b_proj` and the cache.
    MlaAttention,
    /// Router scores and the choice of experts.
    Router,
    /// Down to the experts' width and up again.
    LatentProjections,
    /// The shared experts.
    SharedExperts,
    /// The dense layers' MLP.
    DenseMlp,
    /// The chosen experts.
    RoutedExperts,
    /// Summing the experts of each row in selection order, and the norm of the sum.
    ExpertSum,
    /// Adding to the stream, keeping snapshots of it, and looking for values that are not finite.
    Stream,
    /// The last attention residual, the final norm and the output head.
    Head,
    /// Choosing a token from the logits of the step.
    Sampling,
    /// Waiting for tiles and experts to be read.
    Waiting,
    /// What watches the step: traces, dumps, the live line.
    Observer,
}

impl Part {
    /// Every part, in the order of a step.
    pub const ALL: [Self; 21] = [
        Self::Embedding,
        Self::LayerVectors,
        Self::AttentionResiduals,
        Self::Norms,
        Self::KdaProjections,
        Self::KdaConvolution,
        Self::KdaGates,
        Self::KdaRecurrence,
        Self::MlaProjections,
        Self::MlaAttention,
        Self::Router,
        Self::LatentProjections,
        Self::SharedExperts,
        Self::DenseMlp,
        Self::RoutedExperts,
        Self::ExpertSum,
        Self::Stream,
        Self::Head,
        Self::Sampling,
        Self::Waiting,
        Self::Observer,
    ];

    /// The key of a report: what it is and its unit.
    pub fn key(self) -> &'static str {
        match self {
            Self::Embedding => "embedding_seconds",
            Self::LayerVectors => "layer_vectors_seconds",
            Self::AttentionResiduals => "attention_residuals_seconds",
            Self::Norms => "norms_seconds",
            Self::KdaProjections => "kda_projections_seconds",
            Self::KdaConvolution => "kda_convolution_seconds",
            Self::KdaGates => "kda_gates_seconds",
            Self::KdaRecurrence => "kda_recurrence_seconds",
            Self::MlaProjections => "mla_projections_seconds",
            Self::MlaAttention => "mla_attention_seconds",
            Self::Router => "router_seconds",
            Self::LatentProjections => "latent_projections_seconds",
            Self::SharedExperts => "shared_experts_seconds",
            Self::DenseMlp => "dense_mlp_seconds",
            Self::RoutedExperts => "routed_experts_seconds",
            Self::ExpertSum => "expert_sum_seconds",
            Self::Stream => "stream_seconds",
            Self::Head => "head_seconds",
            Self::Sampling => "sampling_seconds",
            Self::Waiting => "waiting_seconds",
            Self::Observer => "observer_seconds",
        }
    }
}

/// Seconds by part; an object with one key a part in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartTimes([f64; Part::ALL.len()]);

impl PartTimes {
    /// Seconds of one part.
    pub fn get(&self, part: Part) -> f64 {
        self.0[part as usize]
    }

    /// Add to one part.
    pub fn add(&mut self, part: Part, seconds: f64) {
        self.0[part as usize] += seconds;
    }

    /// Add every part of `other`.
    pub fn add_all(&mut self, other: &Self) {
        for (sum, seconds) in self.0.iter_mut().zip(other.0) {
            *sum += seconds;
        }
    }

    /// All parts together.
    pub fn sum(&self) -> f64 {
        self.0.iter().sum()
    }
}

impl Serialize for PartTimes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for part in Part::ALL {
            map.serialize_entry(part.key(), &self.get(part))?;
        }
        map.end()
    }
}

/// What one step took, filled while it runs.
#[derive(Clone, Copy, Debug)]
pub struct StepProfile {
    /// Wall time by part; their sum is the step's.
    pub parts: PartTimes,
    /// Bytes the step had to take from memory, each counted once however often it was used: the payload of every trunk tile and
    /// of the head where it ran, the block of every distinct expert of a layer, the recurrent state and convolution history of
    /// its sequences read and written, the latent cache up to each sequence's last row, and the cache rows written. Activations
    /// and the embedding's rows are not in it.
    pub touched_bytes: u64,
    mark: Instant,
    waited: f64,
    /// Seconds since the last boundary that were counted elsewhere.
    elsewhere: f64,
}

impl Default for StepProfile {
    fn default() -> Self {
        Self {
            parts: PartTimes::default(),
            touched_bytes: 0,
            mark: Instant::now(),
            waited: 0.0,
            elsewhere: 0.0,
        }
    }
}

impl StepProfile {
    /// Begin a step.
    pub(super) fn begin(&mut self) {
        *self = Self::default();
    }

    /// What was done since the last boundary was `part`, apart from waiting and what was done [in between](Self::in_between).
    pub(super) fn lap(&mut self, part: Part) {
        let now = Instant::now();
        let elapsed = now.duration_since(self.mark).as_secs_f64();
        self.parts.add(part, elapsed - self.waited - self.elsewhere);
        self.parts.add(Part::Waiting, self.waited);
        self.mark = now;
        self.waited = 0.0;
        self.elsewhere = 0.0;
    }

    /// Of the time since the last boundary, this much was another part's, taken up in between.
    pub(super) fn in_between(&mut self, part: Part, time: Duration) {
        let seconds = time.as_secs_f64();
        self.parts.add(part, seconds);
        self.elsewhere += seconds;
    }

    /// Of the time since the last boundary, this much was waiting for weights.
    pub(super) fn wait(&mut self, time: Duration) {
        self.waited += time.as_secs_f64();
    }

    /// Weights or state were read from memory, or state written.
    pub(super) fn touch(&mut self, bytes: usize) {
        self.touched_bytes += bytes as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_in_the_order_of_their_numbers_and_have_keys_of_their_own() {
        let mut keys: Vec<&str> = Part::ALL.iter().map(|part| part.key()).collect();
        for (at, part) in Part::ALL.into_iter().enumerate() {
            assert_eq!(part as usize, at);
        }
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), Part::ALL.len());
        assert!(keys.iter().all(|key| key.ends_with("_seconds")));
    }

    #[test]
    fn waiting_and_other_parts_are_taken_out_of_the_part_they_interrupt_and_nothing_is_lost() {
        let began = Instant::now();
        let mut profile = StepProfile::default();
        std::thread::sleep(Duration::from_millis(3));
        profile.wait(Duration::from_micros(1500));
        profile.in_between(Part::RoutedExperts, Duration::from_micros(500));
        profile.lap(Part::Router);
        profile.lap(Part::Head);
        let elapsed = began.elapsed().as_secs_f64();
        let parts = profile.parts;
        assert!((parts.get(Part::Waiting) - 0.0015).abs() < 1e-9);
        assert!((parts.get(Part::RoutedExperts) - 0.0005).abs() < 1e-9);
        assert!(parts.get(Part::Router) >= 0.001 - 1e-9);
        assert!(parts.sum() <= elapsed && parts.sum() >= 0.003);
    }
}
