//! Shows the progress of a fetch: a redrawn line on a terminal, and log lines elsewhere.

use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use corella_hub::FetchEvent;
use corella_model::DeviceMemory;

use crate::terminal::progress_line::{ProgressLine, bar, display_time};

/// Shows the progress until dropped.
pub struct FetchDisplay {
    state: Mutex<State>,
}

struct State {
    /// `None` if standard error is not a terminal.
    progress_line: Option<ProgressLine>,
    interval: Duration,
    num_bytes: u64,
    num_received: u64,
    rate: Rate,
    drawn: Option<Instant>,
}

/// The speed of the last seconds.
#[derive(Default)]
struct Rate {
    /// Pairs of a time and the bytes received by that time. The front is some seconds old.
    marks: VecDeque<(Instant, u64)>,
}

impl FetchDisplay {
    pub fn new() -> Self {
        let is_terminal = io::stderr().is_terminal();
        let interval = match is_terminal {
            true => Duration::from_millis(100),
            false => Duration::from_secs(10),
        };
        Self {
            state: Mutex::new(State {
                progress_line: is_terminal.then(ProgressLine::new),
                interval,
                num_bytes: 0,
                num_received: 0,
                rate: Rate::default(),
                drawn: None,
            }),
        }
    }

    pub fn handle(&self, event: FetchEvent<'_>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            FetchEvent::Started {
                name,
                file,
                num_files,
                num_bytes,
                licence,
                page,
            } => {
                let files = match file {
                    Some(file) => file.to_owned(),
                    None => format!("{num_files} files"),
                };
                let size = shown_bytes(num_bytes);
                let free_bytes = DeviceMemory::of_host().available_bytes;
                let decisions = decisions(num_bytes, free_bytes, licence, page);
                let text = format!("fetching {name}: {files}, {size}{decisions}");
                match state.progress_line {
                    Some(_) => eprintln!("{text}"),
                    None => tracing::info!("{text}"),
                }
                state.drawn = Some(Instant::now());
            }
            FetchEvent::Planned { num_bytes } => state.num_bytes += num_bytes,
            FetchEvent::Received { num_bytes } => state.num_received += num_bytes,
            FetchEvent::Discarded { num_bytes } => {
                state.num_received = state.num_received.saturating_sub(num_bytes);
            }
            FetchEvent::Retrying { reason, pause_s } => {
                tracing::warn!("{reason}; trying again in {pause_s} s");
            }
            FetchEvent::Waiting { path } => {
                tracing::info!("another process is fetching {path}; waiting for it");
            }
        }
        state.draw();
    }
}

impl State {
    fn draw(&mut self) {
        let now = Instant::now();
        if self.num_bytes == 0 || self.drawn.is_some_and(|drawn| now - drawn < self.interval) {
            return;
        }
        self.drawn = Some(now);
        let rate = self.rate.bytes_per_s(now, self.num_received);
        let text = line(self.num_received, self.num_bytes, rate);
        match &self.progress_line {
            Some(line) => line.show(&text),
            None => tracing::info!("{text}"),
        }
    }
}

impl Rate {
    fn bytes_per_s(&mut self, now: Instant, num_received: u64) -> f64 {
        const SPAN: Duration = Duration::from_secs(5);
        // If bytes were discarded, the measurement begins anew.
        if self
            .marks
            .back()
            .is_some_and(|&(_, last)| last > num_received)
        {
            self.marks.clear();
        }
        self.marks.push_back((now, num_received));
        while self.marks.len() > 2 && now - self.marks[1].0 > SPAN {
            self.marks.pop_front();
        }
        let (since, before) = self.marks[0];
        (num_received - before) as f64 / (now - since).as_secs_f64().max(1e-3)
    }
}

/// Returns what a user may want to know before a fetch: that the model is larger than the free memory, and its licence.
fn decisions(num_bytes: u64, free_bytes: u64, licence: Option<&str>, page: &str) -> String {
    /// Licences that allow any use.
    const OPEN: [&str; 10] = [
        "apache-2.0",
        "mit",
        "bsd",
        "bsd-2-clause",
        "bsd-3-clause",
        "cc0-1.0",
        "cc-by-4.0",
        "isc",
        "unlicense",
        "openmdw",
    ];
    let size = match num_bytes > free_bytes {
        true => format!(
            ", which is more than the {} of free memory",
            shown_bytes(free_bytes)
        ),
        false => String::new(),
    };
    match licence {
        Some(licence) if OPEN.contains(&licence) => format!("{size}; licence {licence}"),
        Some(licence) => format!("{size}; licence {licence}, whose conditions are at {page}"),
        None => format!("{size}; its page names no licence: {page}"),
    }
}

fn line(num_received: u64, num_bytes: u64, bytes_per_s: f64) -> String {
    let share = num_received as f64 / num_bytes.max(1) as f64;
    let (done, all) = (shown_bytes(num_received), shown_bytes(num_bytes));
    let mut line = format!(
        "{} {:3.0} %, {done} of {all}",
        bar(share, 20),
        100.0 * share
    );
    if bytes_per_s >= 1.0 {
        let left_s = num_bytes.saturating_sub(num_received) as f64 / bytes_per_s;
        let left = display_time(Duration::from_secs_f64(left_s.ceil().min(1e9)));
        line += &format!(", {}/s, {left} left", shown_bytes(bytes_per_s as u64));
    }
    line
}

/// Formats bytes in decimal units, like the hub and disks.
pub fn shown_bytes(num_bytes: u64) -> String {
    let number = num_bytes as f64;
    match num_bytes {
        0..1_000 => format!("{num_bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", number / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", number / 1e6),
        _ => format!("{:.2} GB", number / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_share_bytes_rate_and_time_left() {
        let shown = line(250_000_000, 1_000_000_000, 5e6);
        let expected =
            "[=====               ]  25 %, 250.0 MB of 1.00 GB, 5.0 MB/s, 2 min 30 s left";
        assert_eq!(shown, expected);
        let shown = line(0, 2_000, 0.0);
        assert_eq!(shown, "[                    ]   0 %, 0 B of 2.0 kB");
    }

    #[test]
    fn a_size_or_a_licence_that_asks_for_a_decision_says_so() {
        let page = "https://hub/acme/nano";
        let shown = decisions(1_000, 2_000, Some("apache-2.0"), page);
        assert_eq!(shown, "; licence apache-2.0");
        let shown = decisions(5_000_000_000, 4_000_000_000, Some("llama3.2"), page);
        assert_eq!(
            shown,
            ", which is more than the 4.00 GB of free memory; licence llama3.2, whose conditions are at \
             https://hub/acme/nano"
        );
        assert!(decisions(1, 2, None, page).ends_with("names no licence: https://hub/acme/nano"));
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut rate = Rate::default();
        assert_eq!(rate.bytes_per_s(start, 500), 0.0);
        for second in 1..=10 {
            rate.bytes_per_s(after(second), 500 + 100 * second);
        }
        let slow = rate.bytes_per_s(after(20), 1500);
        assert!(slow < 100.0, "{slow}");
        // Discarded bytes do not make the rate negative.
        assert_eq!(rate.bytes_per_s(after(21), 100), 0.0);
    }
}
