//! Error of the matrix kernels against f64 at the model's shapes, on normal random data.

use k3_run::kernels::{Activations, Isa, NanScales, Weights, matmul, widen};

use crate::Options;
use crate::pool::next;

/// Rows of each shape that are checked: every row sums in the same order.
const ROWS: usize = 256;

/// About normal, standard deviation 1.
fn normal(seed: &mut u64) -> f32 {
    (0..12)
        .map(|_| (next(seed) & 0xff_ffff) as f32 / 8_388_608.0 - 1.0)
        .sum::<f32>()
        / 2.0
}

/// Relative L2 error of `W x` for one matrix and `tokens` vectors.
fn relative_error(isa: Isa, w: Weights<'_>, cols: usize, tokens: usize, seed: &mut u64) -> f64 {
    let values: Vec<f32> = (0..tokens * cols).map(|_| normal(seed)).collect();
    let mut x = Activations::new();
    x.fill(&values, cols);
    let rows = w.num_rows(cols);
    let (mut out, mut wide) = (vec![0.0; rows * tokens], vec![0.0; rows * cols]);
    matmul(isa, w, &x, &mut out);
    widen(w, &mut wide);
    let (mut error, mut norm) = (0.0, 0.0);
    for (row, out) in wide.chunks_exact(cols).zip(out.chunks_exact(tokens)) {
        for (got, x) in out.iter().zip(values.chunks_exact(cols)) {
            let want: f64 = row
                .iter()
                .zip(x)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum();
            error += (f64::from(*got) - want).powi(2);
            norm += want * want;
        }
    }
    (error / norm).sqrt()
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
pub(crate) fn run(options: &Options) {
    let mut seed = 7;
    let mut headed = false;
    for (kind, cols) in [
        ("bf16", 7168),
        ("bf16", 12288),
        ("bf16", 33792),
        ("f32", 7168),
        ("mxfp4", 3584),
        ("mxfp4", 3072),
    ] {
        let name = format!("error {kind} [{ROWS}, {cols}]");
        if !options.wants(&name) {
            continue;
        }
        if !headed {
            println!("\nrelative L2 error against f64 (the contract: at most 3e-7)");
            headed = true;
        }
        let count = ROWS * cols;
        let normals: Vec<f32> = (0..count).map(|_| normal(&mut seed)).collect();
        let bf16: Vec<u8> = normals
            .iter()
            .flat_map(|w| [w.to_le_bytes()[2], w.to_le_bytes()[3]])
            .collect();
        let f32: Vec<u8> = normals.iter().flat_map(|w| w.to_le_bytes()).collect();
        let packed: Vec<u8> = (0..count / 2)
            .map(|_| next(&mut seed).to_le_bytes()[0])
            .collect();
        let scale: Vec<u8> = (0..count / 32)
            .map(|_| 118 + next(&mut seed).to_le_bytes()[0] % 4)
            .collect();
        let w = match kind {
            "bf16" => Weights::Bf16(&bf16),
            "f32" => Weights::F32(&f32),
            _ => Weights::Mxfp4 {
                packed: &packed,
                scale: &scale,
                nan_scales: NanScales::Zero,
            },
        };
        let errors =
            [1, 4, 32].map(|tokens| relative_error(options.isa, w, cols, tokens, &mut seed));
        println!(
            "{name:<28} {:.1e} one vector, {:.1e} four, {:.1e} thirty-two",
            errors[0], errors[1], errors[2]
        );
    }
}
