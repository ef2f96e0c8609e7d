//! The source's side: passes facts to a [`BlockSource`], and carries out its actions.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use corella_core::session::{
    BlockSource, LoadConfig, LoadFailure, LoadId, LoadKey, RowPart, SourceAction, ToFetcher,
    ToSource,
};
use corella_core::{HoldRefusal, Incarnation, PageTable};
use corella_engine::{BlockExchange, rare_line};
use corella_model::KvGeometry;

use super::{OTHER_END, load_config, whole_rows};
use crate::driver::{Driver, Shared};
use crate::transport::{BlockReply, BlockServer, ConnectionId, KvSender, session_key};

/// The limit of a lookup's wait for blocks from the disk. The loading node waits 250 ms for the answer.
const DISK_TIMEOUT: Duration = Duration::from_millis(150);

/// Serves the blocks of a node's prefix cache to other nodes.
pub struct SourceNode {
    exchange: BlockExchange,
    sender: Weak<KvSender>,
    page_size: u32,
    rows: RowPart,
    shared: Shared<State>,
}

pub(crate) struct State {
    end: BlockSource,
    /// For each loading node, the connection of its last message.
    replies: HashMap<Incarnation, BlockReply>,
    stats: SourceStats,
}

/// Answers to loading nodes, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceStats {
    /// Answered lookups.
    pub num_found: u64,
    /// Refused lookups and loads: too many are running, or the request is invalid.
    pub num_refused: u64,
    /// Loads whose blocks were held until they were read.
    pub num_complete: u64,
    /// Loads that have failed after their lookup.
    pub num_failed: u64,
}

impl SourceStats {
    fn count(&mut self, answer: ToFetcher) {
        let num = match answer {
            ToFetcher::Found { .. } => &mut self.num_found,
            ToFetcher::Failed(LoadFailure::Refused) => &mut self.num_refused,
            ToFetcher::Complete { .. } => &mut self.num_complete,
            ToFetcher::Failed(_) => &mut self.num_failed,
            ToFetcher::Data(_) => return,
        };
        *num += 1;
    }
}

impl SourceNode {
    /// Serves loads over `sender`, on the caller's tokio runtime.
    pub fn start(
        incarnation: Incarnation,
        exchange: BlockExchange,
        sender: &Arc<KvSender>,
        geometry: &KvGeometry,
    ) -> Arc<Self> {
        let config = load_config(geometry);
        // The fetcher sees the progress. The source hears only of the end or of a lost connection.
        let stall_us = config.lease_us;
        let end = BlockSource::new(LoadConfig { stall_us, ..config }, incarnation);
        let node = Arc::new(Self {
            exchange,
            sender: Arc::downgrade(sender),
            rows: whole_rows(geometry),
            page_size: geometry.page_size,
            shared: Shared::new(State {
                end,
                replies: HashMap::new(),
                stats: SourceStats::default(),
            }),
        });
        node.start_timer();
        sender.serve_blocks(Arc::new(Server(Arc::downgrade(&node))));
        node
    }

    /// Returns the number of loads whose blocks are held.
    pub fn num_loads(&self) -> usize {
        self.lock().end.num_loads()
    }

    pub fn stats(&self) -> SourceStats {
        self.lock().stats
    }

    /// Handles the end of a hold in the scheduler.
    pub fn handle_hold_ended(self: &Arc<Self>, hold: corella_core::HoldId) {
        self.with(|end, now_us| end.handle_hold_ended(hold, now_us));
    }
}

/// The sender's reference to the node. It is weak, because the sender outlives the node.
struct Server(Weak<SourceNode>);

impl BlockServer for Server {
    fn handle_message(&self, from: &BlockReply, key: LoadKey, message: ToSource) {
        let Some(node) = self.0.upgrade() else {
            return from.send(key, ToFetcher::Failed(LoadFailure::Refused));
        };
        let mut state = node.lock();
        let message = match message {
            ToSource::LoadBlocks(load) if load.rows != node.rows => {
                let refused = ToFetcher::Failed(LoadFailure::Refused);
                state.stats.count(refused);
                return from.send(key, refused);
            }
            ToSource::LoadBlocks(mut load) => {
                load.credit = u32::MAX;
                ToSource::LoadBlocks(load)
            }
            message => message,
        };
        state.replies.insert(key.fetcher, from.clone());
        node.tell(&mut state, |end, now_us| {
            end.handle_message(OTHER_END, key, message, now_us);
        });
    }

    fn handle_lost(&self, connection: ConnectionId) {
        let Some(node) = self.0.upgrade() else {
            return;
        };
        let mut state = node.lock();
        let mut replies = state.replies.iter();
        let lost = replies.find(|(_, reply)| reply.connection() == connection);
        if let Some(fetcher) = lost.map(|(&fetcher, _)| fetcher) {
            state.replies.remove(&fetcher);
            node.tell(&mut state, |end, now_us| {
                end.handle_fetcher_lost(fetcher, now_us);
            });
        }
    }
}

impl Driver for SourceNode {
    type End = BlockSource;
    type State = State;

    fn shared(&self) -> &Shared<State> {
        &self.shared
    }

    fn end(state: &mut State) -> &mut BlockSource {
        &mut state.end
    }

    fn act(self: &Arc<Self>, state: &mut State, action: SourceAction) {
        tracing::trace!(?action);
        match action {
            SourceAction::Send {
                load: (_, key),
                message,
            } => {
                state.stats.count(message);
                if let Some(reply) = state.replies.get(&key.fetcher) {
                    reply.send(key, message);
                }
            }
            SourceAction::LookUp {
                load,
                list,
                first_block,
            } => {
                let node = self.clone();
                self.spawn(async move {
                    if node.exchange.num_on_disk(&list, 0) > 0 {
                        let brought = node.exchange.bring_from_disk(list.clone());
                        let _ = tokio::time::timeout(DISK_TIMEOUT, brought).await;
                    }
                    let lendable = node.exchange.look_up_lendable(list, first_block).await;
                    let num_blocks = lendable.unwrap_or(0);
                    node.with(|end, now_us| end.handle_looked_up(load, num_blocks, now_us));
                });
            }
            SourceAction::Hold {
                load,
                list,
                first_block,
                until_us,
            } => {
                let node = self.clone();
                self.spawn(async move {
                    let lease = node.clock().until(until_us);
                    let held = node.exchange.hold(list, first_block, lease).await;
                    // A stopped engine has no blocks.
                    let held = held.unwrap_or(Err(HoldRefusal::NothingHere));
                    node.with(|end, now_us| end.handle_held(load, held, now_us));
                });
            }
            SourceAction::Read {
                load,
                tables,
                blocks,
                ..
            } => {
                let num_rows = blocks.end * self.page_size;
                self.export(state, load, tables, num_rows);
            }
            SourceAction::Stop { load } => {
                if let Some(sender) = self.sender.upgrade() {
                    sender.delete(&session_key(&load.1));
                }
                let now_us = self.clock().now_us();
                state.end.handle_stopped(load, now_us);
            }
            SourceAction::Release {
                load,
                hold,
                is_asked,
            } => {
                let node = self.clone();
                self.spawn(async move {
                    let has_lived = node.exchange.release(hold).await.unwrap_or(false);
                    if is_asked {
                        node.with(|end, now_us| end.handle_released(load, has_lived, now_us));
                    }
                });
            }
        }
    }
}

impl SourceNode {
    /// Exports the rows of held blocks to the loading node.
    fn export(&self, state: &mut State, load: LoadId, tables: Vec<PageTable>, num_rows: u32) {
        let Some(sender) = self.sender.upgrade() else {
            return;
        };
        // SAFETY: the scheduler holds the blocks until `Release`, and their rows no longer change. `Stop` comes before
        // `Release` and deletes the session.
        let exported = unsafe { sender.export_whole(session_key(&load.1), num_rows, tables) };
        if let Err(error) = exported {
            rare_line!(warn, "cannot send cached blocks: {error}");
            let now_us = self.clock().now_us();
            let end = &mut state.end;
            end.handle_message(load.0, load.1, ToSource::Release, now_us);
        }
    }
}
