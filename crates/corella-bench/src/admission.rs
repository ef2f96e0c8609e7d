//! `bench admission`: compares, in virtual time, rules for the pages that a request reserves at
//! admission.

mod option;
mod replay;
mod report;
mod rule;
mod workload;

pub use option::{AdmissionOptions, Arrivals, LengthSource};
pub use replay::Replay;
pub use report::AdmissionReport;
pub use rule::{GivenLimit, RULES, Rule};
use workload::Workload;

use crate::BenchError;

/// Plays the same requests under every rule.
pub fn run(options: &AdmissionOptions) -> Result<AdmissionReport, BenchError> {
    let workload = Workload::new(options)?;
    let mut replays = Vec::new();
    for &rule in &options.rules {
        replays.push(Replay::run(rule, &workload, options)?);
    }
    Ok(AdmissionReport::new(options, &workload, replays))
}

#[cfg(test)]
mod tests {
    use corella_core::SchedulerConfig;
    use corella_model::CostModel;

    use super::*;

    /// Two requests with 4 prompt and 3 output tokens arrive at once. A step takes 10 ms, plus 1 ms for each token. A
    /// page holds one token, so each request needs 6 pages at its end.
    fn report(num_pages: u32) -> AdmissionReport {
        let mut config = SchedulerConfig::new(num_pages, 1, 64);
        config.enable_prefix_caching = false;
        let options = AdmissionOptions {
            lengths: LengthSource::Ranges {
                prompt: (4, 4),
                output: (3, 3),
                seed: 0,
            },
            arrivals: Arrivals::AtOnce,
            num_requests: Some(2),
            rules: RULES.iter().collect(),
            config,
            cost: CostModel {
                per_step_us: 10e3,
                per_token_us: 1e3,
                per_decode_us: 1e3,
                per_attended_kilotoken_us: 0.0,
            },
        };
        run(&options).unwrap()
    }

    fn assert_near(got: f64, expected: f64) {
        assert!((got - expected).abs() < 1e-9, "{got} instead of {expected}");
    }

    /// Worked out by hand: a request that reserves all 6 pages runs alone, in steps of 14, 11 and 11 ms, which hold 4,
    /// 5 and 6 pages. The other request follows.
    #[test]
    fn exact_reservations_are_served_one_after_the_other() {
        let report = report(8);
        let replay = report.replay("oracle-reserve").unwrap();
        assert_eq!((replay.num_steps, replay.num_preemptions), (6, 0));
        assert_eq!((replay.num_finished, replay.num_failed), (2, 0));
        assert_near(replay.makespan_s, 0.072);
        assert_near(replay.output_tokens_per_s, 6.0 / 0.072);
        assert_near(replay.ttft_ms.median, (14.0 + 50.0) / 2.0);
        assert_near(replay.ttft_ms.p99, 14.0 + 0.99 * 36.0);
        assert_near(replay.worst_gap_ms, 11.0);
        let page_ms = 14.0 * 4.0 + 11.0 * 5.0 + 11.0 * 6.0;
        assert_near(replay.pool_share, page_ms / (36.0 * 8.0));
        assert_near(replay.page_limited_share, 0.5);
    }

    /// Worked out by hand: no request reserves more than the next token. Both start in a step of 18
    /// ms, the first takes the last page, and the second is preempted. The first ends after 11 and
    /// 11 ms. The second computes its 5 tokens in 15 ms, which brings its next token 37 ms after
    /// the one before, and ends 11 ms later.
    #[test]
    fn without_reservation_the_second_is_preempted() {
        let report = report(9);
        let replay = report.replay("vllm").unwrap();
        assert_eq!((replay.num_steps, replay.num_preemptions), (5, 1));
        assert_eq!((replay.num_finished, replay.num_failed), (2, 0));
        assert_near(replay.makespan_s, 0.066);
        assert_near(replay.ttft_ms.p99, 18.0);
        assert_near(replay.worst_gap_ms, 37.0);
        assert_near(replay.page_limited_share, 22.0 / 66.0);
        let (makespan, ttft) = report.ratios(replay).unwrap();
        assert_near(makespan, 66.0 / 72.0);
        assert!(ttft < 1.0);
    }

    #[test]
    fn every_rule_serves_all_and_what_cannot_fit_is_left_out() {
        let all = report(12);
        assert_eq!(all.num_left_out, 0);
        for rule in &RULES {
            let replay = all.replay(rule.name).unwrap();
            assert_eq!((replay.num_finished, replay.num_failed), (2, 0));
            assert!(all.to_string().contains(rule.name));
        }
        assert_eq!(all.to_json()["rules"][0]["num_finished"], 2);
        let none = report(6);
        assert_eq!(none.num_left_out, 2);
        assert_eq!(none.replays[0].num_finished, 0);
    }
}
