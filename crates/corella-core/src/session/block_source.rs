//! The loads in which other nodes read blocks of this node, and the end of each load.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::ops::Range;

use crate::session::deadline_queue::DeadlineQueue;
use crate::session::tombstone::Tombstones;
use crate::session::{LoadBlocks, LoadConfig, LoadFailure, LoadKey, RowPart, ToFetcher, ToSource};
use crate::{BlockList, HeldBlocks, HoldId, HoldRefusal, Incarnation, NodeId, PageTable};

/// Answers lookups, holds blocks while other nodes load them, and confirms that the hold lived throughout the load.
///
/// ```text
/// LoadBlocks ─▶ Holding ── held ─▶ Sending ── all has landed ─▶ Stopping ── at rest ─▶ Releasing ─▶ Complete or Failed
///                                     └── the hold has ended, the fetcher is lost, … ─┘
/// ```
///
/// * Facts: `handle_*`, each with the time
/// * Actions: [`poll_action`](Self::poll_action), after every call until it returns `None`
/// * Time: [`poll_timeout`](Self::poll_timeout) says when [`handle_timeout`](Self::handle_timeout) must be called
///
/// A hold is released when the transport reports that nothing reads its pages any more. The source does not wait for
/// fetchers that read its memory themselves: blocks count only when they are confirmed, and none is confirmed after the
/// end of the hold.
#[derive(Debug)]
pub struct BlockSource {
    config: LoadConfig,
    incarnation: Incarnation,
    lookups: BTreeSet<LoadId>,
    loads: BTreeMap<LoadId, Load>,
    by_hold: BTreeMap<HoldId, LoadId>,
    deadlines: DeadlineQueue<LoadId>,
    /// Ended loads, each with the number of its blocks if all were confirmed.
    ended: Tombstones<LoadId, Option<u32>>,
    actions: VecDeque<SourceAction>,
    now_us: u64,
}

/// A load and its loading node.
pub type LoadId = (NodeId, LoadKey);

/// A task for the driver. Tasks are carried out in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceAction {
    Send {
        load: LoadId,
        message: ToFetcher,
    },
    /// Asks the scheduler how many blocks it has, for a node that lacks the blocks from `first_block` on. The driver
    /// passes on the answer by [`BlockSource::handle_looked_up`].
    LookUp {
        load: LoadId,
        list: BlockList,
        first_block: u32,
    },
    /// Asks the scheduler to hold the blocks from `first_block` on. The driver passes on the answer by
    /// [`BlockSource::handle_held`].
    Hold {
        load: LoadId,
        list: BlockList,
        first_block: u32,
        until_us: u64,
    },
    /// Reads the blocks for which the tables have pages, and sends them as [`ToFetcher::Data`], in order.
    Read {
        load: LoadId,
        tables: Vec<PageTable>,
        blocks: Range<u32>,
        rows: RowPart,
    },
    /// Stops reading for a load. The driver confirms by [`BlockSource::handle_stopped`].
    Stop {
        load: LoadId,
    },
    /// Releases a hold. If the load `is_asked`, the driver reports by [`BlockSource::handle_released`] whether the hold
    /// lived until now.
    Release {
        load: LoadId,
        hold: HoldId,
        is_asked: bool,
    },
}

#[derive(Debug)]
struct Load {
    /// The blocks to send.
    blocks: Range<u32>,
    request: LoadBlocks,
    until_us: u64,
    phase: SourcePhase,
}

#[derive(Debug)]
enum SourcePhase {
    /// The scheduler makes a hold, which is released at once if the load `is_over`.
    Holding { is_over: bool },
    Sending {
        held: HeldBlocks,
        /// The end of the blocks that were sent or are being sent.
        end_sent: u32,
        end_landed: u32,
    },
    /// Sending stops. All blocks have landed if the load `is_whole`.
    Stopping { hold: HoldId, is_whole: bool },
    /// The scheduler releases the hold, and says whether the hold lived until then.
    Releasing,
}

impl BlockSource {
    pub fn new(config: LoadConfig, incarnation: Incarnation) -> Self {
        let max_ended = 16 * config.max_loads as usize;
        Self {
            ended: Tombstones::new(config.tombstone_us, max_ended),
            config,
            incarnation,
            lookups: BTreeSet::new(),
            loads: BTreeMap::new(),
            by_hold: BTreeMap::new(),
            deadlines: DeadlineQueue::new(),
            actions: VecDeque::new(),
            now_us: 0,
        }
    }

    /// Handles a message of a loading node.
    pub fn handle_message(&mut self, node: NodeId, key: LoadKey, message: ToSource, now_us: u64) {
        self.note_time(now_us);
        let load = (node, key);
        if key.source != self.incarnation {
            self.send(load, ToFetcher::Failed(LoadFailure::Unknown));
            return;
        }
        match message {
            ToSource::Lookup { list, first_block } => self.look_up(load, list, first_block),
            ToSource::LoadBlocks(request) => self.begin(load, request),
            ToSource::Landed { num_blocks } => self.handle_landed(load, num_blocks),
            ToSource::Release => self.end(load, None),
        }
    }

    fn look_up(&mut self, load: LoadId, list: BlockList, first_block: u32) {
        let has_room = self.lookups.len() < self.config.max_loads as usize;
        if !has_room {
            self.send(load, ToFetcher::Failed(LoadFailure::Refused));
        } else if self.lookups.insert(load) {
            self.actions.push_back(SourceAction::LookUp {
                load,
                list,
                first_block,
            });
        }
    }

    /// Handles the scheduler's answer to [`SourceAction::LookUp`].
    pub fn handle_looked_up(&mut self, load: LoadId, num_blocks: u32, now_us: u64) {
        self.note_time(now_us);
        if self.lookups.remove(&load) {
            self.send(load, ToFetcher::Found { num_blocks });
        }
    }

    fn begin(&mut self, load: LoadId, request: LoadBlocks) {
        if self.loads.contains_key(&load) || self.ended.contains(load) {
            // The message was repeated.
            return;
        }
        let num_blocks = request.list.hashes.len() as u32;
        let is_sound = request.first_block < num_blocks
            && request.credit > 0
            && request.lease_us > 0
            && request.list.tokens.len() == num_blocks as usize * self.config.page_size as usize;
        if !is_sound || self.loads.len() >= self.config.max_loads as usize {
            self.send(load, ToFetcher::Failed(LoadFailure::Refused));
            return;
        }
        let lease_us = request.lease_us.min(self.config.lease_us);
        let until_us = self.now_us.saturating_add(lease_us);
        self.actions.push_back(SourceAction::Hold {
            load,
            list: request.list.clone(),
            first_block: request.first_block,
            until_us,
        });
        let begun = Load {
            blocks: request.first_block..num_blocks,
            request,
            until_us,
            phase: SourcePhase::Holding { is_over: false },
        };
        self.loads.insert(load, begun);
        self.set_stall(load);
    }

    /// Handles the scheduler's answer to [`SourceAction::Hold`].
    pub fn handle_held(
        &mut self,
        load: LoadId,
        answer: Result<HeldBlocks, HoldRefusal>,
        now_us: u64,
    ) {
        self.note_time(now_us);
        let Some(begun) = self.loads.get_mut(&load) else {
            return;
        };
        let SourcePhase::Holding { is_over } = begun.phase else {
            return;
        };
        let failure = match answer {
            Ok(held) if held.num_blocks == begun.blocks.end && !is_over => {
                self.by_hold.insert(held.id, load);
                let first_block = begun.blocks.start;
                begun.phase = SourcePhase::Sending {
                    held,
                    end_sent: first_block,
                    end_landed: first_block,
                };
                self.read_more(load);
                return;
            }
            Ok(held) => {
                let num_blocks = held.num_blocks;
                self.actions.push_back(SourceAction::Release {
                    load,
                    hold: held.id,
                    is_asked: false,
                });
                LoadFailure::NotHere { num_blocks }
            }
            Err(HoldRefusal::NothingHere) => LoadFailure::NotHere { num_blocks: 0 },
            Err(_) => LoadFailure::Refused,
        };
        if !is_over {
            self.send(load, ToFetcher::Failed(failure));
        }
        self.forget(load, None);
    }

    /// Sends the blocks for which the fetcher has given credit.
    fn read_more(&mut self, load: LoadId) {
        let Some(begun) = self.loads.get_mut(&load) else {
            return;
        };
        let SourcePhase::Sending {
            held,
            end_sent,
            end_landed,
        } = &mut begun.phase
        else {
            return;
        };
        let end = end_landed.saturating_add(begun.request.credit);
        let end = end.min(begun.blocks.end);
        if *end_sent < end {
            self.actions.push_back(SourceAction::Read {
                load,
                tables: held.tables.clone(),
                blocks: *end_sent..end,
                rows: begun.request.rows.clone(),
            });
            *end_sent = end;
        }
    }

    fn handle_landed(&mut self, load: LoadId, num_blocks: u32) {
        let Some(begun) = self.loads.get_mut(&load) else {
            let answer = match self.ended.get(load) {
                Some(Some(all)) => ToFetcher::Complete { num_blocks: all },
                Some(None) | None => ToFetcher::Failed(LoadFailure::Unknown),
            };
            self.send(load, answer);
            return;
        };
        let all = begun.blocks.end;
        let SourcePhase::Sending {
            end_sent,
            end_landed,
            ..
        } = &mut begun.phase
        else {
            return;
        };
        // A block cannot land before it is sent.
        if num_blocks <= *end_landed || num_blocks > *end_sent {
            return;
        }
        *end_landed = num_blocks;
        if num_blocks == all {
            self.stop(load, true);
            return;
        }
        // Only this node releases the hold, so the pages were locked until now.
        self.send(load, ToFetcher::Complete { num_blocks });
        self.read_more(load);
        self.set_stall(load);
    }

    /// Handles the end of a hold in the scheduler.
    pub fn handle_hold_ended(&mut self, hold: HoldId, now_us: u64) {
        self.note_time(now_us);
        if let Some(&load) = self.by_hold.get(&hold) {
            self.end(load, Some(LoadFailure::HoldEnded));
        }
    }

    /// Handles that no page of a load is being read any more.
    pub fn handle_stopped(&mut self, load: LoadId, now_us: u64) {
        self.note_time(now_us);
        let Some(begun) = self.loads.get_mut(&load) else {
            return;
        };
        let SourcePhase::Stopping { hold, is_whole } = begun.phase else {
            return;
        };
        begun.phase = SourcePhase::Releasing;
        self.by_hold.remove(&hold);
        self.actions.push_back(SourceAction::Release {
            load,
            hold,
            is_asked: is_whole,
        });
        if !is_whole {
            self.forget(load, None);
        }
    }

    /// Handles the release of a hold. The load is complete if the hold `has_lived` until now.
    pub fn handle_released(&mut self, load: LoadId, has_lived: bool, now_us: u64) {
        self.note_time(now_us);
        let Some(begun) = self.loads.get(&load) else {
            return;
        };
        if !matches!(begun.phase, SourcePhase::Releasing) {
            return;
        }
        let num_blocks = begun.blocks.end;
        match has_lived {
            true => self.send(load, ToFetcher::Complete { num_blocks }),
            false => self.send(load, ToFetcher::Failed(LoadFailure::HoldEnded)),
        }
        self.forget(load, has_lived.then_some(num_blocks));
    }

    /// Handles the loss of a loading node's incarnation, which ends its loads.
    pub fn handle_fetcher_lost(&mut self, fetcher: Incarnation, now_us: u64) {
        self.note_time(now_us);
        let loads = self.loads.keys().copied();
        let lost = loads.filter(|(_, key)| key.fetcher == fetcher);
        for load in lost.collect::<Vec<_>>() {
            self.end(load, None);
        }
    }

    pub fn poll_action(&mut self) -> Option<SourceAction> {
        self.actions.pop_front()
    }

    pub fn poll_timeout(&self) -> Option<u64> {
        let forget_us = self.ended.first_us();
        self.deadlines.first_us().into_iter().chain(forget_us).min()
    }

    pub fn handle_timeout(&mut self, now_us: u64) {
        self.note_time(now_us);
        self.ended.expire(now_us);
        while let Some(load) = self.deadlines.due(now_us) {
            self.end(load, Some(LoadFailure::Stalled));
        }
    }

    pub fn num_loads(&self) -> usize {
        self.loads.len()
    }

    /// Ends a load. `failure` is the reason for the fetcher, or `None` if the fetcher has ended the load itself.
    fn end(&mut self, load: LoadId, failure: Option<LoadFailure>) {
        self.deadlines.set(load, None);
        let Some(begun) = self.loads.get_mut(&load) else {
            return;
        };
        if let Some(failure) = failure
            && matches!(
                begun.phase,
                SourcePhase::Holding { is_over: false } | SourcePhase::Sending { .. }
            )
        {
            self.send(load, ToFetcher::Failed(failure));
        }
        let Some(begun) = self.loads.get_mut(&load) else {
            return;
        };
        match &mut begun.phase {
            SourcePhase::Holding { is_over } => *is_over = true,
            SourcePhase::Sending { .. } => self.stop(load, false),
            SourcePhase::Stopping { .. } | SourcePhase::Releasing => {}
        }
    }

    /// Stops reading, so that the hold can be released.
    fn stop(&mut self, load: LoadId, is_whole: bool) {
        self.deadlines.set(load, None);
        if let Some(begun) = self.loads.get_mut(&load)
            && let SourcePhase::Sending { held, .. } = &begun.phase
        {
            let hold = held.id;
            begun.phase = SourcePhase::Stopping { hold, is_whole };
            self.actions.push_back(SourceAction::Stop { load });
        }
    }

    fn forget(&mut self, load: LoadId, confirmed: Option<u32>) {
        self.loads.remove(&load);
        self.deadlines.set(load, None);
        self.ended.insert(load, confirmed, self.now_us);
    }

    /// Restarts the time within which the fetcher's next message must come.
    fn set_stall(&mut self, load: LoadId) {
        if let Some(begun) = self.loads.get(&load) {
            let stall_us = self.now_us.saturating_add(self.config.stall_us);
            self.deadlines.set(load, Some(stall_us.min(begun.until_us)));
        }
    }

    fn send(&mut self, load: LoadId, message: ToFetcher) {
        self.actions.push_back(SourceAction::Send { load, message });
    }

    fn note_time(&mut self, now_us: u64) {
        self.now_us = self.now_us.max(now_us);
    }
}
