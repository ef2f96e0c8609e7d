//! Loads whose source can lend fewer blocks than this node asked for.

use crate::session::LoadKey;
use crate::session::block_loader::{BlockLoader, LoadEnd, LoaderAction, LoaderPhase, Next};
use crate::{FetchEnd, FetchGrant};

/// The number of times that a source may have fewer blocks than it said before.
const MAX_SHORTENED: u32 = 3;

impl BlockLoader {
    /// Handles that the source can lend only the first `num_blocks` blocks. Returns false if the load does not continue
    /// with these.
    pub(super) fn shorten(&mut self, key: LoadKey, num_blocks: u32, now_us: u64) -> bool {
        let Some(load) = self.loads.get_mut(&key) else {
            return false;
        };
        let loading = match &load.phase {
            LoaderPhase::Loading(loading) => loading,
            // The answer was repeated.
            LoaderPhase::Shortening { .. } => return true,
            LoaderPhase::Stopping { next, .. } => return matches!(next, Next::Shorten { .. }),
            _ => return false,
        };
        let landing = &loading.landing;
        let is_part = landing.first_block() < num_blocks && num_blocks < landing.end_block();
        // A source shortens a load only before its first rows.
        if !is_part || landing.has_begun() || load.num_shortened >= MAX_SHORTENED {
            return false;
        }
        load.num_shortened += 1;
        load.truncate(num_blocks, self.config.page_size);
        self.set_stall(key, now_us);
        self.stop_rows(key, Next::Shorten { num_blocks });
        true
    }

    /// Handles the scheduler's answer to [`LoaderAction::ShortenFetch`]: `None` if the fetch was cancelled.
    pub fn handle_fetch_shortened(
        &mut self,
        key: LoadKey,
        answer: Option<FetchGrant>,
        now_us: u64,
    ) {
        let Some(load) = self.loads.get(&key) else {
            return;
        };
        let LoaderPhase::Shortening { fetch, end } = load.phase else {
            return;
        };
        let Some(grant) = answer.filter(|_| end.is_none()) else {
            self.end_fetch(fetch, FetchEnd::Lost);
            self.forget(key, end.unwrap_or(LoadEnd::Cancelled));
            return;
        };
        let next = self.rename(key);
        self.load_blocks(next, grant, now_us);
    }

    /// Gives a load a new key.
    fn rename(&mut self, key: LoadKey) -> LoadKey {
        let next = LoadKey {
            number: self.num_started,
            ..key
        };
        self.num_started += 1;
        self.deadlines.set(key, None);
        if let Some(load) = self.loads.remove(&key) {
            self.loads.insert(next, load);
        }
        self.actions.push_back(LoaderAction::Renamed { key, next });
        next
    }
}
