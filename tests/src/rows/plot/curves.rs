//! Curves of medians, their spread as bars, against what the machine allows.

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, VPos},
};

use super::{
    canvas::{Axis, COLOURS, Canvas, Chart, Drawn, Entry, LIMIT, Mark, number, remark},
    note,
};
use crate::rows::{Group, Limit, Row, Spread};

/// A place on the axis and a figure over repeats.
type Point = (f64, Spread);

const SECONDS: &str = "seconds per generated token";

/// Points from left to right, joined, a bar from the smallest to the largest at each.
fn curve(chart: &mut Chart<'_, '_>, points: &[Point], colour: RGBColor) -> Drawn {
    let mut points = points.to_vec();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let medians: Vec<(f64, f64)> = points.iter().map(|(x, s)| (*x, s.median)).collect();
    chart.draw_series(LineSeries::new(medians, colour.stroke_width(3)))?;
    let (left, right) = {
        let range = chart.x_range();
        (range.start, range.end)
    };
    let cap = (right - left) * 0.006;
    for (x, spread) in points {
        let colour = colour.stroke_width(2);
        let bar = |y| PathElement::new([(x - cap, y), (x + cap, y)], colour);
        chart.draw_series([
            PathElement::new([(x, spread.least), (x, spread.most)], colour),
            bar(spread.least),
            bar(spread.most),
        ])?;
        chart.draw_series([Circle::new((x, spread.median), 4, colour.color.filled())])?;
    }
    Ok(())
}

/// A dashed line through the medians of a limit.
fn dashes(chart: &mut Chart<'_, '_>, points: &[Point], colour: RGBColor) -> Drawn {
    let mut points: Vec<(f64, f64)> = points.iter().map(|(x, s)| (*x, s.median)).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    // A single place still shows where its limit lies.
    if let [(x, y)] = points[..] {
        let range = chart.x_range();
        let reach = (range.end - range.start) * 0.03;
        points = vec![(x - reach, y), (x + reach, y)];
    }
    chart.draw_series(DashedLineSeries::new(points, 7, 5, colour.stroke_width(2)))?;
    Ok(())
}

fn points(groups: &[Group<'_>], x: fn(&Row) -> f64, y: fn(&Row) -> f64) -> Vec<Point> {
    let point = |group: &Group<'_>| (x(group.typical()), group.spread(y));
    groups.iter().map(point).collect()
}

fn limits(groups: &[Group<'_>], x: fn(&Row) -> f64, of: fn(Limit) -> f64) -> Vec<Point> {
    let point = |group: &Group<'_>| {
        let limit = group.known(|row| row.limit().map(of))?;
        Some((x(group.typical()), limit))
    };
    groups.iter().filter_map(point).collect()
}

fn highest(series: &[&[Point]]) -> Vec<f64> {
    series
        .iter()
        .flat_map(|s| s.iter())
        .map(|(_, s)| s.most)
        .collect()
}

/// Measured seconds, and the limits of disk and memory, over any axis.
fn seconds_and_limits(
    groups: &[Group<'_>],
    svg: &mut String,
    title: &str,
    x_axis: Axis,
    x: fn(&Row) -> f64,
    also: impl FnOnce(&mut Chart<'_, '_>, f64) -> Drawn,
) -> Drawn {
    let measured = points(groups, x, Row::seconds_per_token);
    let disk = limits(groups, x, |limit| limit.disk);
    let memory = limits(groups, x, |limit| limit.memory);
    let y = Axis::from_zero(SECONDS, highest(&[&measured, &disk, &memory]));
    let mut key = vec![Entry::new(
        "measured: median,\nsmallest to largest",
        COLOURS[0],
        Mark::Curve,
    )];
    if !disk.is_empty() {
        key.push(Entry::new(
            "disk limit: bytes read\n/ the disk's speed",
            LIMIT,
            Mark::Dashes,
        ));
        key.push(Entry::new(
            "memory limit: bytes\ntouched and read\n/ memory's speed",
            COLOURS[3],
            Mark::Dashes,
        ));
    }
    let top = y.to;
    let canvas = Canvas {
        title: title.to_owned(),
        x: x_axis,
        y,
        key,
        note: note(groups),
    };
    canvas.draw(svg, |chart| {
        also(chart, top)?;
        dashes(chart, &memory, COLOURS[3])?;
        dashes(chart, &disk, LIMIT)?;
        curve(chart, &measured, COLOURS[0])
    })
}

fn memory_gigabytes(row: &Row) -> f64 {
    row.plan.total_bytes as f64 / 1e9
}

/// Seconds a token against memory, and from where on the trunk is resident.
pub(super) fn ladder(groups: &[Group<'_>], svg: &mut String) -> Drawn {
    let x = Axis::from_zero(
        "memory of the whole process as planned, GB",
        groups.iter().map(|group| memory_gigabytes(group.typical())),
    );
    let right = x.to;
    let resident = groups
        .iter()
        .map(Group::typical)
        .filter(|row| row.trunk_resident());
    let knee = resident.map(memory_gigabytes).min_by(f64::total_cmp);
    let title = "What memory buys: seconds per token against memory";
    seconds_and_limits(groups, svg, title, x, memory_gigabytes, |chart, top| {
        let Some(knee) = knee else { return Ok(()) };
        let line = [(knee, 0.0), (knee, top)];
        chart.draw_series(DashedLineSeries::new(line, 2, 4, BLACK.mix(0.5).into()))?;
        let text = format!("trunk resident from {knee:.1} GB");
        let (side, x) = if knee < right * 0.7 {
            (HPos::Left, knee + right * 0.01)
        } else {
            (HPos::Right, knee - right * 0.01)
        };
        remark(chart, text, (x, top * 0.98), (side, VPos::Top))
    })
}

fn pinned_gigabytes(row: &Row) -> f64 {
    row.plan.pinned_trunk_bytes as f64 / 1e9
}

/// Seconds a token against how one budget is divided.
pub(super) fn split(groups: &[Group<'_>], svg: &mut String) -> Drawn {
    let mut rows: Vec<&Row> = groups.iter().map(Group::typical).collect();
    rows.sort_by_key(|row| row.plan.pinned_trunk_bytes);
    let ticks = rows.iter().map(|row| {
        let pinned = pinned_gigabytes(row);
        (
            pinned,
            format!("{pinned:.2}\n{} slots", row.plan.expert_slots),
        )
    });
    let places = rows.iter().map(|row| pinned_gigabytes(row));
    let most = places.fold(0f64, f64::max).max(0.1);
    let x = Axis {
        desc: "pinned trunk, GB, and the expert slots that the rest of the memory holds",
        from: -most * 0.06,
        to: most * 1.06,
        ticks: Some(ticks.collect()),
    };
    let budget = rows
        .first()
        .map_or(0.0, |row| row.plan.budget_bytes as f64 / 1e9);
    let title = format!("One budget ({budget:.2} GB): trunk in memory or experts in memory");
    seconds_and_limits(groups, svg, &title, x, pinned_gigabytes, |_, _| Ok(()))
}

/// Groups that differ in one thing, by all that they share.
fn series<'g, 'a, K: PartialEq>(
    groups: &'g [Group<'a>],
    key: impl Fn(&Row) -> K,
) -> Vec<(K, Vec<Group<'a>>)>
where
    'a: 'g,
{
    let mut all: Vec<(K, Vec<Group<'a>>)> = Vec::new();
    for group in groups {
        let of = key(group.typical());
        match all.iter_mut().find(|(k, _)| *k == of) {
            Some((_, members)) => members.push(group.clone()),
            None => all.push((of, vec![group.clone()])),
        }
    }
    all
}

/// Seconds a token against compute threads, for each budget.
pub(super) fn threads(groups: &[Group<'_>], svg: &mut String) -> Drawn {
    let threads: fn(&Row) -> f64 = |row| row.report.threads as f64;
    let all = series(groups, |row| row.plan.budget_bytes);
    let curves: Vec<Vec<Point>> = all
        .iter()
        .map(|(_, members)| points(members, threads, Row::seconds_per_token))
        .collect();
    let lows: Vec<Vec<Point>> = all
        .iter()
        .map(|(_, m)| limits(m, threads, Limit::seconds))
        .collect();
    let mut places: Vec<f64> = groups
        .iter()
        .map(|group| threads(group.typical()))
        .collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let most = places.last().copied().unwrap_or(1.0);
    let highest = highest(
        &curves
            .iter()
            .chain(&lows)
            .map(Vec::as_slice)
            .collect::<Vec<_>>(),
    );
    let mut key = Vec::new();
    for ((_, members), colour) in all.iter().zip(COLOURS.iter().cycle()) {
        let row = members[0].typical();
        let read = row.report.token.requested_bytes / 1e9;
        let memory = memory_gigabytes(row);
        let text = format!("{memory:.2} GB of memory,\n{read:.2} GB read a token");
        key.push(Entry::new(text, *colour, Mark::Curve));
    }
    if lows.iter().any(|points| !points.is_empty()) {
        key.push(Entry::new(
            "its limit by disk,\nmemory and arithmetic",
            LIMIT,
            Mark::Dashes,
        ));
    }
    let canvas = Canvas {
        title: "Compute threads".to_owned(),
        x: Axis {
            desc: "compute threads",
            from: 0.5,
            to: most + 0.5,
            ticks: Some(places.iter().map(|&x| (x, number(x))).collect()),
        },
        y: Axis::from_zero(SECONDS, highest),
        key,
        note: note(groups),
    };
    canvas.draw(svg, |chart| {
        for ((points, low), colour) in curves.iter().zip(&lows).zip(COLOURS.iter().cycle()) {
            dashes(chart, low, LIMIT)?;
            curve(chart, points, *colour)?;
        }
        Ok(())
    })
}

/// GB/s of a generated token: what it read over the time it took.
fn gigabytes_per_second(row: &Row) -> f64 {
    row.bytes_per_second() / 1e9
}

/// Places by the logarithm, so that doublings lie equally far apart.
fn depth_place(row: &Row) -> f64 {
    (row.plan.queue_depth as f64).log2()
}

/// A power of two as it is chosen.
fn binary(bytes: u64) -> String {
    match bytes {
        b if b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b => format!("{} KiB", b >> 10),
    }
}

/// The depths that were tried.
fn depth_axis(groups: &[Group<'_>]) -> Axis {
    let mut depths: Vec<usize> = groups
        .iter()
        .map(|group| group.typical().plan.queue_depth)
        .collect();
    depths.sort_unstable();
    depths.dedup();
    let ticks: Vec<(f64, String)> = depths
        .iter()
        .map(|&d| ((d as f64).log2(), d.to_string()))
        .collect();
    let ends = (
        ticks.first().map_or(0.0, |t| t.0),
        ticks.last().map_or(0.0, |t| t.0),
    );
    Axis {
        desc: "requests in flight (logarithmic)",
        from: ends.0 - 0.3,
        to: ends.1 + 0.3,
        ticks: Some(ticks),
    }
}

/// Bytes a second that a run reads, against requests in flight, for each size of request.
pub(super) fn depth(groups: &[Group<'_>], svg: &mut String) -> Drawn {
    let mut all = series(groups, |row| row.plan.read_bytes);
    all.sort_by_key(|(size, _)| *size);
    let curves: Vec<Vec<Point>> = all
        .iter()
        .map(|(_, members)| points(members, depth_place, gigabytes_per_second))
        .collect();
    let probed: fn(&Row) -> Option<f64> = |row| Some(row.plan.disk_bytes_per_second? / 1e9);
    let plain: Vec<Vec<Point>> = all
        .iter()
        .map(|(_, members)| {
            let point =
                |group: &Group<'_>| Some((depth_place(group.typical()), group.known(probed)?));
            members.iter().filter_map(point).collect()
        })
        .collect();
    let mut key: Vec<Entry> = all
        .iter()
        .zip(COLOURS.iter().cycle())
        .map(|((size, _), colour)| {
            let text = format!("reads of {}", binary(*size));
            Entry::new(text, *colour, Mark::Curve)
        })
        .collect();
    let drawn: Vec<&[Point]> = curves.iter().chain(&plain).map(Vec::as_slice).collect();
    if plain.iter().any(|points| !points.is_empty()) {
        let text = "a plain reader with the\nsame size and depth\n(k3-plan --probe)";
        key.push(Entry::new(text, LIMIT, Mark::Dashes));
    }
    let canvas = Canvas {
        title: "Reads in flight: what a generated token reads a second".to_owned(),
        x: depth_axis(groups),
        y: Axis::from_zero("GB read a second of the token's time", highest(&drawn)),
        key,
        note: note(groups),
    };
    canvas.draw(svg, |chart| {
        for ((points, plain), colour) in curves.iter().zip(&plain).zip(COLOURS.iter().cycle()) {
            dashes(chart, plain, *colour)?;
            curve(chart, points, *colour)?;
        }
        Ok(())
    })
}

/// Seconds a token against the positions before it.
pub(super) fn context(groups: &[Group<'_>], svg: &mut String) -> Drawn {
    let positions: fn(&Row) -> f64 = |row| row.report.prompt_rows as f64;
    let places = groups.iter().map(|group| positions(group.typical()));
    let x = Axis::from_zero("positions before the generated tokens", places);
    let title = "Context: seconds per token against the length of the prompt";
    seconds_and_limits(groups, svg, title, x, positions, |_, _| Ok(()))
}
