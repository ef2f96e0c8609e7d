//! Retained prefixes in scenarios.

use corella_core::{Retention, SchedulerStats};

use super::World;

/// Reads the marks of a request: `4/9000` retains 4 tokens for 9,000 us.
pub fn read(marks: &str) -> Vec<Retention> {
    let read = |mark: &str| {
        let (num_tokens, ttl_us) = mark.split_once('/').expect("tokens and a time");
        Retention {
            num_tokens: num_tokens.parse().unwrap(),
            ttl_us: ttl_us.parse().unwrap(),
        }
    };
    marks.split(',').map(read).collect()
}

pub fn in_words(num_tokens: u32) -> String {
    match num_tokens {
        0 => String::new(),
        retained => format!(", {retained} retained"),
    }
}

impl World {
    pub fn wait(&mut self, time_us: &str) {
        self.now_us += time_us.parse::<u64>().unwrap();
        self.scheduler.note_time(self.now_us);
    }

    pub fn print_retained(&mut self, stats: &SchedulerStats) {
        let (num_evicted, num_refused) = (
            stats.num_evicted_retained_pages,
            stats.num_refused_retentions,
        );
        if stats.num_retained_pages > 0 || num_evicted + num_refused > 0 {
            self.say(&format!(
                "retained pages {}, evicted {num_evicted} · refused {num_refused}",
                stats.num_retained_pages
            ));
        }
    }
}
