//! Fetches: blocks that come from another node's cache or a lower tier and are published as ordinary cached prefix.
//!
//! ```text
//! begin ──▶ Open ──soft deadline──▶ Late ──hard deadline, or given up──▶ Cancelled
//!            └────────┴── the writer has stopped ─ end ◀───────────────────┘
//! ```
//!
//! A reserved page is in no page table, batch or hold before its block is published. Blocks are published in order,
//! below a path whose pages the fetch locks. If a request has computed a block meanwhile, the request's page stays in
//! the tree, and the fetched page is given back when the fetch ends. The pages of a cancelled fetch stay reserved until
//! the writer has stopped, because it may still write to them.
//!
//! In a group with a window, a fetch brings only the pages that a query after the last block reads. For recurrent
//! layers, it brings the state after the last block.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::Parent;
use crate::{
    BlockId, FetchId, FetchMedium, Namespace, PageId, PageTable, SnapshotId, StepId, TokenId,
};

/// The most fetches under way.
pub(crate) const MAX_FETCHES: usize = 64;

/// Blocks to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRequest {
    pub medium: FetchMedium,
    pub namespace: Namespace,
    /// The blocks' tokens, from the beginning of the sequence. An incomplete last block is left out.
    pub tokens: Vec<TokenId>,
    /// Requests wait for the blocks until this time.
    pub soft_us: u64,
    /// The fetch is cancelled at this time.
    pub hard_us: u64,
}

/// The pages that a fetch fills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchGrant {
    pub id: FetchId,
    /// The number of blocks that are already cached. The fetched blocks follow them.
    pub num_found: u32,
    /// The number of blocks up to the last granted block, counted from the beginning of the sequence. Fewer blocks are
    /// granted than requested if fetches would hold more pages than
    /// [`max_fetched_pages`](crate::SchedulerConfig::max_fetched_pages).
    pub num_blocks: u32,
    /// The pages to fill in each KV group. Entry `i` belongs to block `i` of the sequence.
    pub tables: Vec<PageTable>,
    /// The snapshot to fill with the recurrent state after the last granted block, before that block is reported.
    /// `None` for models without recurrent layers.
    pub state: Option<SnapshotId>,
}

/// The reason why a fetch does not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchRefusal {
    /// Prefix caching is off.
    NoPrefixCache,
    /// All blocks are cached.
    AllCached,
    /// Another fetch brings the next block.
    UnderWay(FetchId),
    /// `MAX_FETCHES` fetches are under way.
    TooMany,
    /// Even with only the first missing block, fetches would hold more pages than
    /// [`max_fetched_pages`](crate::SchedulerConfig::max_fetched_pages).
    TooLarge { num_pages: usize, limit: u32 },
    /// Requests need the pages.
    NoRoom {
        num_needed_pages: usize,
        num_available_pages: usize,
    },
    /// All snapshots of recurrent state have to stay.
    NoSnapshot,
}

/// The end of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchEnd {
    /// The writer has filled all blocks.
    Done,
    /// No more blocks come.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FetchPhase {
    /// Requests wait for the fetch.
    Open,
    /// Only later requests will use the blocks.
    Late,
    /// The writer has to stop.
    Cancelled,
}

#[derive(Debug)]
pub(crate) struct Fetch {
    request: FetchRequest,
    num_found: u32,
    /// The number of the sequence's blocks in the tree, and the last of these blocks.
    num_published: u32,
    end: Option<BlockId>,
    /// The number of published blocks with pages of the fetch. Requests computed the other blocks meanwhile.
    num_brought: u32,
    /// The pages that the writer fills, published or not.
    reserved: PageTables,
    /// The snapshot that the writer fills, until its block is published.
    state: Option<SnapshotId>,
    /// Pages on the path that belong to other owners.
    locked: Vec<PageId>,
    phase: FetchPhase,
    /// The path has lost blocks, so the fetch can publish nothing more.
    is_detached: bool,
}

impl Fetch {
    /// Begins a fetch after a path of the tree, whose pages are `found`. The writer fills `reserved` pages and `state`.
    pub fn new(
        request: FetchRequest,
        path: &[BlockId],
        found: &PageTables,
        (reserved, state): (PageTables, Option<SnapshotId>),
        kv: &mut KvCache,
    ) -> Self {
        let end = path.last().copied();
        kv.move_end(None, end);
        Self {
            request,
            num_found: path.len() as u32,
            num_published: path.len() as u32,
            end,
            num_brought: 0,
            reserved,
            state,
            locked: found.pages().collect(),
            phase: FetchPhase::Open,
            is_detached: false,
        }
    }

    /// Publishes the fetch's blocks up to `num_blocks` from the beginning of the sequence, as far as the tree has room.
    fn publish(&mut self, kv: &mut KvCache, num_blocks: u32, last_returned: StepId) {
        let page_size = kv.page_size() as usize;
        let num_whole = (self.request.tokens.len() / page_size) as u32;
        for at in self.num_published as usize..num_blocks.min(num_whole) as usize {
            if self.is_detached || !kv.make_room_for_blocks(1) {
                return;
            }
            let tokens = &self.request.tokens[at * page_size..(at + 1) * page_size];
            let (parent, before) = match self.end {
                Some(end) => (Parent::Block(end), kv.block_filled_by(end)),
                None => (Parent::Root(&self.request.namespace), None),
            };
            // No block of a path is ready before its parent.
            let filled_by = before.map_or(last_returned, |before| before.max(last_returned));
            let own = |group: usize| self.reserved.group(group).page(at);
            let block = match kv.publish(parent, tokens, own, filled_by) {
                Ok(block) | Err(block) => block,
            };
            let mut is_brought = false;
            for group in 0..self.reserved.num_groups() {
                match kv.page(block, group) {
                    Some(page) if own(group) == Some(page) => {
                        is_brought = true;
                        kv.note_fetched(page, self.request.medium);
                    }
                    Some(page) => {
                        kv.lock(page);
                        self.locked.push(page);
                    }
                    None => {}
                }
            }
            self.num_brought += u32::from(is_brought);
            kv.move_end(self.end, Some(block));
            self.end = Some(block);
            self.num_published += 1;
            if self.num_published == num_whole
                && let Some(state) = self.state.take()
            {
                kv.give_snapshot(state, block);
            }
        }
    }

    pub fn num_brought(&self) -> u32 {
        self.num_brought
    }

    /// The next deadline: first the soft one, then the hard one.
    fn deadline_us(&self) -> Option<u64> {
        match self.phase {
            FetchPhase::Open => Some(self.request.soft_us),
            FetchPhase::Late => Some(self.request.hard_us),
            FetchPhase::Cancelled => None,
        }
    }

    /// The number of whole blocks that `tokens` and the sequence of the fetch have in common.
    fn num_common_blocks(&self, namespace: &Namespace, tokens: &[TokenId], page_size: u32) -> u32 {
        if *namespace != self.request.namespace {
            return 0;
        }
        let page_size = page_size as usize;
        let ours = self.request.tokens.chunks_exact(page_size);
        let common = ours.zip(tokens.chunks_exact(page_size));
        common.take_while(|(ours, theirs)| ours == theirs).count() as u32
    }

    fn has_only(&self, num_blocks: u32, page_size: u32) -> bool {
        self.request.tokens.len() as u32 / page_size == num_blocks
    }

    /// All pages that the fetch locks.
    fn pages(&self) -> impl Iterator<Item = PageId> {
        self.locked.iter().copied().chain(self.reserved.pages())
    }

    /// Gives back all pages after the writer has stopped. Published pages stay cached.
    pub fn release(self, kv: &mut KvCache) {
        kv.unlock_all(self.pages());
        kv.move_end(self.end, None);
        if let Some(state) = self.state {
            kv.drop_snapshot(state);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Fetches {
    by_id: BTreeMap<FetchId, Fetch>,
    by_deadline: BTreeSet<(u64, FetchId)>,
    num_begun: u64,
    num_pages: usize,
    /// Fetches whose writer has to stop.
    cancelled: VecDeque<FetchId>,
    /// A request could not start for lack of pages. No fetch and no hold of blocks begins before a request starts.
    is_barred: bool,
}

impl Fetches {
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    pub fn reserved_pages(&self) -> impl Iterator<Item = PageId> {
        self.by_id.values().flat_map(|fetch| fetch.reserved.pages())
    }

    /// The locked pages of all fetches, each once per lock.
    pub fn locked_pages(&self) -> impl Iterator<Item = PageId> {
        self.by_id.values().flat_map(Fetch::pages)
    }

    pub fn states(&self) -> impl Iterator<Item = SnapshotId> {
        self.by_id.values().filter_map(|fetch| fetch.state)
    }

    pub fn ends(&self) -> impl Iterator<Item = BlockId> {
        self.by_id.values().filter_map(|fetch| fetch.end)
    }

    pub fn is_barred(&self) -> bool {
        self.is_barred
    }

    /// A request has started.
    pub fn unbar(&mut self) {
        self.is_barred = false;
    }

    /// The number of cached blocks before a fetch, if the fetch can be shortened to the first `num_blocks` blocks of
    /// its sequence: the fetch is live, has published nothing, and brings some of these blocks and some after them.
    pub fn num_found_before(&self, id: FetchId, num_blocks: u32, page_size: u32) -> Option<u32> {
        let fetch = self.by_id.get(&id)?;
        let num_all = fetch.request.tokens.len() as u32 / page_size;
        let is_shorter = fetch.num_found < num_blocks && num_blocks < num_all;
        let has_published = fetch.num_published > fetch.num_found;
        let is_over = fetch.phase == FetchPhase::Cancelled || fetch.is_detached;
        (is_shorter && !has_published && !is_over).then_some(fetch.num_found)
    }

    /// Replaces the pages of a fetch by pages for its first blocks only. `reserved` are the tables for these pages,
    /// still empty. In a group with a window, the pages belong to earlier blocks than before, but there are no more
    /// pages.
    pub fn shorten(
        &mut self,
        id: FetchId,
        num_blocks: u32,
        mut reserved: PageTables,
        kv: &mut KvCache,
    ) -> Option<(Vec<PageTable>, Option<SnapshotId>)> {
        let fetch = self.by_id.get_mut(&id)?;
        self.num_pages -= fetch.reserved.num_pages();
        kv.unlock_all(fetch.reserved.take_pages());
        let has_pages = kv.try_extend(&mut reserved, |_| num_blocks as usize);
        assert!(has_pages, "a shorter fetch takes more pages");
        self.num_pages += reserved.num_pages();
        fetch.reserved = reserved;
        let num_tokens = num_blocks as usize * kv.page_size() as usize;
        fetch.request.tokens.truncate(num_tokens);
        Some((fetch.reserved.to_vec(), fetch.state))
    }

    pub fn insert(&mut self, fetch: Fetch) -> FetchId {
        let id = FetchId(self.num_begun);
        self.num_begun += 1;
        self.num_pages += fetch.reserved.num_pages();
        self.by_deadline.insert((fetch.request.soft_us, id));
        self.by_id.insert(id, fetch);
        id
    }

    /// Publishes the first `num_fetched` blocks of a fetch. Returns the number of blocks that the tree then has of the
    /// sequence, or `None` if the fetch is cancelled or unknown.
    pub fn publish(
        &mut self,
        id: FetchId,
        num_fetched: u32,
        kv: &mut KvCache,
        last_returned: StepId,
    ) -> Option<u32> {
        let fetch = self.by_id.get_mut(&id)?;
        if fetch.phase == FetchPhase::Cancelled {
            return None;
        }
        let num_blocks = fetch.num_found.saturating_add(num_fetched);
        fetch.publish(kv, num_blocks, last_returned);
        Some(fetch.num_published)
    }

    /// Removes a fetch whose writer has stopped. If the fetch `is_done`, first publishes all its blocks.
    pub fn take(
        &mut self,
        id: FetchId,
        is_done: bool,
        kv: &mut KvCache,
        last_returned: StepId,
    ) -> Option<Fetch> {
        let mut fetch = self.by_id.remove(&id)?;
        if let Some(deadline_us) = fetch.deadline_us() {
            self.by_deadline.remove(&(deadline_us, id));
        }
        self.cancelled.retain(|&other| other != id);
        self.num_pages -= fetch.reserved.num_pages();
        if is_done {
            fetch.publish(kv, u32::MAX, last_returned);
        }
        Some(fetch)
    }

    /// Asks the writer of a fetch to stop.
    pub fn cancel(&mut self, id: FetchId) {
        let Some(fetch) = self.by_id.get_mut(&id) else {
            return;
        };
        if let Some(deadline_us) = fetch.deadline_us() {
            self.by_deadline.remove(&(deadline_us, id));
            fetch.phase = FetchPhase::Cancelled;
            self.cancelled.push_back(id);
        }
    }

    pub fn pop_cancelled(&mut self) -> Option<FetchId> {
        self.cancelled.pop_front()
    }

    pub fn next_deadline_us(&self) -> Option<u64> {
        self.by_deadline
            .first()
            .map(|&(deadline_us, _)| deadline_us)
    }

    /// Moves the first fetch with an expired deadline to its next phase, and returns its id. From then on, no request
    /// waits for the fetch.
    pub fn end_deadline(&mut self, now_us: u64) -> Option<FetchId> {
        let &(deadline_us, id) = self.by_deadline.first()?;
        if deadline_us > now_us {
            return None;
        }
        let fetch = self.by_id.get_mut(&id)?;
        if fetch.phase == FetchPhase::Open {
            fetch.phase = FetchPhase::Late;
            let hard_us = fetch.request.hard_us;
            self.by_deadline.pop_first();
            self.by_deadline.insert((hard_us, id));
        } else {
            self.cancel(id);
        }
        Some(id)
    }

    /// The newest fetch that is not cancelled.
    pub fn newest(&self) -> Option<FetchId> {
        let mut newest = self.by_id.iter().rev();
        let is_running = |(_, fetch): &(&FetchId, &Fetch)| fetch.phase != FetchPhase::Cancelled;
        newest.find(is_running).map(|(&id, _)| id)
    }

    /// Whether a cancelled fetch will free its pages soon. A fetch whose writer has not stopped by the hard deadline no
    /// longer counts.
    pub fn frees_pages_soon(&self, now_us: u64) -> bool {
        let mut fetches = self.by_id.values();
        fetches.any(|fetch| fetch.phase == FetchPhase::Cancelled && now_us < fetch.request.hard_us)
    }

    pub fn bar(&mut self) {
        self.is_barred = true;
    }

    /// The fetch that brings the block after the first `num_found` blocks of a sequence. With recurrent layers, the
    /// sequence must have all blocks of the fetch, because the fetch brings a state only after its last block.
    pub fn bringing(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        num_found: u32,
        kv: &KvCache,
    ) -> Option<FetchId> {
        let page_size = kv.page_size();
        let brings = |fetch: &Fetch| {
            let num_common = fetch.num_common_blocks(namespace, tokens, page_size);
            let can_be_hit = !kv.is_recurrent() || fetch.has_only(num_common, page_size);
            let brings_more = num_common > num_found.max(fetch.num_published);
            fetch.phase != FetchPhase::Cancelled && can_be_hit && brings_more
        };
        let mut fetches = self.by_id.iter();
        fetches.find(|(_, fetch)| brings(fetch)).map(|(&id, _)| id)
    }

    /// The fetch that a request may follow, and the number of blocks to wait for. The tree has `num_found` blocks of
    /// the request's `tokens`. With windows or recurrent layers, a request can use only the whole fetch.
    pub fn leader_of(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        num_found: u32,
        kv: &KvCache,
    ) -> Option<(FetchId, u32)> {
        let page_size = kv.page_size();
        let open = self
            .by_id
            .iter()
            .filter(|(_, fetch)| fetch.phase == FetchPhase::Open);
        let mut leaders = open.filter_map(|(&id, fetch)| {
            let num_common = fetch.num_common_blocks(namespace, tokens, page_size);
            let is_divisible = !kv.has_windows() && !kv.is_recurrent();
            let can_be_hit = is_divisible || fetch.has_only(num_common, page_size);
            let brings_more = num_common > num_found.max(fetch.num_published);
            (can_be_hit && brings_more).then_some((id, num_common))
        });
        leaders.next()
    }

    /// Cuts the path of each fetch that leads through removed blocks back to `end`. Returns these fetches, which
    /// publish nothing more.
    pub fn set_back_paths(&mut self, kv: &mut KvCache, end: Option<BlockId>) -> Vec<FetchId> {
        let mut set_back = Vec::new();
        for (&id, fetch) in &mut self.by_id {
            if fetch.end.is_some_and(|end| kv.insertion(end).is_none()) {
                kv.move_end(None, end);
                fetch.end = end;
                fetch.is_detached = true;
                set_back.push(id);
            }
        }
        set_back
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self, kv: &KvCache) {
        let num_pages: usize = self.by_id.values().map(|f| f.reserved.num_pages()).sum();
        assert_eq!(num_pages, self.num_pages, "pages of fetches");
        let deadlines = self.by_id.iter();
        let deadlines: BTreeSet<_> = deadlines
            .filter_map(|(&id, fetch)| Some((fetch.deadline_us()?, id)))
            .collect();
        assert_eq!(deadlines, self.by_deadline, "deadlines of fetches");
        for (id, fetch) in &self.by_id {
            assert!(
                fetch.is_detached || kv.path_len(fetch.end) == fetch.num_published as usize,
                "fetch {id} would publish behind another path than its own"
            );
            for (group, table) in fetch.reserved.iter().enumerate() {
                for at in fetch.num_published as usize..table.len() {
                    let is_there = table
                        .page(at)
                        .is_some_and(|page| kv.block_of(page).is_some());
                    assert!(
                        !is_there || fetch.is_detached,
                        "fetch {id} has block {at} of group {group} in the tree before it is whole"
                    );
                }
            }
        }
    }
}
