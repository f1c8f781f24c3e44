//! How many of a decoded token's experts are found in slots: by a trace of an earlier run, or by an assumption.

use std::path::Path;

use anyhow::{Context as _, ensure};
use k3_shared::{
    cache::{ExpertCache, Geometry, GroupBuilder, PolicyKind},
    formats::trace::{Mode, Trace, TraceGroup, cache_groups},
    ids::LayerIdx,
    ledger::Model,
};

use crate::source::Source;

/// Expert requests of an earlier run, in the order a cache sees them.
#[derive(Debug)]
pub struct Replay {
    geometry: Geometry,
    groups: Vec<TraceGroup>,
}

/// Expected requests and hits of decoded tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hits {
    /// Distinct experts asked for by one token.
    pub requests_per_token: f64,
    /// Fraction of them already in a slot.
    pub rate: f64,
    /// Whether a trace says so, rather than the assumption that all experts are equally likely.
    pub from_trace: bool,
}

impl Hits {
    /// Experts that one token has to read.
    pub fn missed_per_token(&self) -> f64 {
        self.requests_per_token * (1.0 - self.rate)
    }
}

impl Replay {
    /// Read a trace of the model of `source`.
    ///
    /// # Errors
    /// If it cannot be read or is of another model.
    pub(crate) fn open(path: &Path, source: &Source) -> anyhow::Result<Self> {
        let moe = &source.config.moe;
        let geometry = Geometry::new(
            source.config.num_hidden_layers,
            moe.num_experts,
            moe.num_experts_per_token,
        )?;
        let mut groups = match Trace::open(path)? {
            Trace::Recorded(mut reader) => {
                let header = reader.header().clone();
                ensure!(
                    header.geometry()? == geometry,
                    "{}: of a model with {} layers of {} experts, {} a token, not of {} (record it again: k3-run --trace FILE)",
                    path.display(),
                    header.layers,
                    header.experts,
                    header.top_k,
                    source.model_dir.display()
                );
                if header.identity != source.identity {
                    log::warn!(
                        "{}: recorded on checkpoint {}, this plan is for {}",
                        path.display(),
                        header.identity,
                        source.identity
                    );
                }
                cache_groups(&mut reader)?
            }
            Trace::Pairs(pairs) => {
                log::info!(
                    "{}: header-less pairs; each run of one layer is taken for one step of it",
                    path.display()
                );
                groups_of_pairs(&pairs, geometry).with_context(|| path.display().to_string())?
            }
        };
        groups.retain(|group| group.layer.get() < source.num_layers);
        ensure!(
            !groups.is_empty(),
            "{}: asks for no expert of the layers planned for",
            path.display()
        );
        Ok(Self { geometry, groups })
    }

    /// A replay of these groups.
    #[cfg(test)]
    pub(crate) fn of_groups(geometry: Geometry, groups: Vec<TraceGroup>) -> Self {
        Self { geometry, groups }
    }

    /// Requests of the whole trace.
    pub(crate) fn num_requests(&self) -> usize {
        self.groups.iter().map(|group| group.keys.len()).sum()
    }

    /// Requests and hits of its decoded tokens (of all steps where it has none) with `slots` slots under `policy`: none where there
    /// can be no such cache.
    pub(crate) fn hits(&self, slots: usize, policy: PolicyKind) -> Hits {
        let decodes = self.groups.iter().any(|group| group.mode == Mode::Decode);
        let mut cache = ExpertCache::new(policy, slots, self.geometry).ok();
        let (mut requests, mut hits) = (0u64, 0u64);
        let mut rows_of_layer = vec![0usize; self.geometry.layers()];
        for group in &self.groups {
            let hit = cache.as_mut().map_or(0, |cache| {
                let before = cache.counters();
                cache.request_group(group.layer, &group.keys);
                cache.counters().since(before).hits
            });
            if group.mode == Mode::Decode || !decodes {
                requests += group.keys.len() as u64;
                hits += hit;
                rows_of_layer[group.layer.get()] += group.rows;
            }
        }
        let tokens = rows_of_layer.into_iter().max().unwrap_or(0).max(1);
        Hits {
            requests_per_token: requests as f64 / tokens as f64,
            rate: hits as f64 / requests.max(1) as f64,
            from_trace: true,
        }
    }
}

/// Groups of a header-less trace: each maximal run of one layer is one step's requests in it.
fn groups_of_pairs(
    pairs: &[k3_shared::formats::trace::Pair],
    geometry: Geometry,
) -> anyhow::Result<Vec<TraceGroup>> {
    let mut builder = GroupBuilder::new(geometry);
    let mut groups: Vec<TraceGroup> = Vec::new();
    let mut step = 0;
    for run in pairs.chunk_by(|a, b| a.layer == b.layer) {
        let layer = run.first().map_or(LayerIdx(0), |pair| pair.layer);
        if groups.last().is_some_and(|group| group.layer >= layer) {
            step += 1;
        }
        let rows = run.len().div_ceil(geometry.top_k());
        let keys = builder
            .group(layer, run.iter().map(|pair| pair.expert))?
            .to_vec();
        groups.push(TraceGroup {
            step,
            mode: if rows == 1 {
                Mode::Decode
            } else {
                Mode::Prefill
            },
            layer,
            rows,
            keys,
        });
    }
    Ok(groups)
}

/// Hits to expect without a trace, all experts being equally likely: whatever is kept from earlier layers and tokens is a random
/// part of all there are. Between nothing and one token's working set, LRU keeps just what is not asked for next.
pub(crate) fn uniform_hits(model: &Model<'_>, slots: usize, policy: PolicyKind) -> Hits {
    let all = model.num_experts();
    let per_token = model.experts_per_token();
    // The slots of the layer in progress hold what is being used, not what may be used again.
    let kept = if slots >= all {
        all
    } else {
        slots.saturating_sub(model.config.moe.num_experts_per_token)
    };
    let rate = if policy == PolicyKind::Lru && slots < per_token.min(all) {
        0.0
    } else {
        kept as f64 / all.max(1) as f64
    };
    Hits {
        requests_per_token: per_token as f64,
        rate,
        from_trace: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k3_shared::{config::Config, formats::trace::Pair, ids::ExpertIdx, release};

    #[test]
    fn lru_below_the_working_set_is_expected_to_hit_nothing() {
        let config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
        let model = Model {
            config: &config,
            num_layers: 93,
            tiles: &[],
        };
        let hits = |slots, policy| {
            let hits = uniform_hits(&model, slots, policy);
            format!("{:.0}", hits.rate * hits.requests_per_token)
        };

        assert_eq!(hits(1471, PolicyKind::Lru), "0");
        assert_eq!(hits(1471, PolicyKind::LayerDistance), "26");
        assert_eq!(hits(82_432, PolicyKind::Lru), "1472");
    }

    #[test]
    fn runs_of_one_layer_in_header_less_pairs_are_its_steps() {
        let geometry = Geometry::new(3, 12, 2).unwrap();
        let pair = |layer, expert| Pair {
            layer: LayerIdx(layer),
            expert: ExpertIdx(expert),
        };
        // Two rows of a prompt, then two tokens that ask for the same experts.
        let pairs = [
            (1, 3),
            (1, 4),
            (1, 4),
            (1, 5),
            (2, 0),
            (2, 1),
            (2, 0),
            (2, 1),
            (1, 6),
            (1, 7),
            (2, 8),
            (2, 9),
            (1, 6),
            (1, 7),
            (2, 8),
            (2, 9),
        ]
        .map(|(layer, expert)| pair(layer, expert));
        let groups = groups_of_pairs(&pairs, geometry).unwrap();
        let shape: Vec<_> = groups
            .iter()
            .map(|g| (g.step, g.layer.0, g.rows, g.keys.len()))
            .collect();
        assert_eq!(
            shape,
            [
                (0, 1, 2, 3),
                (0, 2, 2, 2),
                (1, 1, 1, 2),
                (1, 2, 1, 2),
                (2, 1, 1, 2),
                (2, 2, 1, 2)
            ]
        );
        let replay = Replay { geometry, groups };
        let hits = replay.hits(20, PolicyKind::LayerDistance);
        assert_eq!((hits.requests_per_token, hits.rate), (4.0, 0.5));
    }
}
