//! The medium from which a fetch brings KV.

/// The medium from which a fetch brings blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchMedium {
    /// Host memory beside the pool of a device
    Host,
    /// A disk of this node
    Disk,
    /// The memory of another node
    Peer,
    /// A store of another program
    Store,
}

/// The number of tokens that fetches have brought, by medium.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchedTokens {
    pub num_from_host: u32,
    pub num_from_disk: u32,
    pub num_from_peers: u32,
    pub num_from_store: u32,
}

impl FetchedTokens {
    pub fn total(self) -> u32 {
        self.num_from_host + self.num_from_disk + self.num_from_peers + self.num_from_store
    }

    pub(crate) fn add(&mut self, medium: FetchMedium, num_tokens: u32) {
        match medium {
            FetchMedium::Host => self.num_from_host += num_tokens,
            FetchMedium::Disk => self.num_from_disk += num_tokens,
            FetchMedium::Peer => self.num_from_peers += num_tokens,
            FetchMedium::Store => self.num_from_store += num_tokens,
        }
    }
}
