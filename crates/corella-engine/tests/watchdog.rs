//! The log about a step that hangs. The test has a binary of its own, because the log belongs to
//! the process.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corella_core::SchedulerConfig;
use corella_engine::{Engine, EngineConfig, Submission};
use corella_model::{MockConfig, MockExecutor};
use corella_test::wait_for;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_hanging_step_is_named_once_per_doubling() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();

    let mock = MockConfig::new(50, 20, 4);
    let gate = mock.gate.clone();
    gate.close();
    gate.let_through(2);
    let mut config = EngineConfig::new(SchedulerConfig::new(20, 4, 64));
    config.step_timeout = Duration::from_millis(100);
    let engine = Engine::start(config, Box::new(MockExecutor::new(mock))).unwrap();
    let mut streams = engine.submit(Submission::new(vec![1, 2, 3], 6)).unwrap();
    let id = streams[0].id();
    let reports = || -> Vec<String> {
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let lines = text
            .lines()
            .filter(|line| line.contains("has not returned"));
        lines.map(str::to_owned).collect()
    };
    // A busy machine may delay other steps, too.
    let of_step = |reports: &[String]| -> Vec<String> {
        let reports = reports.iter().filter(|line| line.contains("step=2 "));
        reports.cloned().collect()
    };
    let three = wait_for("three reports of step 2", || {
        Some(of_step(&reports())).filter(|reports| reports.len() == 3)
    });
    let mut least_s = 0.1;
    for report in three {
        for part in ["rows=1", "tokens=1", &format!("requests={id}")] {
            assert!(report.contains(part), "{report}");
        }
        let (_, seconds) = report.rsplit_once("seconds=").expect(&report);
        let seconds: f64 = seconds.trim().parse().expect(&report);
        assert!(seconds >= least_s, "{report}");
        least_s *= 2.0;
    }
    assert_eq!(engine.stats().num_slow_steps, num_slow_steps(&reports()));
    gate.open();
    while streams[0].next_blocking().is_some() {}
}

/// The number of steps in the reports.
fn num_slow_steps(reports: &[String]) -> u64 {
    let step = |line: &String| line.split(" step=").nth(1)?.split(' ').next()?.parse().ok();
    let steps: BTreeSet<u64> = reports.iter().filter_map(step).collect();
    steps.len() as u64
}
