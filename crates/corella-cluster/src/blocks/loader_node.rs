//! The loading side: passes facts to a [`BlockLoader`], and carries out its actions.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use corella_core::session::{
    BlockLoader, BlockOffer, LoadConfig, LoadEnd, LoadFailure, LoadKey, LoadPace, LoadRequest,
    LoaderAction, NodeIncarnation, RowPart, ToLoader, ToSource,
};
use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchRefusal, FetchRequest, Incarnation,
};
use corella_engine::{BlockExchange, Engine, rare_line};
use corella_model::KvGeometry;
use tokio::sync::oneshot;

use super::{FetchConfig, OTHER_END, load_config, whole_rows};
use crate::driver::{Driver, Shared};
use crate::transport::{
    BlockClient, KvReceiver, LoadFailure as RowFailure, LoadHandle, LoadRequest as RowRequest,
    LoadStatus, PeerAddress, session_key,
};

/// Loads blocks of other nodes into a node's prefix cache.
pub struct LoaderNode {
    engine: Engine,
    exchange: BlockExchange,
    receiver: Arc<KvReceiver>,
    rows: RowPart,
    page_size: u32,
    config: FetchConfig,
    shared: Shared<State>,
}

pub(crate) struct State {
    end: BlockLoader,
    loads: HashMap<LoadKey, Load>,
    stats: LoadStats,
}

struct Load {
    source: PeerAddress,
    num_blocks: u32,
    /// The number of blocks cached here before the lookup.
    num_here: u32,
    hard_us: u64,
    grant: Option<FetchGrant>,
    rows: Option<Arc<LoadHandle>>,
    /// Waits for the begin of the fetch, or the end of the load.
    starting: Option<oneshot::Sender<FetchStart>>,
}

/// The begin of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchStart {
    /// Requests with this prefix wait for its blocks.
    Begun,
    /// The load has ended without a fetch.
    Ended(LoadEnd),
    /// The node cannot be reached.
    Unreachable,
    /// Too many loads are running.
    Busy,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadStats {
    pub num_loaded: u64,
    /// Loads whose source had none of the blocks.
    pub num_not_found: u64,
    /// Loads given up because computing is as quick.
    pub num_not_worth: u64,
    /// Loads without pages.
    pub num_refused: u64,
    /// Loads that have failed, timed out or been cancelled.
    pub num_failed: u64,
    /// Blocks that were published.
    pub num_blocks: u64,
}

impl LoaderNode {
    /// Loads by `receiver`, on the caller's tokio runtime.
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
        let end = BlockLoader::new(load_config, incarnation);
        let node = Arc::new(Self {
            exchange: engine.block_exchange(),
            engine,
            rows: whole_rows(geometry),
            page_size: geometry.page_size,
            receiver,
            config,
            shared: Shared::new(State {
                end,
                loads: HashMap::new(),
                stats: LoadStats::default(),
            }),
        });
        node.start_timer();
        let client = Client(Arc::downgrade(&node));
        node.receiver.load_blocks_for(Box::new(client));
        node
    }

    pub fn stats(&self) -> LoadStats {
        self.lock().stats
    }

    /// Returns the measured speed of loads so far.
    pub fn pace(&self) -> LoadPace {
        self.lock().end.pace()
    }

    /// Returns the number of running loads.
    pub fn num_loads(&self) -> usize {
        self.lock().end.num_loads()
    }

    /// Fetches the blocks of a list from another node. Requests with this prefix wait for them until `soft`, and the
    /// fetch ends at `hard`. Returns when the scheduler knows of the fetch, or when there will be none.
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
        let begin = |state: &mut State, now_us: u64| {
            let hard_us = now_us.saturating_add(micros(hard));
            let request = LoadRequest {
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
            let load = Load {
                source,
                num_blocks,
                num_here,
                hard_us,
                grant: None,
                rows: None,
                starting: Some(starting),
            };
            state.loads.insert(key, load);
            true
        };
        if !self.update(&mut self.lock(), begin) {
            return FetchStart::Busy;
        }
        // A load reports its end before it is dropped.
        started.await.unwrap_or(FetchStart::Busy)
    }

    /// Handles the scheduler's cancellation of a fetch.
    pub fn handle_fetch_cancelled(self: &Arc<Self>, fetch: FetchId) {
        self.with(|end, _| end.handle_fetch_cancelled(fetch));
    }
}

/// The node as its receiver sees it, which outlives the node.
struct Client(Weak<LoaderNode>);

impl BlockClient for Client {
    fn handle_answer(&self, key: LoadKey, answer: ToLoader) {
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
            .loads
            .iter()
            .filter(|(_, load)| load.source == *source);
        let lost: Vec<_> = of_source.map(|(&key, _)| key).collect();
        node.tell(&mut state, |end, _| {
            for key in lost {
                end.handle_source_lost(key);
            }
        });
    }
}

impl Drop for LoaderNode {
    /// The scheduler keeps the pages of a fetch until it hears that nothing writes to them.
    fn drop(&mut self) {
        let state = self.shared.state_mut();
        for load in state.loads.values_mut() {
            if let Some(rows) = load.rows.take() {
                rows.cancel();
            }
            if let Some(grant) = load.grant.take() {
                self.exchange.handle_fetch_ended(grant.id, FetchEnd::Lost);
            }
        }
    }
}

impl Driver for LoaderNode {
    type End = BlockLoader;
    type State = State;

    fn shared(&self) -> &Shared<State> {
        &self.shared
    }

    fn end(state: &mut State) -> &mut BlockLoader {
        &mut state.end
    }

    fn act(self: &Arc<Self>, state: &mut State, action: LoaderAction) {
        tracing::trace!(?action);
        let now_us = self.clock().now_us();
        match action {
            LoaderAction::Send { key, message, .. } => self.send(state, key, message),
            LoaderAction::Choose { key, num_offered } => {
                if let Some(load) = state.loads.get(&key) {
                    let offer = BlockOffer {
                        num_blocks: load.num_blocks,
                        num_here: load.num_here,
                        num_offered,
                    };
                    let stats = self.engine.stats().scheduler;
                    let num_blocks = match self.config.is_forced {
                        true => num_offered,
                        false => state.end.pace().num_worth(offer, &stats, self.page_size),
                    };
                    tracing::debug!(?offer, num_blocks, "compute or fetch");
                    state.end.handle_chosen(key, num_blocks);
                }
            }
            LoaderAction::BeginFetch { key, request } => {
                self.spawn(self.clone().begin_fetch(key, request));
            }
            LoaderAction::ShortenFetch {
                key,
                fetch,
                num_blocks,
            } => {
                self.spawn(self.clone().shorten_fetch(key, fetch, num_blocks));
            }
            LoaderAction::Renamed { key, next } => {
                if let Some(load) = state.loads.remove(&key) {
                    state.loads.insert(next, load);
                }
            }
            LoaderAction::Publish { fetch, num_blocks } => {
                self.exchange.handle_fetched(fetch, num_blocks);
            }
            LoaderAction::StopRows { key } => {
                let load = state.loads.get_mut(&key);
                if let Some(rows) = load.and_then(|load| load.rows.take()) {
                    rows.cancel();
                }
                state.end.end_rows(key, false, now_us);
            }
            LoaderAction::EndFetch { fetch, end } => self.exchange.handle_fetch_ended(fetch, end),
            LoaderAction::Ended { key, end } => Self::end_load(state, key, end),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl LoaderNode {
    fn send(self: &Arc<Self>, state: &mut State, key: LoadKey, message: ToSource) {
        let Some(load) = state.loads.get(&key) else {
            return;
        };
        let rows = match &message {
            ToSource::LoadBlocks(request) => Some(request.list.hashes.len() as u32),
            _ => None,
        };
        let now_us = self.clock().now_us();
        if !self.receiver.send_blocks(&load.source, key, message) {
            let refused = ToLoader::Failed(LoadFailure::Refused);
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
        let begun = self.exchange.begin_fetch(namespace, tokens, soft, hard);
        // A stopped engine has no cache.
        let answer = begun.await.unwrap_or(Err(FetchRefusal::NoPrefixCache));
        let mut state = self.lock();
        if let Some(load) = state.loads.get_mut(&key)
            && let Ok(grant) = &answer
        {
            load.grant = Some(grant.clone());
        }
        self.tell(&mut state, |end, now_us| {
            end.handle_fetch_begun(key, answer, now_us);
        });
        if let Some(load) = state.loads.get_mut(&key)
            && let Some(starting) = load.starting.take()
        {
            starting.send(FetchStart::Begun).ok();
        }
    }

    async fn shorten_fetch(self: Arc<Self>, key: LoadKey, fetch: FetchId, num_blocks: u32) {
        // A stopped engine has no fetches.
        let answer = self.exchange.shorten_fetch(fetch, num_blocks).await;
        let answer = answer.flatten();
        let mut state = self.lock();
        if let Some(load) = state.loads.get_mut(&key)
            && let Some(grant) = &answer
        {
            load.grant = Some(grant.clone());
        }
        self.tell(&mut state, |end, now_us| {
            end.handle_fetch_shortened(key, answer, now_us);
        });
    }

    /// Loads the rows of the granted pages. Returns false if the transport takes no further load.
    fn load_rows(self: &Arc<Self>, state: &mut State, key: LoadKey, num_blocks: u32) -> bool {
        let Some(load) = state.loads.get_mut(&key) else {
            return false;
        };
        let Some(grant) = &load.grant else {
            return false;
        };
        let request = RowRequest {
            key: session_key(&key),
            peer: load.source.clone(),
            arithmetic: self.receiver.arithmetic(),
            first_row: grant.num_found * self.page_size,
            num_rows: num_blocks * self.page_size,
            tables: grant.tables.clone(),
            state: None,
            deadline: self.clock().instant(load.hard_us),
        };
        // SAFETY: the scheduler has reserved the pages for this fetch. It keeps them from all others until
        // `handle_fetched` and `handle_fetch_ended`, which follow the end of these rows.
        let rows = match unsafe { self.receiver.load(request) } {
            Ok(rows) => Arc::new(rows),
            Err(rejection) => {
                tracing::debug!("no blocks from {}: {rejection}", load.source);
                return false;
            }
        };
        load.rows = Some(rows.clone());
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

    fn end_load(state: &mut State, key: LoadKey, end: LoadEnd) {
        let Some(mut load) = state.loads.remove(&key) else {
            return;
        };
        let stats = &mut state.stats;
        let mut num_loaded = 0;
        match end {
            LoadEnd::Loaded { num_blocks } => {
                stats.num_loaded += 1;
                let num_found = load.grant.map_or(0, |grant| grant.num_found);
                num_loaded = num_blocks - num_found;
                stats.num_blocks += u64::from(num_loaded);
            }
            LoadEnd::NotFound => stats.num_not_found += 1,
            LoadEnd::NotWorth => stats.num_not_worth += 1,
            LoadEnd::NoPages(_) => stats.num_refused += 1,
            LoadEnd::Cancelled
            | LoadEnd::TimedOut
            | LoadEnd::RowsLost
            | LoadEnd::Failed(_)
            | LoadEnd::SourceLost => stats.num_failed += 1,
        }
        tracing::debug!(source = %load.source, num_loaded, ?end, "a load of cached blocks has ended");
        if let Some(starting) = load.starting.take() {
            starting.send(FetchStart::Ended(end)).ok();
        }
    }
}
