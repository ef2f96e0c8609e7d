//! Fetches whose source can lend fewer blocks than this node asked for.

use crate::session::LoadKey;
use crate::session::block_fetcher::{
    BlockFetchEnd, BlockFetcher, FetcherAction, FetcherPhase, Next,
};
use crate::{FetchEnd, FetchGrant};

/// The limit of times that a source may offer fewer blocks than it offered before.
const MAX_SHORTENED: u32 = 3;

impl BlockFetcher {
    /// Handles that the source can lend only the first `num_blocks` blocks. Returns false if the fetch does not
    /// continue with these blocks.
    pub(super) fn shorten(&mut self, key: LoadKey, num_blocks: u32, now_us: u64) -> bool {
        let Some(fetch) = self.fetches.get_mut(&key) else {
            return false;
        };
        let loading = match &fetch.phase {
            FetcherPhase::Loading(loading) => loading,
            // The answer was repeated.
            FetcherPhase::Shortening { .. } => return true,
            FetcherPhase::Stopping { next, .. } => return matches!(next, Next::Shorten { .. }),
            _ => return false,
        };
        let landing = &loading.landing;
        let is_part = landing.first_block() < num_blocks && num_blocks < landing.end_block();
        // A source shortens a fetch only before its first rows.
        if !is_part || landing.has_begun() || fetch.num_shortened >= MAX_SHORTENED {
            return false;
        }
        fetch.num_shortened += 1;
        fetch.truncate(num_blocks, self.config.page_size);
        self.set_stall(key, now_us);
        self.stop_rows(key, Next::Shorten { num_blocks });
        true
    }

    /// Handles the scheduler's answer to [`FetcherAction::ShortenFetch`]: `None` if the fetch was cancelled.
    pub fn handle_fetch_shortened(
        &mut self,
        key: LoadKey,
        answer: Option<FetchGrant>,
        now_us: u64,
    ) {
        let Some(fetch) = self.fetches.get(&key) else {
            return;
        };
        let FetcherPhase::Shortening { id, end } = fetch.phase else {
            return;
        };
        let Some(grant) = answer.filter(|_| end.is_none()) else {
            self.end_fetch(id, FetchEnd::Lost);
            self.forget(key, end.unwrap_or(BlockFetchEnd::Cancelled));
            return;
        };
        let next = self.rename(key);
        self.load_blocks(next, grant, now_us);
    }

    /// Gives a fetch a new key.
    fn rename(&mut self, key: LoadKey) -> LoadKey {
        let next = LoadKey {
            number: self.num_started,
            ..key
        };
        self.num_started += 1;
        self.deadlines.set(key, None);
        if let Some(fetch) = self.fetches.remove(&key) {
            self.fetches.insert(next, fetch);
        }
        self.actions.push_back(FetcherAction::Renamed { key, next });
        next
    }
}
