//! Miss-ratio curves as SVG.

use anyhow::anyhow;
use k3_shared::cache::PolicyKind;
use plotters::prelude::*;

use crate::{Report, Row};

/// Ten colours that stay apart in print and for most colour-blind readers, one a policy.
const COLOURS: [RGBColor; 10] = [
    RGBColor(0, 0, 0),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(204, 187, 0),
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
    RGBColor(128, 128, 128),
    RGBColor(136, 34, 85),
];

/// A line for each policy: cache size on a logarithmic axis against misses in percent, and the floor that no policy passes.
pub(crate) fn miss_ratio_curves(
    report: &Report,
    policies: &[PolicyKind],
) -> anyhow::Result<String> {
    let mut svg = String::new();
    // The backend's errors borrow the text it writes to, so they are told rather than passed on.
    draw(&mut svg, report, policies).map_err(|e| anyhow!("--plot: cannot draw: {e}"))?;
    Ok(svg)
}

fn draw(
    svg: &mut String,
    report: &Report,
    policies: &[PolicyKind],
) -> Result<(), Box<dyn std::error::Error>> {
    let gigabytes = |row: &Row| row.capacity_bytes as f64 / 1e9;
    let sizes = report.rows.iter().map(gigabytes);
    let (least, most) = sizes.fold((f64::MAX, 0f64), |(least, most), x| {
        (least.min(x), most.max(x))
    });
    let root = SVGBackend::with_string(svg, (960, 600)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(
            "Expert cache: misses by size and policy",
            ("sans-serif", 20),
        )
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(56)
        // A single size still needs an axis with a width.
        .build_cartesian_2d((least * 0.95..most * 1.05).log_scale(), 0f64..100f64)?;
    chart
        .configure_mesh()
        .x_desc("cache, GB")
        .y_desc("misses, %")
        .light_line_style(TRANSPARENT)
        .axis_desc_style(("sans-serif", 18))
        .label_style(("sans-serif", 15))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .x_label_formatter(&|x| format!("{x:.0}"))
        .draw()?;
    let floor = 100.0 * (1.0 - report.ceiling);
    chart
        .draw_series(DashedLineSeries::new(
            [(least * 0.95, floor), (most * 1.05, floor)],
            4,
            4,
            BLACK.mix(0.5).into(),
        ))?
        .label("first requests")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK.mix(0.5)));
    for &policy in policies {
        let place = PolicyKind::ALL.iter().position(|&kind| kind == policy);
        let colour = COLOURS[place.unwrap_or(0) % COLOURS.len()];
        let mut points: Vec<(f64, f64)> = report
            .rows
            .iter()
            .filter(|row| row.policy == policy)
            .map(|row| (gigabytes(row), 100.0 * (1.0 - row.hit_rate)))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(2)).point_size(3))?
            .label(policy.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .label_font(("sans-serif", 16))
        .position(SeriesLabelPosition::LowerLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    Ok(())
}
