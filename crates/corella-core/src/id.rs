//! Identifiers: each kind of number has a type of its own, so that no two kinds are mixed up.

/// The index of a token in the vocabulary.
pub type TokenId = u32;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// One submitted request: with `n` > 1, one choice of the API call. An id is never reused.
    RequestId(u64)
}
id! {
    /// A place in the executor for one running request. A slot is reused after a batch has released it.
    SlotId(u32)
}
id! {
    /// A block at a path of the prefix tree: the tokens of one page, or fewer at the end. The number is reused when the
    /// block has left the tree.
    BlockId(u32)
}
id! {
    /// One page of the KV pool.
    PageId(u32)
}
id! {
    /// A place in the executor for a copy of a slot's recurrent state, below
    /// [`RecurrentState::num_snapshots`](crate::RecurrentState::num_snapshots).
    SnapshotId(u32)
}
id! {
    /// One fetch of blocks from elsewhere. An id is never reused.
    FetchId(u64)
}
id! {
    /// One hold of blocks that another node loads. An id is never reused.
    HoldId(u64)
}
id! {
    /// One batch. Steps are numbered from 0 and run in order.
    StepId(u64)
}
id! {
    /// A KV group, by its index in [`SchedulerConfig::kv_groups`](crate::SchedulerConfig::kv_groups).
    /// Models with one kind of attention have only group 0.
    KvGroupId(u8)
}
id! {
    /// Another node of the fleet, by a number that is valid only in this process and never reused. A table of peers
    /// gives each incarnation a number of its own.
    NodeId(u32)
}
id! {
    /// One start of a node's process. A later start has a larger number.
    Incarnation(u64)
}
id! {
    /// One request of a client that two nodes may serve together. The prefill node makes the id from its incarnation
    /// and a number. All attempts share the id, and no part of it comes from the client.
    SessionId(u128)
}

impl Incarnation {
    /// Stands for the incarnation in the key of a session that any node may ask for. No node has this number.
    pub const ANY: Self = Self(0);
}
