//! A node's fetches of cached blocks from other nodes.

mod shortening;

use alloc::collections::{BTreeMap, VecDeque};

use crate::session::deadline_queue::DeadlineQueue;
use crate::session::landing::Landing;
use crate::session::{
    BlockPart, FetchPace, LoadBlocks, LoadConfig, LoadFailure, LoadKey, NodeIncarnation, RowPart,
    ToFetcher, ToSource,
};
use crate::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchMedium, FetchRefusal, FetchRequest, Incarnation,
    NodeId, PageId,
};

/// Fetches blocks from another node: looks them up, reserves pages for them, and publishes each block when its rows
/// have landed and the source has confirmed its hold.
///
/// ```text
/// start ─▶ LookingUp ── Found ─▶ Choosing ── some ─▶ Reserving ── grant ─▶ Loading ── Complete of all ─▶ done
///              │                    │                   │          NotHere ─┘ │ ▲
///              │                    │                   │                     ▼ │ grant of the first of them
///              └────────────────────┴───────────────────┴─────────▶ (Stopping) ─┴─ Shortening ─▶ lost
/// ```
///
/// * Facts: `handle_*`, each with the time
/// * Actions: [`poll_action`](Self::poll_action), after every call until it returns `None`
/// * Time: [`poll_timeout`](Self::poll_timeout) says when [`handle_timeout`](Self::handle_timeout) must be called
///
/// Each fetch ends once, with [`FetcherAction::Ended`]. The fetch ends in the scheduler when no part is being written.
/// Blocks are published when all of their layers have landed and the source has confirmed that it kept them meanwhile.
///
/// If the source can lend only some of the blocks, it says how many. The fetch then continues with these blocks under a
/// new key, so that late messages with the first key are recognised.
#[derive(Debug)]
pub struct BlockFetcher {
    config: LoadConfig,
    incarnation: Incarnation,
    fetches: BTreeMap<LoadKey, Fetch>,
    by_fetch: BTreeMap<FetchId, LoadKey>,
    deadlines: DeadlineQueue<LoadKey>,
    num_started: u64,
    pace: FetchPace,
    actions: VecDeque<FetcherAction>,
}

/// A task for the driver. Tasks are carried out in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetcherAction {
    Send {
        node: NodeId,
        key: LoadKey,
        message: ToSource,
    },
    /// Asks how many of the source's `num_offered` blocks are worth fetching. The driver answers by
    /// [`BlockFetcher::handle_chosen`].
    Choose { key: LoadKey, num_offered: u32 },
    /// Asks the scheduler for pages. The driver passes on the answer by [`BlockFetcher::handle_fetch_begun`].
    BeginFetch { key: LoadKey, request: FetchRequest },
    /// Asks the scheduler to shorten a fetch to its first `num_blocks` blocks. The driver passes on the answer by
    /// [`BlockFetcher::handle_fetch_shortened`].
    ShortenFetch {
        key: LoadKey,
        id: FetchId,
        num_blocks: u32,
    },
    /// The fetch continues under the key `next`.
    Renamed { key: LoadKey, next: LoadKey },
    /// The first `num_blocks` blocks of a fetch are complete.
    Publish { id: FetchId, num_blocks: u32 },
    /// Stops writing rows of a fetch. The driver confirms by [`BlockFetcher::end_part`] or [`BlockFetcher::end_rows`].
    StopRows { key: LoadKey },
    /// Ends the fetch in the scheduler: nothing is written to its pages any more.
    EndFetch { id: FetchId, end: FetchEnd },
    /// The fetch has ended. Each fetch ends once.
    Ended { key: LoadKey, end: BlockFetchEnd },
}

/// The end of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockFetchEnd {
    /// All blocks before `num_blocks` are cached.
    Loaded { num_blocks: u32 },
    /// The source has none of the blocks.
    NotFound,
    /// Computing the blocks is as quick as fetching them.
    NotWorth,
    /// The scheduler has reserved no pages.
    NoPages(FetchRefusal),
    /// The scheduler has cancelled the fetch.
    Cancelled,
    /// Neither rows nor messages came for too long.
    TimedOut,
    /// The transport has lost rows on their way.
    RowsLost,
    /// The source has ended the fetch, for this reason.
    Failed(LoadFailure),
    /// The source has restarted, or its connection is lost.
    SourceLost,
}

/// Blocks to fetch, their source, and the deadlines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedBlocks {
    pub source: NodeIncarnation,
    pub list: BlockList,
    /// The number of blocks that this node has already.
    pub num_here: u32,
    pub rows: RowPart,
    /// Until this time, requests wait for the blocks.
    pub soft_us: u64,
    /// The fetch ends at this time.
    pub hard_us: u64,
}

#[derive(Debug)]
struct Fetch {
    request: WantedBlocks,
    /// The number of times that the source could lend fewer blocks than this node had asked for.
    num_shortened: u32,
    /// The time at which the last question was sent to the source: the lookup or, after the grant, the request for the
    /// blocks.
    asked_us: u64,
    phase: FetcherPhase,
}

#[derive(Debug)]
enum FetcherPhase {
    LookingUp,
    /// The driver decides how many blocks are worth fetching.
    Choosing {
        num_offered: u32,
    },
    /// The scheduler reserves pages. `end` is set if the fetch ends before the scheduler answers.
    Reserving {
        end: Option<BlockFetchEnd>,
    },
    Loading(Loading),
    /// Parts are still being written.
    Stopping {
        loading: Loading,
        next: Next,
    },
    /// The scheduler shortens the fetch. `end` is set if the fetch ends before the scheduler answers.
    Shortening {
        id: FetchId,
        end: Option<BlockFetchEnd>,
    },
}

/// What follows when a stopped fetch writes no more.
#[derive(Clone, Copy, Debug)]
enum Next {
    End(BlockFetchEnd),
    /// The fetch continues with the first blocks.
    Shorten {
        num_blocks: u32,
    },
}

#[derive(Debug)]
struct Loading {
    id: FetchId,
    landing: Landing,
    /// The end of the landed blocks that this node has reported to the source.
    end_told: u32,
    /// The end of the blocks that the source has confirmed.
    end_confirmed: u32,
}

impl BlockFetcher {
    pub fn new(config: LoadConfig, incarnation: Incarnation) -> Self {
        Self {
            config,
            incarnation,
            fetches: BTreeMap::new(),
            by_fetch: BTreeMap::new(),
            deadlines: DeadlineQueue::new(),
            num_started: 0,
            pace: FetchPace::default(),
            actions: VecDeque::new(),
        }
    }

    /// Begins a fetch, unless there are too many.
    pub fn start(&mut self, request: WantedBlocks, now_us: u64) -> Option<LoadKey> {
        if self.fetches.len() >= self.config.max_loads as usize {
            return None;
        }
        let key = LoadKey {
            fetcher: self.incarnation,
            source: request.source.incarnation,
            number: self.num_started,
        };
        self.num_started += 1;
        let lookup = ToSource::Lookup {
            list: request.list.clone(),
            first_block: request.num_here,
        };
        self.send(key, request.source.node, lookup);
        let deadline_us = now_us.saturating_add(self.config.lookup_us);
        self.deadlines
            .set(key, Some(deadline_us.min(request.hard_us)));
        let fetch = Fetch {
            request,
            num_shortened: 0,
            asked_us: now_us,
            phase: FetcherPhase::LookingUp,
        };
        self.fetches.insert(key, fetch);
        Some(key)
    }

    /// Handles a message of a source, except the rows of [`ToFetcher::Data`]: [`begin_part`](Self::begin_part) takes
    /// these.
    pub fn handle_message(&mut self, node: NodeId, key: LoadKey, message: ToFetcher, now_us: u64) {
        let Some(fetch) = self.fetches.get(&key) else {
            return;
        };
        if fetch.request.source.node != node {
            return;
        }
        match message {
            ToFetcher::Found { num_blocks } => self.handle_found(key, num_blocks, now_us),
            ToFetcher::Data(_) => {}
            ToFetcher::Complete { num_blocks } => self.handle_complete(key, num_blocks, now_us),
            ToFetcher::Failed(failure) => {
                let is_shortened = match failure {
                    LoadFailure::NotHere { num_blocks } => self.shorten(key, num_blocks, now_us),
                    _ => false,
                };
                if !is_shortened {
                    self.end(key, BlockFetchEnd::Failed(failure));
                }
            }
        }
    }

    fn handle_found(&mut self, key: LoadKey, num_blocks: u32, now_us: u64) {
        let Some(fetch) = self.fetches.get_mut(&key) else {
            return;
        };
        if !matches!(fetch.phase, FetcherPhase::LookingUp) {
            return;
        }
        self.pace
            .note_round_trip(now_us.saturating_sub(fetch.asked_us));
        let num_blocks = num_blocks.min(fetch.request.list.hashes.len() as u32);
        if num_blocks == 0 {
            self.end(key, BlockFetchEnd::NotFound);
            return;
        }
        fetch.phase = FetcherPhase::Choosing {
            num_offered: num_blocks,
        };
        let hard_us = fetch.request.hard_us;
        self.deadlines.set(key, Some(hard_us));
        self.actions.push_back(FetcherAction::Choose {
            key,
            num_offered: num_blocks,
        });
    }

    /// Handles the driver's choice: the first `num_blocks` blocks are worth fetching.
    pub fn handle_chosen(&mut self, key: LoadKey, num_blocks: u32) {
        let Some(fetch) = self.fetches.get_mut(&key) else {
            return;
        };
        let FetcherPhase::Choosing { num_offered } = fetch.phase else {
            return;
        };
        let num_blocks = num_blocks.min(num_offered);
        if num_blocks == 0 {
            self.end(key, BlockFetchEnd::NotWorth);
            return;
        }
        fetch.phase = FetcherPhase::Reserving { end: None };
        fetch.truncate(num_blocks, self.config.page_size);
        let request = &fetch.request;
        let request = FetchRequest {
            medium: FetchMedium::Peer,
            namespace: request.list.namespace.clone(),
            tokens: request.list.tokens.clone(),
            soft_us: request.soft_us,
            hard_us: request.hard_us,
        };
        self.actions
            .push_back(FetcherAction::BeginFetch { key, request });
    }

    /// Handles the scheduler's answer to [`FetcherAction::BeginFetch`].
    pub fn handle_fetch_begun(
        &mut self,
        key: LoadKey,
        answer: Result<FetchGrant, FetchRefusal>,
        now_us: u64,
    ) {
        let Some(fetch) = self.fetches.get_mut(&key) else {
            return;
        };
        let FetcherPhase::Reserving { end } = fetch.phase else {
            return;
        };
        let grant = match answer {
            Ok(grant) => grant,
            Err(refusal) => {
                self.forget(key, end.unwrap_or(BlockFetchEnd::NoPages(refusal)));
                return;
            }
        };
        if let Some(end) = end {
            self.end_fetch(grant.id, FetchEnd::Lost);
            self.forget(key, end);
            return;
        }
        self.load_blocks(key, grant, now_us);
    }

    /// Asks the source for the blocks that a grant has pages for.
    fn load_blocks(&mut self, key: LoadKey, grant: FetchGrant, now_us: u64) {
        let Some(fetch) = self.fetches.get_mut(&key) else {
            return;
        };
        fetch.truncate(grant.num_blocks, self.config.page_size);
        fetch.asked_us = now_us;
        let num_layers = &self.config.num_layers;
        let landing = Landing::new(grant.num_found, grant.num_blocks, grant.tables, num_layers);
        fetch.phase = FetcherPhase::Loading(Loading {
            id: grant.id,
            landing,
            end_told: grant.num_found,
            end_confirmed: grant.num_found,
        });
        self.by_fetch.insert(grant.id, key);
        let message = ToSource::LoadBlocks(LoadBlocks {
            list: fetch.request.list.clone(),
            first_block: grant.num_found,
            rows: fetch.request.rows.clone(),
            lease_us: fetch.request.hard_us.saturating_sub(now_us),
            credit: self.config.credit_blocks,
        });
        let node = fetch.request.source.node;
        self.send(key, node, message);
        self.set_stall(key, now_us);
    }

    /// Handles the arrival of a part's first bytes. Returns the part's page, or `None` if the part must not be written.
    pub fn begin_part(&mut self, node: NodeId, key: LoadKey, part: BlockPart) -> Option<PageId> {
        let fetch = self.fetches.get_mut(&key)?;
        match &mut fetch.phase {
            FetcherPhase::Loading(loading) if fetch.request.source.node == node => {
                loading.landing.begin(part)
            }
            _ => None,
        }
    }

    /// Handles the end of writing a part to its page. The part has landed if it `is_whole`.
    pub fn end_part(&mut self, key: LoadKey, part: BlockPart, is_whole: bool, now_us: u64) {
        let has_landed = self.end_writing(key, |landing| landing.end(part, is_whole));
        if has_landed == Some(true) {
            self.tell_landed(key, now_us);
        }
    }

    /// Ends writing to the pages of a fetch. Returns the result of `end`, or `None` if the fetch no longer loads.
    fn end_writing<T>(&mut self, key: LoadKey, end: impl FnOnce(&mut Landing) -> T) -> Option<T> {
        match &mut self.fetches.get_mut(&key)?.phase {
            FetcherPhase::Loading(loading) => Some(end(&mut loading.landing)),
            FetcherPhase::Stopping { loading, .. } => {
                end(&mut loading.landing);
                self.end_stopped(key);
                None
            }
            FetcherPhase::LookingUp
            | FetcherPhase::Choosing { .. }
            | FetcherPhase::Reserving { .. }
            | FetcherPhase::Shortening { .. } => None,
        }
    }

    /// Begins writing all rows of a fetch, by a transport that chooses the order and pace of the parts itself. Returns
    /// false if nothing may be written.
    pub fn begin_rows(&mut self, key: LoadKey) -> bool {
        match self.fetches.get_mut(&key).map(|fetch| &mut fetch.phase) {
            Some(FetcherPhase::Loading(loading)) => {
                loading.landing.begin_all();
                true
            }
            _ => false,
        }
    }

    /// Handles the arrival of some rows, which postpones the fetch's timeout.
    pub fn handle_progress(&mut self, key: LoadKey, now_us: u64) {
        if let Some(FetcherPhase::Loading(_)) = self.fetches.get(&key).map(|fetch| &fetch.phase) {
            self.set_stall(key, now_us);
        }
    }

    /// Handles the end of writing after [`begin_rows`](Self::begin_rows). All rows have landed if the fetch `is_whole`.
    pub fn end_rows(&mut self, key: LoadKey, is_whole: bool, now_us: u64) {
        let ended = self.end_writing(key, |landing| landing.end_all(is_whole));
        match ended {
            Some(()) if is_whole => self.tell_landed(key, now_us),
            Some(()) => self.stop(key, BlockFetchEnd::RowsLost),
            None => {}
        }
    }

    /// Tells the source how many blocks have landed.
    fn tell_landed(&mut self, key: LoadKey, now_us: u64) {
        let Some(fetch) = self.fetches.get_mut(&key) else {
            return;
        };
        let FetcherPhase::Loading(loading) = &mut fetch.phase else {
            return;
        };
        let num_blocks = loading.landing.end_whole();
        if num_blocks > loading.end_told {
            loading.end_told = num_blocks;
            let node = fetch.request.source.node;
            self.send(key, node, ToSource::Landed { num_blocks });
        }
        self.set_stall(key, now_us);
    }

    /// Stops a fetch's rows. `next` follows when no row is being written.
    fn stop_rows(&mut self, key: LoadKey, next: Next) {
        let Some(fetch) = self.fetches.remove(&key) else {
            return;
        };
        let phase = match fetch.phase {
            FetcherPhase::Loading(loading) => {
                if !loading.landing.is_at_rest() {
                    self.actions.push_back(FetcherAction::StopRows { key });
                }
                FetcherPhase::Stopping { loading, next }
            }
            phase => phase,
        };
        self.fetches.insert(key, Fetch { phase, ..fetch });
        self.end_stopped(key);
    }

    /// Ends or shortens a stopped fetch in the scheduler when no row is being written.
    fn end_stopped(&mut self, key: LoadKey) {
        let Some(fetch) = self.fetches.get_mut(&key) else {
            return;
        };
        let FetcherPhase::Stopping { loading, next } = &fetch.phase else {
            return;
        };
        if !loading.landing.is_at_rest() {
            return;
        }
        let id = loading.id;
        match *next {
            Next::End(end) => {
                self.end_fetch(id, FetchEnd::Lost);
                self.forget(key, end);
            }
            Next::Shorten { num_blocks } => {
                fetch.phase = FetcherPhase::Shortening { id, end: None };
                self.actions.push_back(FetcherAction::ShortenFetch {
                    key,
                    id,
                    num_blocks,
                });
            }
        }
    }

    fn handle_complete(&mut self, key: LoadKey, num_blocks: u32, now_us: u64) {
        let Some(fetch) = self.fetches.get_mut(&key) else {
            return;
        };
        let asked_us = fetch.asked_us;
        let FetcherPhase::Loading(loading) = &mut fetch.phase else {
            return;
        };
        // A source confirms only blocks that this node has reported as landed. Other confirmations are false.
        if num_blocks <= loading.end_confirmed || num_blocks > loading.landing.end_whole() {
            return;
        }
        loading.end_confirmed = num_blocks;
        let (id, first_block) = (loading.id, loading.landing.first_block());
        if num_blocks < loading.landing.end_block() {
            self.actions.push_back(FetcherAction::Publish {
                id,
                num_blocks: num_blocks - first_block,
            });
            self.set_stall(key, now_us);
            return;
        }
        self.pace
            .note_load(num_blocks - first_block, now_us.saturating_sub(asked_us));
        self.end_fetch(id, FetchEnd::Done);
        self.forget(key, BlockFetchEnd::Loaded { num_blocks });
    }

    /// Handles the scheduler's cancellation of a fetch.
    pub fn handle_fetch_cancelled(&mut self, id: FetchId) {
        if let Some(&key) = self.by_fetch.get(&id) {
            self.stop(key, BlockFetchEnd::Cancelled);
        }
    }

    /// Handles the loss of the connection to a fetch's source. Messages in both directions are lost.
    pub fn handle_source_lost(&mut self, key: LoadKey) {
        self.end(key, BlockFetchEnd::SourceLost);
    }

    pub fn poll_action(&mut self) -> Option<FetcherAction> {
        self.actions.pop_front()
    }

    pub fn poll_timeout(&self) -> Option<u64> {
        self.deadlines.first_us()
    }

    pub fn handle_timeout(&mut self, now_us: u64) {
        while let Some(key) = self.deadlines.due(now_us) {
            self.stop(key, BlockFetchEnd::TimedOut);
        }
    }

    /// The measured speed of fetches so far.
    pub fn pace(&self) -> FetchPace {
        self.pace
    }

    pub fn num_fetches(&self) -> usize {
        self.fetches.len()
    }

    /// Ends a fetch, and tells its source.
    fn stop(&mut self, key: LoadKey, end: BlockFetchEnd) {
        if let Some(fetch) = self.fetches.get(&key)
            && let FetcherPhase::Loading(_) = fetch.phase
        {
            self.send(key, fetch.request.source.node, ToSource::Release);
        }
        self.end(key, end);
    }

    /// Ends a fetch when nothing of it is being written and no answer is pending.
    fn end(&mut self, key: LoadKey, end: BlockFetchEnd) {
        self.deadlines.set(key, None);
        let Some(fetch) = self.fetches.get_mut(&key) else {
            return;
        };
        match &mut fetch.phase {
            FetcherPhase::LookingUp | FetcherPhase::Choosing { .. } => self.forget(key, end),
            FetcherPhase::Loading(_) => self.stop_rows(key, Next::End(end)),
            FetcherPhase::Reserving { end: over, .. }
            | FetcherPhase::Shortening { end: over, .. } => {
                *over = Some(end);
            }
            FetcherPhase::Stopping { next, .. } => {
                if let Next::Shorten { .. } = next {
                    *next = Next::End(end);
                }
            }
        }
    }

    fn end_fetch(&mut self, id: FetchId, end: FetchEnd) {
        self.by_fetch.remove(&id);
        self.actions.push_back(FetcherAction::EndFetch { id, end });
    }

    fn forget(&mut self, key: LoadKey, end: BlockFetchEnd) {
        self.fetches.remove(&key);
        self.deadlines.set(key, None);
        self.actions.push_back(FetcherAction::Ended { key, end });
    }

    /// Restarts the time within which the next part or confirmation must come.
    fn set_stall(&mut self, key: LoadKey, now_us: u64) {
        if let Some(fetch) = self.fetches.get(&key) {
            let stall_us = now_us.saturating_add(self.config.stall_us);
            let deadline_us = stall_us.min(fetch.request.hard_us);
            self.deadlines.set(key, Some(deadline_us));
        }
    }

    fn send(&mut self, key: LoadKey, node: NodeId, message: ToSource) {
        self.actions
            .push_back(FetcherAction::Send { node, key, message });
    }
}

impl Fetch {
    /// Keeps only the first `num_blocks` blocks of the list.
    fn truncate(&mut self, num_blocks: u32, page_size: u32) {
        let list = &mut self.request.list;
        list.tokens
            .truncate(num_blocks as usize * page_size as usize);
        list.hashes.truncate(num_blocks as usize);
    }
}
