//! KV events of the blocks in a file.
//!
//! The names of blocks in events come from another hash than the names in the file: routers of several servers may
//! share one index, and a server's file has the bits of one instruction set only. So the tokens are read from the
//! headers.

use std::io;

use corella_core::KvEvent;
use crossbeam_channel::Sender;

use super::PageStore;
use crate::kv_disk::file_layer::FileLayer;
use crate::kv_disk::slot::PlainBlock;

impl<F: FileLayer> PageStore<F> {
    /// Begins to report blocks, beginning with those in the file. `bell` wakes the subscriber.
    pub fn watch(&self, bell: Sender<()>) {
        self.index().watch(bell);
    }

    /// The next event. `salt` seeds the names of blocks. Blocks of adapters and with salts make no events: the file has
    /// only digests of their namespaces.
    pub fn next_event(&self, salt: u64) -> io::Result<Option<KvEvent>> {
        loop {
            let slot = {
                let mut index = self.index();
                let Some(watch) = index.watch_mut() else {
                    return Ok(None);
                };
                if let Some(event) = watch.pop_removed() {
                    return Ok(Some(event));
                }
                match watch.pop_untold() {
                    Some(slot) => slot,
                    None => return Ok(None),
                }
            };
            let block = match self.read_plain_block(slot) {
                Ok(Some(block)) => block,
                Ok(None) => continue,
                Err(error) => {
                    self.index().tell_again();
                    return Err(error);
                }
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

    fn read_plain_block(&self, slot: u32) -> io::Result<Option<PlainBlock>> {
        let mut header = vec![0; self.shape.header_bytes()];
        match self.file.read_at(&mut header, self.at(slot)) {
            Ok(()) => Ok(self.shape.plain_block(&header)),
            // The file was cut off.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The next event while the file cannot be used: all announced blocks are retracted.
    pub fn next_retraction(&self) -> Option<KvEvent> {
        let mut index = self.index();
        let watch = index.watch_mut()?;
        if watch.has_told() {
            index.tell_again();
        }
        index.watch_mut()?.pop_removed()
    }
}
