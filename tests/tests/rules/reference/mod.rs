//! A float64 forward pass written from the specification, section 3, that can make one mistake on purpose.
//!
//! Slow and plain: one token, one head, one value at a time, sharing no arithmetic with the engine. Keys and values of MLA are
//! expanded, the shared experts are two MLPs added up, and every file is decoded on its own, so that agreement with the engine
//! is agreement of two readings of the rules. [`Mistake`] breaks exactly one rule of section 4.

mod kda;
mod mla;
mod moe;
mod residual;
mod weights;

pub use weights::Model;

/// One rule broken; the number is the row of section 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// 1: the decay rate is taken by channel, not by head.
    ALogPerChannel,
    /// 4: the slots past the latent do not enter the score.
    RopeDropped,
    /// 4: they are rotated by position.
    RopeRotated,
    /// 5: expert weights are made of biased scores.
    BiasInWeights,
    /// 5: experts are selected without the bias.
    BiasMissing,
    /// 7: the low-rank norms of MLA use the epsilon of the others.
    LowRankEps,
    /// 8: the slice after the latent is normed with it.
    RopeNormed,
    /// 8: the latent is not normed.
    LatentRaw,
    /// 9: the score is scaled by the width from the latent alone.
    ScaleOfNopeOnly,
    /// 10: a query head begins with its shared part.
    QueryRopeFirst,
    /// 10: all keys come before all values.
    KeysThenValues,
    /// 11: no output gate.
    MlaGateMissing,
    /// 11: the output gate is a `SiLU`.
    MlaGateSilu,
    /// 11: the heads are normed before the gate.
    MlaOutputNormed,
    /// 12: gate first, then norm.
    GateThenNorm,
    /// 12: the gate is a `SiLU`.
    KdaGateSilu,
    /// 13: queries and keys are divided by the root of the mean.
    L2OfMean,
    /// 13: values are normalised too.
    ValuesNormalised,
    /// 13: queries are not scaled.
    QueryUnscaled,
    /// 15: epsilon is added to the root in the norm of the heads' outputs.
    EpsOutsideRoot,
    /// 16: the bias is added after the product with the rate.
    DecayBiasOutside,
    /// 16: the decay is the unbounded softplus form.
    DecaySoftplus,
    /// 17: the decay scales value columns.
    DecayOfColumns,
    /// 18: what is read is the state before the decay.
    ReadBeforeDecay,
    /// 18: the output is that of the state before the write.
    OutputBeforeWrite,
    /// 18: the value is written whole, not its difference from what is read.
    NoDifference,
    /// 19: the write strength is not squashed.
    BetaRaw,
    /// 19: it is doubled.
    BetaDoubled,
    /// 20: the first tap meets the current input.
    TapsReversed,
    /// 20: no `SiLU` after the convolution.
    ConvWithoutSilu,
    /// 20: every call begins with an empty history.
    HistoryLost,
    /// 22: normalised vectors are mixed.
    MixNormalised,
    /// 22: raw vectors are scored.
    ScoreRaw,
    /// 22: the norm weight does not enter the score.
    ScoreUnweighted,
    /// 23: the mixer takes the stream as it is.
    NoMixBeforeMixer,
    /// 23: the channel mixer does.
    NoMixBeforeMlp,
    /// 23: the head does.
    NoMixBeforeHead,
    /// 23: the channel mixer does at boundary layers.
    NoMlpMixAtBoundary,
    /// 24: the snapshot is the mixed input.
    SnapshotOfMix,
    /// 24: the running sum goes on over a boundary.
    NoRestart,
    /// 24: layers are counted from one to find the boundaries.
    BoundaryLate,
    /// 25: every expert is normed, not the sum.
    NormPerExpert,
    /// 25: nothing is.
    LatentNormMissing,
    /// 26: the shared experts weigh half.
    SharedHalved,
    /// 26: only the first of them runs.
    SharedFirstOnly,
    /// 26: none.
    SharedMissing,
    /// 27: the linear branch has no cap.
    UpUncapped,
    /// 27: the sigmoid sees the capped gate.
    SigmoidOfCapped,
    /// 27: the capped values are not multiplied back.
    CapsNotRescaled,
    /// 27: `SwiGLU`.
    SwiGlu,
    /// 29: the high nibble is the even element.
    NibblesSwapped,
    /// 29: the scale's bias is 128.
    ScaleBiasOff,
    /// 30: gate and up swapped.
    GateIsUp,
    /// 31: experts lie in the order of their numbers.
    NumericOrder,
    /// 34: F32 tensors are read as BF16.
    F32AsBf16,
}

/// What a forward pass gives.
#[derive(Clone, Debug)]
pub struct Pass {
    /// The stream after each layer, `[rows * hidden]`.
    pub hidden: Vec<Vec<f64>>,
    /// `[rows * vocab]`.
    pub logits: Vec<f64>,
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `W x` for `W` of as many columns as `x` has values.
pub fn times(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

pub fn softmax(x: &mut [f64]) {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    for x in &mut *x {
        *x = (*x - max).exp();
    }
    let sum: f64 = x.iter().sum();
    for x in x {
        *x /= sum;
    }
}
