//! The thread that copies blocks to the server.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use corella_core::{BlockList, HoldRefusal, Namespace, PageHash, TokenId};
use corella_engine::FeedReader;
use tokio::runtime::Handle;

use super::chunk;
use super::client::CallError;
use super::link::Link;
use super::store::KvStore;

/// The lease of a hold for a copy. The copy in memory takes milliseconds.
const HOLD_LEASE: Duration = Duration::from_secs(10);
/// The pause after requests needed the pages.
const PAUSE: Duration = Duration::from_millis(100);

/// Copies the offered paths, one after the other, until the engine stops.
pub fn start(
    store: &Arc<KvStore>,
    offers: FeedReader<(Namespace, Vec<TokenId>)>,
) -> io::Result<()> {
    let (weak, mut link) = (Arc::downgrade(store), store.watch_link());
    let runtime = Handle::current();
    let run = move || {
        loop {
            // Paths wait in the scheduler while the server does not answer.
            if runtime.block_on(link.wait_for(Option::is_some)).is_err() {
                return;
            }
            let Some((namespace, tokens)) = offers.next_blocking() else {
                return;
            };
            let Some(store) = weak.upgrade() else {
                return;
            };
            match store.link() {
                Some(link) => runtime.block_on(copy_path(&store, &link, namespace, tokens)),
                None => store.exchange.retract_copy_offer(namespace, tokens),
            }
        }
    };
    let thread = thread::Builder::new().name("corella-kv-store".to_owned());
    thread.spawn(run).map(drop)
}

/// How the copy of a chunk ended.
enum Copied {
    Done,
    /// Its blocks are no longer here, or too many to be held at once.
    Gone,
    /// Requests needed the pages.
    GivenUp,
}

async fn copy_path(store: &KvStore, link: &Arc<Link>, namespace: Namespace, tokens: Vec<TokenId>) {
    // The server has one namespace: that of the model without adapters and salts.
    if namespace != Namespace::default() {
        return;
    }
    let hashes = store.exchange.hashes(&namespace, &tokens);
    let list = store.exchange.list(&namespace, &tokens, &hashes);
    let names: Vec<_> = link.shape.names(&list.hashes).collect();
    let mut buffer = Vec::new();
    for (at, name) in (0..).zip(names) {
        if store.known().has(name) {
            continue;
        }
        buffer.resize(link.shape.num_bytes(), 0);
        match copy_chunk(store, link, &list, (at, name), &mut buffer).await {
            Ok(Copied::Done) => store.known().insert(name),
            Ok(Copied::Gone) => return,
            Ok(Copied::GivenUp) => {
                store.counts.num_dropped.fetch_add(1, Ordering::Relaxed);
                store.exchange.retract_copy_offer(namespace, tokens);
                return tokio::time::sleep(PAUSE).await;
            }
            Err(error) => {
                store.lose_link(link, &error);
                return store.exchange.retract_copy_offer(namespace, tokens);
            }
        }
    }
}

/// Copies a chunk to memory while the scheduler holds its blocks, and then to the server. The server's slot is reserved
/// only for a chunk that is valid, because a reservation cannot be given back.
async fn copy_chunk(
    store: &KvStore,
    link: &Link,
    list: &BlockList,
    (at, name): (u32, PageHash),
    buffer: &mut [u8],
) -> Result<Copied, CallError> {
    let per_chunk = link.shape.num_blocks;
    let (first, end) = (at * per_chunk, (at + 1) * per_chunk);
    let mut chunk_list = list.clone();
    chunk_list.truncate(end, store.exchange.page_size());
    let tokens = chunk_list.tokens.clone();
    let held = match store.exchange.hold(chunk_list, first, HOLD_LEASE).await {
        Some(Ok(held)) => held,
        Some(Err(HoldRefusal::NothingHere | HoldRefusal::TooLarge { .. })) | None => {
            return Ok(Copied::Gone);
        }
        Some(Err(refusal)) => {
            tracing::debug!(?refusal, "blocks are not copied to LMCache's server now");
            return Ok(Copied::GivenUp);
        }
    };
    let is_whole = held.num_blocks == end;
    if is_whole {
        let table = &held.tables[0];
        let pages = &table.pages[first as usize - table.num_gone..];
        // SAFETY: the scheduler holds the pages until they are released below, or says then that it has not.
        unsafe { store.copy_pages(pages, chunk::pages_mut(buffer)) };
    }
    let is_valid = store.exchange.release(held.id).await == Some(true);
    match (is_whole, is_valid) {
        (false, _) => return Ok(Copied::Gone),
        (_, false) => return Ok(Copied::GivenUp),
        (true, true) => chunk::seal(buffer, name),
    }
    let session = store.new_session();
    if let Some(slot) = link.reserve(&session, &tokens).await? {
        let written = link.pool.write(slot, buffer);
        // Also after an error: the server keeps the reservation otherwise, and readers notice the content.
        let is_stored = link.commit(&session, &tokens).await?;
        written.map_err(|error| CallError::Failed(format!("writing a chunk: {error}")))?;
        if is_stored {
            store.counts.num_stored.fetch_add(1, Ordering::Relaxed);
            let num_bytes = buffer.len() as u64;
            store
                .counts
                .bytes_written
                .fetch_add(num_bytes, Ordering::Relaxed);
        }
    }
    link.end_session(&session).await?;
    Ok(Copied::Done)
}
