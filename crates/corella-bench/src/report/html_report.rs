//! The report on one or two benchmarks as a self-contained HTML file: the setup, the numbers, and plots.

use std::fmt::Write;

use crate::report::comparison::Comparison;
use crate::report::number::number;
use crate::report::plot::{Curve, Plot};
use crate::report::result_file::{LATENCIES, ResultFile};

const STYLE: &str = include_str!("html_report/style.css");

/// The most important numbers, with the decimals that each is shown with.
const FIGURES: [(&str, &str, &str); 6] = [
    ("output_throughput", "Output tokens/s", ""),
    ("request_throughput", "Requests/s", ""),
    ("request_goodput", "Good requests/s", ""),
    ("median_ttft_ms", "Time to first token, median", " ms"),
    ("median_tpot_ms", "Time per output token, median", " ms"),
    ("median_e2el_ms", "End to end, median", " ms"),
];

const KINDS: [(&str, &str); 4] = [
    ("mean", "mean"),
    ("median", "median"),
    ("p95", "p95"),
    ("p99", "p99"),
];

/// Writes a report of one benchmark or of several, side by side.
pub(crate) fn write(results: &[ResultFile]) -> String {
    let models: Vec<String> = results
        .iter()
        .filter_map(|it| it.text("model_id"))
        .collect();
    let mut names = models.clone();
    names.dedup();
    let title = escape(&format!("Benchmark of {}", names.join(" and ")));
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\"><meta name=\"color-scheme\" content=\"light dark\">\
         <title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
    );
    for result in results {
        for warning in result.warnings() {
            let name = match results {
                [_] => String::new(),
                _ => format!("{}: ", result.name),
            };
            let _ = write!(
                html,
                "<p class=\"warning\">{}</p>",
                escape(&(name + &warning))
            );
        }
    }
    if let [first, second] = results {
        let differences = Comparison::differences(&[first.clone(), second.clone()]);
        if !differences.is_empty() {
            let _ = write!(
                html,
                "<p class=\"warning\">They differ in {}.</p>",
                escape(&differences.join("; "))
            );
        }
    }
    write_figures(&mut html, results);
    for result in results {
        write_facts(&mut html, result, results.len());
    }
    html.push_str("<div class=\"plots\">");
    for plot in plots(results) {
        html.push_str(&plot.to_html(escape));
    }
    html.push_str("</div>");
    match results {
        [first, second] => write_comparison(&mut html, [first, second]),
        _ => results
            .iter()
            .for_each(|result| write_latencies(&mut html, result)),
    }
    html.push_str("</body></html>\n");
    html
}

fn write_figures(html: &mut String, results: &[ResultFile]) {
    html.push_str("<dl class=\"figures\">");
    for (key, name, unit) in FIGURES {
        let values: Vec<f64> = results
            .iter()
            .filter_map(|result| result.number(key))
            .collect();
        if values.is_empty() || values.len() < results.len() {
            continue;
        }
        let shown: Vec<String> = values
            .iter()
            .map(|value| format!("{}{unit}", number(*value)))
            .collect();
        let _ = write!(html, "<div><dt>{name}</dt><dd>{}</dd>", shown.join(" → "));
        let spread = match results {
            [result] => result.spread(key),
            _ => None,
        };
        if let Some((least, most)) = spread {
            let _ = write!(
                html,
                "<dd class=\"quiet\">{} to {}</dd>",
                number(least),
                number(most)
            );
        } else if let [first, second] = values[..]
            && first > 0.0
        {
            let _ = write!(
                html,
                "<dd class=\"quiet\">× {}</dd>",
                number(second / first)
            );
        }
        html.push_str("</div>");
    }
    html.push_str("</dl>");
}

/// Writes the setup: when, where and with which command the benchmark ran.
fn write_facts(html: &mut String, result: &ResultFile, num_results: usize) {
    html.push_str("<section class=\"facts\">");
    if num_results > 1 {
        let _ = write!(html, "<h2>{}</h2>", escape(&result.name));
    }
    html.push_str("<dl>");
    for (name, value) in facts(result) {
        let _ = write!(
            html,
            "<div><dt>{name}</dt><dd>{}</dd></div>",
            escape(&value)
        );
    }
    html.push_str("</dl></section>");
}

fn facts(result: &ResultFile) -> Vec<(&'static str, String)> {
    let count = |key| result.number(key).map(number);
    let mut facts = vec![("Model", result.text("model_id").unwrap_or_default())];
    facts.extend(result.text("date").map(|date| ("Date", readable(&date))));
    let mut load = format!("{} requests", count("num_prompts").unwrap_or_default());
    load += &match result.number("request_rate") {
        Some(rate) => format!(", {} per second", number(rate)),
        None => ", all at once".to_owned(),
    };
    if let Some(burstiness) = result.number("burstiness").filter(|it| *it != 1.0) {
        load += &format!(", burstiness {burstiness}");
    }
    if let Some(most) = count("max_concurrency") {
        load += &format!(", at most {most} at a time");
    }
    if let Some(repeats) = count("repeats") {
        load += &format!("; {repeats} runs, whose medians are shown");
    }
    facts.push(("Load", load));
    let completed = result.number("completed").unwrap_or(0.0).max(1.0);
    let mean = |key| {
        result
            .number(key)
            .map(|total| number((total / completed).round()))
    };
    let lengths = [
        mean("total_input_tokens").map(|tokens| format!("prompts of {tokens} tokens")),
        mean("total_output_tokens").map(|tokens| format!("answers of {tokens} tokens")),
    ];
    let mut lengths: Vec<String> = lengths.into_iter().flatten().collect();
    lengths.extend(count("max_tokens").map(|most| format!("at most {most}")));
    if result.text("ignore_eos").as_deref() == Some("yes") {
        lengths.push("none ended by itself".to_owned());
    }
    facts.push(("Lengths, on average", lengths.join(", ")));
    let duration = result
        .number("duration")
        .map(|seconds| format!("{} s", number(seconds)));
    facts.extend(duration.map(|duration| ("Duration", duration)));
    let requests = format!(
        "{} completed, {} failed",
        count("completed").unwrap_or_default(),
        count("failed").unwrap_or_else(|| "0".to_owned())
    );
    facts.push(("Requests", requests));
    for (name, key) in [
        ("Overtaken at most", "max_passed_over"),
        ("Server", "base_url"),
        ("Server's version", "server_version"),
        ("Version of this program", "version"),
        ("Machine of the load", "machine"),
        ("Command", "command"),
    ] {
        facts.extend(result.text(key).map(|value| (name, value)));
    }
    facts
}

/// Writes `20261129-133834` as `2026-11-29 13:38`. This program's dates are in UTC, those of other programs in local
/// time.
fn readable(date: &str) -> String {
    let is_known = date.len() == 15 && date.is_ascii() && date.as_bytes()[8] == b'-';
    if !is_known {
        return date.to_owned();
    }
    let [year, month, day] = [&date[..4], &date[4..6], &date[6..8]];
    format!("{year}-{month}-{day} {}:{}", &date[9..11], &date[11..13])
}

fn write_latencies(html: &mut String, result: &ResultFile) {
    html.push_str("<h2>Latencies</h2><div class=\"scroll\"><table><tr><th>milliseconds</th>");
    for (_, name) in KINDS {
        let _ = write!(html, "<th>{name}</th>");
    }
    html.push_str("</tr>");
    for (key, name) in LATENCIES {
        if result.number(&format!("mean_{key}_ms")).is_none() {
            continue;
        }
        let _ = write!(html, "<tr><td>{name}</td>");
        for (kind, _) in KINDS {
            let value = result.number(&format!("{kind}_{key}_ms"));
            let _ = write!(html, "<td>{}</td>", value.map_or_else(String::new, number));
        }
        html.push_str("</tr>");
    }
    html.push_str("</table></div>");
}

fn write_comparison(html: &mut String, [first, second]: [&ResultFile; 2]) {
    let _ = write!(
        html,
        "<h2>All numbers</h2><div class=\"scroll\"><table><tr><th></th><th>{}</th><th>{}</th><th>ratio</th></tr>",
        escape(&first.name),
        escape(&second.name)
    );
    for row in Comparison::rows(&[first.clone(), second.clone()]) {
        let [a, b] = row.values.map(number);
        let ratio = row
            .ratio()
            .map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{a}</td><td>{b}</td><td>{ratio}</td></tr>",
            row.name
        );
    }
    html.push_str("</table></div>");
}

fn plots(results: &[ResultFile]) -> Vec<Plot> {
    let share = "% of them";
    let of = |title, x_unit, y_unit, series: &[(&str, Series)]| Plot {
        title,
        x_unit,
        y_unit,
        curves: curves(results, series),
    };
    vec![
        of(
            "Throughput",
            "seconds",
            "output tokens/s",
            &[("output", throughput)],
        ),
        of(
            "Time to the first token",
            "milliseconds",
            share,
            &[
                ("time to first token", |it| {
                    distribution(ms(it.series("ttfts")))
                }),
                ("of it, queue wait", |it| {
                    distribution(ms(it.series("queue_times")))
                }),
            ],
        ),
        of(
            "Time between tokens",
            "milliseconds",
            share,
            &[
                ("between two tokens", |it| {
                    distribution(ms(it.intervals().concat()))
                }),
                ("mean of a request", |it| distribution(ms(means(it)))),
            ],
        ),
        of(
            "Time to the last token",
            "milliseconds",
            share,
            &[("end to end", |it| distribution(ms(it.series("e2els"))))],
        ),
        of(
            "Requests",
            "seconds",
            "requests",
            &[
                ("running", |it| over_time(it, "running")),
                ("waiting", |it| over_time(it, "waiting")),
            ],
        ),
        of(
            "What the steps compute",
            "seconds",
            "tokens/s",
            &[
                ("prefill", |it| growth(it, "prefilled")),
                ("generated", |it| growth(it, "generated")),
            ],
        ),
        of(
            "KV cache in use",
            "seconds",
            "% of pages",
            &[("in use", |it| {
                let shares = over_time(it, "kv_usage");
                shares
                    .into_iter()
                    .map(|(at, share)| (at, 100.0 * share))
                    .collect()
            })],
        ),
    ]
}

/// The curves of a plot: one for each result and series that has points.
fn curves(results: &[ResultFile], series: &[(&str, Series)]) -> Vec<Curve> {
    let is_one = results.len() == 1;
    let mut curves = Vec::new();
    for (index, result) in results.iter().enumerate() {
        for (number, (name, points)) in series.iter().enumerate() {
            curves.push(Curve {
                name: match (is_one, series.len()) {
                    (true, _) => (*name).to_owned(),
                    (false, 1) => result.name.clone(),
                    (false, _) => format!("{}: {name}", result.name),
                },
                points: points(result),
                colour: if is_one { number } else { index },
                is_dashed: !is_one && number > 0,
            });
        }
    }
    curves.retain(|curve| !curve.points.is_empty());
    curves
}

/// The points of a curve, from the numbers of every request or of the engine over time.
type Series = fn(&ResultFile) -> Vec<(f64, f64)>;

fn ms(seconds: Vec<f64>) -> Vec<f64> {
    seconds.into_iter().map(|seconds| seconds * 1e3).collect()
}

/// The mean time between the tokens of each request.
fn means(result: &ResultFile) -> Vec<f64> {
    let requests = result
        .intervals()
        .into_iter()
        .filter(|times| !times.is_empty());
    requests
        .map(|times| times.iter().sum::<f64>() / times.len() as f64)
        .collect()
}

/// A cumulative distribution, in per cent.
fn distribution(mut values: Vec<f64>) -> Vec<(f64, f64)> {
    const MAX_POINTS: usize = 500;
    // Failed requests have no time.
    values.retain(|value| *value > 0.0);
    values.sort_by(f64::total_cmp);
    let count = values.len();
    let every = count.div_ceil(MAX_POINTS).max(1);
    let picked = (0..count).filter(|at| at % every == 0 || at + 1 == count);
    picked
        .map(|at| (values[at], 100.0 * (at + 1) as f64 / count as f64))
        .collect()
}

/// Output tokens per second, as clients received them, in intervals of a round number of seconds.
fn throughput(result: &ResultFile) -> Vec<(f64, f64)> {
    const NUM_INTERVALS: f64 = 60.0;
    let (starts, firsts) = (result.series("start_times"), result.series("ttfts"));
    let mut times = Vec::new();
    for ((start, first), intervals) in starts.iter().zip(firsts).zip(result.intervals()) {
        if first > 0.0 {
            let mut at = start + first;
            times.push(at);
            times.extend(intervals.iter().map(|interval| {
                at += interval;
                at
            }));
        }
    }
    let end = times.iter().copied().fold(0.0, f64::max);
    if end <= 0.0 {
        return Vec::new();
    }
    let lengths = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];
    let length = lengths
        .into_iter()
        .find(|length| end / length <= NUM_INTERVALS)
        .unwrap_or(3600.0);
    let mut counts = vec![0u32; (end / length) as usize + 1];
    for at in times {
        counts[(at / length) as usize] += 1;
    }
    // A curve keeps its value until the next point, so a point is where its interval begins.
    let points = counts
        .iter()
        .enumerate()
        .map(|(index, count)| (index as f64 * length, f64::from(*count) / length));
    points.collect()
}

fn over_time(result: &ResultFile, key: &str) -> Vec<(f64, f64)> {
    let times = result.timeline("at");
    match times.len() {
        0 | 1 => Vec::new(),
        _ => times.into_iter().zip(result.timeline(key)).collect(),
    }
}

/// Returns the growth of a counter per second, at the beginning of each interval.
fn growth(result: &ResultFile, key: &str) -> Vec<(f64, f64)> {
    let points = over_time(result, key);
    let pairs = points.windows(2).map(|pair| {
        let [(begin, before), (end, after)] = [pair[0], pair[1]];
        (begin, (after - before).max(0.0) / (end - begin).max(1e-6))
    });
    pairs.collect()
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn detailed(model: &str) -> Value {
        json!({
            "model_id": model, "date": "20261129-133834", "command": "corella bench serve --seed 1", "version": "0.1.0",
            "machine": "a <CPU>", "server_version": "0.2.0", "num_prompts": 2, "request_rate": 2.5, "burstiness": 1.0,
            "max_concurrency": 4, "max_tokens": 3, "completed": 2, "failed": 0, "ended_early": 2, "duration": 1.5,
            "total_input_tokens": 602, "total_output_tokens": 5, "output_throughput": 3.3, "request_throughput": 1.3,
            "median_ttft_ms": 500.0, "mean_ttft_ms": 600.0, "mean_queue_ms": 1.0,
            "start_times": [0.0, 0.5], "ttfts": [0.55, 0.71], "itls": [[0.1, 0.1], [0.2]], "e2els": [0.7, 0.9],
            "timeline": { "at": [0.1, 0.2], "running": [1, 2], "waiting": [0, 0], "kv_usage": [0.1, 0.2],
                          "prefilled": [100, 150], "generated": [1, 4] },
        })
    }

    #[test]
    fn a_report_tells_what_was_measured() {
        let html = write(&[ResultFile::new("a".into(), detailed("m&m"))]);
        for part in [
            "<title>Benchmark of m&amp;m</title>",
            "2026-11-29 13:38",
            "corella bench serve --seed 1",
            "a &lt;CPU&gt;",
            "2 requests, 2.5 per second, at most 4 at a time",
            "prompts of 301 tokens, answers of 3 tokens, at most 3",
            "2 of 2 answers ended before max tokens",
            ">0.2.0<",
            "prefers-color-scheme: dark",
            "width=device-width",
            "<h2>Throughput</h2>",
            "<h2>KV cache in use</h2>",
            "<td>Queue wait</td><td>1</td><td></td>",
        ] {
            assert!(html.contains(part), "{part} is in {html}");
        }
        // The file loads no other file, and runs no script.
        for part in ["http:", "https:", "<script", "src=", "url("] {
            assert!(!html.contains(part), "{part} is not in {html}");
        }
        // Without the numbers of every request there are no plots.
        let mut plain = detailed("m");
        for key in ["start_times", "ttfts", "itls", "e2els", "timeline"] {
            plain[key] = Value::Null;
        }
        assert!(!write(&[ResultFile::new("a".into(), plain)]).contains("<svg"));
    }

    #[test]
    fn two_results_share_their_plots() {
        let mut other = detailed("m");
        other["output_throughput"] = json!(6.6);
        other["max_concurrency"] = json!(8);
        let names = ["<one>", "two"].map(str::to_owned);
        let [first, second] = names;
        let html = write(&[
            ResultFile::new(first, detailed("m")),
            ResultFile::new(second, other),
        ]);
        for part in [
            "<title>Benchmark of m</title>",
            "They differ in requests at a time: 4 and 8.",
            "3.3 → 6.6",
            "× 2",
            "</svg>&lt;one&gt;</li>",
            "</svg>two: waiting</li>",
            "<td>Output tokens/s</td><td>3.3</td><td>6.6</td><td>2.00</td>",
        ] {
            assert!(html.contains(part), "{part} is in {html}");
        }
        assert!(!html.contains("<one>"));
    }

    #[test]
    fn a_distribution_ends_at_all_of_them() {
        let points = distribution((0..=2000).rev().map(f64::from).collect());
        assert!(points.len() <= 501);
        assert_eq!(points.last(), Some(&(2000.0, 100.0)));
        assert!(points.is_sorted_by_key(|point| point.0));
    }

    /// Tokens come at 0.55, 0.65, 0.75, 1.21 and 1.41 s.
    #[test]
    fn throughput_counts_tokens_where_they_came() {
        let points = throughput(&ResultFile::new("a".into(), detailed("m")));
        let counts: Vec<f64> = points.iter().map(|point| (point.1 * 0.1).round()).collect();
        assert_eq!(
            counts[5..],
            [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
        );
        assert_eq!(counts[..5], [0.0; 5]);
    }
}
