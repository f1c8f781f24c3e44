//! What all pictures share: size, title, axes, key and the note below.

use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type Chart<'a, 'b> =
    ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
pub(super) type Drawn = Result<(), Box<dyn std::error::Error>>;

const SIZE: (u32, u32) = (1080, 600);
/// Width of the chart; the key stands beside it.
const CHART_WIDTH: u32 = 800;
const NOTE_HEIGHT: u32 = 30;
const KEY_LINE: i32 = 28;

/// Colours that stay apart in print and for most colour-blind readers.
pub(super) const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(153, 102, 204),
    RGBColor(190, 174, 0),
];

/// The colour of time in which nothing is done.
pub(super) const IDLE: RGBColor = RGBColor(190, 190, 190);

/// The colour of limits.
pub(super) const LIMIT: RGBColor = RGBColor(90, 90, 90);

/// How a line of the key looks.
#[derive(Clone, Copy)]
pub(super) enum Mark {
    /// A curve with its points.
    Curve,
    /// Dashes.
    Dashes,
    /// A filled box.
    Area,
    /// A short thick bar.
    Bar,
    /// A dot.
    Dot,
}

/// One line of the key; a long text goes on after a line break.
pub(super) struct Entry {
    pub text: String,
    pub colour: RGBColor,
    pub mark: Mark,
}

impl Entry {
    pub(super) fn new(text: impl Into<String>, colour: RGBColor, mark: Mark) -> Self {
        Self {
            text: text.into(),
            colour,
            mark,
        }
    }
}

/// An axis: what it measures, its ends, and where it is labelled.
pub(super) struct Axis {
    pub desc: &'static str,
    pub from: f64,
    pub to: f64,
    /// Labels at places of their own, two lines at most; none for round numbers.
    pub ticks: Option<Vec<(f64, String)>>,
}

impl Axis {
    /// From zero to a little past the largest of `values`.
    pub(super) fn from_zero(desc: &'static str, values: impl IntoIterator<Item = f64>) -> Self {
        let most = values.into_iter().fold(0f64, f64::max);
        Self {
            desc,
            from: 0.0,
            to: if most > 0.0 { most * 1.08 } else { 1.0 },
            ticks: None,
        }
    }

    /// Lines of its longest label.
    fn lines(&self) -> u32 {
        let ticks = self.ticks.iter().flatten();
        if ticks.into_iter().any(|(_, text)| text.contains('\n')) {
            2
        } else {
            1
        }
    }

    /// One place for each of these labels, from 0 on.
    pub(super) fn of_labels(desc: &'static str, labels: impl IntoIterator<Item = String>) -> Self {
        let ticks: Vec<(f64, String)> = (0u32..).map(f64::from).zip(labels).collect();
        Self {
            desc,
            from: -0.6,
            to: ticks.len() as f64 - 0.4,
            ticks: Some(ticks),
        }
    }
}

/// A picture before its data.
pub(super) struct Canvas {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub key: Vec<Entry>,
    pub note: String,
}

impl Canvas {
    /// Draw frame and key, then what `body` draws.
    pub(super) fn draw(
        &self,
        svg: &mut String,
        body: impl FnOnce(&mut Chart<'_, '_>) -> Drawn,
    ) -> Drawn {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (picture, note) = root.split_vertically(SIZE.1 - NOTE_HEIGHT);
        let (left, key) = picture.split_horizontally(CHART_WIDTH);
        let mut chart = ChartBuilder::on(&left)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(48 + 16 * (self.x.lines() - 1))
            .y_label_area_size(64)
            .build_cartesian_2d(self.x.from..self.x.to, self.y.from..self.y.to)?;
        let own_ticks = self.x.ticks.is_some();
        let x_labels = |x: &f64| if own_ticks { String::new() } else { number(*x) };
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh()
            .x_labels(12)
            .y_labels(9)
            .x_label_formatter(&x_labels)
            .y_label_formatter(&|y| number(*y))
            .x_desc(self.x.desc)
            .y_desc(self.y.desc)
            .bold_line_style(BLACK.mix(0.12))
            .light_line_style(TRANSPARENT)
            .axis_style(BLACK.mix(0.6))
            .axis_desc_style(("sans-serif", 17))
            .label_style(("sans-serif", 14));
        if own_ticks {
            mesh.set_tick_mark_size(LabelAreaPosition::Bottom, 0);
        }
        mesh.draw()?;
        if let Some(ticks) = &self.x.ticks {
            self.ticks(&left, &chart, ticks)?;
        }
        body(&mut chart)?;
        self.entries(&key)?;
        let style = ("sans-serif", 13).into_font().color(&BLACK.mix(0.6));
        let style = style.pos(Pos::new(HPos::Left, VPos::Center));
        note.draw(&Text::new(self.note.clone(), (22, 12), style))?;
        root.present()?;
        Ok(())
    }

    fn ticks(&self, area: &Area<'_>, chart: &Chart<'_, '_>, ticks: &[(f64, String)]) -> Drawn {
        let style = ("sans-serif", 14).into_font().color(&BLACK);
        let style = style.pos(Pos::new(HPos::Center, VPos::Top));
        let mut free_from = i32::MIN;
        for (at, text) in ticks {
            let (x, y) = chart.backend_coord(&(*at, self.y.from));
            let longest = text
                .lines()
                .map(|line| line.chars().count())
                .max()
                .unwrap_or(0);
            let half = 4 * i32::try_from(longest)?;
            area.draw(&PathElement::new([(x, y), (x, y + 5)], BLACK.mix(0.6)))?;
            // A label that would touch the one before is left out; its place is still marked.
            if x - half < free_from {
                continue;
            }
            free_from = x + half + 4;
            for (line, down) in text.lines().zip((0..).map(|n| 8 + 16 * n)) {
                area.draw(&Text::new(line.to_owned(), (x, y + down), style.clone()))?;
            }
        }
        Ok(())
    }

    fn entries(&self, area: &Area<'_>) -> Drawn {
        let style = ("sans-serif", 15).into_font().color(&BLACK);
        let style = style.pos(Pos::new(HPos::Left, VPos::Center));
        let mut y = 62;
        for entry in &self.key {
            let colour = entry.colour;
            match entry.mark {
                Mark::Curve => {
                    area.draw(&PathElement::new([(4, y), (28, y)], colour.stroke_width(3)))?;
                    area.draw(&Circle::new((16, y), 4, colour.filled()))?;
                }
                Mark::Dashes => {
                    for from in [4, 13, 22] {
                        let ends = [(from, y), (from + 6, y)];
                        area.draw(&PathElement::new(ends, colour.stroke_width(2)))?;
                    }
                }
                Mark::Area => {
                    area.draw(&Rectangle::new([(6, y - 8), (26, y + 8)], colour.filled()))?;
                }
                Mark::Bar => {
                    area.draw(&PathElement::new([(4, y), (28, y)], colour.stroke_width(4)))?;
                }
                Mark::Dot => area.draw(&Circle::new((16, y), 4, colour.filled()))?,
            }
            let lines: Vec<&str> = entry.text.lines().collect();
            for (line, down) in lines.iter().zip((0..).map(|n| 17 * n)) {
                area.draw(&Text::new(
                    (*line).to_owned(),
                    (36, y + down),
                    style.clone(),
                ))?;
            }
            y += KEY_LINE + 17 * (i32::try_from(lines.len())? - 1);
        }
        Ok(())
    }
}

/// A label of an axis: no more digits than it needs.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" {
        "0".to_owned()
    } else {
        text.to_owned()
    }
}

/// Text that stands beside a point of the chart.
pub(super) fn remark(
    chart: &mut Chart<'_, '_>,
    text: impl Into<String>,
    at: (f64, f64),
    (h, v): (HPos, VPos),
) -> Drawn {
    let style = ("sans-serif", 14).into_font().color(&BLACK.mix(0.75));
    let style = style.pos(Pos::new(h, v));
    chart.draw_series([Text::new(text.into(), at, style)])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lose_their_trailing_zeros() {
        assert_eq!(number(2.5), "2.5");
        assert_eq!(number(10.0), "10");
        assert_eq!(number(-0.0), "0");
        assert_eq!(number(0.125), "0.125");
    }
}
