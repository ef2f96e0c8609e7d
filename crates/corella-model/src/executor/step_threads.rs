//! The caller's side of an executor whose steps run in threads of their own.

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use corella_core::BatchOutput;

use crate::executor::{CallerWaker, StepWaker};
use crate::{DeviceError, ExecutorError};

/// The number of commands or results that a queue holds. Steps in flight (`SchedulerConfig::max_inflight_steps`) need
/// fewer entries: a step has a few commands and one result.
pub const STEP_QUEUE_LEN: usize = 64;

/// A command to the first of the threads.
pub trait StepCommand: Send + 'static {
    /// Asks for a warm-up, whose result is sent to `reply`.
    fn warm_up(reply: SyncSender<Result<(), String>>) -> Self;

    /// Ends the threads.
    fn close() -> Self;
}

/// A step's result, on its way to the caller.
pub type StepResult = Result<BatchOutput, ExecutorError>;

/// The threads of an executor, and the channels to them. Dropping this value closes the channels and joins the threads.
pub struct StepThreads<C: StepCommand> {
    commands: SyncSender<C>,
    results: Receiver<StepResult>,
    waker: Arc<OnceLock<StepWaker>>,
    threads: Vec<JoinHandle<()>>,
}

impl<C: StepCommand> StepThreads<C> {
    /// Makes the channels, and no threads yet. Returns the threads' ends of both channels.
    pub fn new() -> (Self, Receiver<C>, SyncSender<StepResult>) {
        let (commands, receiver) = sync_channel(STEP_QUEUE_LEN);
        let (sender, results) = sync_channel(STEP_QUEUE_LEN);
        let threads = Self {
            commands,
            results,
            waker: Arc::default(),
            threads: Vec::new(),
        };
        (threads, receiver, sender)
    }

    /// Another sender of commands.
    pub fn commands(&self) -> SyncSender<C> {
        self.commands.clone()
    }

    /// The waker of the caller. The thread that sends results owns it, and must drop it after the sender of results.
    pub fn waker(&self) -> CallerWaker {
        CallerWaker(Arc::clone(&self.waker))
    }

    pub fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), DeviceError> {
        let thread = std::thread::Builder::new().name(String::from(name));
        let thread = thread.spawn(run);
        let thread = thread
            .map_err(|error| DeviceError(format!("cannot start the executor's threads: {error}")));
        self.threads.push(thread?);
        Ok(())
    }

    pub fn send(&self, command: C) -> Result<(), ExecutorError> {
        self.commands.send(command).map_err(|_| lost())
    }

    pub fn warm_up(&self) -> Result<(), ExecutorError> {
        let (sender, receiver) = sync_channel(1);
        self.send(C::warm_up(sender))?;
        let result = receiver.recv().map_err(|_| lost())?;
        result.map_err(|reason| ExecutorError::Lost { reason })
    }

    pub fn wait(&self) -> StepResult {
        self.results.recv().unwrap_or_else(|_| Err(lost()))
    }

    pub fn try_wait(&self) -> Result<Option<BatchOutput>, ExecutorError> {
        match self.results.try_recv() {
            Ok(result) => result.map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(lost()),
        }
    }

    pub fn set_waker(&self, waker: StepWaker) {
        assert!(self.waker.set(waker).is_ok(), "an executor has one waker");
    }
}

impl<C: StepCommand> Drop for StepThreads<C> {
    fn drop(&mut self) {
        // Sending fails if the first thread has ended. The other threads then end, too.
        let _ = self.commands.send(C::close());
        for thread in self.threads.drain(..) {
            // A panic of the thread has been reported as a lost executor.
            let _ = thread.join();
        }
    }
}

fn lost() -> ExecutorError {
    let reason = String::from("the executor's thread has ended");
    ExecutorError::Lost { reason }
}
