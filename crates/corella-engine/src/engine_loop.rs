//! The loop of the engine's thread: takes commands, has the executor compute steps, and emits outputs.

pub(crate) mod block_feed;
pub(crate) mod in_flight;
pub(crate) mod spill_thread;

use std::collections::HashMap;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use corella_core::{BatchOutput, KvEvent, KvFact, RequestId, Scheduler, StepId};
use corella_model::{Executor, ExecutorError};

use crate::draft::drafter::Drafter;
use crate::draft::head_drafter::HeadDrafter;
use crate::kv_disk::KvDisk;
use crate::log::panic_message::panic_message;
use crate::log::step_log::StepLog;
use crate::mask::mask_table::MaskTable;
use crate::request::command::Command;
use crate::request::stream_sender::StreamSender;
use crate::state::engine_error::ResetError;
use crate::state::shared::Shared;
use crate::state::stream_event::StreamEvent;
use crate::wake::doorbell::WakeReceiver;
use crate::wake::feed::Feed;
use crate::watch::engine_snapshot::{EngineSnapshot, MAX_CELLS, MAX_REQUESTS};
use crate::watch::engine_watch::WatchEnd;
use block_feed::BlockFeed;
use in_flight::InFlight;
use spill_thread::SpillThread;

/// Moves data between callers, scheduler and executor, and decides nothing. Every decision about
/// tokens belongs in the scheduler.
pub(crate) struct EngineLoop {
    pub(crate) scheduler: Scheduler,
    pub(crate) executor: Box<dyn Executor>,
    /// `None` without a draft model or a draft head, or after the model or head has failed.
    pub(crate) drafter: Option<DraftSource>,
    pub(crate) commands: Receiver<Command>,
    pub(crate) streams: HashMap<RequestId, StreamSender>,
    /// Rings for commands, returned steps, ended copies, and room in a feed.
    pub(crate) wake_receiver: WakeReceiver,
    pub(crate) kv_events: Feed<KvEvent>,
    pub(crate) kv_facts: Feed<KvFact>,
    pub(crate) block_feed: BlockFeed,
    /// `None` if no request may keep its KV in host memory.
    pub(crate) spill_thread: Option<SpillThread>,
    /// `None` without a disk for blocks.
    pub(crate) kv_disk: Option<KvDisk>,
    pub(crate) masks: MaskTable,
    /// The last submitted step, while it waits for its masks.
    pub(crate) unsampled: Option<StepId>,
    pub(crate) in_flight: InFlight,
    /// `None` without a watch.
    pub(crate) watch: Option<WatchEnd>,
    pub(crate) step_log: StepLog,
    pub(crate) shared: Arc<Shared>,
}

/// The source of guessed tokens for steps to check.
pub(crate) enum DraftSource {
    Model(Box<Drafter>),
    /// The served model's own draft head.
    Head(HeadDrafter),
}

/// The reason for the end of the loop.
pub(crate) enum Stopped {
    Asked,
    Lost(String),
}

enum Event {
    Command(Command),
    /// A subscriber has room, a copy has ended, or a deadline has come.
    Nothing,
    StepReturned(BatchOutput),
    StepFailed {
        step: StepId,
        reason: String,
    },
}

/// Further commands are for the next round.
const MAX_COMMANDS_PER_ROUND: usize = 4096;

impl EngineLoop {
    pub(crate) fn run(&mut self) -> Result<Infallible, Stopped> {
        loop {
            // Everything that rings is checked after this, so that no event is missed.
            self.wake_receiver.clear();
            self.drain_commands()?;
            self.take_ended_copies();
            self.take_made_masks()?;
            self.drive_step()?;
            self.forward_outputs();
            self.show_watcher();
            match self.next_event()? {
                Event::Command(command) => self.handle_command(command)?,
                Event::Nothing => {}
                Event::StepReturned(output) => self.handle_step_returned(&output),
                Event::StepFailed { step, reason } => self.handle_step_failed(step, &reason),
            }
        }
    }

    /// Handles the commands that have arrived by now. The limit keeps callers from delaying the next step for ever.
    fn drain_commands(&mut self) -> Result<(), Stopped> {
        for _ in 0..MAX_COMMANDS_PER_ROUND {
            let Ok(command) = self.commands.try_recv() else {
                break;
            };
            self.handle_command(command)?;
        }
        Ok(())
    }

    fn take_ended_copies(&mut self) {
        if let Some(spill_thread) = &mut self.spill_thread {
            spill_thread.take_ended(&mut self.scheduler);
            self.check_invariants();
        }
        if let Some(disk) = &mut self.kv_disk {
            disk.take_reports(&mut self.scheduler, self.shared.now_us());
            self.check_invariants();
        }
    }

    /// Takes the finished masks. If a step has all of its masks now, lets the step draw its tokens.
    fn take_made_masks(&mut self) -> Result<(), Stopped> {
        self.masks.take_made(&mut self.scheduler);
        if !self.masks.is_awaiting()
            && let Some(step) = self.unsampled.take()
        {
            self.sample(step)?;
        }
        Ok(())
    }

    /// Plans and submits steps up to the limit of steps in flight. The executor computes a step while its masks are
    /// being made. The next step is planned when the masks are there.
    fn drive_step(&mut self) -> Result<(), Stopped> {
        if self.masks.is_awaiting() {
            // Deadlines do not wait for masks.
            self.scheduler.note_time(self.shared.now_us());
            return Ok(());
        }
        self.draft();
        while !self.masks.is_awaiting()
            && let Some(batch) = self.scheduler.schedule(self.shared.now_us())
        {
            let batch = Arc::new(batch);
            self.step_log.push(batch.clone());
            self.in_flight.push(batch.clone());
            let submitted =
                self.call_executor(batch.step, |executor| executor.submit(batch.clone()))?;
            if let Err(reason) = submitted {
                self.in_flight.fail_newest(reason);
                continue;
            }
            let in_flight = &self.in_flight;
            self.masks.ask(&batch, |slot| in_flight.request_of(slot));
            match self.masks.is_awaiting() {
                true => self.unsampled = Some(batch.step),
                false => self.sample(batch.step)?,
            }
        }
        Ok(())
    }

    /// Lets the newest step draw its tokens.
    fn sample(&mut self, step: StepId) -> Result<(), Stopped> {
        let masks = self.masks.masks();
        let sampled = self.call_executor(step, |executor| executor.sample(step, masks))?;
        if let Err(reason) = sampled {
            self.in_flight.fail_newest(reason);
        }
        Ok(())
    }

    /// Asks the draft model, or the draft head, to guess tokens for the next step to check. Guesses are optional: if
    /// the draft model or head fails, requests continue without it.
    fn draft(&mut self) {
        let Some(drafter) = &mut self.drafter else {
            return;
        };
        let requests = self.scheduler.draft_requests();
        if requests.is_empty() {
            return;
        }
        let (drafted, subject) = match drafter {
            DraftSource::Model(drafter) => (drafter.draft(&requests), "model"),
            DraftSource::Head(drafter) => {
                let drafted = drafter.draft(&mut *self.executor, &requests);
                (drafted, "head")
            }
        };
        match drafted {
            Ok(drafts) => {
                for (request, drafts) in drafts {
                    self.scheduler.give_drafts(request, drafts);
                }
            }
            Err(reason) => {
                tracing::warn!(reason, "the draft {subject} has failed; speculation stops");
                self.drafter = None;
            }
        }
    }

    fn forward_outputs(&mut self) {
        let scheduler = &mut self.scheduler;
        if let Some(spill_thread) = &mut self.spill_thread {
            spill_thread.forward_tasks(scheduler);
        }
        self.kv_facts.forward(|| scheduler.poll_kv_fact());
        if !self.kv_facts.has_subscriber() {
            self.let_go_of_exports();
        }
        let now_us = self.shared.now_us();
        if let Some(disk) = &mut self.kv_disk {
            disk.store_next(&mut self.scheduler, now_us);
        }
        self.block_feed
            .forward(&mut self.scheduler, self.kv_disk.as_ref(), now_us);
        // The counters come before the outputs: a caller that sees its request end also sees the counts after it.
        let stats = self.scheduler.stats();
        self.shared.lock().stats.scheduler = stats;
        while let Some(output) = self.scheduler.poll_output() {
            let id = output.request;
            let finished = output.finish.is_some();
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.send(StreamEvent::Output(output));
            }
            if finished {
                self.streams.remove(&id);
                self.masks.remove(id);
            }
        }
        let scheduler = &mut self.scheduler;
        if self.kv_events.forward(|| scheduler.poll_kv_event()) {
            scheduler.unwatch_kv();
        }
    }

    /// Makes a snapshot if the watcher has asked for one.
    fn show_watcher(&mut self) {
        let Some(watch) = &mut self.watch else {
            return;
        };
        if watch.is_abandoned() {
            self.watch = None;
        } else if watch.is_due() {
            let mut stats = self.shared.lock().stats.clone();
            stats.kv_disk = self.kv_disk.as_ref().map(|disk| disk.tier().stats());
            let snapshot = EngineSnapshot {
                time: self.shared.now(),
                stats,
                steps: watch.take_steps(),
                requests: self.scheduler.request_views(MAX_REQUESTS),
                page_map: self.scheduler.page_map(MAX_CELLS),
            };
            watch.give(snapshot);
        }
    }

    /// Releases all exported pages, because no subscriber can read them.
    fn let_go_of_exports(&mut self) {
        while let Some(fact) = self.scheduler.poll_kv_fact() {
            match fact {
                KvFact::ExportEnded { request, .. } | KvFact::LeaseEnded { request } => {
                    self.scheduler.release_hold(request);
                }
                KvFact::Exported { .. } | KvFact::Declined { .. } => {}
            }
        }
    }

    /// The only place where the loop sleeps: until a command arrives, the step in flight returns, a subscriber has
    /// room, a copy to or from host memory ends, or the scheduler's next deadline.
    fn next_event(&mut self) -> Result<Event, Stopped> {
        if let Some(event) = self.poll_event()? {
            return Ok(event);
        }
        let is_idle = self.in_flight.oldest().is_none();
        if is_idle && !self.streams.is_empty() && !self.scheduler.waits_for_kv() {
            return Err(Stopped::Lost(format!(
                "{} requests are left, but the scheduler plans no step",
                self.streams.len()
            )));
        }
        let timeout = self.scheduler.poll_deadline().map(|deadline_us| {
            Duration::from_micros(deadline_us.saturating_sub(self.shared.now_us()))
        });
        self.wake_receiver.wait(timeout);
        Ok(self.poll_event()?.unwrap_or(Event::Nothing))
    }

    /// Returns the oldest step in flight if it has returned, or else the next command, if any.
    fn poll_event(&mut self) -> Result<Option<Event>, Stopped> {
        if let Some(event) = self.take_returned()? {
            return Ok(Some(event));
        }
        match self.commands.try_recv() {
            Ok(command) => Ok(Some(Event::Command(command))),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Stopped::Asked),
        }
    }

    fn take_returned(&mut self) -> Result<Option<Event>, Stopped> {
        let Some(oldest) = self.in_flight.oldest() else {
            return Ok(None);
        };
        let step = oldest.batch.step;
        let returned = match oldest.failure.take() {
            Some(reason) => Err(reason),
            None => match self.call_executor(step, |executor| executor.try_wait())? {
                Ok(None) => return Ok(None),
                Ok(Some(output)) => Ok(output),
                Err(reason) => Err(reason),
            },
        };
        let ended = self.in_flight.pop();
        if let Some(watch) = &mut self.watch
            && let Some((batch, step_time)) = ended
            && returned.is_ok()
        {
            let num_prefill_tokens = self.scheduler.num_prefill_tokens(step);
            watch.note_step(&batch, num_prefill_tokens, self.shared.now(), step_time);
        }
        // A step may fail before it has drawn its tokens.
        self.unsampled.take_if(|unsampled| *unsampled == step);
        match returned {
            Err(reason) => Ok(Some(Event::StepFailed { step, reason })),
            Ok(output) if output.step == step => Ok(Some(Event::StepReturned(output))),
            Ok(output) => Err(Stopped::Lost(format!(
                "the executor returned step {} instead of step {step}",
                output.step
            ))),
        }
    }

    // Long: one arm for each command.
    fn handle_command(&mut self, command: Command) -> Result<(), Stopped> {
        match command {
            Command::Add {
                requests,
                senders,
                constraint,
                is_accepted,
            } => {
                if let Some(disk) = &mut self.kv_disk
                    && let Some(request) = requests.first()
                {
                    let now_us = self.shared.now_us();
                    self.scheduler.note_time(now_us);
                    disk.begin_fetch(request, &mut self.scheduler, now_us);
                }
                let ids: Vec<_> = requests.iter().map(|request| request.id).collect();
                if let Some(constraint) = &constraint {
                    for request in &requests {
                        self.masks.insert(request, constraint);
                    }
                }
                let added = match is_accepted {
                    true => self.scheduler.add_accepted_requests(requests),
                    false => self.scheduler.add_requests(requests),
                };
                match added {
                    Ok(()) => {
                        for (id, mut sender) in ids.into_iter().zip(senders) {
                            sender.send(StreamEvent::Accepted);
                            self.streams.insert(id, sender);
                        }
                    }
                    Err(error) => {
                        for (id, mut sender) in ids.into_iter().zip(senders) {
                            self.masks.remove(id);
                            sender.send(StreamEvent::Refused(error.clone()));
                        }
                    }
                }
            }
            Command::Reserve {
                request,
                timeout,
                mut sender,
                constraint,
                reservation,
            } => {
                let id = request.id;
                if let Some(constraint) = &constraint {
                    self.masks.insert(&request, constraint);
                }
                let deadline_us = self.shared.now_us() + timeout.as_micros() as u64;
                match self.scheduler.reserve(*request, deadline_us) {
                    Ok(reserved) => {
                        // The caller reads the reservation only after `Accepted`.
                        let _ = reservation.set(reserved);
                        sender.send(StreamEvent::Accepted);
                        self.streams.insert(id, sender);
                    }
                    Err(error) => {
                        self.masks.remove(id);
                        sender.send(StreamEvent::Refused(error));
                    }
                }
            }
            Command::Scheduler(call) => {
                call(&mut self.scheduler, self.shared.now_us());
                self.check_invariants();
            }
            Command::SubscribeKvFacts(subscriber) => self.kv_facts.subscribe(subscriber),
            Command::ReleaseBlocks { id, reply } => {
                let now_us = self.shared.now_us();
                let has_lived = self.block_feed.release(id, &mut self.scheduler, now_us);
                let _ = reply.send(has_lived);
                self.check_invariants();
            }
            Command::BringBlocks { list, reply } => {
                if let Some(disk) = &mut self.kv_disk {
                    let now_us = self.shared.now_us();
                    self.scheduler.note_time(now_us);
                    disk.bring(list, reply, &mut self.scheduler, now_us);
                }
                self.check_invariants();
            }
            Command::SubscribeBlockFacts(subscriber) => {
                let now_us = self.shared.now_us();
                self.block_feed
                    .subscribe(subscriber, &mut self.scheduler, now_us);
            }
            Command::SubscribeCopyOffers(subscriber) => {
                self.scheduler.offer_copies();
                self.block_feed.subscribe_offers(subscriber);
            }
            Command::SubscribeKvEvents { salt, subscriber } => {
                self.scheduler.watch_kv(salt);
                self.kv_events.subscribe(subscriber);
            }
            Command::ResetPrefixCache(reply) => {
                if let Some(disk) = &mut self.kv_disk {
                    disk.end_copy(&mut self.scheduler, self.shared.now_us());
                }
                let result = self.scheduler.reset_prefix_cache();
                let _ = reply.send(result.map_err(|_| ResetError::Busy));
            }
            Command::StoreCache(reply) => {
                if let Some(disk) = &mut self.kv_disk {
                    disk.store_all(reply);
                }
            }
            Command::Watch(end) => self.watch = Some(end),
            Command::Stop => return Err(Stopped::Asked),
        }
        Ok(())
    }

    fn handle_step_returned(&mut self, output: &BatchOutput) {
        self.scheduler.update_from_output(output);
        self.check_invariants();
    }

    fn handle_step_failed(&mut self, step: StepId, reason: &str) {
        tracing::error!(%step, reason, "a step failed; its requests end with an error");
        self.shared.lock().stats.num_failed_steps += 1;
        self.scheduler.handle_step_failed(step, reason);
        self.check_invariants();
    }

    fn check_invariants(&self) {
        if cfg!(debug_assertions) {
            self.scheduler.check_invariants();
            if let Some(DraftSource::Model(drafter)) = &self.drafter {
                drafter.check_invariants();
            }
        }
    }

    /// Calls the executor. The inner error is one failed step, the outer one a lost executor. A panic in the executor
    /// fails only that step. The executor is used again, because its contract is to be ready for further steps after a
    /// failed one.
    fn call_executor<T>(
        &mut self,
        step: StepId,
        call: impl FnOnce(&mut dyn Executor) -> Result<T, ExecutorError>,
    ) -> Result<Result<T, String>, Stopped> {
        match catch_unwind(AssertUnwindSafe(|| call(&mut *self.executor))) {
            Ok(Ok(value)) => Ok(Ok(value)),
            Ok(Err(ExecutorError::StepFailed {
                step: failed,
                reason,
            })) if failed == step => Ok(Err(reason)),
            Ok(Err(error)) => Err(Stopped::Lost(error.to_string())),
            Err(panic) => {
                let reason = panic_message(&*panic);
                self.step_log
                    .dump(&format!("step {step} panicked: {reason}"));
                Ok(Err(reason))
            }
        }
    }
}
