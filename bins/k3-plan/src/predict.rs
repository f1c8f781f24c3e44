//! What a decoded token is expected to read, and how long it takes at the physical limit (design, section 5).

use std::path::Path;

use anyhow::{Context as _, ensure};
use k3_shared::{
    cache::{ExpertCache, Geometry, GroupBuilder, PolicyKind},
    formats::{
        plan::{Predicted, Probe},
        trace::{Mode, Trace, TraceGroup, cache_groups},
    },
    ids::LayerIdx,
    ledger::{Choice, Model},
};

use crate::source::Source;

/// Expert requests of an earlier run, in the order a cache sees them.
#[derive(Debug)]
pub(crate) struct Replay {
    geometry: Geometry,
    groups: Vec<TraceGroup>,
}

/// Expected requests and hits of decoded tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Hits {
    /// Distinct experts asked for by one token.
    pub(crate) requests_per_token: f64,
    /// Fraction of them already in a slot.
    pub(crate) rate: f64,
    /// Whether a trace says so, rather than the assumption that all experts are equally likely.
    pub(crate) from_trace: bool,
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

    /// Requests and hits of its decoded tokens (of all steps where it has none) with `slots` slots under `policy`.
    ///
    /// # Errors
    /// If there are no slots.
    pub(crate) fn hits(&self, slots: usize, policy: PolicyKind) -> anyhow::Result<Hits> {
        let decodes = self.groups.iter().any(|group| group.mode == Mode::Decode);
        let mut cache = ExpertCache::new(policy, slots, self.geometry)?;
        let (mut requests, mut hits) = (0u64, 0u64);
        let mut rows_of_layer = vec![0usize; self.geometry.layers()];
        for group in &self.groups {
            let before = cache.counters();
            cache.request_group(group.layer, &group.keys);
            if group.mode == Mode::Decode || !decodes {
                let counted = cache.counters().since(before);
                requests += counted.requests;
                hits += counted.hits;
                rows_of_layer[group.layer.get()] += group.rows;
            }
        }
        let tokens = rows_of_layer.into_iter().max().unwrap_or(0).max(1);
        Ok(Hits {
            requests_per_token: requests as f64 / tokens as f64,
            rate: hits as f64 / requests.max(1) as f64,
            from_trace: true,
        })
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

/// What one decoded token reads and takes.
pub(crate) fn predict(
    model: &Model<'_>,
    choice: &Choice,
    hits: Hits,
    probe: Option<&Probe>,
) -> Predicted {
    let (trunk, head) = model.streamed_payload(&choice.pinned);
    let expert = model.config.moe.expert_bytes() as f64;
    let expert_bytes = (hits.requests_per_token * (1.0 - hits.rate) * expert).round();
    let work = Work {
        read: trunk as f64 + head as f64 + expert_bytes,
        touched: touched_bytes(model),
        flops: flops(model),
    };
    Predicted {
        trunk_bytes_per_token: trunk,
        head_bytes_per_token: head,
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole, non-negative number of bytes far below 2^53"
        )]
        expert_bytes_per_token: expert_bytes as u64,
        seconds_per_token: probe.and_then(|probe| work.limit(probe)),
    }
}

/// One decoded token's work.
#[derive(Clone, Copy, Debug)]
struct Work {
    read: f64,
    touched: f64,
    flops: f64,
}

impl Work {
    /// `max(read / D, (touched + read) / M, flops / F)` over what is known; nothing if the disk is read but was not measured.
    fn limit(&self, probe: &Probe) -> Option<f64> {
        let disk = match probe.disk_bytes_per_second {
            Some(speed) => self.read / speed,
            None if self.read > 0.0 => return None,
            None => 0.0,
        };
        let memory = probe
            .memory_bytes_per_second
            .map_or(0.0, |speed| (self.touched + self.read) / speed);
        let arithmetic = probe
            .flops_per_second
            .map_or(0.0, |speed| self.flops / speed);
        let limit = disk.max(memory).max(arithmetic);
        (limit > 0.0 && limit.is_finite()).then_some(limit)
    }
}

/// Weights that one token multiplies: the trunk, the head and the chosen experts, wherever they lie.
fn touched_bytes(model: &Model<'_>) -> f64 {
    let trunk: f64 = model.tiles.iter().map(|tile| tile.raw_bytes() as f64).sum();
    trunk + model.experts_per_token() as f64 * model.config.moe.expert_bytes() as f64
}

/// A multiplication and an addition for every weight touched.
fn flops(model: &Model<'_>) -> f64 {
    let trunk: f64 = model
        .tiles
        .iter()
        .flat_map(|tile| &tile.parts)
        .map(|part| part.rows.len() as f64 * part.cols as f64)
        .sum();
    let moe = &model.config.moe;
    let expert = 3.0 * moe.routed_expert_hidden_size as f64 * moe.moe_intermediate_size as f64;
    2.0 * (trunk + model.experts_per_token() as f64 * expert)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k3_shared::{
        config::Config,
        formats::trace::Pair,
        ids::ExpertIdx,
        ledger::TileSet,
        release,
        tiles::{DEFAULT_TILE_BYTES, as_released, trunk_tiles},
    };

    fn probe(disk: f64, memory: Option<f64>, flops: Option<f64>) -> Probe {
        Probe {
            disk_bytes_per_second: Some(disk),
            memory_bytes_per_second: memory,
            flops_per_second: flops,
            date: "2000-01-01".into(),
        }
    }

    #[test]
    fn the_limit_is_the_slowest_of_disk_memory_and_arithmetic() {
        let work = Work {
            read: 100.0,
            touched: 300.0,
            flops: 1000.0,
        };
        assert_eq!(work.limit(&probe(10.0, None, None)), Some(10.0));
        assert_eq!(work.limit(&probe(10.0, Some(20.0), None)), Some(20.0));
        assert_eq!(work.limit(&probe(10.0, Some(20.0), Some(25.0))), Some(40.0));
        let unmeasured = Probe {
            disk_bytes_per_second: None,
            ..probe(1.0, Some(1.0), None)
        };
        assert_eq!(work.limit(&unmeasured), None);
        let resident = Work { read: 0.0, ..work };
        assert_eq!(resident.limit(&unmeasured), Some(300.0));
    }

    #[test]
    fn a_streamed_token_of_the_release_reads_what_is_published() {
        let config = Config::parse(release::CONFIG_JSON.as_bytes(), "c".as_ref()).unwrap();
        let tiles = trunk_tiles(&config, 93, DEFAULT_TILE_BYTES, &as_released(&config));
        let model = Model {
            config: &config,
            num_layers: 93,
            tiles: &tiles,
        };
        let choice = Choice {
            context: 1,
            prefill_chunk: 1,
            threads: 1,
            queue_depth: 4,
            stream_buffer_bytes: 0,
            expert_slots: 20,
            pinned: TileSet::none(tiles.len()),
            verify_experts: false,
        };
        let hits = uniform_hits(&model, 16, PolicyKind::LayerDistance);
        let predicted = predict(&model, &choice, hits, None);
        assert_eq!(predicted.trunk_bytes_per_token, 108_811_877_376 + 43_008);
        assert_eq!(predicted.head_bytes_per_token, 2_348_810_240);
        assert_eq!(predicted.expert_bytes_per_token, 1472 * 17_547_264);
        assert_eq!(predicted.seconds_per_token, None);
    }

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
        let hits = replay.hits(20, PolicyKind::LayerDistance).unwrap();
        assert_eq!((hits.requests_per_token, hits.rate), (4.0, 0.5));
    }
}
