//! How fast values are multiplied, by all threads together.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// How long each round runs.
const ARITHMETIC: Duration = Duration::from_millis(150);
/// Rounds, of which the best counts.
const ROUNDS: usize = 3;
/// Values multiplied at once: enough independent products to fill the pipelines, in 12 of 16 registers.
const LANES: usize = 48;

/// Multiply-adds a second of all threads, each counted as two.
///
/// This tool has no unsafe code, and without any it cannot call into instructions that only some processors have. So the loop is
/// compiled for every processor of the architecture, and measures what can be had there: how many vector multiplications are
/// issued a second, four lanes each on x86-64. A fused multiply-add takes the same units and counts twice, and wider registers
/// hold more lanes. Where a processor works on 512 bits in two halves the estimate is twice too high; a limit computed from it
/// is then still a limit.
pub(super) fn arithmetic_speed(threads: usize) -> f64 {
    let rounds = (0..ROUNDS).map(|_| products_per_second(threads));
    rounds.fold(0.0, f64::max) * fused_operations_per_product()
}

fn products_per_second(threads: usize) -> f64 {
    const REPEATS: usize = 4096;
    let over = AtomicBool::new(false);
    let one = || {
        let mut products = [1.0f32; LANES];
        let mut work = || {
            // From one again: products that fade to subnormals would be slow on some processors.
            products.fill(1.0);
            let factor = black_box(0.999_999f32);
            for _ in 0..REPEATS {
                for product in &mut products {
                    *product *= factor;
                }
            }
            black_box(&products);
            (LANES * REPEATS) as f64
        };
        // Once for the clock to rise.
        work();
        let start = Instant::now();
        let mut done = 0.0;
        while !over.load(Ordering::Relaxed) {
            done += work();
            if start.elapsed() >= ARITHMETIC {
                over.store(true, Ordering::Relaxed);
            }
        }
        done / start.elapsed().as_secs_f64()
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(one)).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or(0.0))
            .sum()
    })
}

/// Operations of the widest fused multiply-add of this processor for each lane of the loop's multiplication.
#[cfg(target_arch = "x86_64")]
fn fused_operations_per_product() -> f64 {
    let fused = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    if fused && is_x86_feature_detected!("avx512f") {
        8.0
    } else if fused {
        4.0
    } else {
        1.0
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fused_operations_per_product() -> f64 {
    2.0
}
