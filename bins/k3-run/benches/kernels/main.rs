//! Speed and error of the kernels at the released model's shapes, against what this machine can do at all.
//!
//! Every line is a share of a limit measured in the same process: the streaming read rate of as many threads, in turns with the
//! kernel, where memory is the limit; the fused multiply-add rate of the same threads and instruction set where arithmetic is.
//!
//! `cargo bench -p k3-run --bench kernels -- WORD...` keeps the lines that contain every word (`'x1 '`: those of one row);
//! `--isa avx2` takes another instruction set than the best.

mod attention;
mod error;
mod limits;
mod matrices;
mod pool;
mod vectors;

use k3_run::kernels::Isa;

use limits::Limits;
use pool::Pool;

/// What the command line asked for.
struct Options {
    isa: Isa,
    words: Vec<String>,
}

impl Options {
    fn parse() -> Self {
        let (mut isa, mut words) = (Isa::detect(), Vec::new());
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            match arg.as_str() {
                // Cargo adds it to every benchmark.
                "--bench" => {}
                "--isa" => {
                    let name = args.next().unwrap_or_default();
                    let known = Isa::available();
                    isa = known
                        .iter()
                        .copied()
                        .find(|isa| isa.name() == name)
                        .unwrap_or_else(|| {
                            let names: Vec<&str> = known.iter().map(|isa| isa.name()).collect();
                            panic!("--isa {name}: this processor has {}", names.join(", "))
                        });
                }
                _ => words.push(arg),
            }
        }
        Self { isa, words }
    }

    /// Whether the line of this name is asked for.
    fn wants(&self, name: &str) -> bool {
        self.words.iter().all(|word| name.contains(word.as_str()))
    }
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its table")]
fn main() {
    let options = Options::parse();
    let mut pool = Pool::new();
    let limits = Limits::measure(options.isa, pool.bytes());
    println!(
        "{}: one thread reads {:.1} GB/s and does {:.0} GFLOP/s; {} threads {:.1} GB/s and {:.0} GFLOP/s",
        options.isa.name(),
        limits.read[0] / 1e9,
        limits.arithmetic[0] / 1e9,
        limits.threads(),
        limits.read[1] / 1e9,
        limits.arithmetic[1] / 1e9,
    );
    matrices::dense(&options, &limits, &pool);
    matrices::experts(&options, &limits, &mut pool);
    vectors::run(&options, &limits);
    attention::run(&options, &limits);
    error::run(&options);
}
