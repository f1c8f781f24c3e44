//! Rows as pictures: SVG, one a question.

mod bars;
mod canvas;
mod curves;
mod noise;

use anyhow::anyhow;

use super::{Group, Row, groups, settled};
use canvas::Drawn;

/// A picture and the ladder whose rows it shows.
#[derive(Clone, Copy)]
pub struct Plot {
    /// The picture's file name, without its ending.
    pub name: &'static str,
    /// The ladder.
    pub target: &'static str,
    draw: fn(&[Group<'_>], &mut String) -> Drawn,
}

/// All pictures.
pub const PLOTS: &[Plot] = &[
    Plot {
        name: "ladder",
        target: "ladder",
        draw: curves::ladder,
    },
    Plot {
        name: "parts",
        target: "ladder",
        draw: bars::parts,
    },
    Plot {
        name: "bytes",
        target: "ladder",
        draw: bars::bytes,
    },
    Plot {
        name: "split",
        target: "split",
        draw: curves::split,
    },
    Plot {
        name: "threads",
        target: "threads",
        draw: curves::threads,
    },
    Plot {
        name: "depth",
        target: "depth",
        draw: curves::depth,
    },
    Plot {
        name: "context",
        target: "context",
        draw: curves::context,
    },
    Plot {
        name: "replicate",
        target: "replicate",
        draw: noise::replicate,
    },
];

/// Draw a picture of rows of its ladder, at least one.
///
/// # Errors
/// If the rows cannot be drawn.
pub fn draw(plot: &Plot, rows: &[Row]) -> anyhow::Result<String> {
    let mut svg = String::new();
    // Where speeds are the subject, those of the probe stay as they were found.
    let rows = if plot.target == "depth" {
        rows.to_vec()
    } else {
        settled(rows)
    };
    // The backend's errors borrow the text it writes to, so they are told rather than passed on.
    (plot.draw)(&groups(&rows), &mut svg)
        .map_err(|e| anyhow!("{}: cannot draw: {e}", plot.name))?;
    Ok(svg)
}

/// The line under a picture: what it was measured on.
fn note(groups: &[Group<'_>]) -> String {
    let Some(row) = groups.first().and_then(|group| group.rows.first()) else {
        return String::new();
    };
    let rows = groups.iter().flat_map(|group| &group.rows);
    let disk: Vec<f64> = rows
        .filter_map(|row| row.plan.disk_bytes_per_second)
        .collect();
    let disk = match super::median(&disk) {
        speed if speed.is_nan() || row.target == "depth" => String::new(),
        speed => format!(" · disk {:.2} GB/s", speed / 1e9),
    };
    let (least, most) = groups.iter().fold((usize::MAX, 0), |(least, most), group| {
        (least.min(group.rows.len()), most.max(group.rows.len()))
    });
    let repeats = if least == most {
        format!("n = {most}")
    } else {
        format!("n = {least} to {most}")
    };
    let date = row.date.split('T').next().unwrap_or_default();
    format!(
        "{} layers · {} · {} cores{disk} · {repeats} · {} · {date}",
        row.plan.num_layers, row.machine.cpu, row.machine.cores, row.tree
    )
}

#[cfg(test)]
mod tests {
    use super::{super::make::tests::row, *};

    /// Rows of a small ladder: three budgets, three rounds.
    fn ladder() -> Vec<Row> {
        let mut rows = Vec::new();
        for round in 1..=3 {
            for (step, threads, streamed) in [
                (1u64, 1, 5_000_000_000u64),
                (4, 2, 2_000_000_000),
                (7, 4, 0),
            ] {
                let mut row = row(&format!("{step}.00 GB"), round);
                row.plan.total_bytes = step * 1_000_000_000;
                row.plan.budget_bytes = row.plan.total_bytes;
                row.plan.streamed_trunk_bytes = streamed;
                row.plan.head_pinned = streamed == 0;
                row.report.token.requested_bytes = streamed as f64 + 7e8;
                row.report.token.trunk_bytes = streamed as f64;
                row.report.threads = threads;
                let seconds = row.report.token.requested_bytes / 2.8e9 + 0.01 * f64::from(round);
                row.report.decode_seconds = vec![seconds];
                rows.push(row);
            }
        }
        rows
    }

    #[test]
    fn every_plot_has_a_title_axes_and_its_numbers() {
        for plot in PLOTS {
            let svg = draw(plot, &ladder()).unwrap();
            assert!(
                svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"),
                "{}",
                plot.name
            );
            assert!(
                !svg.contains("NaN") && !svg.contains("inf"),
                "{}",
                plot.name
            );
            for text in ["a processor", "n = 3", "2026-01-02"] {
                assert!(svg.contains(text), "{}: no {text:?}", plot.name);
            }
        }
    }

    #[test]
    fn a_single_row_is_a_plot_too() {
        for plot in PLOTS {
            let svg = draw(plot, &ladder()[..1]).unwrap();
            assert!(
                !svg.contains("NaN") && !svg.contains("inf"),
                "{}",
                plot.name
            );
        }
    }

    #[test]
    fn rows_of_an_unprobed_machine_are_drawn_without_limits() {
        let mut rows = ladder();
        for row in &mut rows {
            row.plan.disk_bytes_per_second = None;
        }
        for plot in PLOTS {
            let svg = draw(plot, &rows).unwrap();
            assert!(!svg.contains("NaN"), "{}", plot.name);
        }
        assert!(!draw(&PLOTS[0], &rows).unwrap().contains("disk limit"));
    }

    #[test]
    fn the_ladder_shows_limit_and_knee() {
        let svg = draw(&PLOTS[0], &ladder()).unwrap();
        assert!(
            svg.contains("disk limit") && svg.contains("trunk resident"),
            "{svg}"
        );
    }
}
