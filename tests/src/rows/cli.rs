//! The command line of `k3-rows`.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand};
use k3_shared::term::{self, Outcome};

use super::{Made, PLOTS, Row, append, draw, make, read, same_ids, table};

/// Keep, compare and draw the rows that the measuring pipelines write.
#[derive(Debug, Parser)]
#[command(name = "k3-rows", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    /// What to do.
    pub what: What,
}

/// What to do with rows.
#[derive(Debug, Subcommand)]
pub enum What {
    /// Add a row, made from a plan and the report of its run.
    Add(Box<Add>),
    /// Exit 0 if a file has this row, 1 if not.
    Has {
        /// The rows, a JSON line each.
        file: PathBuf,
        /// The row's name.
        #[arg(long, value_name = "NAME")]
        row: String,
        /// Which repeat of it.
        #[arg(long, value_name = "N")]
        round: u32,
    },
    /// Print medians and spread; exit 1 if rows generated different tokens.
    Table {
        /// The rows, a JSON line each; ids are compared over all files.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Draw every plot that there are rows for.
    Plot {
        /// The folder with the rows: ladder.jsonl, split.jsonl, ...
        rows: PathBuf,
        /// The folder for the plots: ladder.svg, ...
        out: PathBuf,
    },
}

/// What makes a row.
#[derive(Debug, Args)]
pub struct Add {
    /// The rows, a JSON line each.
    pub file: PathBuf,
    /// The ladder.
    #[arg(long, value_name = "NAME")]
    pub target: String,
    /// The row's name.
    #[arg(long, value_name = "NAME")]
    pub row: String,
    /// Which repeat of it.
    #[arg(long, value_name = "N")]
    pub round: u32,
    /// When it was measured, UTC.
    #[arg(long, value_name = "TIME")]
    pub date: String,
    /// The revision of the source.
    #[arg(long, value_name = "REV")]
    pub tree: String,
    /// What held the run to its memory.
    #[arg(long, value_name = "TEXT")]
    pub cap: String,
    /// The plan.
    #[arg(long, value_name = "FILE")]
    pub plan: PathBuf,
    /// The report of k3-run.
    #[arg(long, value_name = "FILE")]
    pub report: PathBuf,
}

/// Do what the command line asks.
///
/// # Errors
/// If a file cannot be read or written, or is not what it should be.
pub fn run(cli: &Cli, out: &mut dyn Write) -> anyhow::Result<Outcome> {
    match &cli.what {
        What::Add(add) => add_row(add),
        What::Has { file, row, round } => {
            let rows = read(file)?;
            let mut found = rows.iter().map(|r| (&r.name, r.round));
            Ok(if found.any(|at| at == (row, *round)) {
                Outcome::Done
            } else {
                Outcome::Negative
            })
        }
        What::Table { files } => print(files, out),
        What::Plot { rows, out } => draw_all(rows, out),
    }
}

fn add_row(add: &Add) -> anyhow::Result<Outcome> {
    let made = Made {
        target: &add.target,
        name: &add.row,
        round: add.round,
        date: &add.date,
        tree: &add.tree,
        cap: &add.cap,
    };
    let row = make(&made, &add.plan, &add.report)?;
    append(&add.file, &row)?;
    log::info!(
        "{}: {:.3} s a token, {:.2} GB/s read",
        row.label(),
        row.seconds_per_token(),
        row.bytes_per_second() / 1e9
    );
    Ok(Outcome::Done)
}

fn print(files: &[PathBuf], out: &mut dyn Write) -> anyhow::Result<Outcome> {
    let mut all = Vec::new();
    for file in files {
        let rows = read(file)?;
        if rows.is_empty() {
            bail!(
                "{}: no rows (make -C pipelines ladder writes some)",
                file.display()
            );
        }
        if files.len() > 1 {
            writeln!(out, "{}", file.display())?;
        }
        write!(out, "{}", table(&rows))?;
        all.extend(rows);
    }
    Ok(match same_ids(&all) {
        Ok(()) => Outcome::Done,
        Err(difference) => {
            log::error!("ids differ: {difference}");
            Outcome::Negative
        }
    })
}

fn draw_all(rows: &Path, out: &Path) -> anyhow::Result<Outcome> {
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let mut drawn = 0;
    for plot in PLOTS {
        let file = rows.join(plot.target).with_extension("jsonl");
        let rows: Vec<Row> = read(&file)?;
        let target = out.join(plot.name).with_extension("svg");
        if rows.is_empty() {
            log::info!(
                "{}: not drawn, {} has no rows",
                target.display(),
                file.display()
            );
            continue;
        }
        let svg = draw(plot, &rows)?;
        term::write_atomic(&target, svg.as_bytes())
            .with_context(|| target.display().to_string())?;
        log::info!("{}", target.display());
        drawn += 1;
    }
    if drawn == 0 {
        bail!(
            "{}: no rows (make -C pipelines ladder writes some)",
            rows.display()
        );
    }
    Ok(Outcome::Done)
}
