//! The two text formats of metrics: OpenMetrics, and Prometheus' own, which older scrapers and browsers read.

use axum::http::HeaderMap;
use axum::http::header::ACCEPT;

/// Returns whether `Accept` names OpenMetrics and does not prefer plain text. As with Prometheus' libraries, a client
/// that names neither gets plain text.
pub fn prefers_open_metrics(headers: &HeaderMap) -> bool {
    let (mut open, mut plain) = (0.0f32, 0.0f32);
    let values = headers.get_all(ACCEPT).iter();
    let ranges = values.filter_map(|value| value.to_str().ok());
    for range in ranges.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let quality = parts.find_map(|part| part.strip_prefix("q="));
        let quality = quality.map_or(1.0, |quality| quality.parse().unwrap_or(0.0));
        match kind.as_str() {
            "application/openmetrics-text" => open = open.max(quality),
            "text/plain" => plain = plain.max(quality),
            _ => {}
        }
    }
    open > 0.0 && open >= plain
}

/// Converts the metrics to Prometheus' format: a counter is named like its series, and units and the end mark are left
/// out.
pub fn prometheus_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            // The written name depends on the type, which a later line has.
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                kind => ("", kind),
            };
            if let Some((_, help)) = help.take().filter(|(of, _)| *of == name) {
                push(&mut text, &["# HELP ", name, suffix, " ", help]);
            }
            push(&mut text, &["# TYPE ", name, suffix, " ", kind]);
        } else if !line.starts_with('#') {
            push(&mut text, &[line]);
        }
    }
    text
}

fn push(text: &mut String, parts: &[&str]) {
    text.extend(parts.iter().copied());
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_decides() {
        let prefers = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, accept.parse().expect("a header"));
            prefers_open_metrics(&headers)
        };
        assert!(!prefers_open_metrics(&HeaderMap::new()));
        for (accept, is_open) in [
            ("*/*", false),
            ("text/plain;version=0.0.4", false),
            ("application/openmetrics-text", true),
            ("application/openmetrics-text;q=0, */*", false),
            ("application/openmetrics-text;q=0.2,text/plain;q=0.5", false),
            // The headers of Prometheus 2 and 3.
            (
                "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,\
                 text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
                true,
            ),
        ] {
            assert_eq!(prefers(accept), is_open, "{accept}");
        }
    }

    #[test]
    fn counters_are_named_as_their_series() {
        let open = "# HELP a_requests Requests.\n# TYPE a_requests counter\na_requests_total{b=\"c # d\"} 1\n\
                    # HELP a_seconds Time.\n# TYPE a_seconds gauge\n# UNIT a_seconds seconds\na_seconds 2.5\n\
                    # HELP a_build Build.\n# TYPE a_build info\na_build_info{v=\"1\"} 1\n# EOF\n";
        let plain = "# HELP a_requests_total Requests.\n# TYPE a_requests_total counter\na_requests_total{b=\"c # d\"} 1\n\
                     # HELP a_seconds Time.\n# TYPE a_seconds gauge\na_seconds 2.5\n\
                     # HELP a_build_info Build.\n# TYPE a_build_info gauge\na_build_info{v=\"1\"} 1\n";
        assert_eq!(prometheus_text(open), plain);
    }
}
