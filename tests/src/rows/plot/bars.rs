//! Stacked bars: where a token's time goes, and its bytes.

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, VPos},
};

use super::{
    canvas::{Axis, COLOURS, Canvas, Drawn, Entry, IDLE, LIMIT, Mark, remark},
    note,
};
use crate::rows::{Group, Row};

/// What is shown as one, and the parts of a report that belong to it; parts named nowhere are "the rest".
const KINDS: [(&str, &[&str]); 8] = [
    ("waiting for reads", &["waiting"]),
    (
        "KDA",
        &[
            "kda_projections",
            "kda_convolution",
            "kda_gates",
            "kda_recurrence",
        ],
    ),
    ("MLA", &["mla_projections", "mla_attention"]),
    ("dense MLP", &["dense_mlp"]),
    ("shared experts", &["shared_experts"]),
    ("routed experts", &["routed_experts", "expert_sum"]),
    (
        "router and latent\nprojections",
        &["router", "latent_projections"],
    ),
    ("output head", &["head", "sampling"]),
];

const MEMORY: &str = "memory of the whole process as planned, GB";

/// Half the width of a bar; bars stand 1 apart.
const HALF: f64 = 0.32;

/// Seconds of each of [`KINDS`], then of the rest.
fn seconds_by_kind(row: &Row) -> Vec<f64> {
    let of = |kind: &[&str]| {
        let parts = row.report.parts.iter();
        let mine = parts.filter(|(part, _)| kind.contains(&part.trim_end_matches("_seconds")));
        mine.map(|(_, seconds)| seconds).sum::<f64>()
    };
    let mut seconds: Vec<f64> = KINDS.iter().map(|(_, kind)| of(kind)).collect();
    let all: f64 = row.report.parts.values().sum();
    seconds.push((all - seconds.iter().sum::<f64>()).max(0.0));
    seconds
}

fn by_memory<'a>(groups: &[Group<'a>]) -> Vec<Group<'a>> {
    let mut groups = groups.to_vec();
    groups.sort_by_key(|group| group.typical().plan.total_bytes);
    groups
}

fn labels(groups: &[Group<'_>]) -> Vec<String> {
    let label = |group: &Group<'_>| {
        let gigabytes = group.typical().plan.total_bytes as f64 / 1e9;
        format!("{gigabytes:.2}")
    };
    groups.iter().map(label).collect()
}

/// A bar of these heights, one upon the other.
fn stack(at: f64, heights: &[f64], colours: &[RGBColor]) -> Vec<Rectangle<(f64, f64)>> {
    let mut from = 0.0;
    let mut boxes = Vec::new();
    for (height, colour) in heights.iter().zip(colours) {
        let corners = [(at - HALF, from), (at + HALF, from + height)];
        boxes.push(Rectangle::new(corners, colour.filled()));
        from += height;
    }
    boxes
}

/// Where the step of median time went, for each budget: shares, so that a step of a tenth of the time shows as much.
pub(super) fn parts(groups: &[Group<'_>], svg: &mut String) -> Drawn {
    let groups = by_memory(groups);
    let stacks: Vec<(f64, Vec<f64>)> = groups
        .iter()
        .map(|group| {
            let seconds = seconds_by_kind(group.typical());
            let all: f64 = seconds.iter().sum();
            let whole = if all > 0.0 { all } else { 1.0 };
            (all, seconds.iter().map(|s| 100.0 * s / whole).collect())
        })
        .collect();
    let names = KINDS.iter().map(|(name, _)| *name).chain(["the rest"]);
    let colours: Vec<RGBColor> = [IDLE].into_iter().chain(COLOURS).collect();
    let mut key: Vec<Entry> = names
        .zip(&colours)
        .map(|(name, colour)| Entry::new(name, *colour, Mark::Area))
        .collect();
    // In the order of the stack, from its top down.
    key.reverse();
    let canvas = Canvas {
        title: "Where a token's time goes, by memory".to_owned(),
        x: Axis::of_labels(MEMORY, labels(&groups)),
        y: Axis {
            desc: "share of the token's time, %",
            from: 0.0,
            to: 108.0,
            ticks: None,
        },
        key,
        note: note(&groups),
    };
    canvas.draw(svg, |chart| {
        for (at, (all, shares)) in (0u32..).map(f64::from).zip(&stacks) {
            chart.draw_series(stack(at, shares, &colours))?;
            let text = format!("{all:.3} s");
            remark(chart, text, (at, 101.0), (HPos::Center, VPos::Bottom))?;
        }
        Ok(())
    })
}

/// Bytes of a token by class for each budget, against what the disk can read in the time that the token took.
pub(super) fn bytes(groups: &[Group<'_>], svg: &mut String) -> Drawn {
    let groups = by_memory(groups);
    let stacks: Vec<[f64; 3]> = groups
        .iter()
        .map(|group| {
            let median = |figure: fn(&Row) -> f64| group.spread(figure).median / 1e9;
            [
                median(|row| row.report.token.trunk_bytes),
                median(|row| row.report.token.head_bytes),
                median(|row| row.report.token.expert_bytes),
            ]
        })
        .collect();
    let possible =
        |row: &Row| Some(row.plan.disk_bytes_per_second? * row.seconds_per_token() / 1e9);
    let disk: Vec<Option<f64>> = groups
        .iter()
        .map(|group| group.known(possible).map(|s| s.median))
        .collect();
    let colours = [COLOURS[0], COLOURS[4], COLOURS[1]];
    let mut key = vec![
        Entry::new("experts", colours[2], Mark::Area),
        Entry::new("output head", colours[1], Mark::Area),
        Entry::new("trunk", colours[0], Mark::Area),
    ];
    if disk.iter().any(Option::is_some) {
        let text = "what the disk reads in the\ntime the token took:\na bar that reaches it is\nbound by the disk";
        key.push(Entry::new(text, LIMIT, Mark::Bar));
    }
    let heights = stacks.iter().map(|s| s.iter().sum());
    let canvas = Canvas {
        title: "Bytes read for a token, by class and memory".to_owned(),
        x: Axis::of_labels(
            "memory of the whole process as planned, GB",
            labels(&groups),
        ),
        y: Axis::from_zero(
            "GB per generated token",
            heights.chain(disk.iter().flatten().copied()),
        ),
        key,
        note: note(&groups),
    };
    let top = canvas.y.to;
    canvas.draw(svg, |chart| {
        for ((at, heights), disk) in (0u32..).map(f64::from).zip(&stacks).zip(&disk) {
            chart.draw_series(stack(at, heights, &colours))?;
            let total: f64 = heights.iter().sum();
            let mut over = total;
            if let Some(disk) = disk {
                let line = [(at - HALF * 1.25, *disk), (at + HALF * 1.25, *disk)];
                chart.draw_series([PathElement::new(line, LIMIT.stroke_width(4))])?;
                over = over.max(*disk);
            }
            let text = format!("{total:.2}");
            remark(
                chart,
                text,
                (at, over + top * 0.012),
                (HPos::Center, VPos::Bottom),
            )?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::make::tests::row;

    #[test]
    fn every_second_of_a_step_is_in_one_kind() {
        let mut row = row("a", 1);
        row.report.parts.insert("norms_seconds".to_owned(), 0.25);
        row.report.parts.insert("head_seconds".to_owned(), 0.125);
        let seconds = seconds_by_kind(&row);
        assert_eq!(seconds.len(), KINDS.len() + 1);
        assert!(
            (seconds.iter().sum::<f64>() - row.report.parts.values().sum::<f64>()).abs() < 1e-9
        );
        assert!((seconds[0] - 1.5).abs() < 1e-9 && (seconds[8] - 0.25).abs() < 1e-9);
    }
}
