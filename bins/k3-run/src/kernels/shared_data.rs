//! Operators against vectors computed by others, in the folder `K3_SHARED_DATA` names: `cargo test -- --ignored shared_data`.

use serde_json::Value;

use super::*;

/// One file of `ops/`.
pub(crate) struct Vectors(Value);

impl Vectors {
    /// `ops/NAME.json`.
    pub(crate) fn open(name: &str) -> Self {
        let dir = std::env::var("K3_SHARED_DATA")
            .expect("K3_SHARED_DATA names the folder that holds ops/");
        let path = std::path::Path::new(&dir)
            .join("ops")
            .join(format!("{name}.json"));
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self(serde_json::from_str(&text).unwrap())
    }

    /// One number.
    pub(crate) fn number(&self, key: &str) -> f64 {
        self.0[key]
            .as_f64()
            .unwrap_or_else(|| panic!("{key} is a number"))
    }

    /// One count.
    pub(crate) fn count(&self, key: &str) -> usize {
        usize::try_from(self.0[key].as_u64().unwrap()).unwrap()
    }

    /// The numbers of an array, which must have `len` of them.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the file holds f32 as decimals"
    )]
    pub(crate) fn array(&self, key: &str, len: usize) -> Vec<f32> {
        let data = self.0[key]["data"]
            .as_array()
            .unwrap_or_else(|| panic!("{key} is an array"));
        assert_eq!(data.len(), len, "{key}");
        data.iter().map(|v| v.as_f64().unwrap() as f32).collect()
    }

    /// Whether the file holds `key`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.get(key).is_some()
    }

    fn bytes(&self, key: &str, len: usize) -> Vec<u8> {
        let data = self.0[key]["data"]
            .as_array()
            .unwrap_or_else(|| panic!("{key} is an array"));
        assert_eq!(data.len(), len, "{key}");
        data.iter()
            .map(|v| u8::try_from(v.as_u64().unwrap()).unwrap())
            .collect()
    }
}

/// The tolerance stated with the vectors.
pub(crate) fn close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(
            (g - w).abs() <= 1e-5 + 1e-4 * w.abs(),
            "{what}: element {i} is {g}, not {w}"
        );
    }
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_rmsnorm() {
    let file = Vectors::open("rmsnorm");
    let (weight, x, want) = (
        file.array("weight", 128),
        file.array("in", 384),
        file.array("out", 384),
    );
    let mut out = vec![0.0; 384];
    for (x, out) in x.chunks(128).zip(out.chunks_mut(128)) {
        rms_norm(x, &weight, file.number("eps"), out);
    }
    close(&out, &want, "out");
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_situ_glu() {
    let file = Vectors::open("situ_glu");
    let (x, want) = (file.array("in", 96), file.array("out", 48));
    for isa in Isa::available() {
        for (x, want) in x.chunks(16).zip(want.chunks(8)) {
            let mut out = [0.0; 8];
            situ_slice(isa, &x[..8], &x[8..], (4.0, 25.0), &mut out);
            close(&out, want, "out");
            assert!(out.iter().all(|v| v.abs() <= 100.0));
        }
    }
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_shortconv() {
    let file = Vectors::open("shortconv");
    let (channels, taps) = (file.count("channels"), file.count("kernel"));
    let weight = file.array("weight", channels * taps);
    let (x, next) = (
        file.array("in", 5 * channels),
        file.array("in_next", channels),
    );
    for isa in Isa::available() {
        let (mut history, mut out) = (vec![0.0; 3 * channels], vec![0.0; 5 * channels]);
        conv_silu(isa, &x, &mut history, &weight, channels, &mut out);
        close(&out, &file.array("out", 5 * channels), "out");
        // The file keeps the history channel by channel.
        let by_channel: Vec<f32> = (0..channels)
            .flat_map(|c| (0..3).map(move |t| t * channels + c))
            .map(|i| history[i])
            .collect();
        close(
            &by_channel,
            &file.array("state_after", 3 * channels),
            "state_after",
        );
        let mut out = vec![0.0; channels];
        conv_silu(isa, &next, &mut history, &weight, channels, &mut out);
        close(&out, &file.array("out_next", channels), "out_next");
    }
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_kda_decay() {
    let file = Vectors::open("kda_decay");
    let (z, a_log, bias) = (
        file.array("z", 256),
        file.array("A_log", 4),
        file.array("dt_bias", 64),
    );
    let want = file.array("alpha", 256);
    #[expect(clippy::cast_possible_truncation, reason = "a small integer")]
    let lambda = file.number("lower_bound") as f32;
    for isa in Isa::available() {
        let mut alpha = vec![0.0; 256];
        for (row, (z, alpha)) in z.chunks(16).zip(alpha.chunks_mut(16)).enumerate() {
            let head = row % 4;
            decay_gate(
                isa,
                z,
                &bias[head * 16..][..16],
                math::exp(a_log[head]),
                lambda,
                alpha,
            );
        }
        close(&alpha, &want, "alpha");
    }
}

fn recurrence(name: &str) {
    let file = Vectors::open(name);
    let (t, heads, d) = (file.count("T"), file.count("H"), file.count("d_k"));
    let n = t * heads * d;
    let (q, k, v, alpha) = (
        file.array("q", n),
        file.array("k", n),
        file.array("v", n),
        file.array("alpha", n),
    );
    let beta = file.array("beta", t * heads);
    #[expect(clippy::cast_possible_truncation, reason = "a quarter")]
    let scale = file.number("q_scale") as f32;
    for isa in Isa::available() {
        let (mut state, mut out, mut u) = (vec![0.0; heads * d * d], vec![0.0; n], vec![0.0; d]);
        for (i, out) in out.chunks_mut(d).enumerate() {
            let row = i * d..(i + 1) * d;
            let q: Vec<f32> = q[row.clone()].iter().map(|q| q * scale).collect();
            let (k, v, alpha) = (&k[row.clone()], &v[row.clone()], &alpha[row]);
            let state = &mut state[i % heads * d * d..][..d * d];
            delta_step(
                isa,
                state,
                DeltaInput {
                    q: &q,
                    k,
                    v,
                    alpha,
                    beta: beta[i],
                },
                &mut u,
                out,
            );
        }
        close(&out, &file.array("out", n), "out");
        close(&state, &file.array("state_out", heads * d * d), "state_out");
    }
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_kda_recur1() {
    recurrence("kda_recur1");
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_kda_recur8() {
    recurrence("kda_recur8");
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_attnres() {
    let file = Vectors::open("attnres");
    let (stream, snapshots) = (
        file.array("prefix_sum", 4 * 128),
        file.array("block_residual", 4 * 8 * 128),
    );
    let (proj, norm) = (
        file.array("proj_weight", 128),
        file.array("norm_weight", 128),
    );
    let weights: Vec<f32> = proj.iter().zip(&norm).map(|(p, w)| p * w).collect();
    let want = file.array("out", 4 * 128);
    for ((stream, snapshots), want) in stream
        .chunks(128)
        .zip(snapshots.chunks(8 * 128))
        .zip(want.chunks(128))
    {
        let sources: Vec<&[f32]> = snapshots.chunks(128).chain([stream]).collect();
        let (mut out, mut probs) = ([0.0; 128], [0.0; 9]);
        attention_residual(
            sources.iter().copied(),
            &weights,
            file.number("eps"),
            &mut out,
            &mut probs,
        );
        close(&out, want, "out");
    }
}

#[test]
#[ignore = "needs K3_SHARED_DATA"]
fn shared_data_mxfp4() {
    let file = Vectors::open("mxfp4");
    let (rows, cols) = (file.count("rows"), file.count("logical_width"));
    let (packed, scale) = (
        file.bytes("packed", rows * cols / 2),
        file.bytes("scales", rows * cols / 32),
    );
    let want = file.array("expected", rows * cols);
    let w = Weights::Mxfp4 {
        packed: &packed,
        scale: &scale,
        nan_scales: NanScales::Propagate,
    };
    let mut out = vec![0.0; rows * cols];
    widen(w, &mut out);
    assert_eq!(out, want, "decoded weights are exact");
    // And by position through the kernels: a unit vector picks one column.
    let mut x = Activations::new();
    for isa in Isa::available() {
        for col in [0, 1, 31, 32, 127, 128, 1000, cols - 1] {
            let mut unit = vec![0.0; cols];
            unit[col] = 1.0;
            x.fill(&unit, cols);
            let mut picked = vec![0.0; rows];
            matmul(isa, w, &x, &mut picked);
            let column: Vec<f32> = want.chunks(cols).map(|row| row[col]).collect();
            assert_eq!(picked, column, "column {col}");
        }
    }
}
