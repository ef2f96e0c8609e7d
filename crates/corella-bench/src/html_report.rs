//! The report as a self-contained HTML file: numbers, and plots drawn as SVG.

use std::fmt::Write;
use std::time::Duration;

use crate::repeat::Spread;
use crate::timeline::{Moment, Timeline};
use crate::{Repeats, Report, RequestRecord};

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const BOTTOM: f64 = 36.0;
const TOP: f64 = 14.0;
const RIGHT: f64 = 14.0;
const COLOURS: [&str; 4] = ["#0b6e4f", "#d1495b", "#2e4057", "#edae49"];

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;\
padding:0 1em;color:#1b1b1b;background:#fff}h1{font-size:1.5em}h2{font-size:1.1em;margin:0 0 .3em}\
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .9em;text-align:right;\
border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}\
.plots{display:flex;flex-wrap:wrap;gap:1.5em}figure{margin:0}svg{display:block}\
text{font:12px system-ui,sans-serif;fill:#444}.key{font-size:13px;color:#444}";

/// A line in a plot.
struct Curve {
    name: &'static str,
    points: Vec<(f64, f64)>,
}

/// Writes a report. With several `repeats`, `report` is the typical run, shown in the plots, and
/// its numbers appear beside those of all runs.
pub fn write(report: &Report, timeline: &Timeline, repeats: Option<&Repeats>) -> String {
    let mut html = String::new();
    let model = escape(&report.head.model);
    let _ = write!(
        html,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{model}: benchmark</title>\
         <style>{STYLE}</style><h1>{model}</h1>"
    );
    let _ = write!(
        html,
        "<p>{} requests completed, {} failed, in {:.2} s: {:.1} output tokens/s, {} input and {} \
         output tokens.</p>",
        report.num_completed,
        report.num_failed,
        report.duration.as_secs_f64(),
        report.output_throughput(),
        report.total_input_tokens,
        report.total_output_tokens
    );
    if let Some(times) = report.max_passed_over {
        let _ = write!(
            html,
            "<p>A waiting request was overtaken {times} times at most.</p>"
        );
    }
    if let Some(repeats) = repeats.filter(|repeats| repeats.runs.len() > 1) {
        write_spreads(&mut html, repeats);
    }
    html.push_str(
        "<table><tr><th>milliseconds</th><th>mean</th><th>p50</th><th>p95</th><th>p99</th></tr>",
    );
    for (_, name, summary) in report.metrics() {
        let _ = write!(html, "<tr><td>{name}</td>");
        for value in [summary.mean, summary.p50, summary.p95, summary.p99] {
            let _ = write!(html, "<td>{value:.2}</td>");
        }
        html.push_str("</tr>");
    }
    for phase in &report.server_phases {
        let _ = write!(html, "<tr><td>{}, by the server</td>", phase.name);
        for value in phase.values() {
            let _ = write!(html, "<td>{value:.2}</td>");
        }
        html.push_str("</tr>");
    }
    html.push_str("</table><div class=\"plots\">");
    for (title, curves) in latencies(report) {
        html.push_str(&plot(title, "milliseconds", "share of them", &curves));
    }
    for (title, unit, curves) in over_time(&timeline.moments) {
        html.push_str(&plot(title, "seconds", unit, &curves));
    }
    html.push_str("</div></html>\n");
    html
}

fn write_spreads(html: &mut String, repeats: &Repeats) {
    let _ = write!(
        html,
        "<p>This is run {} of {}, the one with the median throughput; over all of them:</p>\
         <table><tr><th></th><th>median</th><th>lowest</th><th>highest</th></tr>",
        repeats.typical() + 1,
        repeats.runs.len()
    );
    for (key, spread) in repeats.spreads() {
        let Spread { median, min, max } = spread;
        let _ = write!(
            html,
            "<tr><td>{key}</td><td>{median:.2}</td><td>{min:.2}</td><td>{max:.2}</td></tr>"
        );
    }
    html.push_str("</table>");
}

/// The cumulative distributions of latencies.
fn latencies(report: &Report) -> Vec<(&'static str, Vec<Curve>)> {
    let completed = || {
        report
            .requests
            .iter()
            .filter(|request| request.error.is_none())
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let of = |time: fn(&RequestRecord) -> Option<Duration>| {
        completed().filter_map(time).map(ms).collect::<Vec<f64>>()
    };
    let itls = completed().flat_map(|request| &request.itls);
    let plots = [
        (
            "To the first token",
            vec![
                ("time to first token", of(|request| request.ttft)),
                ("of it, queue wait", of(|request| request.queue)),
            ],
        ),
        (
            "Between tokens",
            vec![
                ("inter-token latency", itls.map(|&itl| ms(itl)).collect()),
                (
                    "per output token of a request",
                    completed()
                        .filter_map(RequestRecord::tpot)
                        .map(|tpot| tpot * 1e3)
                        .collect(),
                ),
            ],
        ),
        (
            "To the last token",
            vec![("end-to-end latency", of(|request| Some(request.latency)))],
        ),
    ];
    let plots = plots.into_iter().map(|(title, series)| {
        let curves = series.into_iter().filter(|(_, values)| !values.is_empty());
        (
            title,
            curves
                .map(|(name, values)| distribution(name, values))
                .collect(),
        )
    });
    plots.collect()
}

fn distribution(name: &'static str, mut values: Vec<f64>) -> Curve {
    const MAX_POINTS: usize = 500;
    values.sort_by(f64::total_cmp);
    let count = values.len();
    let every = count.div_ceil(MAX_POINTS).max(1);
    let picked = (0..count).filter(|at| at % every == 0 || at + 1 == count);
    Curve {
        name,
        points: picked
            .map(|at| (values[at], (at + 1) as f64 / count as f64))
            .collect(),
    }
}

fn over_time(moments: &[Moment]) -> Vec<(&'static str, &'static str, Vec<Curve>)> {
    if moments.len() < 2 {
        return Vec::new();
    }
    let series = |name, value: fn(&Moment) -> f64| Curve {
        name,
        points: moments
            .iter()
            .map(|m| (m.at.as_secs_f64(), value(m)))
            .collect(),
    };
    let rate = |name, count: fn(&Moment) -> f64| Curve {
        name,
        points: moments
            .windows(2)
            .map(|pair| {
                let seconds = (pair[1].at - pair[0].at).as_secs_f64().max(1e-6);
                (
                    pair[1].at.as_secs_f64(),
                    (count(&pair[1]) - count(&pair[0])).max(0.0) / seconds,
                )
            })
            .collect(),
    };
    vec![
        (
            "Requests",
            "requests",
            vec![
                series("running", |m| m.num_running),
                series("waiting", |m| m.num_waiting),
            ],
        ),
        (
            "What the steps compute",
            "tokens/s",
            vec![
                rate("prefill", |m| m.num_prefilled),
                rate("generated", |m| m.num_generated),
            ],
        ),
        (
            "KV cache in use",
            "% of pages",
            vec![series("in use", |m| 100.0 * m.kv_usage)],
        ),
    ]
}

fn plot(title: &str, x_unit: &str, y_unit: &str, curves: &[Curve]) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let x_max = nice_ceiling(points().map(|point| point.0).fold(0.0, f64::max));
    let y_max = nice_ceiling(points().map(|point| point.1).fold(0.0, f64::max));
    let x = |value: f64| LEFT + value / x_max * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - value / y_max * (HEIGHT - BOTTOM - TOP);
    let mut svg = format!(
        "<figure><h2>{title}</h2><svg width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" \
         aria-label=\"{title}\">"
    );
    for tick in 0..=4 {
        let share = f64::from(tick) / 4.0;
        let (at_x, at_y) = (x(x_max * share), y(y_max * share));
        let _ = write!(
            svg,
            "<path d=\"M{LEFT} {at_y:.1}H{:.1}\" stroke=\"#e4e4e4\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <text x=\"{at_x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at_y + 4.0,
            number(y_max * share),
            HEIGHT - BOTTOM + 16.0,
            number(x_max * share)
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{x_unit}</text>\
         <text x=\"{LEFT}\" y=\"10\">{y_unit}</text>",
        WIDTH - RIGHT,
        HEIGHT - 4.0
    );
    for (curve, colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let mut path = String::new();
        for (index, &(at_x, at_y)) in curve.points.iter().enumerate() {
            let _ = match index {
                0 => write!(path, "M{:.1} {:.1}", x(at_x), y(at_y)),
                _ => write!(path, "H{:.1}V{:.1}", x(at_x), y(at_y)),
            };
        }
        let _ = write!(
            svg,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\"/>"
        );
    }
    svg.push_str("</svg><div class=\"key\">");
    for (curve, colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let _ = write!(
            svg,
            "<span style=\"color:{colour}\">&#9632;</span> {} &nbsp; ",
            curve.name
        );
    }
    svg.push_str("</div></figure>");
    svg
}

/// The next number up that is 1, 2, 2.5 or 5 times a power of ten.
fn nice_ceiling(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
    let step = steps
        .into_iter()
        .find(|step| step * power >= value * 0.999_999);
    step.unwrap_or(10.0) * power
}

fn number(value: f64) -> String {
    let text = match value {
        value if value >= 100.0 || value == 0.0 => format!("{value:.0}"),
        value if value >= 1.0 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    };
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        for (value, ceiling) in [
            (0.0, 1.0),
            (1.0, 1.0),
            (1.1, 2.0),
            (2.2, 2.5),
            (730.0, 1000.0),
            (0.03, 0.05),
        ] {
            assert!((nice_ceiling(value) - ceiling).abs() < 1e-9, "{value}");
        }
        assert_eq!(number(0.25), "0.25");
        assert_eq!(number(3.75), "3.75");
        assert_eq!(number(2.5), "2.5");
        assert_eq!(number(100.0), "100");
    }

    #[test]
    fn a_distribution_ends_at_one() {
        let curve = distribution("x", (0..2000).rev().map(f64::from).collect());
        assert!(curve.points.len() <= 501);
        assert_eq!(curve.points.last(), Some(&(1999.0, 1.0)));
        assert!(curve.points.is_sorted_by_key(|point| point.0));
    }

    #[test]
    fn names_cannot_break_the_html() {
        assert_eq!(escape("<a&\"b\">"), "&lt;a&amp;&quot;b&quot;&gt;");
    }
}
