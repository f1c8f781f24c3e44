//! Seeds by rule: small files of every kind that k3 reads.

use std::{fs, path::Path};

use k3_run::{
    model::{MixerState, SequenceState},
    saved::{self, Header, Origin, Reader, Sampling},
    tokenizer::Tokenizer,
};
use k3_shared::{
    config::Config,
    formats::{
        plan::Plan,
        safetensors,
        trace::{Mode, TraceHeader, TraceReader, TraceRecord, TraceRow, TraceWriter},
        trunk::Trunk,
    },
    ids::{ExpertIdx, LayerIdx},
};
use k3_tests::synth::Recipe;

use crate::{common::Fixture, properties};

type Seeds = Vec<(String, Vec<u8>)>;

/// The seeds of a target, by name.
pub(crate) fn of(target: &str) -> Seeds {
    let mut seeds: Seeds = match target {
        "safetensors" => shard_headers(),
        "config" => configs(),
        "trunk" => trunks(),
        "plan" => plans(),
        "trace" => traces(),
        "state" => states(),
        "tokenizer_files" => tokenizer_files(),
        "tokenizer_text" => texts(),
        other => panic!("no target {other}"),
    };
    seeds.sort_unstable();
    seeds
}

/// Whether the parser of a target takes the input, which a check alone does not tell.
pub(crate) fn is_accepted(target: &str, input: &[u8]) -> bool {
    let name = Path::new("seed");
    let body = input.get(1..).unwrap_or_default();
    let len = body.len() as u64;
    match target {
        "safetensors" => {
            let (size, start) = input.split_first_chunk().unwrap();
            let size = u64::from_le_bytes(*size);
            let header = safetensors::header_len(*start.first_chunk().unwrap(), size, "seed");
            header.is_ok_and(|len| safetensors::Header::parse(&start[..len], size, "seed").is_ok())
        }
        "config" => Config::parse(input, name).is_ok(),
        "trunk" => Trunk::parse(input, name).is_ok(),
        "plan" => Plan::parse(input).is_ok(),
        "trace" => TraceReader::new(body, len, name).is_ok_and(|mut reader| {
            while let Ok(Some(_)) = reader.next_record() {}
            reader.digest().is_some()
        }),
        "state" => {
            let config = properties::state::config();
            let mut state = SequenceState::new(&config, 2, properties::state::CONTEXT);
            let reader = Reader::new(body, len, name);
            reader.is_ok_and(|reader| reader.read_into(&mut state).is_ok())
        }
        "tokenizer_files" => {
            let vocabulary = input.split(|&byte| byte == 0).next().unwrap();
            Tokenizer::parse(vocabulary).is_ok()
        }
        _ => true,
    }
}

fn named<const N: usize>(seeds: [(&str, &[u8]); N]) -> Seeds {
    let seed = |(name, bytes): (&str, &[u8])| (name.to_owned(), bytes.to_vec());
    seeds.into_iter().map(seed).collect()
}

/// The length of a file, then its beginning.
fn shard_file(json: &str, data_bytes: u64) -> Vec<u8> {
    let file_bytes = 8 + json.len() as u64 + data_bytes;
    let mut bytes = file_bytes.to_le_bytes().to_vec();
    bytes.extend_from_slice(&(json.len() as u64).to_le_bytes());
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

fn shard_headers() -> Seeds {
    let tiny = Recipe::tiny().unwrap();
    let of_shard = |index: usize| {
        let shard = tiny.shard(index).unwrap();
        let mut bytes = shard.file_bytes().to_le_bytes().to_vec();
        bytes.extend_from_slice(shard.header());
        bytes
    };
    let (dense, top, vision) = (of_shard(0), of_shard(13), of_shard(14));
    let one = r#"{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
    let odd = r#"{"__metadata__":{"k":"v"},"a\u00e9":{"dtype":"F4","shape":[4],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[0,7],"data_offsets":[2,2],"x":[{}]},"c":{"shape":[],"dtype":"F64","data_offsets":[2,10]}} "#;
    let twice = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
    named([
        ("dense-layer", &dense),
        ("embedding-and-head", &top),
        ("vision", &vision),
        ("one", &shard_file(one, 12)),
        ("odd", &shard_file(odd, 10)),
        ("twice", &shard_file(twice, 2)),
        ("empty", &shard_file("{}", 0)),
        (
            "lfs",
            b"\x80\0\0\0\0\0\0\0version https://git-lfs.github.com/spec/v1",
        ),
        ("longest", &[0xFF; 16]),
    ])
}

fn golden_shape(name: &str) -> Vec<u8> {
    let path = format!(
        "{}/golden/shapes/{name}.config.json",
        env!("CARGO_MANIFEST_DIR")
    );
    fs::read(path).unwrap()
}

fn configs() -> Seeds {
    let shapes = ["single-kda", "single-mla", "flat", "odd-heads"];
    let mut seeds: Seeds = shapes
        .into_iter()
        .map(|name| (name.to_owned(), golden_shape(name)))
        .collect();
    let nested: serde_json::Value = serde_json::from_slice(&golden_shape("single-mla")).unwrap();
    let wrapped = serde_json::json!({ "config": nested });
    seeds.extend(named([
        ("wrapped", wrapped.to_string().as_bytes()),
        ("list", b"[]"),
        ("empty", b"{}"),
    ]));
    seeds
}

fn trunks() -> Seeds {
    let packed = |name: &str, tile_bytes: &str| {
        let fixture = Fixture::empty();
        let config = serde_json::from_slice(&golden_shape(name)).unwrap();
        k3_tests::synth::custom(&fixture.model, &config, k3_tests::synth::Options::default())
            .unwrap();
        fixture.pack(&["--tile-bytes", tile_bytes]);
        let record = fs::read(fixture.trunk.join("trunk.json")).unwrap();
        // Compact: a mutant of white space says nothing.
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        record.to_string().into_bytes()
    };
    let (kda, mla) = (packed("single-kda", "64Ki"), packed("single-mla", "4Ki"));
    named([
        ("one-kda-layer", &kda),
        ("one-mla-layer", &mla),
        ("no-layers", br#"{"schema":"k3.trunk/1","layers":[]}"#),
    ])
}

fn plans() -> Seeds {
    let fixture = Fixture::tiny("64Ki");
    let planned = |budget: &str| {
        let chosen = [
            "--threads",
            "2",
            "--queue-depth",
            "4",
            "--read-size",
            "64Ki",
        ];
        let mut plan = fixture.plan(&[&chosen[..], &["--budget", budget]].concat());
        // What depends on where and when it is made.
        plan.model_dir = "/model".into();
        plan.trunk_dir = "/trunk".into();
        plan.trunk_files = vec!["/trunk/trunk.bin".into()];
        plan.host.available_bytes = 1 << 34;
        plan.host.limit_bytes = 1 << 34;
        plan.host.limited_by = "MemAvailable".into();
        plan.host.cores = 2;
        plan.probe = None;
        plan
    };
    let (floor, all) = (planned("floor"), planned("200M"));
    let json = |plan: &Plan| serde_json::to_vec(plan).unwrap();
    let list = serde_json::json!({ "schema": "k3.plans/1", "plans": [floor] });
    named([
        ("floor", &json(&floor)),
        ("all-resident", &json(&all)),
        ("list", list.to_string().as_bytes()),
        ("blank", b" \n"),
    ])
}

/// As they are, and with the byte in front that asks for digests.
fn flagged(name: &str, body: &[u8], sealed: bool) -> (String, Vec<u8>) {
    let mut bytes = vec![u8::from(sealed)];
    bytes.extend_from_slice(body);
    let how = if sealed { "sealed" } else { "as-is" };
    (format!("{name}-{how}"), bytes)
}

fn traces() -> Seeds {
    let recorded = |top_k: u32, rows: &[u32]| {
        let header = TraceHeader {
            identity: "0123456789abcdef".into(),
            layers: 3,
            experts: 12,
            top_k,
            expert_bytes: 9792,
        };
        let mut writer = TraceWriter::new(Vec::new(), header).unwrap();
        let mut position = 0;
        for (step, &rows) in (0u32..).zip(rows) {
            for layer in 1..3 {
                let row = |row| TraceRow {
                    sequence: 0,
                    position: position + row,
                };
                let expert = |n: u32| ExpertIdx((n * 5 + layer + step) % 12);
                let record = TraceRecord {
                    step: step.into(),
                    mode: if rows > 1 {
                        Mode::Prefill
                    } else {
                        Mode::Decode
                    },
                    layer: LayerIdx(layer),
                    rows: (0..rows).map(row).collect(),
                    experts: (0..rows * top_k).map(expert).collect(),
                };
                writer.write(&record).unwrap();
            }
            position += rows;
        }
        writer.finish().unwrap()
    };
    let (short, long) = (recorded(2, &[1]), recorded(4, &[3, 1, 1]));
    let pairs: Vec<u8> = [0u32, 5, 0, 7, 1, 2, 1, 3]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    vec![
        flagged("short", &short, false),
        flagged("short", &short, true),
        flagged("long", &long, false),
        flagged("long", &long, true),
        flagged("pairs", &pairs, false),
    ]
}

fn states() -> Seeds {
    let saved = |positions: usize| {
        let mut state = SequenceState::new(&properties::state::config(), 2, positions);
        let mut next = 0.0f32;
        let mut fill = |values: &mut [f32]| {
            for value in values {
                next += 0.25;
                *value = next;
            }
        };
        for mixer in &mut state.mixers {
            match mixer {
                MixerState::Kda(kda) => {
                    fill(&mut kda.matrix);
                    kda.history.iter_mut().for_each(|values| fill(values));
                }
                MixerState::Mla(cache) => {
                    let mut latent = vec![0.0; cache.width()];
                    for position in 0..positions {
                        fill(&mut latent);
                        cache.store(position, &latent);
                    }
                }
            }
        }
        state.position = positions;
        let header = Header {
            origin: Origin {
                identity: "0123456789abcdef".into(),
                num_layers: 2,
                mla_norm_eps: 1e-6,
                allow_nan_scales: false,
            },
            ids: (0..=u32::try_from(positions).unwrap()).collect(),
            generated: 1,
            position: positions as u64,
            sampling: Sampling {
                temperature: 0.5,
                top_p: 0.9,
                generator: 77,
            },
        };
        let mut bytes = Vec::new();
        saved::write(&mut bytes, &header, &state).unwrap();
        bytes
    };
    let (empty, full) = (saved(0), saved(properties::state::CONTEXT));
    vec![
        flagged("empty", &empty, false),
        flagged("empty", &empty, true),
        flagged("full", &full, false),
        flagged("full", &full, true),
    ]
}

fn tokenizer_files() -> Seeds {
    let tiny = k3_tests::tokenizer::tiny();
    let with_config = |json: &str| [&tiny[..], b"\0", json.as_bytes()].concat();
    let agrees = with_config(
        r#"{"added_tokens_decoder":{"321":{"content":"[EOS]"},"328":{"content":"<|reserved_token_328|>"}}}"#,
    );
    let differs = with_config(r#"{"added_tokens_decoder":{"321":{"content":"[BOS]"}}}"#);
    named([
        ("tiny", &tiny),
        ("agrees", &agrees),
        ("differs", &differs),
        ("rank-twice", b"IQ== 0\nIg== 0\n"),
        ("empty", b""),
    ])
}

fn texts() -> Seeds {
    named([
        (
            "words",
            b"The world's motion, and the 1234567 others.\r\n\n  hello",
        ),
        (
            "han",
            "\u{4f60}\u{597d}\u{3002}abc\u{d55c}\u{ae00}e\u{301} \u{1f469}\u{200d}\u{1f680}"
                .as_bytes(),
        ),
        ("not-utf-8", b"QUJDRA\xFF\xE4\xBD\xF0\x9F then \xC3"),
        (
            "specials",
            b"<|open|>user<|sep|>[EOS]<|end_of_msg|><|reserved_token_328|><|ope",
        ),
        ("white", b"   \t\t \n\n\n     x    !!--=="),
        ("upper", b"McDonald'S HTTPServer iPhone 'LL"),
    ])
}
