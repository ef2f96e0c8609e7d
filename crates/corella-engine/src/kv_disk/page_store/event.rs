//! KV events of the blocks in the files.
//!
//! The names of blocks in events come from another hash than the names in the file: routers of several servers may
//! share one index, and a server's file has the bits of one instruction set only. So the tokens are read from the
//! headers.

use corella_core::KvEvent;
use crossbeam_channel::Sender;

use super::{DiskError, PageStore};
use crate::kv_disk::file_layer::FileLayer;
use crate::kv_disk::slot::PlainBlock;

impl<F: FileLayer> PageStore<F> {
    /// Begins to report blocks, beginning with those in the files. `bell` wakes the subscriber.
    pub fn watch(&self, bell: Sender<()>) {
        self.index().watch(bell);
    }

    /// The next event. `salt` seeds the names of blocks. Blocks of adapters and with salts make no events: the file has
    /// only digests of their namespaces.
    pub fn next_event(&self, salt: u64) -> Result<Option<KvEvent>, DiskError> {
        loop {
            let slot = {
                let mut index = self.index();
                let Some(watch) = index.watch_mut() else {
                    return Ok(None);
                };
                if let Some(event) = watch.pop_removed() {
                    return Ok(Some(event));
                }
                let Some(slot) = watch.pop_untold() else {
                    return Ok(None);
                };
                // The entries of a closed disk are dropped a little later.
                if !index.is_open(index.disk_of(slot)) {
                    continue;
                }
                slot
            };
            let Some(block) = self.read_plain_block(slot)? else {
                continue;
            };
            let mut index = self.index();
            // Another page may have got the slot meanwhile.
            let is_there = index.slot(block.key) == Some(slot);
            let watch = index.watch_mut().filter(|_| is_there);
            if let Some(event) = watch.and_then(|watch| watch.tell(slot, block, salt)) {
                return Ok(Some(event));
            }
        }
    }

    fn read_plain_block(&self, slot: u32) -> Result<Option<PlainBlock>, DiskError> {
        let mut header = vec![0; self.shape.header_bytes()];
        let disk = self.index().disk_of(slot);
        let read = self.files[disk].read(slot, &mut header);
        let is_whole = read.map_err(|error| self.fail(disk, error))?;
        Ok(is_whole.then(|| self.shape.plain_block(&header)).flatten())
    }
}
