//! Metrics of several texts, added up: those of several models, or of one model that was loaded several times.

use std::collections::HashMap;
use std::fmt::Write as _;

/// Metrics in OpenMetrics' form. A family is written once, however many texts have it.
#[derive(Clone, Debug, Default)]
pub struct MetricSum {
    families: Vec<MetricFamily>,
    /// The places of the families by their names.
    places: HashMap<String, usize>,
}

#[derive(Clone, Debug)]
struct MetricFamily {
    name: String,
    /// The lines of help and type.
    head: String,
    kind: Kind,
    series: Vec<(String, f64)>,
    /// The places of the series by their names and labels.
    places: HashMap<String, usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Counters and histograms.
    Count,
    Gauge,
    /// A fact, whose value is always 1.
    Info,
}

impl MetricSum {
    /// Reads the text of a registry.
    pub fn of(text: &str) -> Self {
        let mut sum = Self::default();
        let mut family = None;
        for line in text.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                let mut words = comment.splitn(3, ' ');
                let (keyword, name) = (words.next(), words.next());
                let Some(name) = name else { continue };
                let place = sum.place_of(name);
                let kind = words.next().filter(|_| keyword == Some("TYPE"));
                let its = &mut sum.families[place];
                its.head.push_str(line);
                its.head.push('\n');
                match kind {
                    Some("gauge") => its.kind = Kind::Gauge,
                    Some("info") => its.kind = Kind::Info,
                    _ => {}
                }
                family = Some(place);
            } else if let (Some((series, value)), Some(place)) = (line.rsplit_once(' '), family)
                && let Ok(value) = value.parse()
            {
                sum.families[place].add(series, value);
            }
        }
        sum
    }

    pub fn is_empty(&self) -> bool {
        self.families.is_empty()
    }

    pub fn add(&mut self, other: &Self) {
        for theirs in &other.families {
            let place = self.place_of(&theirs.name);
            let ours = &mut self.families[place];
            if ours.head.is_empty() {
                ours.head.clone_from(&theirs.head);
                ours.kind = theirs.kind;
            }
            for (series, value) in &theirs.series {
                ours.add(series, *value);
            }
        }
    }

    /// Only counts have series: they stay when their cause has gone. Gauges and facts do not.
    pub fn counts(mut self) -> Self {
        for family in &mut self.families {
            if family.kind != Kind::Count {
                family.series.clear();
                family.places.clear();
            }
        }
        self
    }

    pub fn write(&self, text: &mut String) {
        for family in &self.families {
            text.push_str(&family.head);
            for (series, value) in &family.series {
                // Writing to a text cannot fail.
                let _ = match *value == f64::INFINITY {
                    true => writeln!(text, "{series} +Inf"),
                    false => writeln!(text, "{series} {value}"),
                };
            }
        }
    }

    fn place_of(&mut self, name: &str) -> usize {
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        let place = self.families.len();
        self.families.push(MetricFamily {
            name: name.to_owned(),
            head: String::new(),
            kind: Kind::Count,
            series: Vec::new(),
            places: HashMap::new(),
        });
        self.places.insert(name.to_owned(), place);
        place
    }
}

impl MetricFamily {
    fn add(&mut self, series: &str, value: f64) {
        match self.places.get(series) {
            Some(place) if self.kind == Kind::Info => self.series[*place].1 = value,
            Some(place) => self.series[*place].1 += value,
            None => {
                self.places.insert(series.to_owned(), self.series.len());
                self.series.push((series.to_owned(), value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "\
# HELP a_requests Requests.
# TYPE a_requests counter
a_requests_total{model=\"a\",path=\"/x y\"} 3
# HELP a_wait_seconds Waits.
# TYPE a_wait_seconds histogram
a_wait_seconds_sum{model=\"a\"} 0.5
a_wait_seconds_bucket{le=\"+Inf\",model=\"a\"} 2
# HELP a_running Running.
# TYPE a_running gauge
a_running{model=\"a\"} 4
# HELP a_config Facts.
# TYPE a_config info
a_config_info{model=\"a\"} 1
";

    #[test]
    fn counts_add_up_and_gauges_are_of_the_present() {
        // The label of a fact differs from load to load.
        let earlier = FIRST.replace("a_config_info{", "a_config_info{pages=\"9\",");
        let mut sum = MetricSum::of(&earlier).counts();
        sum.add(&MetricSum::of(FIRST));
        let mut text = String::new();
        sum.write(&mut text);
        let expected = FIRST
            .replace("/x y\"} 3", "/x y\"} 6")
            .replace("sum{model=\"a\"} 0.5", "sum{model=\"a\"} 1")
            .replace("Inf\",model=\"a\"} 2", "Inf\",model=\"a\"} 4");
        assert_eq!(text, expected);
    }

    #[test]
    fn a_family_of_two_models_is_written_once() {
        let mut sum = MetricSum::of(FIRST);
        sum.add(&MetricSum::of(&FIRST.replace("model=\"a\"", "model=\"b\"")));
        let mut text = String::new();
        sum.write(&mut text);
        assert_eq!(text.matches("# TYPE a_running gauge").count(), 1);
        assert!(text.contains("a_running{model=\"a\"} 4\na_running{model=\"b\"} 4\n"));
    }
}
