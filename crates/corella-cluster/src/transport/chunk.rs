//! Pages on their way to a socket.

use std::io;
use std::ptr::NonNull;
use std::time::Duration;

use corella_core::{PageId, SnapshotId};
use corella_model::PageForm;

use super::checksum::Checksum;
use super::frame::{Frame, PageRun, StateRun, TRAILER_BYTES, Trailer};
use super::io_parts::IoParts;
use super::memory_region::{MemoryRegion, REGION_BYTES};
use super::outgoing::Outgoing;
use super::socket::Socket;

/// Sent in place of pages that were taken back.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Writes whole frames. Each connection has its own writer.
pub struct ChunkWriter {
    parts: IoParts,
    /// Buffer for pages in their canonical form, for regions and for recurrent states.
    copy: Vec<u8>,
    hasher: Checksum,
    /// Whether the receiver reads native pages from this node's memory.
    sends_regions: bool,
    /// A peer that takes nothing for this long is given up.
    stall_timeout: Duration,
}

impl ChunkWriter {
    pub fn new(sends_regions: bool, stall_timeout: Duration) -> Self {
        Self {
            parts: IoParts::default(),
            copy: Vec::new(),
            hasher: Checksum::new(),
            sends_regions,
            stall_timeout,
        }
    }

    pub async fn write_bytes(&mut self, socket: &Socket, bytes: &[u8]) -> io::Result<()> {
        self.parts.clear();
        self.parts.push_slice(bytes);
        // SAFETY: bytes borrowed for this call.
        unsafe { self.send(socket, None, 0).await }.map(drop)
    }

    /// Sends native pages straight from the KV pool. A receiver that reads this node's memory gets only the pages'
    /// addresses and copies the pages itself. If the session ends during the call, the frame is withdrawn. If it ends
    /// later, the checksum shows the receiver whether the pages have changed.
    pub async fn write(
        &mut self,
        socket: &Socket,
        outgoing: &Outgoing,
        mut run: PageRun,
        pages: &[PageId],
    ) -> io::Result<()> {
        if self.sends_regions && run.form == PageForm::Native {
            return self.write_places(socket, outgoing, &mut run, pages).await;
        }
        let header = Frame::Data(run).encode();
        let Some(checksum) = outgoing.gate.enter(|| {
            self.parts.clear();
            self.parts.push_slice(&header);
            self.hasher.reset();
            self.push_pages(outgoing, run, pages);
            self.hasher.value()
        }) else {
            // No byte of the frame was sent yet.
            return Ok(());
        };
        let num_bytes = self.parts.num_bytes();
        let trailer = Trailer::Whole { checksum }.encode();
        self.parts.push_slice(&trailer);
        let gate = match run.form {
            PageForm::Native => Some(outgoing),
            PageForm::Canonical => None,
        };
        // SAFETY: header, trailer and copy stay for this call, pages as long as their gate is open.
        let rest = unsafe { self.send(socket, gate, TRAILER_BYTES).await? };
        if rest == 0 || rest == num_bytes {
            // The whole frame is out, or no byte of it.
            return Ok(());
        }
        let trailer = Trailer::Withdrawn.encode();
        self.parts.clear();
        push_rest(&mut self.parts, &header, rest, num_bytes - header.len());
        self.parts.push_slice(&trailer);
        // SAFETY: bytes that stay for this call.
        unsafe { self.send(socket, None, 0).await }.map(drop)
    }

    /// Sends a copy of a layer's state. Sends nothing if the session has ended.
    pub async fn write_state(
        &mut self,
        socket: &Socket,
        outgoing: &Outgoing,
        run: StateRun,
        snapshot: SnapshotId,
    ) -> io::Result<()> {
        let Some(states) = outgoing.pages.states() else {
            return Ok(());
        };
        let copy = &mut self.copy;
        copy.resize(run.num_bytes as usize, 0);
        let read = || states.read(run.layer, snapshot, run.num_rows, copy);
        let Some(read) = outgoing.gate.enter(read) else {
            return Ok(());
        };
        read.map_err(io::Error::other)?;
        self.hasher.reset();
        self.hasher.update(&self.copy);
        let checksum = self.hasher.value();
        let header = Frame::State(run).encode();
        let trailer = Trailer::Whole { checksum }.encode();
        self.parts.clear();
        for bytes in [&header[..], &self.copy, &trailer] {
            self.parts.push_slice(bytes);
        }
        // SAFETY: bytes that stay for this call.
        unsafe { self.send(socket, None, 0).await }.map(drop)
    }

    async fn write_places(
        &mut self,
        socket: &Socket,
        outgoing: &Outgoing,
        run: &mut PageRun,
        pages: &[PageId],
    ) -> io::Result<()> {
        let Some(checksum) = outgoing.gate.enter(|| {
            self.parts.clear();
            self.hasher.reset();
            self.push_pages(outgoing, *run, pages);
            self.hasher.value()
        }) else {
            return Ok(());
        };
        let regions = self.parts.iter();
        self.copy.clear();
        self.copy
            .extend(regions.flat_map(|part| MemoryRegion::of(part).encode()));
        run.num_regions = (self.copy.len() / REGION_BYTES) as u32;
        let header = Frame::Data(*run).encode();
        let trailer = Trailer::Whole { checksum }.encode();
        self.parts.clear();
        for bytes in [&header[..], &self.copy, &trailer] {
            self.parts.push_slice(bytes);
        }
        // SAFETY: bytes that stay for this call.
        unsafe { self.send(socket, None, 0).await }.map(drop)
    }

    /// Must be called inside the gate.
    fn push_pages(&mut self, outgoing: &Outgoing, run: PageRun, pages: &[PageId]) {
        let Self {
            parts,
            copy,
            hasher,
            ..
        } = self;
        let layers = &outgoing.pages.geometry().layers;
        let layer = layers.place(run.layer).in_page as u32;
        match run.form {
            PageForm::Native => {
                let of_page = |&page| outgoing.pages.native_parts(layer, page);
                for part in pages.iter().flat_map(of_page) {
                    parts.push(part);
                    // SAFETY: the pages are not written to while the gate is open.
                    hasher.update(unsafe { part.as_ref() });
                }
            }
            PageForm::Canonical => {
                let num_bytes = pages.len() * outgoing.pages.geometry().layer_bytes();
                copy.resize(num_bytes, 0);
                // SAFETY: as above.
                unsafe { outgoing.pages.read(layer, pages, run.form, copy) };
                hasher.update(copy);
                parts.push(NonNull::from(copy.as_slice()));
            }
        }
    }

    /// Sends the bytes of `parts`. The last `num_own` of them are sent even if the gate is closed. If it closes while
    /// bytes before them are left, sends nothing more, and returns how many bytes before them are left.
    ///
    /// # Safety
    /// The parts are not written to until this has returned, or while the gate is open.
    async unsafe fn send(
        &mut self,
        socket: &Socket,
        gate: Option<&Outgoing>,
        num_own: usize,
    ) -> io::Result<usize> {
        loop {
            if self.parts.num_bytes() == 0 {
                match socket.try_flush() {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.wait(socket).await?;
                        continue;
                    }
                    flushed => return flushed.map(|()| 0),
                }
            }
            // SAFETY: promised by the caller.
            let send = || unsafe { socket.try_send(&self.parts) };
            let sent = match gate.filter(|_| self.parts.num_bytes() > num_own) {
                Some(outgoing) => match outgoing.gate.enter(send) {
                    Some(sent) => sent,
                    None => return Ok(self.parts.num_bytes() - num_own),
                },
                None => send(),
            };
            match sent {
                Ok(num_bytes) => self.parts.advance(num_bytes, |_| {}),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(socket).await?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn wait(&self, socket: &Socket) -> io::Result<()> {
        let writable = tokio::time::timeout(self.stall_timeout, socket.writable());
        writable.await.map_err(|_| io::ErrorKind::TimedOut)?
    }
}

/// Completes a frame whose last `rest` bytes before the trailer are unsent: the rest of its header, then zeroes for
/// its payload of `num_payload` bytes. A receiver reads zeroes in place of a header as a broken frame, and ends the
/// connection.
fn push_rest(parts: &mut IoParts, header: &[u8], rest: usize, num_payload: usize) {
    parts.push_slice(&header[header.len() - rest.saturating_sub(num_payload)..]);
    let mut num_zeroes = rest.min(num_payload);
    while num_zeroes > 0 {
        let len = num_zeroes.min(ZEROES.len());
        parts.push_slice(&ZEROES[..len]);
        num_zeroes -= len;
    }
}

#[cfg(test)]
mod tests;
