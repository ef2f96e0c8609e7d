//! `corella quantize`: runs the quantisation, with progress and a summary on standard error.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use corella_quantize::QuantizeProgress;
use corella_server::shutdown_signal;
use tokio::runtime::Runtime;

use crate::Error;
use crate::arguments::config::Quantize;

pub fn run(config: Quantize) -> Result<(), Error> {
    let start = Instant::now();
    let is_interrupted = interrupt_flag()?;
    let mut display = Display::new();
    let mut progress = |progress: QuantizeProgress| {
        display.show(progress);
        match is_interrupted.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let result = crate::quantize(&config.source, &config.out, &config.options, &mut progress);
    display.clear();
    let quantized = result?;
    let kept = match &quantized.kept[..] {
        [] => String::new(),
        [one] => format!(", {one} kept"),
        kept => format!(", {} kept", kept.len()),
    };
    let calibration = match quantized.num_calibration_tokens {
        0 => String::new(),
        number => format!(", calibrated on {number} tokens"),
    };
    eprintln!(
        "{}: {:.1} MB; {} matrices at {:.2} bits per weight{kept}{calibration}; {:.1} s",
        config.out.display(),
        quantized.num_bytes as f64 / 1e6,
        quantized.num_matrices,
        quantized.bits_per_weight,
        start.elapsed().as_secs_f64(),
    );
    Ok(())
}

/// A flag that SIGINT and SIGTERM set, so that a half-written folder is removed.
fn interrupt_flag() -> Result<Arc<AtomicBool>, Error> {
    let flag = Arc::new(AtomicBool::new(false));
    let no_thread = |error| Error::Io("installing signal handlers".to_owned(), error);
    let runtime = Runtime::new().map_err(no_thread)?;
    let seen = Arc::clone(&flag);
    let mut shutdown = runtime
        .block_on(async { shutdown_signal() })
        .map_err(no_thread)?;
    std::thread::Builder::new()
        .name("corella-interrupt".to_owned())
        .spawn(move || {
            runtime.block_on(shutdown.requested());
            seen.store(true, Ordering::Relaxed);
        })
        .map_err(no_thread)?;
    Ok(flag)
}

struct Display {
    is_shown: bool,
    drawn: Instant,
}

impl Display {
    fn new() -> Self {
        Self {
            is_shown: std::io::stderr().is_terminal(),
            drawn: Instant::now(),
        }
    }

    fn show(&mut self, progress: QuantizeProgress) {
        const INTERVAL: Duration = Duration::from_millis(200);
        if !self.is_shown || self.drawn.elapsed() < INTERVAL {
            return;
        }
        self.drawn = Instant::now();
        let share = 100.0 * progress.done as f64 / progress.total.max(1) as f64;
        eprint!(
            "\r\x1b[K{share:.0} % of {} M weights",
            progress.total / 1_000_000
        );
        // Work continues even if the progress line cannot be written.
        let _ = std::io::stderr().flush();
    }

    fn clear(&self) {
        if self.is_shown {
            eprint!("\r\x1b[K");
        }
    }
}
