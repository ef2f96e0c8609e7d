//! The thread that waits for steps, and reports their results.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use corella_core::{BatchOutput, SlotId, StepId};
use corella_model::{CallerWaker, ExecutorError, StepOutput, StepResult, StepSample, StepScore};

use crate::device::{Event, SharedDevice, Stream};
use crate::kv::KvMemory;

use super::sampling::{SamplingStep, Staging};

/// The memory of a step on the device: its uploads, and its results.
pub struct StepInFlight {
    pub sampling: SamplingStep,
    pub staging: Staging,
    pub scores: Vec<StepScore>,
    pub samples: Vec<StepSample>,
    /// The slots that drew under a mask.
    pub masked: Vec<SlotId>,
}

impl StepInFlight {
    pub fn new(sampling: SamplingStep, staging: Staging) -> Self {
        Self {
            sampling,
            staging,
            scores: Vec::new(),
            samples: Vec::new(),
            masked: Vec::new(),
        }
    }

    /// Forgets a finished step.
    pub fn clear(&mut self) {
        self.sampling.clear();
        self.staging.clear();
        self.scores.clear();
        self.samples.clear();
        self.masked.clear();
    }
}

/// A report that is due when the device has reached the report's event.
pub enum Completion {
    Step {
        step: StepId,
        event: Event,
        output: StepOutput,
        in_flight: StepInFlight,
    },
    Failed {
        error: ExecutorError,
        in_flight: StepInFlight,
    },
    WarmUp {
        event: Event,
        in_flight: StepInFlight,
    },
}

pub struct CompletionThread {
    pub device: SharedDevice,
    pub kv: Arc<KvMemory>,
    pub completions: Receiver<Completion>,
    pub free_steps: SyncSender<StepInFlight>,
    pub results: SyncSender<StepResult>,
    /// Declared after `results`, so that it is dropped later: when this thread ends, the caller is woken and finds
    /// `results` closed.
    pub waker: CallerWaker,
}

impl CompletionThread {
    /// Reports results in the calling thread, in the order of steps, until the stage has ended.
    pub fn run(self) {
        while let Ok(completion) = self.completions.recv() {
            let (result, in_flight) = match completion {
                Completion::WarmUp { event, in_flight } => {
                    // The device keeps an error, and the first step reports it.
                    let _ = self.device.synchronize(event);
                    (None, in_flight)
                }
                Completion::Failed { error, in_flight } => {
                    if let ExecutorError::StepFailed { step, .. } = &error {
                        self.kv.counter.finish(*step);
                    }
                    // Work launched before the error was found reads the step's memory.
                    if let Ok(event) = self.device.record(Stream::Compute) {
                        let _ = self.device.synchronize(event);
                    }
                    (Some(Err(error)), in_flight)
                }
                Completion::Step {
                    step,
                    event,
                    output,
                    in_flight,
                } => {
                    let done = self.device.synchronize(event);
                    self.kv.counter.finish(step);
                    let result = match done {
                        Ok(()) => Ok(output_of(output, &in_flight)),
                        Err(error) => Err(ExecutorError::Lost {
                            reason: error.to_string(),
                        }),
                    };
                    (Some(result), in_flight)
                }
            };
            let is_lost = matches!(result, Some(Err(ExecutorError::Lost { .. })));
            // If the stage has ended, it needs no memory, and the send fails.
            let _ = self.free_steps.send(in_flight);
            if let Some(result) = result {
                if self.results.send(result).is_err() || is_lost {
                    return;
                }
                self.waker.wake();
            }
        }
    }
}

/// Assembles a step's output from the device's draws.
fn output_of(mut output: StepOutput, step: &StepInFlight) -> BatchOutput {
    // SAFETY: the step's results are downloaded.
    let results = unsafe { step.sampling.results() };
    for (index, score) in step.scores.iter().enumerate() {
        let scored = results.score(index);
        output.add_score(score, scored.map_err(|error| error.to_string()));
    }
    for (index, sample) in (step.scores.len()..).zip(&step.samples) {
        let drawn = results.sample(index);
        let is_masked = step.masked.contains(&sample.slot);
        // The result is not needed: the device itself has recorded the slot's draw.
        output.add_draw(sample, drawn.map_err(|error| error.to_string()), is_masked);
    }
    output.finish()
}
