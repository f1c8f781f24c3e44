use k3_shared::direct::ALIGN;

use super::*;
use crate::store::{
    model,
    trunk::tests::{stream, use_tile},
};

/// Experts of both layers.
const EXPERTS: u64 = 4;

fn offset(id: ExpertId) -> u64 {
    (16 + u64::from(id.layer.0) * EXPERTS + u64::from(id.expert.0)) * ALIGN as u64
}

/// Two layers of four experts, of which a token selects two.
fn slots(options: &StoreOptions, readers: &Arc<Readers>) -> ExpertSlots {
    let layers = [LayerIdx(0), LayerIdx(1)].map(|layer| {
        let place = |expert| {
            offset(ExpertId {
                layer,
                expert: ExpertIdx(expert),
            })
        };
        Some(LayerFile {
            file: model::numbered_file(),
            offsets: (0..4).map(place).collect(),
        })
    });
    let block = Block {
        bytes: ALIGN,
        layout: std::array::from_fn(|_| 0..0),
    };
    let geometry = Geometry::new(2, 4, 2).unwrap();
    ExpertSlots::over(geometry, layers.into(), block, options, Arc::clone(readers)).unwrap()
}

/// The bytes given are those of the expert named, and none comes twice.
fn take(layer: u32, left: &mut Vec<u32>, expert: ExpertIdx, weights: &ExpertWeights<'_>) {
    let id = ExpertId {
        layer: LayerIdx(layer),
        expert,
    };
    let want = model::number_at(offset(id));
    assert!(weights.block.iter().all(|b| *b == want), "{id:?}");
    let at = left.iter().position(|e| *e == expert.0);
    left.swap_remove(at.unwrap_or_else(|| panic!("{id:?} was not asked for, or came twice")));
}

/// Request a group, look between tiles for experts that are there, then wait for the others.
fn run_group(
    experts: &mut ExpertSlots,
    layer: u32,
    group: &[u32],
    mut between: impl FnMut(),
    looks: usize,
) {
    let ids: Vec<ExpertIdx> = group.iter().copied().map(ExpertIdx).collect();
    experts.request(LayerIdx(layer), &ids).unwrap();
    let mut left = group.to_vec();
    for _ in 0..looks {
        between();
        let mut use_it =
            |expert, weights: ExpertWeights<'_>| take(layer, &mut left, expert, &weights);
        while experts.with_ready(&mut use_it).unwrap() {}
    }
    let mut use_it = |expert, weights: ExpertWeights<'_>| take(layer, &mut left, expert, &weights);
    while experts.with_next(&mut use_it).unwrap() {}
    assert!(left.is_empty(), "{left:?} of layer {layer} never came");
}

#[test]
fn every_expert_comes_once_and_whole_with_fewer_slots_than_a_group_has_members() {
    model::check(2, || {
        let options = model::options(0, 0, 2);
        let readers = Arc::new(Readers::start(2, 2, 1).unwrap());
        let mut experts = slots(&options, &readers);
        run_group(&mut experts, 0, &[0, 1, 2], || (), 1);
        run_group(&mut experts, 0, &[2, 3], || (), 0);
        let mut reads = StepReads::default();
        experts.add_reads(&mut reads);
        assert_eq!((reads.expert_requests, reads.expert_hits), (5, 1));
        assert_eq!(reads.expert_bytes, 4 * ALIGN as u64);
    });
}

#[test]
fn experts_and_tiles_share_readers_without_waiting_for_each_other() {
    model::check(2, || {
        let options = model::options(5, 2, 2);
        let readers = Arc::new(Readers::start(2, 2, 4).unwrap());
        let mut trunk = stream(&[3], &options, &readers);
        let mut experts = slots(&options, &readers);
        trunk.announce(&[false]);
        use_tile(&mut trunk, 0);
        let mut next = 1;
        let tile = || {
            use_tile(&mut trunk, next);
            next += 1;
        };
        run_group(&mut experts, 0, &[0, 1, 3], tile, 2);
        assert_eq!(trunk.discard(), 0);
    });
}
