//! Reads rows that follow their frames, and writes them to pages.

use std::io;
use std::ptr::NonNull;

use corella_model::{PageConversion, PageForm};

use crate::transport::checksum::Checksum;
use crate::transport::frame::{PageRun, Trailer};
use crate::transport::frame_reader::FrameReader;
use crate::transport::incoming::Incoming;
use crate::transport::io_parts::IoParts;
use crate::transport::socket::Socket;

pub struct TcpReader {
    /// Converts the sender's canonical pages to this node's.
    conversion: PageConversion,
    parts: IoParts,
    hasher: Checksum,
    /// A buffer for pages in their canonical form.
    copy: Vec<u8>,
    /// A buffer for the converted pages, in this node's form.
    own: Vec<u8>,
}

impl TcpReader {
    pub fn new(conversion: PageConversion) -> Self {
        Self {
            conversion,
            parts: IoParts::default(),
            hasher: Checksum::new(),
            copy: Vec::new(),
            own: Vec::new(),
        }
    }

    /// Reads a run of this many bytes. Returns whether the whole run has arrived and matches the checksum, or `None` if
    /// the run is withdrawn or its load has ended.
    pub async fn read(
        &mut self,
        socket: &Socket,
        frames: &mut FrameReader,
        run: &PageRun,
        num_bytes: usize,
        load: Option<&Incoming>,
    ) -> io::Result<Option<bool>> {
        let Self {
            parts,
            hasher,
            copy,
            ..
        } = self;
        parts.clear();
        let mut gate = None;
        match load {
            Some(load) if run.form == PageForm::Native => {
                load.native_parts_of(run).for_each(|part| parts.push(part));
                gate = Some(&load.gate);
            }
            Some(_) => {
                copy.resize(num_bytes, 0);
                parts.push(NonNull::from(copy.as_mut_slice()));
            }
            None => frames.push_rubbish(parts, num_bytes),
        }
        // SAFETY: own memory, or pages that are reserved for a load whose gate is open.
        let trailer = unsafe { frames.read_payload(socket, parts, gate, hasher).await? };
        let (Some(load), Trailer::Whole { checksum }) = (load, trailer) else {
            // The sender gives the reason in a separate frame.
            return Ok(None);
        };
        if checksum != self.hasher.value() {
            // The rest of a payload whose load ended in the middle was discarded, so its checksum is meaningless.
            return Ok(load.gate.is_open().then_some(false));
        }
        if run.form == PageForm::Canonical {
            load.write_rows(run, &self.conversion, &self.copy, &mut self.own);
        }
        Ok(Some(true))
    }
}
