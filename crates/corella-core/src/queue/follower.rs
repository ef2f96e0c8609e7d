//! Followers: requests that wait while their leader, another request, computes the prefix that they share. They are not
//! in the queue meanwhile, so that they do not delay later requests.

use crate::cache::kv_cache::FoundPrefix;
use crate::request_state::{RequestIndex, RequestState, RequestTable};

/// The prefilling request, if any, that is about to publish the next block that the request `state` needs.
pub(crate) fn leader_of(
    state: &RequestState,
    found: &FoundPrefix,
    prefilling: &[RequestIndex],
    requests: &RequestTable,
    page_size: u32,
) -> Option<RequestIndex> {
    let page_size = page_size as usize;
    let frontier = found.path.len();
    let next_block = frontier * page_size..(frontier + 1) * page_size;
    if next_block.end > state.max_cached_tokens() {
        return None;
    }
    let leads = |&leader: &RequestIndex| {
        let leader = &requests[leader];
        leader.frontier() == Some((found.path.last().copied(), frontier as u32))
            && next_block.end <= leader.prefill_end() as usize
            && leader.tokens()[next_block.clone()] == state.tokens()[next_block.clone()]
            && leader.request().namespace == state.request().namespace
    };
    prefilling.iter().copied().find(leads)
}

/// The number of blocks that a follower shares with its leader. The first `num_found` of them are in the prefix tree.
pub(crate) fn num_shared_blocks(
    state: &RequestState,
    leader: &RequestState,
    num_found: usize,
    page_size: u32,
) -> u32 {
    let page_size = page_size as usize;
    let end = (leader.prefill_end() as usize).min(state.max_cached_tokens());
    let known = num_found * page_size..end;
    let theirs = leader.tokens()[known.clone()].chunks_exact(page_size);
    let ours = state.tokens()[known].chunks_exact(page_size);
    let common = theirs.zip(ours).take_while(|(theirs, ours)| theirs == ours);
    (num_found + common.count()) as u32
}
