//! A registration at LMCache's server, and the calls that need it.
//!
//! The server forgets registrations when it restarts, and after an hour without a call. Then it says that it has no
//! chunks, or answers with errors. So the registration is repeated every few seconds.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use corella_core::TokenId;

use super::chunk::ChunkShape;
use super::client::{CallError, Client};
use super::pool::SharedPool;
use super::slot_list::{Slot, read_slots};
use super::wire;

/// The facts about this process and its pages that the server learns.
pub struct Tenant {
    pub client: Client,
    /// A number that no other process has.
    pub instance: i64,
    /// Names the model, the arithmetic and the layout of pages.
    pub name: String,
    pub page_size: u32,
    pub page_bytes: usize,
}

/// A live registration, with the server's shared memory.
pub struct Link {
    tenant: Arc<Tenant>,
    pub shape: ChunkShape,
    pub pool: SharedPool,
    /// The name of the chunks. Chunks of another size have another name.
    name: String,
}

impl Link {
    /// Registers this process, or renews its registration.
    pub async fn open(tenant: &Arc<Tenant>) -> Result<Self, CallError> {
        let client = &tenant.client;
        client.check_version().await?;
        let size: wire::ChunkSize = client.call(wire::GET_CHUNK_SIZE, wire::Empty {}).await?;
        let (num_tokens, page_size) = (size.num_tokens, tenant.page_size);
        let shape = ChunkShape::new(num_tokens, page_size, tenant.page_bytes).ok_or_else(|| {
            CallError::Unsuitable(format!(
                "chunks of {num_tokens} tokens do not consist of whole pages of {page_size} tokens: start \
                 LMCache's server with a --chunk-size that is a multiple of {page_size}"
            ))
        })?;
        let name = format!("{}-{num_tokens}", tenant.name);
        // A chunk is a single row of bytes to the server, because only this program reads it.
        let registration = wire::Registration {
            instance: tenant.instance,
            model_name: name.clone(),
            world_size: 1,
            block_size: page_size.into(),
            num_layers: 1,
            row_len: shape.num_bytes() as i64,
            element: "uint8".to_owned(),
            has_one_matrix: true,
            num_rows: Some(1),
        };
        let registered: wire::Registered = client.call(wire::REGISTER, registration).await?;
        if registered.pool_name.is_empty() {
            let why = "LMCache's server has no shared memory: start it with --shm-name, with --no-l1-use-lazy, \
                       and with an --l1-size-gb for which /dev/shm has room";
            return Err(CallError::Unsuitable(why.to_owned()));
        }
        let pool = SharedPool::open(&registered.pool_name, registered.pool_bytes);
        let pool = pool.map_err(|error| {
            CallError::Failed(format!(
                "the shared memory {} of LMCache's server: {error}",
                registered.pool_name
            ))
        })?;
        Ok(Self {
            tenant: tenant.clone(),
            shape,
            pool,
            name,
        })
    }

    /// Whether a renewed registration has the same chunks in the same memory.
    pub fn is_same(&self, other: &Self) -> bool {
        self.shape == other.shape && self.pool.is_same(&other.pool)
    }

    /// Looks up a sequence of whole chunks. Returns the number of chunks that the server has, from the first on, within
    /// `limit`. The server keeps them until they are released.
    pub async fn look_up(
        &self,
        session: &str,
        tokens: &[TokenId],
        limit: Duration,
    ) -> Result<u32, CallError> {
        let client = &self.tenant.client;
        let num_chunks = tokens.len() as u32 / self.shape.num_tokens;
        let key = self.key(session, tokens, 0..num_chunks, None);
        let lookup = wire::LookupCall {
            key: Some(key),
            world_size: 1,
        };
        let _: wire::Empty = client.call(wire::LOOKUP, lookup).await?;
        let wait = wire::WaitPrefetch {
            session: session.to_owned(),
            limit_s: limit.as_secs_f64(),
        };
        // The server ends the wait by itself.
        let limit = limit + Duration::from_secs(1);
        let found: wire::Prefetched = client.call_within(wire::WAIT_PREFETCH, wait, limit).await?;
        let num_found = found.num_chunks.unwrap_or(0).try_into().unwrap_or(0);
        Ok(num_chunks.min(num_found))
    }

    /// Returns the places of chunks that a look-up has found, until [`end_read`](Self::end_read). `None` if the server
    /// no longer has all of them.
    pub async fn begin_read(
        &self,
        session: &str,
        tokens: &[TokenId],
        chunks: Range<u32>,
    ) -> Result<Option<Vec<Slot>>, CallError> {
        let num_chunks = chunks.len();
        let call = self.chunk_call(session, tokens, chunks);
        let answer: wire::RetrievePrepared = self
            .tenant
            .client
            .call(wire::PREPARE_RETRIEVE, call)
            .await?;
        if !answer.is_found {
            return Ok(None);
        }
        let slots = read_slots(&answer.slots).ok_or_else(bad_slots)?;
        Ok(Some(slots).filter(|slots| slots.len() == num_chunks))
    }

    pub async fn end_read(
        &self,
        session: &str,
        tokens: &[TokenId],
        chunks: Range<u32>,
    ) -> Result<(), CallError> {
        let call = self.chunk_call(session, tokens, chunks);
        let client = &self.tenant.client;
        let _: wire::Committed = client.call(wire::COMMIT_RETRIEVE, call).await?;
        Ok(())
    }

    /// Releases chunks that a look-up has found and that are not read.
    pub async fn release(
        &self,
        session: &str,
        tokens: &[TokenId],
        chunks: Range<u32>,
    ) -> Result<(), CallError> {
        if chunks.is_empty() {
            return Ok(());
        }
        let release = wire::LookupCall {
            key: Some(self.key(session, tokens, chunks, None)),
            world_size: 1,
        };
        let client = &self.tenant.client;
        let _: wire::Empty = client.call(wire::FREE_LOOKUP_LOCKS, release).await?;
        Ok(())
    }

    pub async fn end_session(&self, session: &str) -> Result<(), CallError> {
        let session = wire::Session {
            session: session.to_owned(),
        };
        let client = &self.tenant.client;
        let _: wire::Empty = client.call(wire::END_SESSION, session).await?;
        Ok(())
    }

    /// Reserves room for the last chunk of a sequence. Returns `None` if the server has the chunk, or has no room.
    /// [`commit`](Self::commit) must follow a reservation.
    pub async fn reserve(
        &self,
        session: &str,
        tokens: &[TokenId],
    ) -> Result<Option<Slot>, CallError> {
        let call = self.chunk_call(session, tokens, self.last_chunk(tokens));
        let answer: wire::StorePrepared =
            self.tenant.client.call(wire::PREPARE_STORE, call).await?;
        let slots = read_slots(&answer.slots).ok_or_else(bad_slots)?;
        Ok(slots.first().copied())
    }

    /// Gives the last chunk of a sequence, whose slot was filled, to all readers.
    pub async fn commit(&self, session: &str, tokens: &[TokenId]) -> Result<bool, CallError> {
        let call = self.chunk_call(session, tokens, self.last_chunk(tokens));
        let client = &self.tenant.client;
        let answer: wire::Committed = client.call(wire::COMMIT_STORE, call).await?;
        Ok(answer.is_done)
    }

    fn last_chunk(&self, tokens: &[TokenId]) -> Range<u32> {
        let num_chunks = tokens.len() as u32 / self.shape.num_tokens;
        num_chunks - 1..num_chunks
    }

    fn chunk_call(&self, session: &str, tokens: &[TokenId], chunks: Range<u32>) -> wire::ChunkCall {
        wire::ChunkCall {
            key: Some(self.key(session, tokens, chunks, Some(0))),
            instance: self.tenant.instance,
        }
    }

    fn key(
        &self,
        session: &str,
        tokens: &[TokenId],
        chunks: Range<u32>,
        worker: Option<i64>,
    ) -> wire::Key {
        let at = |chunk: u32| i64::from(chunk) * i64::from(self.shape.num_tokens);
        wire::Key {
            model_name: self.name.clone(),
            world_size: 1,
            worker,
            tokens: tokens.iter().map(|&token| token.into()).collect(),
            start: at(chunks.start),
            end: at(chunks.end),
            session: session.to_owned(),
            num_readers: 1,
        }
    }
}

fn bad_slots() -> CallError {
    CallError::Failed("LMCache's server has sent no list of slots".to_owned())
}
