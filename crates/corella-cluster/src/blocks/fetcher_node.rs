//! The fetching side: passes facts to a [`BlockFetcher`], and carries out its actions.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use corella_core::session::{
    BlockFetchEnd, BlockFetcher, BlockOffer, FetchPace, FetcherAction, LoadConfig, LoadFailure,
    LoadKey, NodeIncarnation, RowPart, ToFetcher, ToSource, WantedBlocks,
};
use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchMedium, FetchRefusal, FetchRequest, Incarnation,
};
use corella_engine::{BlockExchange, Engine, rare_line};
use corella_model::KvGeometry;
use tokio::sync::oneshot;

use super::{FetchConfig, OTHER_END, load_config, whole_rows};
use crate::driver::{Driver, Shared};
use crate::transport::{
    BlockClient, KvReceiver, LoadFailure as RowFailure, LoadHandle, LoadRequest, LoadStatus,
    PeerAddress, session_key,
};

/// Fetches blocks of other nodes into a node's prefix cache.
pub struct FetcherNode {
    engine: Engine,
    exchange: BlockExchange,
    receiver: Arc<KvReceiver>,
    rows: RowPart,
    page_size: u32,
    config: FetchConfig,
    shared: Shared<State>,
}

pub(crate) struct State {
    end: BlockFetcher,
    fetches: HashMap<LoadKey, Fetch>,
    stats: FetchStats,
}

struct Fetch {
    source: PeerAddress,
    num_blocks: u32,
    /// The number of blocks cached here before the lookup.
    num_here: u32,
    /// The number of blocks, from the first on, that this node's memory and disk have together.
    num_on_disk: u32,
    hard_us: u64,
    grant: Option<FetchGrant>,
    rows: Option<Arc<LoadHandle>>,
    /// Tells the caller of [`fetch`](FetcherNode::fetch) how the fetch began, or that it has ended.
    starting: Option<oneshot::Sender<FetchStart>>,
}

/// How a fetch began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchStart {
    /// The fetch has begun. Requests with this prefix wait for its blocks.
    Begun,
    /// The fetch has ended before it began in the scheduler.
    Ended(BlockFetchEnd),
    /// The other node cannot be reached.
    Unreachable,
    /// Too many fetches are running.
    Busy,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchStats {
    pub num_loaded: u64,
    /// Fetches whose source had none of the blocks.
    pub num_not_found: u64,
    /// Fetches given up because computing the blocks is as quick.
    pub num_not_worth: u64,
    /// Fetches that ended because no pages were free for the blocks.
    pub num_refused: u64,
    /// Fetches that have failed, timed out or been cancelled.
    pub num_failed: u64,
    /// Blocks that were published.
    pub num_blocks: u64,
}

impl FetcherNode {
    /// Starts fetching by `receiver`, on the caller's tokio runtime.
    pub fn start(
        incarnation: Incarnation,
        engine: Engine,
        receiver: Arc<KvReceiver>,
        geometry: &KvGeometry,
        config: FetchConfig,
    ) -> Arc<Self> {
        let load_config = LoadConfig {
            lookup_us: micros(config.lookup),
            stall_us: micros(config.stall),
            ..load_config(geometry)
        };
        let end = BlockFetcher::new(load_config, incarnation);
        let node = Arc::new(Self {
            exchange: engine.block_exchange(),
            engine,
            rows: whole_rows(geometry),
            page_size: geometry.page_size,
            receiver,
            config,
            shared: Shared::new(State {
                end,
                fetches: HashMap::new(),
                stats: FetchStats::default(),
            }),
        });
        node.start_timer();
        let client = Client(Arc::downgrade(&node));
        node.receiver.load_blocks_for(Box::new(client));
        node
    }

    pub fn stats(&self) -> FetchStats {
        self.lock().stats
    }

    /// Returns the measured speed of fetches so far.
    pub fn pace(&self) -> FetchPace {
        self.lock().end.pace()
    }

    /// Returns the number of running fetches.
    pub fn num_fetches(&self) -> usize {
        self.lock().end.num_fetches()
    }

    /// Fetches the blocks of a list from another node. Requests with this prefix wait for the blocks for the duration
    /// `soft`. The fetch ends after `hard`. Returns when the scheduler knows of the fetch, or when there will be no
    /// fetch.
    pub async fn fetch(
        self: &Arc<Self>,
        list: BlockList,
        source: PeerAddress,
        soft: Duration,
        hard: Duration,
    ) -> FetchStart {
        let greeting = self.receiver.incarnation_of(&source);
        let greeting = tokio::time::timeout(self.config.greeting, greeting);
        // A stopped engine has no cache, and begins no fetch.
        let looked_up = self.exchange.look_up(list.clone());
        let (greeting, num_here) = tokio::join!(greeting, looked_up);
        let num_here = num_here.unwrap_or(0);
        let incarnation = match greeting {
            Ok(Ok(incarnation)) => incarnation,
            Ok(Err(failure)) => {
                if let RowFailure::Incompatible(what) = failure {
                    rare_line!(warn, "no cached blocks come from {source}: {what}");
                } else {
                    tracing::debug!("no blocks from {source}: {failure}");
                }
                return FetchStart::Unreachable;
            }
            Err(_) => return FetchStart::Unreachable,
        };
        let (starting, started) = oneshot::channel();
        let num_blocks = list.hashes.len() as u32;
        let num_on_disk = self.exchange.num_on_disk(&list, num_here);
        let begin = |state: &mut State, now_us: u64| {
            let hard_us = now_us.saturating_add(micros(hard));
            let request = WantedBlocks {
                source: NodeIncarnation {
                    node: OTHER_END,
                    incarnation,
                },
                list,
                num_here,
                rows: self.rows.clone(),
                soft_us: now_us.saturating_add(micros(soft)),
                hard_us,
            };
            let Some(key) = state.end.start(request, now_us) else {
                return false;
            };
            let fetch = Fetch {
                source,
                num_blocks,
                num_here,
                num_on_disk,
                hard_us,
                grant: None,
                rows: None,
                starting: Some(starting),
            };
            state.fetches.insert(key, fetch);
            true
        };
        if !self.update(&mut self.lock(), begin) {
            return FetchStart::Busy;
        }
        // A fetch reports its end before it is dropped.
        started.await.unwrap_or(FetchStart::Busy)
    }

    /// Handles the scheduler's cancellation of a fetch.
    pub fn handle_fetch_cancelled(self: &Arc<Self>, id: FetchId) {
        self.with(|end, _| end.handle_fetch_cancelled(id));
    }
}

/// The receiver's reference to the node. It is weak, because the receiver outlives the node.
struct Client(Weak<FetcherNode>);

impl BlockClient for Client {
    fn handle_answer(&self, key: LoadKey, answer: ToFetcher) {
        if let Some(node) = self.0.upgrade() {
            node.with(|end, now_us| end.handle_message(OTHER_END, key, answer, now_us));
        }
    }

    fn handle_unsent(&self, key: LoadKey) {
        if let Some(node) = self.0.upgrade() {
            node.with(|end, _| end.handle_source_lost(key));
        }
    }

    fn handle_lost(&self, source: &PeerAddress) {
        let Some(node) = self.0.upgrade() else {
            return;
        };
        let mut state = node.lock();
        let of_source = state
            .fetches
            .iter()
            .filter(|(_, fetch)| fetch.source == *source);
        let lost: Vec<_> = of_source.map(|(&key, _)| key).collect();
        node.tell(&mut state, |end, _| {
            for key in lost {
                end.handle_source_lost(key);
            }
        });
    }
}

impl Drop for FetcherNode {
    /// The scheduler keeps the pages of a fetch until it hears that nothing writes to them.
    fn drop(&mut self) {
        let state = self.shared.state_mut();
        for fetch in state.fetches.values_mut() {
            if let Some(rows) = fetch.rows.take() {
                rows.cancel();
            }
            if let Some(grant) = fetch.grant.take() {
                self.exchange.handle_fetch_ended(grant.id, FetchEnd::Lost);
            }
        }
    }
}

impl Driver for FetcherNode {
    type End = BlockFetcher;
    type State = State;

    fn shared(&self) -> &Shared<State> {
        &self.shared
    }

    fn end(state: &mut State) -> &mut BlockFetcher {
        &mut state.end
    }

    fn act(self: &Arc<Self>, state: &mut State, action: FetcherAction) {
        tracing::trace!(?action);
        let now_us = self.clock().now_us();
        match action {
            FetcherAction::Send { key, message, .. } => self.send(state, key, message),
            FetcherAction::Choose { key, num_offered } => {
                if let Some(fetch) = state.fetches.get(&key) {
                    let offer = BlockOffer {
                        num_blocks: fetch.num_blocks,
                        num_here: fetch.num_here,
                        num_offered,
                    };
                    let stats = self.engine.stats().scheduler;
                    let num_blocks = match self.config.is_forced {
                        // This node has all offered blocks in memory or on its disk.
                        _ if fetch.num_on_disk >= num_offered => 0,
                        true => num_offered,
                        false => state.end.pace().num_worth(offer, &stats, self.page_size),
                    };
                    tracing::debug!(?offer, num_blocks, "compute or fetch");
                    state.end.handle_chosen(key, num_blocks);
                }
            }
            FetcherAction::BeginFetch { key, request } => {
                self.spawn(self.clone().begin_fetch(key, request));
            }
            FetcherAction::ShortenFetch {
                key,
                id,
                num_blocks,
            } => {
                self.spawn(self.clone().shorten_fetch(key, id, num_blocks));
            }
            FetcherAction::Renamed { key, next } => {
                if let Some(fetch) = state.fetches.remove(&key) {
                    state.fetches.insert(next, fetch);
                }
            }
            FetcherAction::Publish { id, num_blocks } => {
                self.exchange.handle_fetched(id, num_blocks);
            }
            FetcherAction::StopRows { key } => {
                let fetch = state.fetches.get_mut(&key);
                if let Some(rows) = fetch.and_then(|fetch| fetch.rows.take()) {
                    rows.cancel();
                }
                state.end.end_rows(key, false, now_us);
            }
            FetcherAction::EndFetch { id, end } => self.exchange.handle_fetch_ended(id, end),
            FetcherAction::Ended { key, end } => Self::end_fetch(state, key, end),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl FetcherNode {
    fn send(self: &Arc<Self>, state: &mut State, key: LoadKey, message: ToSource) {
        let Some(fetch) = state.fetches.get(&key) else {
            return;
        };
        let rows = match &message {
            ToSource::LoadBlocks(request) => Some(request.list.hashes.len() as u32),
            _ => None,
        };
        let now_us = self.clock().now_us();
        if !self.receiver.send_blocks(&fetch.source, key, message) {
            let refused = ToFetcher::Failed(LoadFailure::Refused);
            return state.end.handle_message(OTHER_END, key, refused, now_us);
        }
        if let Some(num_blocks) = rows
            && state.end.begin_rows(key)
            && !self.load_rows(state, key, num_blocks)
        {
            state.end.end_rows(key, false, now_us);
        }
    }

    async fn begin_fetch(self: Arc<Self>, key: LoadKey, request: FetchRequest) {
        let soft = self.clock().until(request.soft_us);
        let hard = self.clock().until(request.hard_us);
        let (namespace, tokens) = (request.namespace, request.tokens);
        let medium = FetchMedium::Peer;
        let begun = self
            .exchange
            .begin_fetch(medium, namespace, tokens, soft, hard);
        // A stopped engine has no cache.
        let answer = begun.await.unwrap_or(Err(FetchRefusal::NoPrefixCache));
        let mut state = self.lock();
        if let Some(fetch) = state.fetches.get_mut(&key)
            && let Ok(grant) = &answer
        {
            fetch.grant = Some(grant.clone());
        }
        self.tell(&mut state, |end, now_us| {
            end.handle_fetch_begun(key, answer, now_us);
        });
        if let Some(fetch) = state.fetches.get_mut(&key)
            && let Some(starting) = fetch.starting.take()
        {
            starting.send(FetchStart::Begun).ok();
        }
    }

    async fn shorten_fetch(self: Arc<Self>, key: LoadKey, id: FetchId, num_blocks: u32) {
        // A stopped engine has no fetches.
        let answer = self.exchange.shorten_fetch(id, num_blocks).await;
        let answer = answer.flatten();
        let mut state = self.lock();
        if let Some(fetch) = state.fetches.get_mut(&key)
            && let Some(grant) = &answer
        {
            fetch.grant = Some(grant.clone());
        }
        self.tell(&mut state, |end, now_us| {
            end.handle_fetch_shortened(key, answer, now_us);
        });
    }

    /// Loads the rows of the granted pages. Returns false if the transport takes no further load.
    fn load_rows(self: &Arc<Self>, state: &mut State, key: LoadKey, num_blocks: u32) -> bool {
        let Some(fetch) = state.fetches.get_mut(&key) else {
            return false;
        };
        let Some(grant) = &fetch.grant else {
            return false;
        };
        let request = LoadRequest {
            key: session_key(&key),
            peer: fetch.source.clone(),
            arithmetic: self.receiver.arithmetic(),
            first_row: grant.num_found * self.page_size,
            num_rows: num_blocks * self.page_size,
            tables: grant.tables.clone(),
            state: None,
            deadline: self.clock().instant(fetch.hard_us),
        };
        // SAFETY: the scheduler has reserved the pages for this fetch. It keeps them from all others until
        // `handle_fetched` and `handle_fetch_ended`, which follow the end of these rows.
        let rows = match unsafe { self.receiver.load(request) } {
            Ok(rows) => Arc::new(rows),
            Err(rejection) => {
                tracing::debug!("no blocks from {}: {rejection}", fetch.source);
                return false;
            }
        };
        fetch.rows = Some(rows.clone());
        self.spawn(self.clone().follow_rows(key, rows));
        true
    }

    async fn follow_rows(self: Arc<Self>, key: LoadKey, rows: Arc<LoadHandle>) {
        let mut status = rows.watch();
        let is_whole = loop {
            let now = status.borrow_and_update().clone();
            match now {
                LoadStatus::Done { .. } => break true,
                LoadStatus::Failed(failure) => {
                    tracing::debug!("the rows of blocks have not all come: {failure}");
                    break false;
                }
                LoadStatus::Opening => {}
                LoadStatus::Receiving { .. } => {
                    self.with(|end, now_us| end.handle_progress(key, now_us));
                }
            }
            if status.changed().await.is_err() {
                break false;
            }
        };
        self.with(|end, now_us| end.end_rows(key, is_whole, now_us));
    }

    fn end_fetch(state: &mut State, key: LoadKey, end: BlockFetchEnd) {
        let Some(mut fetch) = state.fetches.remove(&key) else {
            return;
        };
        let stats = &mut state.stats;
        let mut num_loaded = 0;
        match end {
            BlockFetchEnd::Loaded { num_blocks } => {
                stats.num_loaded += 1;
                let num_found = fetch.grant.map_or(0, |grant| grant.num_found);
                num_loaded = num_blocks - num_found;
                stats.num_blocks += u64::from(num_loaded);
            }
            BlockFetchEnd::NotFound => stats.num_not_found += 1,
            BlockFetchEnd::NotWorth => stats.num_not_worth += 1,
            BlockFetchEnd::NoPages(_) => stats.num_refused += 1,
            BlockFetchEnd::Cancelled
            | BlockFetchEnd::TimedOut
            | BlockFetchEnd::RowsLost
            | BlockFetchEnd::Failed(_)
            | BlockFetchEnd::SourceLost => stats.num_failed += 1,
        }
        tracing::debug!(source = %fetch.source, num_loaded, ?end, "a fetch of cached blocks has ended");
        if let Some(starting) = fetch.starting.take() {
            starting.send(FetchStart::Ended(end)).ok();
        }
    }
}
