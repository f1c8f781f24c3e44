use k3_shared::{
    direct::ALIGN,
    ids::LayerIdx,
    names::{Dtype, LayerTensor, TensorRole},
    tiles::TilePart,
};

use super::*;
use crate::store::model;

fn tile(index: usize, role: TensorRole) -> Tile {
    Tile {
        spec: TileSpec {
            parts: vec![TilePart {
                role,
                dtype: Dtype::Bf16,
                cols: ALIGN / 2,
                rows: 0..1,
                offset: 0,
            }],
        },
        file: model::numbered_file(),
        offset: (index * ALIGN) as u64,
        stored_bytes: ALIGN,
        raw_bytes: ALIGN as u64,
        sha256: [0; 32],
        verified: false,
        memory: Memory::Ring,
    }
}

/// Three tiles of layers, the final vectors and one of the head; those numbered in `pinned` stay.
pub(in crate::store) fn stream(
    pinned: &[usize],
    options: &StoreOptions,
    readers: &Arc<Readers>,
) -> TrunkStream {
    let matrix = TensorRole::Layer(LayerIdx(0), LayerTensor::KdaQ);
    let roles = [
        matrix,
        matrix,
        matrix,
        TensorRole::FinalNorm,
        TensorRole::OutputHead,
    ];
    let mut tiles: Vec<Tile> = (0..).zip(roles).map(|(i, role)| tile(i, role)).collect();
    for &index in pinned {
        tiles[index].memory = Memory::of(true, ALIGN);
    }
    TrunkStream::over(tiles, options, Arc::clone(readers), String::new())
}

/// Use the next tile, which must be `index`, whole.
pub(in crate::store) fn use_tile(stream: &mut TrunkStream, index: usize) {
    let want = model::number_at((index * ALIGN) as u64);
    stream
        .with_tile(&mut |_, bytes| assert!(bytes.iter().all(|b| *b == want), "tile {index}"))
        .unwrap();
}

#[test]
fn tiles_come_whole_and_in_order_however_reads_and_arithmetic_interleave() {
    model::check(2, || {
        let options = model::options(5, 2, 1);
        let readers = Arc::new(Readers::start(2, 1, 4).unwrap());
        let mut stream = stream(&[0, 3], &options, &readers);
        stream.announce(&[false, true]);
        for index in [0, 1, 2, 0, 1, 2, 3, 4] {
            use_tile(&mut stream, index);
        }
        let mut reads = StepReads::default();
        stream.add_reads(&mut reads);
        assert_eq!(reads.trunk_bytes, 5 * ALIGN as u64);
        assert_eq!(reads.head_bytes, 2 * ALIGN as u64);
        assert_eq!(stream.discard(), 0, "nothing is read past the last step");
    });
}

#[test]
fn a_run_that_ends_early_waits_for_its_reads_and_counts_what_it_drops() {
    model::check(2, || {
        let options = model::options(5, 2, 1);
        let readers = Arc::new(Readers::start(2, 1, 4).unwrap());
        let mut stream = stream(&[3], &options, &readers);
        stream.announce(&[true, true]);
        for index in 0..3 {
            use_tile(&mut stream, index);
        }
        // The pinned tile, the head, the first tile of the next step: how many are under way the ring says, not the moment.
        assert_eq!(stream.discard(), 3 * ALIGN as u64);
    });
}
