//! The baselines of transfers: sockets that carry only pages, and memory.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ptr::NonNull;
use std::thread;

use corella_core::PageId;
use corella_model::KvPages;

use super::layout::Layout;

/// Connections that carry only pages.
pub struct BareSockets {
    ends: Vec<(TcpStream, TcpStream)>,
}

impl BareSockets {
    pub fn connect(num_connections: usize) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let connect = |_| {
            let near = TcpStream::connect(address)?;
            let (far, _) = listener.accept()?;
            near.set_nodelay(true)?;
            Ok((near, far))
        };
        let ends = (0..num_connections).map(connect);
        Ok(Self {
            ends: ends.collect::<io::Result<_>>()?,
        })
    }

    /// Starts a sending and a receiving thread for each connection. A system call moves up to one chunk of a transfer.
    pub fn copy(&mut self, layout: &Layout, chunk_bytes: usize) -> io::Result<()> {
        let pages_per_call = (chunk_bytes / layout.geometry().layer_bytes()).max(1);
        let num_messages = layout.num_messages / layout.num_connections;
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for (index, (near, far)) in self.ends.iter_mut().enumerate() {
                let tables = layout.tables_of(index).cycle().take(num_messages);
                let senders = tables.clone();
                threads.push(scope.spawn(move || {
                    for chunk in senders.flat_map(|table| table.from.chunks(pages_per_call)) {
                        send(near, &*layout.from, chunk)?;
                    }
                    Ok(())
                }));
                threads.push(scope.spawn(move || {
                    for chunk in tables.flat_map(|table| table.to.chunks(pages_per_call)) {
                        receive(far, &*layout.to, chunk)?;
                    }
                    Ok(())
                }));
            }
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().expect("a copying thread ends"))
        })
    }
}

fn part(pages: &dyn KvPages, page: PageId) -> NonNull<[u8]> {
    let [part, _] = pages.native_parts(0, page);
    part
}

fn send(socket: &mut TcpStream, pages: &dyn KvPages, chunk: &[PageId]) -> io::Result<()> {
    // SAFETY: the pages of the sending side are not written to.
    let slice = |&page| IoSlice::new(unsafe { part(pages, page).as_ref() });
    let mut slices: Vec<_> = chunk.iter().map(slice).collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        let num_bytes = socket.write_vectored(rest)?;
        IoSlice::advance_slices(&mut rest, num_bytes);
    }
    Ok(())
}

fn receive(socket: &mut TcpStream, pages: &dyn KvPages, chunk: &[PageId]) -> io::Result<()> {
    // SAFETY: each page of the receiving side is in one table, which one thread fills.
    let slice = |&page| IoSliceMut::new(unsafe { part(pages, page).as_mut() });
    let mut slices: Vec<_> = chunk.iter().map(slice).collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        let num_bytes = socket.read_vectored(rest)?;
        if num_bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        IoSliceMut::advance_slices(&mut rest, num_bytes);
    }
    Ok(())
}

/// Copies all messages in memory, with one thread for each connection.
pub fn copy_memory(layout: &Layout) -> io::Result<()> {
    let num_messages = layout.num_messages / layout.num_connections;
    thread::scope(|scope| {
        for index in 0..layout.num_connections {
            let tables = layout.tables_of(index).cycle().take(num_messages);
            scope.spawn(move || {
                for table in tables {
                    for (&from, &to) in table.from.iter().zip(&table.to) {
                        let (from, mut to) = (part(&*layout.from, from), part(&*layout.to, to));
                        // SAFETY: the source is not written to, and one thread fills the destination.
                        unsafe { to.as_mut().copy_from_slice(from.as_ref()) };
                    }
                }
            });
        }
    });
    Ok(())
}
