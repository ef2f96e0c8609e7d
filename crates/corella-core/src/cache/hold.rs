//! Pages that stay locked for readers and writers after their request has given them up.
//!
//! Another node reads the exported KV of a request layer by layer, while the prompt is computed and for a while after
//! the request has ended. When the request gives up its pages, for whatever reason, they go into a hold. They leave the
//! hold only when [`Scheduler::release_hold`](crate::Scheduler::release_hold) reports that all reads have ended. In the
//! same way, the pages of a request that stops receiving KV stay in a hold until all writes have ended.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::cache::block_hold::BlockHolds;
use crate::cache::fetch::Fetches;
use crate::cache::page_table::PageTables;
use crate::{KvGroup, PageId, PageTable, RequestId, SnapshotId, StepId};

/// News about KV, for the driver that moves it to other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvFact {
    /// A planned step computes the last of these rows. Earlier steps have computed the other rows, or are in flight.
    /// When the step is done with a layer, the rows of that layer may be read until
    /// [`Scheduler::release_hold`](crate::Scheduler::release_hold). If the step fails, the rows are void.
    Exported {
        request: RequestId,
        step: StepId,
        first_row: u32,
        end_row: u32,
        /// For each KV group, the pages from the first row to the last. Pages that no query after the prompt reads are
        /// left out.
        tables: Vec<PageTable>,
    },
    /// The export would exceed `max_held_pages`. The request runs and exports nothing.
    Declined { request: RequestId },
    /// No more rows will be exported. The first `num_rows` have been computed by steps that have returned; their pages
    /// stay unchanged until [`Scheduler::release_hold`](crate::Scheduler::release_hold).
    ExportEnded {
        request: RequestId,
        num_rows: u32,
        /// The recurrent state after the last exported row, in a snapshot that stays unchanged until the release, too.
        /// `None` for models without recurrent layers, and when rows are missing.
        state: Option<SnapshotId>,
    },
    /// The hold's lease is over, or a running request needs the pages. The reader must stop and call
    /// [`Scheduler::release_hold`](crate::Scheduler::release_hold); the pages stay held until then.
    LeaseEnded { request: RequestId },
}

impl KvFact {
    pub fn request(&self) -> RequestId {
        match *self {
            Self::Exported { request, .. }
            | Self::Declined { request }
            | Self::ExportEnded { request, .. }
            | Self::LeaseEnded { request } => request,
        }
    }
}

/// While this many facts are unread, no request that exports KV starts. A started request adds at most one fact for
/// each chunk of its prompt, and two when it ends.
const MAX_UNREAD_FACTS: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct Holds {
    by_request: BTreeMap<RequestId, Hold>,
    by_lease: BTreeSet<(u64, RequestId)>,
    num_pages: usize,
    /// Pages of running requests that export KV. The pages count now, because they will be held.
    num_exporting_pages: usize,
    facts: VecDeque<KvFact>,
    fetches: Fetches,
    of_blocks: BlockHolds,
}

/// The KV that one request exports to other nodes.
#[derive(Debug, Default)]
pub(crate) struct Export {
    /// The number of exported pages; 0 without a reader.
    num_pages: u32,
    /// The number of announced rows, from the first on.
    num_rows: u32,
    /// The end of the exported rows.
    end_row: u32,
    /// The snapshot of the recurrent state after the last exported row.
    state: Option<SnapshotId>,
}

impl Export {
    pub fn num_pages(&self) -> u32 {
        self.num_pages
    }

    pub fn end_row(&self) -> u32 {
        self.end_row
    }

    pub fn state(&self) -> Option<SnapshotId> {
        self.state
    }

    /// Sets the snapshot that takes the state after the last exported row.
    pub fn set_state(&mut self, snapshot: Option<SnapshotId>) {
        self.state = snapshot;
    }

    pub fn take_state(&mut self) -> Option<SnapshotId> {
        self.state.take()
    }

    /// The entries of each group's table for the rows up to `end_row` that are not announced yet. Entries that other
    /// nodes do not read are left out.
    fn next_tables(
        &self,
        end_row: u32,
        tables: &PageTables,
        (groups, page_size): (&[KvGroup], u32),
    ) -> Vec<PageTable> {
        let (first, end) = (self.num_rows / page_size, end_row.div_ceil(page_size));
        let part = |(table, group): (&PageTable, &KvGroup)| {
            let first_exported = group.first_page_exported(self.end_row, page_size);
            table.part(first.max(first_exported) as usize, end as usize)
        };
        tables.iter().zip(groups).map(part).collect()
    }
}

#[derive(Debug)]
struct Hold {
    pages: Vec<PageId>,
    state: Option<SnapshotId>,
    /// `None` when the lease is over, and for a hold without a lease.
    lease_us: Option<u64>,
}

impl Holds {
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    pub fn is_empty(&self) -> bool {
        self.by_request.is_empty()
    }

    /// Fetches. Their pages belong to the cache and to no request.
    pub fn fetches(&self) -> &Fetches {
        &self.fetches
    }

    pub fn fetches_mut(&mut self) -> &mut Fetches {
        &mut self.fetches
    }

    /// Holds of blocks that other nodes load. The blocks' pages belong to the cache, too.
    pub fn of_blocks(&self) -> &BlockHolds {
        &self.of_blocks
    }

    pub fn of_blocks_mut(&mut self) -> &mut BlockHolds {
        &mut self.of_blocks
    }

    pub fn is_exporting(&self) -> bool {
        self.num_exporting_pages > 0
    }

    /// Whether the driver has read enough facts for another export.
    pub fn has_room_for_facts(&self) -> bool {
        self.facts.len() < MAX_UNREAD_FACTS
    }

    pub fn next_lease_us(&self) -> Option<u64> {
        self.by_lease.first().map(|&(lease_us, _)| lease_us)
    }

    pub fn pages(&self) -> impl Iterator<Item = PageId> {
        self.by_request
            .values()
            .flat_map(|hold| &hold.pages)
            .copied()
    }

    pub fn states(&self) -> impl Iterator<Item = SnapshotId> {
        self.by_request.values().filter_map(|hold| hold.state)
    }

    /// Holds the pages of `request`, and the snapshot of its recurrent state. The locks of the request's page tables
    /// pass to the hold.
    pub fn insert(
        &mut self,
        request: RequestId,
        (pages, state): (Vec<PageId>, Option<SnapshotId>),
        lease_us: Option<u64>,
    ) {
        self.num_pages += pages.len();
        self.by_lease
            .extend(lease_us.map(|lease_us| (lease_us, request)));
        let before = self.by_request.insert(
            request,
            Hold {
                pages,
                state,
                lease_us,
            },
        );
        assert!(before.is_none(), "request {request} holds pages twice");
    }

    pub fn remove(&mut self, request: RequestId) -> Option<(Vec<PageId>, Option<SnapshotId>)> {
        let hold = self.by_request.remove(&request)?;
        if let Some(lease_us) = hold.lease_us {
            self.by_lease.remove(&(lease_us, request));
        }
        self.num_pages -= hold.pages.len();
        Some((hold.pages, hold.state))
    }

    pub fn pop_fact(&mut self) -> Option<KvFact> {
        self.facts.pop_front()
    }

    /// Extends the lease of a hold to `lease_us`. Returns false for an unknown hold, or after the end of its lease.
    pub fn renew(&mut self, request: RequestId, lease_us: u64) -> bool {
        let hold = self.by_request.get_mut(&request);
        let Some(lease) = hold.and_then(|hold| hold.lease_us.as_mut()) else {
            return false;
        };
        let before = core::mem::replace(lease, lease_us);
        self.by_lease.remove(&(before, request));
        self.by_lease.insert((lease_us, request));
        true
    }

    /// Begins the export of a request's rows up to `end_row`, and counts their `num_pages` pages as held. Returns false
    /// if that would exceed `max_pages`.
    pub fn begin_export(
        &mut self,
        export: &mut Export,
        (end_row, num_pages): (u32, u32),
        max_pages: u32,
    ) -> bool {
        let num_held_pages = self.num_pages + self.num_exporting_pages + num_pages as usize;
        if num_held_pages > max_pages as usize {
            return false;
        }
        (export.num_pages, export.end_row) = (num_pages, end_row);
        self.num_exporting_pages += num_pages as usize;
        true
    }

    /// Reports that a request exports nothing, because its pages cannot be held.
    pub fn decline(&mut self, request: RequestId) {
        self.facts.push_back(KvFact::Declined { request });
    }

    /// Announces that `step` computes a request's exported rows up to `end_row`.
    pub fn announce(
        &mut self,
        step: StepId,
        request: RequestId,
        (export, end_row): (&mut Export, u32),
        tables: &PageTables,
        pages: (&[KvGroup], u32),
    ) {
        let first_row = export.num_rows;
        if export.num_pages == 0 || first_row >= end_row {
            return;
        }
        let tables = export.next_tables(end_row, tables, pages);
        export.num_rows = end_row;
        self.facts.push_back(KvFact::Exported {
            request,
            step,
            first_row,
            end_row,
            tables,
        });
    }

    /// Ends a request's export. Its pages no longer count as pages of a running export.
    pub fn stop_export(&mut self, export: &mut Export) {
        self.num_exporting_pages -= core::mem::take(&mut export.num_pages) as usize;
    }

    /// When an exporting request gives up its pages, holds them until `lease_us`. The first `num_computed_rows` rows of
    /// the request are computed.
    pub fn hold_exported(
        &mut self,
        request: RequestId,
        export: &mut Export,
        num_computed_rows: u32,
        pages: Vec<PageId>,
        lease_us: u64,
    ) {
        self.stop_export(export);
        let num_rows = num_computed_rows.min(export.num_rows);
        let state = export.take_state();
        self.facts.push_back(KvFact::ExportEnded {
            request,
            num_rows,
            state: state.filter(|_| num_rows == export.end_row),
        });
        self.insert(request, (pages, state), Some(lease_us));
    }

    /// Reports the leases that end by `now_us`.
    pub fn end_leases(&mut self, now_us: u64) {
        while let Some(&(lease_us, request)) = self.by_lease.first()
            && lease_us <= now_us
        {
            self.by_lease.pop_first();
            if let Some(hold) = self.by_request.get_mut(&request) {
                hold.lease_us = None;
            }
            self.facts.push_back(KvFact::LeaseEnded { request });
        }
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self, num_exporting_pages: usize) {
        let num_pages: usize = self.by_request.values().map(|hold| hold.pages.len()).sum();
        assert_eq!(num_pages, self.num_pages, "held pages");
        assert_eq!(
            num_exporting_pages, self.num_exporting_pages,
            "exporting pages"
        );
        let leases = self.by_request.iter();
        let leases: BTreeSet<_> = leases
            .filter_map(|(&request, hold)| Some((hold.lease_us?, request)))
            .collect();
        assert_eq!(leases, self.by_lease, "leases of held pages");
        self.of_blocks.check_invariants();
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn a_lease_ends_once_and_is_not_renewed_then() {
        let mut holds = Holds::default();
        let pages = vec![PageId(3), PageId(4)];
        holds.insert(RequestId(1), (pages.clone(), Some(SnapshotId(2))), Some(10));
        assert!(holds.renew(RequestId(1), 20));
        holds.end_leases(19);
        assert_eq!(holds.pop_fact(), None);
        holds.end_leases(20);
        let request = RequestId(1);
        assert_eq!(holds.pop_fact(), Some(KvFact::LeaseEnded { request }));
        assert!(!holds.renew(request, 30));
        holds.end_leases(u64::MAX);
        assert_eq!(holds.pop_fact(), None);
        // The pages stay until the reader has stopped.
        assert_eq!(holds.num_pages(), 2);
        holds.check_invariants(0);
        assert_eq!(holds.remove(request), Some((pages, Some(SnapshotId(2)))));
        assert!(holds.is_empty());
    }

    #[test]
    fn exports_are_declined_beyond_the_limit() {
        let mut holds = Holds::default();
        let (mut first, mut second) = (Export::default(), Export::default());
        assert!(holds.begin_export(&mut first, (12, 3), 4));
        assert!(!holds.begin_export(&mut second, (8, 2), 4));
        holds.check_invariants(3);
        holds.stop_export(&mut first);
        assert!(holds.begin_export(&mut second, (16, 4), 4));
    }

    #[test]
    #[should_panic(expected = "exporting pages")]
    fn exporting_pages_are_those_of_requests() {
        let mut holds = Holds::default();
        assert!(holds.begin_export(&mut Export::default(), (4, 1), 8));
        holds.check_invariants(0);
    }
}
