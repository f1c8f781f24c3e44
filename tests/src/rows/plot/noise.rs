//! Repeats of one row: how far apart the same measurement lies.

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, VPos},
};

use super::{
    canvas::{Axis, COLOURS, Canvas, Drawn, Entry, Mark, remark},
    note,
};
use crate::rows::{Group, Row, Spread};

/// A column of dots for each row, in percent of its median; the middle half as a box.
pub(super) fn replicate(groups: &[Group<'_>], svg: &mut String) -> Drawn {
    let columns: Vec<(Spread, Vec<f64>)> = groups
        .iter()
        .map(|group| {
            let median = group.spread(Row::seconds_per_token).median;
            let off = |row: &Row| 100.0 * (row.seconds_per_token() / median - 1.0);
            (
                group.spread(off),
                group.rows.iter().map(|row| off(row)).collect(),
            )
        })
        .collect();
    let widest = columns
        .iter()
        .map(|(s, _)| s.most.max(-s.least))
        .fold(1f64, f64::max);
    let labels = groups.iter().map(|group| {
        let seconds = group.spread(Row::seconds_per_token).median;
        format!("{}\n{seconds:.3} s", group.name)
    });
    let canvas = Canvas {
        title: "Noise: the same row again and again".to_owned(),
        x: Axis::of_labels("row, and its median seconds per token", labels),
        y: Axis {
            desc: "seconds per token, % from the row's median",
            from: -widest * 1.25,
            to: widest * 1.25,
            ticks: None,
        },
        key: vec![
            Entry::new("a run", COLOURS[0], Mark::Dot),
            Entry::new("the middle half of them", COLOURS[4], Mark::Area),
        ],
        note: note(groups),
    };
    canvas.draw(svg, |chart| {
        for (at, (spread, values)) in (0u32..).map(f64::from).zip(&columns) {
            let (low, high) = spread.quartiles;
            let corners = [(at - 0.2, low), (at + 0.2, high)];
            chart.draw_series([Rectangle::new(corners, COLOURS[4].mix(0.5).filled())])?;
            // In the order in which they were run, so that a drift shows.
            let step = 0.36 / values.len().max(2) as f64;
            let places = (0u32..).map(|n| at - 0.18 + step * (f64::from(n) + 0.5));
            let dots = places.zip(values);
            chart.draw_series(dots.map(|(x, &y)| Circle::new((x, y), 4, COLOURS[0].filled())))?;
            let text = format!("{:+.1} to {:+.1} %", spread.least, spread.most);
            let y = spread.most + widest * 0.05;
            remark(chart, text, (at, y), (HPos::Center, VPos::Bottom))?;
        }
        Ok(())
    })
}
