//! Requests whose prompt the server may have. The missing chunks are fetched, and the request waits for them like a
//! follower of a request with the same prefix.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use corella_core::session::BlockOffer;
use corella_core::{BlockList, FetchEnd, FetchGrant, FetchMedium, Namespace, RequestId};
use corella_engine::{Generate, Submission, SubmitError, TokenStream};
use tokio::runtime::Handle;

use super::chunk;
use super::client::CallError;
use super::link::Link;
use super::slot_list::Slot;
use super::store::KvStore;
use crate::kv_connector::Answers;

/// The least time for which a request waits for the server: for the look-up, and then for its chunks.
const LEAST_WAIT: Duration = Duration::from_millis(200);
/// The longest time. It also applies while the speed of computing is unknown.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Fetches the chunks of prompts before it submits them.
pub struct StoreReader {
    store: Arc<KvStore>,
    local: Arc<dyn Generate>,
    runtime: Handle,
}

impl StoreReader {
    /// Must be called within a tokio runtime.
    pub fn new(store: Arc<KvStore>, local: Arc<dyn Generate>) -> Self {
        Self {
            store,
            local,
            runtime: Handle::current(),
        }
    }
}

impl Generate for StoreReader {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.store.engine.state().check()?;
        let Some(wanted) = Wanted::new(&self.store, &submission) else {
            return self.local.submit(submission);
        };
        let (answers, streams) = Answers::new(RequestId(0), submission.num_choices);
        let (local, runtime) = (self.local.clone(), self.runtime.clone());
        self.runtime.spawn(async move {
            wanted.bring().await;
            answers.relay(local.submit(submission), &runtime);
        });
        Ok(streams)
    }

    fn check(&self, submission: Submission) -> Result<(), SubmitError> {
        self.local.check(submission)
    }
}

/// The whole chunks of a prompt.
struct Wanted {
    store: Arc<KvStore>,
    link: Arc<Link>,
    list: BlockList,
    session: String,
}

impl Wanted {
    /// Returns `None` for requests that fetch nothing: the server does not answer, the prompt is shorter than a chunk, or
    /// its blocks are not kept.
    fn new(store: &Arc<KvStore>, submission: &Submission) -> Option<Self> {
        let link = store.link()?;
        let is_plain = submission.namespace == Namespace::default() && submission.adapter.is_none();
        if !is_plain || submission.sampling.wants_prompt_outputs() {
            return None;
        }
        // The last token is always computed, because its logits are needed.
        let num_tokens = submission.prompt.len().checked_sub(1)?;
        let chunk_tokens = link.shape.num_tokens as usize;
        let tokens = &submission.prompt[..num_tokens - num_tokens % chunk_tokens];
        if tokens.is_empty() {
            return None;
        }
        let hashes = store.exchange.hashes(&submission.namespace, tokens);
        let list = store.exchange.list(&submission.namespace, tokens, &hashes);
        Some(Self {
            session: store.new_session(),
            store: store.clone(),
            link,
            list,
        })
    }

    /// Begins to fetch the chunks, if that pays. Returns when the scheduler knows of the fetch, or when there will be
    /// none.
    async fn bring(self) {
        let store = self.store.clone();
        let looked_up = store.exchange.look_up(self.list.clone()).await;
        let num_here = looked_up.unwrap_or(0);
        let num_blocks = self.list.hashes.len() as u32;
        let offer = |num_offered| BlockOffer {
            num_blocks,
            num_here,
            num_offered,
        };
        if num_here == num_blocks || self.num_worth(offer(num_blocks)) <= num_here {
            return;
        }
        let wait = self.wait();
        let begun = Instant::now();
        let found = self
            .link
            .look_up(&self.session, &self.list.tokens, wait)
            .await;
        let num_chunks = match found {
            Ok(num_chunks) => num_chunks,
            Err(error) => return store.lose_link(&self.link, &error),
        };
        store
            .pace()
            .note_round_trip(begun.elapsed().as_micros() as u64);
        let names = self.link.shape.names(&self.list.hashes);
        store.note_found(names, num_chunks);
        let num_found = num_chunks * self.link.shape.num_blocks;
        let num_worth = self.num_worth(offer(num_found)).min(num_found);
        let grant = match num_worth > num_here {
            true => self.begin_fetch(num_worth, wait).await,
            false => None,
        };
        let Some(grant) = grant else {
            let ended = self.release(0, 0, num_chunks).await;
            return ended.unwrap_or_else(|error| store.lose_link(&self.link, &error));
        };
        tokio::spawn(self.fetch(grant, num_chunks));
    }

    fn num_worth(&self, offer: BlockOffer) -> u32 {
        let stats = self.store.engine.stats().scheduler;
        let page_size = self.store.exchange.page_size();
        self.store.pace().num_worth(offer, &stats, page_size)
    }

    /// The time that computing the prompt would take, within limits.
    fn wait(&self) -> Duration {
        let prefill_us = self.store.engine.stats().scheduler.prefill_us;
        // `prefill_us` was measured for 1,024 tokens.
        let computing_us = prefill_us.saturating_mul(self.list.tokens.len() as u64) / 1024;
        match prefill_us {
            0 => LONGEST_WAIT,
            _ => Duration::from_micros(computing_us).clamp(LEAST_WAIT, LONGEST_WAIT),
        }
    }

    async fn begin_fetch(&self, num_blocks: u32, wait: Duration) -> Option<FetchGrant> {
        let page_size = self.store.exchange.page_size();
        let tokens = self.list.tokens[..(num_blocks * page_size) as usize].to_vec();
        let namespace = self.list.namespace.clone();
        let exchange = &self.store.exchange;
        let begun = exchange
            .begin_fetch(FetchMedium::Store, namespace, tokens, wait, LONGEST_WAIT)
            .await?;
        begun
            .inspect_err(|refusal| {
                tracing::debug!(?refusal, "no blocks come from LMCache's server")
            })
            .ok()
    }

    /// Fills the granted pages from the first `num_chunks` chunks, which a look-up has found.
    async fn fetch(self, grant: FetchGrant, num_chunks: u32) {
        let (store, link, tokens) = (&self.store, &self.link, &self.list.tokens);
        let begun = Instant::now();
        let per_chunk = link.shape.num_blocks;
        let first = grant.num_found / per_chunk;
        let end = grant.num_blocks.div_ceil(per_chunk);
        let slots = link.begin_read(&self.session, tokens, first..end).await;
        let num_filled = match &slots {
            Ok(Some(slots)) => self.fill(&grant, first, slots).await,
            // The server has evicted a chunk, and keeps none of them any longer.
            Ok(None) | Err(_) => 0,
        };
        let fetched = match num_filled == grant.num_blocks - grant.num_found {
            true => FetchEnd::Done,
            false => FetchEnd::Lost,
        };
        // Requests may wait for this, and not for the server.
        store.exchange.handle_fetch_ended(grant.id, fetched);
        let elapsed_us = begun.elapsed().as_micros() as u64;
        store.pace().note_load(num_filled, elapsed_us);
        let ended = async {
            if slots?.is_some() {
                link.end_read(&self.session, tokens, first..end).await?;
            }
            self.release(first, end, num_chunks).await
        };
        if let Err(error) = ended.await {
            store.lose_link(link, &error);
        }
    }

    /// Fills the granted pages from the chunks from `first` on. Returns the number of filled blocks.
    async fn fill(&self, grant: &FetchGrant, first: u32, slots: &[Slot]) -> u32 {
        let mut num_filled = 0;
        let mut buffer = self.link.shape.new_chunk();
        for (at, &slot) in (first..).zip(slots) {
            let filling = Filling {
                store: self.store.clone(),
                link: self.link.clone(),
                list: self.list.clone(),
                grant: grant.clone(),
                buffer,
            };
            // The copy takes milliseconds, which other tasks must not wait for.
            let filled = tokio::task::spawn_blocking(move || filling.fill(at, slot));
            let Ok((next_buffer, Some(num_blocks))) = filled.await else {
                break;
            };
            buffer = next_buffer;
            num_filled = num_blocks;
            self.store.exchange.handle_fetched(grant.id, num_filled);
        }
        num_filled
    }

    /// Releases the found chunks before `first` and from `end` on, and ends the session.
    async fn release(&self, first: u32, end: u32, num_chunks: u32) -> Result<(), CallError> {
        let (link, tokens) = (&self.link, &self.list.tokens);
        link.release(&self.session, tokens, 0..first).await?;
        link.release(&self.session, tokens, end..num_chunks).await?;
        link.end_session(&self.session).await
    }
}

/// The work of copying a chunk into granted pages.
struct Filling {
    store: Arc<KvStore>,
    link: Arc<Link>,
    list: BlockList,
    grant: FetchGrant,
    buffer: Vec<u8>,
}

impl Filling {
    /// Copies the wanted pages of a chunk. Returns the buffer, and the number of blocks that are filled with this chunk,
    /// or `None` if the chunk cannot be used.
    fn fill(mut self, at: u32, slot: Slot) -> (Vec<u8>, Option<u32>) {
        let num_filled = self.try_fill(at, slot);
        (self.buffer, num_filled)
    }

    fn try_fill(&mut self, at: u32, slot: Slot) -> Option<u32> {
        let (shape, counts) = (self.link.shape, &self.store.counts);
        let damaged = |why: String| {
            tracing::debug!(why, "a chunk of LMCache's server cannot be used");
            counts.num_damaged.fetch_add(1, Ordering::Relaxed);
        };
        let read = self.link.pool.read(slot, &mut self.buffer);
        read.map_err(|error| damaged(error.to_string())).ok()?;
        let name = self.list.hashes[((at + 1) * shape.num_blocks - 1) as usize];
        let Some(pages) = chunk::open(&self.buffer, name) else {
            damaged("another content".to_owned());
            return None;
        };
        let grant = &self.grant;
        let first = at * shape.num_blocks;
        let end = grant.num_blocks.min(first + shape.num_blocks);
        let table = &grant.tables[0];
        for block in grant.num_found.max(first)..end {
            let page = table.pages[block as usize - table.num_gone];
            let rows = pages
                .chunks(shape.page_bytes)
                .nth((block - first) as usize)?;
            // SAFETY: the scheduler has reserved the page for this fetch, and keeps it from all others until its block
            // or the end of the fetch is reported.
            unsafe { self.store.fill_page(page, rows) };
        }
        let num_new = u64::from(end - grant.num_found.max(first));
        counts.num_hits.fetch_add(num_new, Ordering::Relaxed);
        let num_bytes = shape.num_bytes() as u64;
        counts.bytes_read.fetch_add(num_bytes, Ordering::Relaxed);
        Some(end - grant.num_found)
    }
}
