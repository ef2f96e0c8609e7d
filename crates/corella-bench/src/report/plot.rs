//! Plots as SVG that follow the theme and the width of their page.

use std::fmt::Write;

use crate::report::number::number;

const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 40.0;

/// The approximate number of lines that divide an axis.
const NUM_TICKS: f64 = 5.0;

/// A line in a plot.
pub(crate) struct Curve {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// The index of the curve's colour in the style sheet.
    pub colour: usize,
    pub is_dashed: bool,
}

pub(crate) struct Plot {
    pub title: &'static str,
    pub x_unit: &'static str,
    pub y_unit: &'static str,
    pub curves: Vec<Curve>,
}

impl Plot {
    /// The figure as HTML, or an empty text if no curve has points.
    pub(crate) fn to_html(&self, escape: fn(&str) -> String) -> String {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        if points().next().is_none() {
            return String::new();
        }
        let most = |value: fn(&(f64, f64)) -> f64| points().map(value).fold(0.0, f64::max);
        let (x_step, x_max) = axis(most(|point| point.0));
        let (y_step, y_max) = axis(most(|point| point.1));
        let x = |value: f64| LEFT + value / x_max * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| HEIGHT - BOTTOM - value / y_max * (HEIGHT - BOTTOM - TOP);
        let Self {
            title,
            x_unit,
            y_unit,
            ..
        } = self;
        let mut html = format!(
            "<figure><h2>{title}</h2><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\
             <text x=\"0\" y=\"12\">{y_unit}</text>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{x_unit}</text>",
            WIDTH - RIGHT,
            HEIGHT - 4.0
        );
        for tick in ticks(y_step, y_max) {
            let _ = write!(
                html,
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                y(tick) + 4.0,
                number(tick),
                at = y(tick),
            );
        }
        for tick in ticks(x_step, x_max) {
            let _ = write!(
                html,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                x(tick),
                HEIGHT - BOTTOM + 17.0,
                number(tick)
            );
        }
        for curve in &self.curves {
            let mut path = String::new();
            for (index, &(at_x, at_y)) in curve.points.iter().enumerate() {
                let _ = match index {
                    0 => write!(path, "M{:.1} {:.1}", x(at_x), y(at_y)),
                    _ => write!(path, "H{:.1}V{:.1}", x(at_x), y(at_y)),
                };
            }
            let _ = write!(html, "<path class=\"{}\" d=\"{path}\"/>", curve.class());
        }
        html.push_str("</svg><ul class=\"key\">");
        for curve in self.curves.iter().filter(|curve| !curve.points.is_empty()) {
            let _ = write!(
                html,
                "<li><svg viewBox=\"0 0 20 8\"><path class=\"{}\" d=\"M0 4H20\"/></svg>{}</li>",
                curve.class(),
                escape(&curve.name)
            );
        }
        html.push_str("</ul></figure>");
        html
    }
}

impl Curve {
    fn class(&self) -> String {
        let dashed = if self.is_dashed { " dashed" } else { "" };
        format!("line c{}{dashed}", self.colour)
    }
}

/// The distance between an axis's ticks, a round number, and the axis's end, the first multiple that is not below
/// `most`.
fn axis(most: f64) -> (f64, f64) {
    if most <= 0.0 || !most.is_finite() {
        return (0.25, 1.0);
    }
    let least = most / NUM_TICKS;
    let power = 10f64.powf(least.log10().floor());
    let factors = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter();
    let step = factors
        .map(|factor| factor * power)
        .find(|step| *step >= least * 0.999_999);
    let step = step.unwrap_or(10.0 * power);
    (step, (most / step * 0.999_999).ceil() * step)
}

fn ticks(step: f64, max: f64) -> impl Iterator<Item = f64> {
    let num_steps = (max / step).round() as u32;
    (0..=num_steps).map(move |index| f64::from(index) * step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tick_is_a_round_number() {
        for (most, expected) in [
            (0.0, "0 0.25 0.5 0.75 1"),
            (1.0, "0 0.2 0.4 0.6 0.8 1"),
            (1.1, "0 0.25 0.5 0.75 1 1.25"),
            (3.98, "0 1 2 3 4"),
            (37.0, "0 10 20 30 40"),
            (730.0, "0 200 400 600 800"),
            (0.03, "0 0.01 0.02 0.03"),
            (12_345.0, "0 2,500 5,000 7,500 10,000 12,500"),
        ] {
            let (step, max) = axis(most);
            let labels: Vec<String> = ticks(step, max).map(number).collect();
            assert_eq!(labels.join(" "), expected, "{most}");
        }
    }

    #[test]
    fn names_cannot_break_the_page_and_no_points_make_no_plot() {
        let plot = |points| Plot {
            title: "Times",
            x_unit: "ms",
            y_unit: "%",
            curves: vec![Curve {
                name: "<a>".into(),
                points,
                colour: 0,
                is_dashed: false,
            }],
        };
        let escape = |text: &str| text.replace('<', "&lt;");
        let html = plot(vec![(1.0, 2.0)]).to_html(escape);
        assert!(html.contains("&lt;a>") && !html.contains("<a>"));
        assert_eq!(plot(Vec::new()).to_html(escape), "");
    }
}
