//! Identities. A number that names something is never a bare integer.

/// A vocabulary entry.
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
    /// One submitted request (one choice of it, when `n` > 1). Never reused.
    RequestId(u64)
}
id! {
    /// An executor's place for one running request; reused after a batch has released it.
    SlotId(u32)
}
id! {
    /// One page of the KV pool.
    PageId(u32)
}
id! {
    /// One batch. Steps are numbered from 0 and run in order.
    StepId(u64)
}
id! {
    /// Layers that share a page table. Models with one kind of attention have group 0 only.
    KvGroupId(u8)
}
id! {
    /// A node of the fleet, by a number that means something in this process only. It stays the same
    /// when the node is started again.
    NodeId(u32)
}
id! {
    /// One start of a node's process. A later start has a larger number.
    Incarnation(u64)
}
id! {
    /// One request of a client that two nodes may serve together. Drawn at random by the prefill
    /// node, shared by all attempts, and never taken from what the client sent.
    SessionId(u128)
}
