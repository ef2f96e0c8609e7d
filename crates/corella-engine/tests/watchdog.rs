//! What the log says about a step that hangs. The test has a binary of its own, because the log
//! belongs to the process.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corella_core::{Namespace, SamplingParams, SchedulerConfig, StepId, StoppingCriteria};
use corella_engine::{Engine, EngineConfig, Submission};
use corella_model::{Fault, MockConfig, MockExecutor};

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

    let mut mock = MockConfig::new(50, 20, 4);
    // The step hangs long enough for reports after 100, 200, 400 and 800 ms.
    mock.faults = vec![(StepId(2), Fault::Hang(Duration::from_millis(1200)))];
    let mut config = EngineConfig::new(SchedulerConfig::new(20, 4, 64));
    config.step_timeout = Duration::from_millis(100);
    let engine = Engine::start(config, Box::new(MockExecutor::new(mock))).unwrap();
    let mut streams = engine
        .submit(Submission {
            prompt: vec![1, 2, 3],
            output: Vec::new(),
            exports_kv: false,
            sampling: SamplingParams::GREEDY,
            num_choices: 1,
            stopping: StoppingCriteria {
                max_tokens: Some(6),
                ..Default::default()
            },
            priority: 0,
            objectives: Default::default(),
            namespace: Namespace::default(),
            constraint: None,
            adapter: None,
            trace_id: None,
            trace: None,
        })
        .unwrap();
    let id = streams[0].id();
    while streams[0].next_blocking().is_some() {}

    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let reports: Vec<_> = text
        .lines()
        .filter(|line| line.contains("has not returned"))
        .collect();
    assert!((2..=4).contains(&reports.len()), "{text}");
    for report in reports {
        for part in ["step=2", "rows=1", "tokens=1", &format!("requests={id}")] {
            assert!(report.contains(part), "{report}");
        }
    }
    assert_eq!(engine.stats().num_slow_steps, 1);
}
