//! Header-less traces: which requests were one token's, and which passes read the same prompt again.

use std::{ops::Range, path::Path};

use k3_shared::{
    cache::{Geometry, GroupBuilder},
    formats::trace::Pair,
    ids::{ExpertId, LayerIdx},
};

use crate::{
    PartArgs, Pass,
    replay::{Builder, Phase, ReplayError, part_error, shape_error},
};

/// The replay of a header-less trace.
pub(crate) fn replay(pairs: &[Pair], path: &Path, part: &PartArgs) -> Result<Builder, ReplayError> {
    if part.decode_only {
        let problem = "--decode-only needs a trace with steps, as k3-run --trace writes them; for a header-less one \
             use --pass last --warmup-tokens N";
        return Err(part_error(path, problem));
    }
    let most = |number: fn(&Pair) -> u32| pairs.iter().map(number).max().unwrap_or(0) as usize + 1;
    let (layers, experts) = (most(|pair| pair.layer.0), most(|pair| pair.expert.0));
    let geometry = Geometry::new(layers, experts, part.top_k.min(experts))
        .map_err(|source| shape_error(path, source))?;
    let view = View {
        pairs,
        path,
        part,
        passes: passes(pairs),
    };
    let mut builder = Builder::new(geometry);
    let all = view.token_counts(&view.passes);
    let repeated = all.as_ref().ok().map(|counts| view.repeated_tokens(counts));
    if part.pass.is_none() && part.warmup_tokens.is_none() && !part.grouped {
        view.as_is(&mut builder, all.ok().as_deref(), repeated);
        return Ok(builder);
    }
    let chosen = match part.pass {
        None => &view.passes[..],
        Some(Pass::Last) => &view.passes[view.passes.len().saturating_sub(1)..],
        Some(Pass::Number(n)) => view.passes.get(n - 1..n).ok_or_else(|| {
            part_error(
                path,
                format!(
                    "--pass {n}: it has {} passes over the layers",
                    view.passes.len()
                ),
            )
        })?,
    };
    view.by_token(&mut builder, chosen)?;
    if part.pass.is_none() {
        builder.facts().repeated_tokens = repeated;
    }
    Ok(builder)
}

/// A header-less trace and what is asked of it.
struct View<'a> {
    pairs: &'a [Pair],
    path: &'a Path,
    part: &'a PartArgs,
    passes: Vec<PassRuns>,
}

impl View<'_> {
    fn token_counts(&self, passes: &[PassRuns]) -> Result<Vec<u64>, ReplayError> {
        let counts = passes.iter();
        counts
            .map(|pass| pass.tokens(self.pairs, self.path, self.part.top_k))
            .collect()
    }

    /// The requests of one token in one run.
    fn token(&self, run: &Range<usize>, token: usize) -> &[Pair] {
        let start = run.start + token * self.part.top_k;
        let end = start + self.part.top_k;
        self.pairs.get(start..end.min(run.end)).unwrap_or_default()
    }

    /// Tokens at the start of a pass that the pass before began with, too.
    fn repeated_tokens(&self, counts: &[u64]) -> u64 {
        let passes = self.passes.windows(2).zip(counts.windows(2));
        let repeated = |(passes, counts): (&[PassRuns], &[u64])| {
            let [before, now] = passes else { return 0 };
            let both = counts.iter().copied().min().unwrap_or(0);
            let same = |token: &u64| {
                let token = usize::try_from(*token).unwrap_or(usize::MAX);
                let runs = before.runs.iter().zip(&now.runs);
                before.runs.len() == now.runs.len()
                    && runs
                        .into_iter()
                        .all(|(a, b)| self.token(a, token) == self.token(b, token))
            };
            (0..both).take_while(same).count() as u64
        };
        passes.map(repeated).sum()
    }

    /// Every pair in order, each a group of its own: nothing says which of them were one step.
    fn as_is(&self, builder: &mut Builder, counts: Option<&[u64]>, repeated: Option<u64>) {
        push(builder, self.pairs, Some(Phase::Unknown));
        let passes = self.passes.len();
        let tokens = counts.map(|counts| counts.iter().sum());
        builder.facts().tokens = tokens;
        builder.facts().repeated_tokens = repeated;
        builder.warn(match (repeated, tokens) {
            (Some(repeated), Some(tokens)) if repeated > 0 => format!(
                "no header, so no steps: {passes} passes over the layers are replayed as is. {repeated} of the {tokens} tokens \
                 repeat the start of the pass before: prefixes were computed again, so reuse between passes is an artefact and \
                 the hit rates are too high; use --pass last --warmup-tokens N"
            ),
            _ => format!(
                "no header, so no steps: {passes} passes over the layers are replayed as is. If each pass read the whole prompt \
                 again, reuse between passes is an artefact and the hit rates are too high: use --pass last --warmup-tokens N"
            ),
        });
    }

    /// Token by token: all layers of the first, then of the next.
    fn by_token(&self, builder: &mut Builder, chosen: &[PassRuns]) -> Result<(), ReplayError> {
        let counts = self.token_counts(chosen)?;
        let shape = |source| shape_error(self.path, source);
        let mut groups = GroupBuilder::new(builder.geometry());
        let warmup = self.part.warmup_tokens.unwrap_or(0);
        let mut number = 0u32;
        for (pass, &tokens) in chosen.iter().zip(&counts) {
            for token in 0..usize::try_from(tokens).unwrap_or(usize::MAX) {
                let phase = (u64::from(number) >= warmup).then_some(Phase::Unknown);
                for run in &pass.runs {
                    let token = self.token(run, token);
                    for &Pair { layer, expert } in token {
                        builder
                            .ask(number, ExpertId { layer, expert }, phase)
                            .map_err(shape)?;
                    }
                    let layer = token.first().map_or(LayerIdx(0), |pair| pair.layer);
                    if self.part.grouped {
                        let experts = token.iter().map(|pair| pair.expert);
                        builder.push(layer, groups.group(layer, experts).map_err(shape)?, phase);
                    } else {
                        push(builder, token, phase);
                    }
                }
                number += 1;
            }
        }
        builder.facts().tokens = Some(u64::from(number).saturating_sub(warmup));
        let as_groups = if self.part.grouped {
            ", a group each"
        } else {
            ""
        };
        builder.warn(format!(
            "no header, so no steps: runs of {} requests per layer are taken as one token{as_groups}, and replayed token by token",
            self.part.top_k
        ));
        Ok(())
    }
}

/// Each pair as a group of its own.
fn push(builder: &mut Builder, pairs: &[Pair], phase: Option<Phase>) {
    for &Pair { layer, expert } in pairs {
        // The shape was made from the largest numbers of these pairs.
        if let Some(key) = builder.geometry().key(ExpertId { layer, expert }) {
            builder.push(layer, &[key], phase);
        }
    }
}

/// One walk over the layers: a run of requests for each.
#[derive(Debug, Default)]
struct PassRuns {
    runs: Vec<Range<usize>>,
}

impl PassRuns {
    /// How many tokens went through all layers of this pass.
    fn tokens(&self, pairs: &[Pair], path: &Path, top_k: usize) -> Result<u64, ReplayError> {
        let first = self
            .runs
            .first()
            .map_or(0, std::iter::ExactSizeIterator::len);
        for run in &self.runs {
            let problem = if !run.len().is_multiple_of(top_k) {
                format!("not a multiple of {top_k}")
            } else if run.len() != first {
                format!("but the pass begins with {first}")
            } else {
                continue;
            };
            let layer = pairs.get(run.start).map_or(LayerIdx(0), |pair| pair.layer);
            return Err(ReplayError::Tokens {
                path: path.to_owned(),
                offset: run.start * size_of::<[i32; 2]>(),
                problem: format!("{} requests of layer {layer}, {problem}", run.len()),
            });
        }
        Ok((first / top_k) as u64)
    }
}

/// Cut pairs into runs of one layer, and runs into passes: a pass ends where the layers begin again.
///
/// With a single layer the passes cannot be seen, so all is one pass of many tokens.
fn passes(pairs: &[Pair]) -> Vec<PassRuns> {
    let mut passes: Vec<PassRuns> = Vec::new();
    let mut last: Option<LayerIdx> = None;
    let mut start = 0;
    for run in pairs.chunk_by(|a, b| a.layer == b.layer) {
        let layer = run.first().map(|pair| pair.layer);
        if passes.is_empty() || layer < last {
            passes.push(PassRuns::default());
        }
        if let Some(pass) = passes.last_mut() {
            pass.runs.push(start..start + run.len());
        }
        start += run.len();
        last = layer;
    }
    passes
}
