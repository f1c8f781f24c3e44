//! Miss-ratio curves as SVG.

use anyhow::anyhow;
use k3_shared::cache::PolicyKind;
use plotters::{
    coord::{Shift, combinators::LogCoord, types::RangedCoordf64},
    prelude::*,
    style::text_anchor::{HPos, VPos},
};

use crate::{Phase, Report, Row};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<LogCoord<f64>, RangedCoordf64>>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

const SIZE: (u32, u32) = (1080, 600);
/// Width of the chart; the key stands beside it.
const CHART_WIDTH: u32 = 890;
const KEY_LINE: i32 = 26;

/// Colours that stay apart in print and for most colour-blind readers, one a policy.
const COLOURS: [RGBColor; 11] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(190, 174, 0),
    RGBColor(128, 128, 128),
    RGBColor(153, 102, 204),
    RGBColor(204, 121, 167),
    RGBColor(213, 30, 0),
    RGBColor(0, 0, 0),
    RGBColor(139, 90, 43),
];

/// A line for each policy (dashed where it knows the future): cache size on a logarithmic axis against misses in percent; the
/// floor that no policy passes, and the size that one token's experts take.
pub(crate) fn miss_ratio_curves(
    report: &Report,
    policies: &[PolicyKind],
) -> anyhow::Result<String> {
    let mut svg = String::new();
    let plot = Plot::new(report, policies);
    // The backend's errors borrow the text it writes to, so they are told rather than passed on.
    plot.draw(&mut svg)
        .map_err(|e| anyhow!("--plot: cannot draw: {e}"))?;
    Ok(svg)
}

struct Plot<'a> {
    report: &'a Report,
    policies: &'a [PolicyKind],
    /// The phase that is drawn; `None` is all requests.
    phase: Option<Phase>,
    /// Ends of the axis of sizes, GB.
    least: f64,
    most: f64,
}

impl<'a> Plot<'a> {
    fn new(report: &'a Report, policies: &'a [PolicyKind]) -> Self {
        let sizes = report.rows.iter().map(gigabytes);
        let (least, most) = sizes.fold((f64::MAX, 0f64), |(least, most), x| {
            (least.min(x), most.max(x))
        });
        let decodes = report.rows.iter().any(|row| row.decode.is_some());
        Self {
            report,
            policies,
            phase: decodes.then_some(Phase::Decode),
            // A single size still needs an axis with a width.
            least: least * 0.93,
            most: most * 1.07,
        }
    }

    fn draw(&self, svg: &mut String) -> Drawn {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, key) = root.split_horizontally(CHART_WIDTH);
        let title = match self.phase {
            Some(_) => "Expert cache: misses of decode steps, by size and policy",
            None => "Expert cache: misses by size and policy",
        };
        let mut chart = ChartBuilder::on(&left)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(48)
            .y_label_area_size(60)
            .build_cartesian_2d((self.least..self.most).log_scale(), 0f64..100f64)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            // The sizes replayed are marked instead.
            .x_label_formatter(&|_| String::new())
            .set_tick_mark_size(LabelAreaPosition::Bottom, 0)
            .y_labels(11)
            .x_desc("cache size, GB (logarithmic)")
            .y_desc("requests that miss, %")
            .light_line_style(TRANSPARENT)
            .axis_desc_style(("sans-serif", 17))
            .label_style(("sans-serif", 14))
            .y_label_formatter(&|y| format!("{y:.0}"))
            .draw()?;
        self.sizes(&left, &chart)?;
        self.bounds(&mut chart)?;
        for &policy in self.policies {
            self.curve(&mut chart, policy)?;
        }
        self.key(&key)?;
        root.present()?;
        Ok(())
    }

    /// The sizes under the axis, each where it stands, unless it would touch the one before.
    fn sizes(&self, area: &Area<'_>, chart: &Chart<'_, '_>) -> Drawn {
        let mut sizes: Vec<f64> = self.report.rows.iter().map(gigabytes).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        let mut free_from = i32::MIN;
        let style = ("sans-serif", 14).into_font().color(&BLACK);
        let style = style.pos(pos(HPos::Center, VPos::Top));
        for size in sizes {
            let (x, y) = chart.backend_coord(&(size, 0.0));
            let text = label(size);
            let half = 5 * i32::try_from(text.len())?;
            if x - half < free_from {
                continue;
            }
            free_from = x + half + 4;
            area.draw(&PathElement::new([(x, y), (x, y + 5)], BLACK))?;
            area.draw(&Text::new(text, (x, y + 8), style.clone()))?;
        }
        Ok(())
    }

    /// The floor of all policies, and one token's experts.
    fn bounds(&self, chart: &mut Chart<'_, '_>) -> Drawn {
        let floor = self.floor();
        let grey = BLACK.mix(0.55);
        chart.draw_series(DashedLineSeries::new(
            [(self.least, floor), (self.most, floor)],
            5,
            4,
            grey.into(),
        ))?;
        let note = ("sans-serif", 14).into_font().color(&BLACK.mix(0.75));
        let text = format!("first requests: no policy misses less than {floor:.1} %");
        // On the side where no line of the grid is near.
        let (side, y) = if floor % 10.0 > 4.0 {
            (VPos::Top, floor - 0.7)
        } else {
            (VPos::Bottom, floor + 0.7)
        };
        let style = note.pos(pos(HPos::Left, side));
        chart.draw_series([Text::new(text, (self.least * 1.03, y), style)])?;
        let working_set = self.report.trace.working_set;
        let knee = working_set as f64 * self.report.expert_bytes as f64 / 1e9;
        if self.least < knee && knee < self.most {
            chart.draw_series(DashedLineSeries::new(
                [(knee, 0.0), (knee, 100.0)],
                2,
                4,
                grey.into(),
            ))?;
            let text = format!("one token: {working_set} experts, {} GB", label(knee));
            let right = (self.most / self.least).ln() * 0.6 > (knee / self.least).ln();
            let side = if right { HPos::Left } else { HPos::Right };
            let x = knee * if right { 1.02 } else { 0.98 };
            chart.draw_series([Text::new(text, (x, 1.5), note.pos(pos(side, VPos::Bottom)))])?;
        }
        Ok(())
    }

    /// Misses that no policy avoids, in percent.
    fn floor(&self) -> f64 {
        let distances = &self.report.reuse_distances;
        let of_phase = distances.iter().find(|d| Some(d.phase) == self.phase);
        100.0 * (1.0 - of_phase.map_or(self.report.ceiling, |d| d.ceiling))
    }

    fn curve(&self, chart: &mut Chart<'_, '_>, policy: PolicyKind) -> Drawn {
        let of_policy = self.report.rows.iter().filter(|row| row.policy == policy);
        let mut points: Vec<(f64, f64)> = of_policy
            .map(|row| {
                let counted = self.phase.and(row.decode).unwrap_or(row.all);
                (gigabytes(row), 100.0 * (1.0 - counted.hit_rate))
            })
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (colour, width) = look(policy);
        if policy.is_replay_only() {
            let series = DashedLineSeries::new(points.clone(), 7, 4, colour.stroke_width(width));
            chart.draw_series(series)?;
        } else {
            chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(width)))?;
        }
        let dots = points
            .into_iter()
            .map(|at| Circle::new(at, 3, colour.filled()));
        chart.draw_series(dots)?;
        Ok(())
    }

    /// Names beside the chart, from the best at the smallest size to the worst, so that they stand in the order of the curves.
    fn key(&self, area: &Area<'_>) -> Drawn {
        let smallest = self.report.rows.iter().map(|row| row.slots).min();
        let hits = |policy: PolicyKind| {
            let mut rows = self.report.rows.iter();
            let row = rows.find(|row| row.policy == policy && Some(row.slots) == smallest);
            row.map_or(0, |row| self.phase.and(row.decode).unwrap_or(row.all).hits)
        };
        let mut policies = self.policies.to_vec();
        policies.sort_by_key(|&policy| hits(policy));
        let text = ("sans-serif", 16).into_font().color(&BLACK);
        let text = text.pos(pos(HPos::Left, VPos::Center));
        for (y, policy) in (0..).map(|line| 60 + line * KEY_LINE).zip(policies) {
            let (colour, width) = look(policy);
            let ends = if policy.is_replay_only() {
                vec![(6, 14), (22, 30)]
            } else {
                vec![(6, 30)]
            };
            for (from, to) in ends {
                area.draw(&PathElement::new(
                    [(from, y), (to, y)],
                    colour.stroke_width(width),
                ))?;
            }
            area.draw(&Circle::new((18, y), 3, colour.filled()))?;
            let foreknown = if policy.is_replay_only() {
                " (foreknown)"
            } else {
                ""
            };
            let name = format!("{policy}{foreknown}");
            area.draw(&Text::new(name, (38, y), text.clone()))?;
        }
        Ok(())
    }
}

/// Colour and width of a policy's line: the default's is the widest.
fn look(policy: PolicyKind) -> (RGBColor, u32) {
    let place = PolicyKind::ALL.iter().position(|&kind| kind == policy);
    let colour = COLOURS[place.unwrap_or(0) % COLOURS.len()];
    (colour, if policy == PolicyKind::DEFAULT { 4 } else { 2 })
}

fn pos(h: HPos, v: VPos) -> plotters::style::text_anchor::Pos {
    plotters::style::text_anchor::Pos::new(h, v)
}

fn gigabytes(row: &Row) -> f64 {
    row.capacity_bytes as f64 / 1e9
}

/// Three digits.
fn label(gigabytes: f64) -> String {
    let decimals = match gigabytes {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        x if x >= 1.0 => 2,
        _ => 4,
    };
    let text = format!("{gigabytes:.decimals$}");
    if decimals == 0 {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
