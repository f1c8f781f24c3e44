//! What a sequence carries from step to step: recurrent state, convolution history, latent cache, position.

use k3_shared::config::{Config, Mixer};

pub use crate::kernels::attention::LatentCache;

/// State of one KDA layer.
#[derive(Clone, Debug, PartialEq)]
pub struct KdaState {
    /// `[heads, head_dim, head_dim]`: key rows by value columns.
    pub matrix: Vec<f32>,
    /// For queries, keys and values: the last `K - 1` raw projections, `[K - 1, heads * head_dim]`, oldest first.
    pub history: [Vec<f32>; 3],
}

impl KdaState {
    /// Bytes of the state and the history.
    pub fn bytes(&self) -> usize {
        let history: usize = self.history.iter().map(Vec::len).sum();
        (self.matrix.len() + history) * size_of::<f32>()
    }
}

/// State of one layer's mixer.
#[derive(Clone, Debug, PartialEq)]
pub enum MixerState {
    /// Of fixed size.
    Kda(KdaState),
    /// Growing with the context.
    Mla(LatentCache),
}

/// State of one sequence: zero at its start, advanced only by whole steps.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceState {
    /// One a layer.
    pub mixers: Vec<MixerState>,
    /// Positions computed so far.
    pub position: usize,
    /// Positions there is room for.
    pub context: usize,
    /// Set while a step runs: a step that fails leaves layers at different positions.
    pub(super) torn: bool,
}

impl SequenceState {
    /// The state before the first token of a sequence of at most `context` positions.
    pub fn new(config: &Config, num_layers: usize, context: usize) -> Self {
        let kda = &config.kda;
        let history = (kda.short_conv_kernel_size - 1) * kda.projection_size();
        let mixer = |mixer: &Mixer| match mixer {
            Mixer::Kda => MixerState::Kda(KdaState {
                matrix: vec![0.0; kda.num_heads * kda.head_dim * kda.head_dim],
                history: [vec![0.0; history], vec![0.0; history], vec![0.0; history]],
            }),
            Mixer::Mla => MixerState::Mla(LatentCache::new(context, config.mla.cache_width())),
        };
        Self {
            mixers: config.mixers.iter().take(num_layers).map(mixer).collect(),
            position: 0,
            context,
            torn: false,
        }
    }
}
