//! The engine's handle, which callers use to submit requests, observe, drain and stop.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use corella_core::{
    ConfigError, KvEvent, KvFact, Namespace, Request, RequestId, Scheduler, SchedulerConfig,
    Speculation, TokenId,
};
use corella_model::{Adapters, Executor, ExecutorError, KvPages};
use crossbeam_channel::Sender;

use crate::adapter::AdapterIndex;
use crate::draft::drafter::{DraftModel, Drafter};
use crate::draft::head_drafter::HeadDrafter;
use crate::engine_loop::block_feed::BlockFeed;
use crate::engine_loop::in_flight::InFlight;
use crate::engine_loop::spill_thread::SpillThread;
use crate::engine_loop::{DraftSource, EngineLoop, Stopped};
use crate::exchange::block_exchange::BlockExchange;
use crate::exchange::kv_exchange::{KvExchange, Receipt};
use crate::kv_disk::{DiskEvents, KvDisk, KvDiskConfig, Tier};
use crate::log::panic_message::panic_message;
use crate::log::step_log::StepLog;
use crate::mask::mask_table::MaskTable;
use crate::request::block_fact::BlockFact;
use crate::request::command::{Command, CommandSender};
use crate::request::submission::Submission;
use crate::request::token_stream::{TokenStream, token_stream};
use crate::state::engine_error::{EngineError, PinPrefixError, ResetError, SubmitError};
use crate::state::engine_stats::EngineStats;
use crate::state::shared::{EngineState, Entry, Inner, Shared};
use crate::state::stream_event::StreamEvent;
use crate::state::watchdog::Watchdog;
use crate::wake::doorbell::{doorbell, loop_channel};
use crate::wake::feed::{Feed, FeedReader, subscription};
use crate::watch::engine_watch::{EngineWatch, watch};

#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub scheduler: SchedulerConfig,
    /// A step that runs longer than this is reported in the log.
    pub step_timeout: Duration,
    /// A step that runs longer than this counts as hung for ever, and the engine is lost.
    pub step_deadline: Duration,
    /// The number of batches kept for a dump after a panic.
    pub step_log_len: usize,
    /// The file of that dump. Each dump replaces the previous one.
    pub step_log_path: PathBuf,
    /// A disk that keeps blocks of the prefix cache.
    pub kv_disk: Option<KvDiskConfig>,
}

impl EngineConfig {
    pub fn new(scheduler: SchedulerConfig) -> Self {
        let file = format!("corella-steps-{}.log", std::process::id());
        Self {
            scheduler,
            step_timeout: Duration::from_secs(30),
            step_deadline: Duration::from_secs(300),
            step_log_len: 64,
            step_log_path: std::env::temp_dir().join(file),
            kv_disk: None,
        }
    }
}

/// A handle to the engine, which runs one model. Clones share one engine. The engine stops when its last handle and its
/// last stream are dropped.
#[derive(Clone)]
pub struct Engine {
    commands: CommandSender,
    shared: Arc<Shared>,
    step_timeout: Duration,
    kv_pages: Arc<dyn KvPages>,
    adapters: Option<Arc<dyn Adapters>>,
    served_adapters: Arc<AdapterIndex>,
    kv_disk: Option<Arc<Tier>>,
}

impl Engine {
    /// Starts an engine, and returns when the executor is warm and the engine takes requests.
    pub fn start(config: EngineConfig, executor: Box<dyn Executor>) -> Result<Self, EngineError> {
        Self::start_with(config, executor, None)
    }

    /// Starts an engine with a draft model. `config.scheduler.speculation` must ask for one.
    pub fn start_with_draft_model(
        config: EngineConfig,
        executor: Box<dyn Executor>,
        draft_model: DraftModel,
    ) -> Result<Self, EngineError> {
        Self::start_with(config, executor, Some(draft_model))
    }

    // Long: makes the parts of an engine, each after the parts that it needs.
    fn start_with(
        config: EngineConfig,
        mut executor: Box<dyn Executor>,
        draft_model: Option<DraftModel>,
    ) -> Result<Self, EngineError> {
        let mut scheduler =
            Scheduler::new(config.scheduler.clone()).map_err(EngineError::Config)?;
        let layout = executor.kv_layout();
        let limits = &config.scheduler;
        if (layout.num_pages, layout.page_size) != (limits.num_pages, limits.page_size) {
            return Err(EngineError::KvLayout {
                layout,
                num_pages: limits.num_pages,
                page_size: limits.page_size,
            });
        }
        if layout.groups != limits.kv_groups {
            let text = format!(
                " are {:?}, and the executor has {:?}",
                limits.kv_groups, layout.groups
            );
            return Err(EngineError::Config(ConfigError::new("kv_groups", text)));
        }
        let is_drafting = matches!(limits.speculation, Speculation::Draft { .. });
        if is_drafting != (draft_model.is_some() || executor.has_draft_head()) {
            return Err(EngineError::Config(ConfigError::new(
                "speculation",
                " by drafts needs a draft model or a draft head, and the reverse",
            )));
        }
        let max_live_requests = limits
            .max_queued_requests
            .saturating_add(limits.max_num_seqs);
        if max_live_requests > MAX_LIVE_REQUESTS {
            let text = format!(" together may be at most {MAX_LIVE_REQUESTS}");
            let error = ConfigError::new("max_queued_requests", " and ").then("max_num_seqs", text);
            return Err(EngineError::Config(error));
        }
        // Twice the scheduler's limit: requests that were aborted, or that the scheduler will refuse, count as live
        // until the loop has handled them. Meanwhile they must not exclude others.
        let max_live_requests = 2 * max_live_requests as usize;

        let shared = Arc::new(Shared::new(config.scheduler, max_live_requests));
        // Between two drains, the channel may hold an add and an abort for each live request, and an abort for each
        // request that has ended since the first of these drains. The channel has room for all of them, so submitting
        // and aborting never block. A driver of loads may fill the channel. The driver then waits for the loop, and the
        // loop never waits for a driver.
        let (doorbell, wake_receiver) = doorbell();
        let (sender, commands) = loop_channel(4 * max_live_requests + 64, doorbell.clone());
        let kv_pages = executor.kv_pages();
        let adapters = executor.adapters();
        let step_returned = doorbell.clone();
        executor.set_waker(Arc::new(move || step_returned.ring()));
        let spill_thread = match shared.limits().max_spilled_pages {
            0 => None,
            max_pages => {
                let thread = SpillThread::start(kv_pages.clone(), max_pages, doorbell.clone());
                Some(thread.map_err(EngineError::Thread)?)
            }
        };
        let kv_disk = match &config.kv_disk {
            None => None,
            Some(disk) => {
                check_disk_limits(shared.limits()).map_err(EngineError::Config)?;
                let pages = kv_pages.clone();
                let disk = KvDisk::start(disk, pages, &mut scheduler, doorbell.clone());
                Some(disk.map_err(EngineError::Thread)?)
            }
        };
        let tier = kv_disk.as_ref().map(|disk| disk.tier().clone());
        let masks = MaskTable::start(doorbell.clone());
        let masks = masks.map_err(EngineError::Thread)?;
        let watchdog = |subject| {
            let (timeout, deadline) = (config.step_timeout, config.step_deadline);
            Watchdog::start(subject, timeout, deadline, shared.clone()).map_err(EngineError::Thread)
        };
        let drafter = match draft_model {
            Some(model) => {
                let drafter = Drafter::new(model, watchdog("step of the draft model")?);
                Some(DraftSource::Model(Box::new(drafter)))
            }
            None if is_drafting => {
                let drafter = HeadDrafter::new(watchdog("round of the draft head")?);
                Some(DraftSource::Head(drafter))
            }
            None => None,
        };
        let watchdog = watchdog("step")?;
        let engine_loop = EngineLoop {
            scheduler,
            executor,
            drafter,
            commands,
            streams: HashMap::new(),
            wake_receiver,
            kv_events: Feed::default(),
            kv_facts: Feed::default(),
            block_feed: BlockFeed::default(),
            spill_thread,
            kv_disk,
            masks,
            unsampled: None,
            in_flight: InFlight::new(watchdog, shared.clone()),
            watch: None,
            step_log: StepLog::new(config.step_log_len, config.step_log_path),
            shared: shared.clone(),
        };
        let (ready, warm) = crossbeam_channel::bounded(1);
        thread::Builder::new()
            .name("corella-engine".to_owned())
            .spawn(move || run_thread(engine_loop, &ready))
            .map_err(EngineError::Thread)?;
        match warm.recv() {
            Ok(Ok(())) => Ok(Self {
                commands: sender,
                shared,
                step_timeout: config.step_timeout,
                kv_pages,
                adapters,
                served_adapters: Arc::new(AdapterIndex::new(tier.clone())),
                kv_disk: tier,
            }),
            Ok(Err(error)) => Err(EngineError::WarmUp(error)),
            Err(_) => Err(EngineError::WarmUp(ExecutorError::Lost {
                reason: shared.lost_reason(),
            })),
        }
    }

    /// Submits a request and returns a stream for each choice: all of them or none. Never blocks.
    pub fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.submit_as(submission, Entry::New)
    }

    /// Submits under the conditions of `entry`. Never blocks.
    pub fn submit_as(
        &self,
        submission: Submission,
        entry: Entry,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        let num_choices = submission.num_choices;
        let constraint = submission.constraint.clone();
        let adapter = submission.adapter.clone();
        let first = self.take_in(submission, entry)?;
        let mut requests = Vec::with_capacity(num_choices as usize);
        let mut senders = Vec::with_capacity(num_choices as usize);
        let mut streams = Vec::with_capacity(num_choices as usize);
        for choice in 0..num_choices {
            let mut request = first.clone();
            request.id.0 += u64::from(choice);
            request.sampling.choice += choice;
            let (mut sender, stream) =
                token_stream(&request, self.commands.clone(), self.shared.clone());
            sender.hold(adapter.clone());
            requests.push(request);
            senders.push(sender);
            streams.push(stream);
        }
        self.commands.send(Command::Add {
            requests,
            senders,
            constraint,
            is_accepted: entry == Entry::Accepted,
        });
        Ok(streams)
    }

    /// Reserves KV pages for one choice whose prompt another node computes. The KV must arrive within `timeout`. The
    /// stream's first event comes within milliseconds, and outputs come after [`KvExchange::handle_kv_arrived`]. If the
    /// stream ends or is dropped before all KV has arrived, the caller still has to call [`KvExchange::handle_kv_lost`]
    /// when all writes to the pages have ended.
    pub fn reserve(
        &self,
        submission: Submission,
        timeout: Duration,
    ) -> Result<Receipt, SubmitError> {
        let submission = Submission {
            num_choices: 1,
            ..submission
        };
        let constraint = submission.constraint.clone();
        let adapter = submission.adapter.clone();
        let request = self.take_in(submission, Entry::New)?;
        let (mut sender, stream) =
            token_stream(&request, self.commands.clone(), self.shared.clone());
        let adapter_name = adapter.as_ref().map(|adapter| adapter.name().clone());
        sender.hold(adapter);
        let reservation = Arc::new(OnceLock::new());
        self.commands.send(Command::Reserve {
            request: Box::new(request),
            timeout,
            sender,
            constraint,
            reservation: reservation.clone(),
        });
        Ok(Receipt {
            stream,
            adapter: adapter_name,
            reservation,
        })
    }

    /// Returns the handle for reports on KV that other nodes bring or fetch.
    pub fn kv_exchange(&self) -> KvExchange {
        KvExchange {
            commands: self.commands.clone(),
        }
    }

    /// Subscribes to facts about requests that export KV. A new reader ends the previous subscription. Without a
    /// reader, exported pages are released together with their request.
    pub fn subscribe_kv_facts(&self) -> FeedReader<KvFact> {
        let (subscriber, facts) = subscription(MAX_UNREAD_KV_NEWS, self.commands.doorbell());
        self.commands.send(Command::SubscribeKvFacts(subscriber));
        facts
    }

    /// Returns the handle that holds blocks for other nodes and fetches blocks from them.
    pub fn block_exchange(&self) -> BlockExchange {
        BlockExchange {
            commands: self.commands.clone(),
            shared: self.shared.clone(),
            disk: self.kv_disk.clone(),
        }
    }

    /// Subscribes to the transfers that the driver of fetches has to stop. A new reader ends the previous subscription.
    /// Without a reader, blocks are released when their hold ends.
    pub fn subscribe_block_facts(&self) -> FeedReader<BlockFact> {
        let (subscriber, facts) = subscription(MAX_UNREAD_KV_NEWS, self.commands.doorbell());
        self.commands.send(Command::SubscribeBlockFacts(subscriber));
        facts
    }

    /// Subscribes to the paths of blocks that are worth a copy outside of this process: a request used them again, or
    /// they are next to be evicted. Each path has a namespace and tokens. A new reader ends the previous subscription.
    /// A disk takes these paths itself, so an engine with a disk has none left for a reader.
    pub fn subscribe_copy_offers(&self) -> FeedReader<(Namespace, Vec<TokenId>)> {
        let (subscriber, offers) = subscription(1, self.commands.doorbell());
        self.commands.send(Command::SubscribeCopyOffers(subscriber));
        offers
    }

    /// Checks a submission and counts its choices as live. Returns the request of the first choice.
    fn take_in(&self, submission: Submission, entry: Entry) -> Result<Request, SubmitError> {
        let num_choices = submission.num_choices;
        let first = self.checked(submission)?;
        self.shared.count_live(num_choices, entry)?;
        Ok(first)
    }

    /// Checks a submission against the fixed limits, without submitting it.
    pub fn check(&self, submission: Submission) -> Result<(), SubmitError> {
        self.checked(submission).map(drop)
    }

    fn checked(&self, submission: Submission) -> Result<Request, SubmitError> {
        let id = RequestId(self.shared.take_ids(submission.num_choices));
        let first = submission.into_request(id, self.shared.now_us());
        let checked = self.shared.limits().check_request(&first);
        checked.map_err(SubmitError::Refused)?;
        Ok(first)
    }

    /// Evicts all cached prefixes except the pinned ones. Blocks until the loop has answered.
    pub fn reset_prefix_cache(&self) -> Result<(), ResetError> {
        let (reply, answer) = crossbeam_channel::bounded(1);
        self.commands.send(Command::ResetPrefixCache(reply));
        answer
            .recv()
            .unwrap_or_else(|_| Err(ResetError::Lost(self.shared.lost_reason())))
    }

    /// Resets the prefix cache, and erases the blocks on the disk.
    pub fn reset_prefix_cache_and_tiers(&self) -> Result<(), ResetError> {
        self.reset_prefix_cache()?;
        if let Some(disk) = &self.kv_disk {
            disk.erase();
        }
        Ok(())
    }

    /// Stores the whole prefix cache on the disk, before the engine is shut down. No request may be live. Blocks for at
    /// most `limit`, and returns whether all blocks are stored.
    pub fn store_prefix_cache(&self, limit: Duration) -> bool {
        let (reply, answer) = crossbeam_channel::bounded(1);
        self.commands.send(Command::StoreCache(reply));
        answer.recv_timeout(limit).is_ok()
    }

    /// Computes a prefix and pins its full KV pages. Returns the number of newly pinned pages. Blocks until it is done.
    pub fn pin_prefix(&self, tokens: Vec<TokenId>) -> Result<usize, PinPrefixError> {
        let submission = Submission::new(tokens.clone(), 1);
        let streams = self.submit(submission).map_err(PinPrefixError::Submit)?;
        for mut stream in streams {
            while let Some(event) = stream.next_blocking() {
                if let StreamEvent::Refused(error) = event {
                    return Err(PinPrefixError::Submit(SubmitError::Refused(error)));
                }
            }
        }
        let (reply, answer) = crossbeam_channel::bounded(1);
        self.commands.send(Command::scheduler(move |scheduler, _| {
            let _ = reply.send(scheduler.pin_prefix(&Namespace::default(), &tokens));
        }));
        match answer.recv() {
            Ok(result) => result.map_err(PinPrefixError::Pin),
            Err(_) => {
                let lost = SubmitError::Lost(self.shared.lost_reason());
                Err(PinPrefixError::Submit(lost))
            }
        }
    }

    /// Subscribes to KV events, which list the full pages of the prefix cache, beginning with those cached now. `salt`
    /// seeds the page hashes and must be the same in the whole fleet. A new subscriber ends the stream of the previous
    /// one. A slow subscriber misses no event that still applies.
    pub fn subscribe_kv_events(&self, salt: u64) -> FeedReader<KvEvent> {
        let (subscriber, events) = subscription(MAX_UNREAD_KV_NEWS, self.commands.doorbell());
        self.commands
            .send(Command::SubscribeKvEvents { salt, subscriber });
        events
    }

    /// Subscribes to events of the blocks on the disk, beginning with the blocks in its file. Returns `None` if there
    /// is no disk, if there is a subscriber already, or if some layers have a window or a recurrent state: with such
    /// layers, a request cannot continue after every block.
    pub fn subscribe_disk_events(&self, salt: u64) -> Option<DiskEvents> {
        DiskEvents::subscribe(self.kv_disk.clone()?, salt)
    }

    /// Waits until the file of the disk is open and scanned, or cannot be opened. Without the wait, the first requests
    /// compute prefixes that the disk may have.
    pub fn wait_disk_opened(&self) {
        self.wait_disk_opened_for(Duration::MAX);
    }

    /// Like `wait_disk_opened`, for at most `limit`. Returns false if a disk is not open by then.
    pub fn wait_disk_opened_for(&self, limit: Duration) -> bool {
        { self.kv_disk.as_ref() }.is_none_or(|disk| disk.wait_opened(limit))
    }

    /// Whether the engine keeps blocks on a disk.
    pub fn has_disk(&self) -> bool {
        self.kv_disk.is_some()
    }

    /// Begins to watch the engine, and ends the previous watch.
    pub fn watch(&self) -> EngineWatch {
        let (watch, end) = watch(self.commands.doorbell());
        self.commands.send(Command::Watch(end));
        watch
    }

    /// The executor's KV memory, for transfers of pages.
    pub fn kv_pages(&self) -> &Arc<dyn KvPages> {
        &self.kv_pages
    }

    /// The adapters of the executor; `None` if it supports none.
    pub fn adapters(&self) -> Option<&Arc<dyn Adapters>> {
        self.adapters.as_ref()
    }

    /// The served adapters.
    pub fn served_adapters(&self) -> &Arc<AdapterIndex> {
        &self.served_adapters
    }

    pub fn limits(&self) -> &SchedulerConfig {
        self.shared.limits()
    }

    /// The counters as of the last step. Does not wait for the engine's thread.
    pub fn stats(&self) -> EngineStats {
        let mut stats = self.shared.lock().stats.clone();
        stats.kv_disk = self.kv_disk.as_ref().map(|disk| disk.stats());
        stats
    }

    pub fn state(&self) -> EngineState {
        self.shared.lock().state.clone()
    }

    /// Refuses new submissions from now on. Requests that are waiting or running still finish.
    pub fn drain(&self) {
        let mut inner = self.shared.lock();
        if inner.state == EngineState::Ready {
            inner.state = EngineState::Draining;
        }
    }

    /// Waits until every request has ended. Returns false if that takes longer than `timeout`.
    pub fn wait_idle(&self, timeout: Duration) -> bool {
        let is_busy = |inner: &Inner| inner.stats.num_live_requests > 0;
        !self.shared.wait_while(timeout, is_busy)
    }

    /// Ends every request and stops the engine's thread. Waits for the step in flight, but not for one that hangs.
    /// Returns whether the thread has stopped. Until it has, it keeps the executor's memory.
    pub fn shutdown(&self) -> bool {
        self.commands.send(Command::Stop);
        let is_stuck = { &self.shared }.wait_while(self.step_timeout, |inner| !inner.stopped);
        if is_stuck {
            tracing::error!(
                "the engine's thread has not stopped: a step, or an access to the disk, does not return"
            );
        }
        !is_stuck
    }
}

/// The most KV events or facts that may wait between the loop and a subscriber.
const MAX_UNREAD_KV_NEWS: usize = 1024;

/// The most requests that may be live, which limits the memory of the command channel.
const MAX_LIVE_REQUESTS: u32 = 1 << 16;

/// The disk holds and fetches blocks as other nodes do, so the same limits must allow it.
fn check_disk_limits(limits: &SchedulerConfig) -> Result<(), ConfigError> {
    let has_blocks = limits.enable_prefix_caching;
    match has_blocks && limits.max_served_pages > 0 && limits.max_fetched_pages > 0 {
        true => Ok(()),
        false => Err(ConfigError::new(
            "kv_disk",
            " needs prefix caching, max_served_pages and max_fetched_pages",
        )),
    }
}

/// Runs the engine's thread. At any end of the loop, every stream ends, because dropping the loop drops their senders.
fn run_thread(mut engine_loop: EngineLoop, ready: &Sender<Result<(), ExecutorError>>) {
    let shared = engine_loop.shared.clone();
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let drafter = engine_loop.drafter.as_mut();
        let mut warm_drafter = || match drafter {
            Some(DraftSource::Model(drafter)) => drafter.warm_up(),
            Some(DraftSource::Head(_)) | None => Ok(()),
        };
        let warm = engine_loop.executor.warm_up().and_then(|()| warm_drafter());
        let failed = warm
            .as_ref()
            .err()
            .map(|error| Stopped::Lost(error.to_string()));
        let _ = ready.send(warm);
        match failed {
            Some(stopped) => stopped,
            None => {
                let Err(stopped) = engine_loop.run();
                stopped
            }
        }
    }));
    let stopped = ended.unwrap_or_else(|panic| {
        Stopped::Lost(format!("its loop panicked: {}", panic_message(&*panic)))
    });
    let reason = match stopped {
        Stopped::Asked => "it was shut down".to_owned(),
        Stopped::Lost(reason) => {
            engine_loop.step_log.dump(&reason);
            reason
        }
    };
    shared.lock().state = EngineState::Lost(reason);
    drop(engine_loop);
    shared.handle_stopped();
}
