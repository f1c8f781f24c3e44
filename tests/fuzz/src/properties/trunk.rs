//! `trunk.json`: what is accepted names tiles that lie inside their files, apart from each other, and reads back as itself.

use k3_shared::{
    formats::trunk::Trunk,
    tiles::{TILE_ALIGN, TileSpec},
};

use super::NAME;

/// The bytes of a `trunk.json`.
pub fn check(input: &[u8]) {
    let Ok((trunk, config, specs)) = Trunk::parse(input, NAME.as_ref()) else {
        return;
    };
    assert_eq!(specs.len(), trunk.tiles().count());
    assert!(trunk.num_layers <= config.num_hidden_layers);
    let mut taken: Vec<(usize, u64, u64)> = Vec::new();
    for (tile, spec) in trunk.tiles().zip(&specs) {
        let end = tile.offset + tile.stored_bytes;
        assert!(end <= trunk.files[tile.file].bytes);
        assert_eq!(tile.offset % TILE_ALIGN, 0);
        assert_eq!(tile.raw_bytes, spec.raw_bytes());
        assert!(tile.raw_bytes <= tile.stored_bytes);
        inside(spec);
        taken.push((tile.file, tile.offset, end));
    }
    taken.sort_unstable();
    for pair in taken.windows(2) {
        assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, "{pair:?}");
    }
    let text = serde_json::to_vec(&trunk).expect("a record is JSON");
    let again = Trunk::parse(&text, NAME.as_ref()).expect("what was parsed reads back");
    assert_eq!(again, (trunk, config, specs));
}

/// The parts of a tile follow each other inside it.
fn inside(spec: &TileSpec) {
    let mut next = 0;
    for part in &spec.parts {
        assert_eq!(part.offset, next);
        next += part.bytes();
    }
    assert_eq!(next, spec.raw_bytes());
}
