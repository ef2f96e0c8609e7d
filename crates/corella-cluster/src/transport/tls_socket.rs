//! A TCP connection encrypted by TLS.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::iovec;
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;
use tokio_rustls::rustls::Connection;

/// The reader and the writer share the TLS session. Both are tasks of one thread, so neither waits for the lock.
pub struct TlsSocket {
    stream: TcpStream,
    session: Mutex<Connection>,
}

impl From<TlsStream<TcpStream>> for TlsSocket {
    fn from(stream: TlsStream<TcpStream>) -> Self {
        let (stream, session) = match stream {
            TlsStream::Client(stream) => {
                let (stream, session) = stream.into_inner();
                (stream, Connection::from(session))
            }
            TlsStream::Server(stream) => {
                let (stream, session) = stream.into_inner();
                (stream, Connection::from(session))
            }
        };
        Self {
            stream,
            session: Mutex::new(session),
        }
    }
}

impl TlsSocket {
    fn session(&self) -> MutexGuard<'_, Connection> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// Received bytes may have been decrypted before a caller asked for them.
    pub async fn readable(&self) -> io::Result<()> {
        if process(&mut self.session())? > 0 {
            return Ok(());
        }
        self.stream.readable().await
    }

    pub async fn writable(&self) -> io::Result<()> {
        self.stream.writable().await
    }

    pub fn try_read(&self, out: &mut [u8]) -> io::Result<usize> {
        let session = &mut *self.session();
        loop {
            match session.reader().read(out) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if session.read_tls(&mut Raw(&self.stream))? == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    process(session)?;
                }
                result => return result,
            }
        }
    }

    /// # Safety
    /// The pieces' memory has no other user during the call.
    pub unsafe fn try_receive(&self, parts: &[iovec]) -> io::Result<usize> {
        let mut num_bytes = 0;
        for part in parts {
            // SAFETY: the caller's piece, which is written before it is read.
            let out = unsafe { std::slice::from_raw_parts_mut(part.iov_base.cast(), part.iov_len) };
            let mut filled = 0;
            while filled < out.len() {
                match self.try_read(&mut out[filled..]) {
                    Ok(0) => return Ok(num_bytes),
                    Ok(len) => {
                        filled += len;
                        num_bytes += len;
                    }
                    // The next call returns the error again.
                    Err(_) if num_bytes > 0 => return Ok(num_bytes),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(num_bytes)
    }

    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let part = iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        // SAFETY: bytes borrowed for this call, which only reads them.
        unsafe { self.try_send(&[part]) }
    }

    /// Accepts bytes. Some may stay in this socket until [`try_flush`](Self::try_flush).
    ///
    /// # Safety
    /// The pieces' memory is not written to during the call.
    pub unsafe fn try_send(&self, parts: &[iovec]) -> io::Result<usize> {
        let session = &mut *self.session();
        self.flush(session)?;
        let mut num_bytes = 0;
        for part in parts {
            // SAFETY: the caller's piece, which is not written to.
            let bytes = unsafe { std::slice::from_raw_parts(part.iov_base.cast(), part.iov_len) };
            let taken = session.writer().write(bytes)?;
            num_bytes += taken;
            if taken < bytes.len() {
                break;
            }
        }
        match self.flush(session) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(num_bytes),
        }
    }

    /// Sends the accepted bytes. Fails with `WouldBlock` while some of them are left.
    pub fn try_flush(&self) -> io::Result<()> {
        self.flush(&mut self.session())
    }

    fn flush(&self, session: &mut Connection) -> io::Result<()> {
        while session.wants_write() {
            session.write_tls(&mut Raw(&self.stream))?;
        }
        Ok(())
    }
}

/// Decrypts the received bytes, and returns the number of readable bytes.
fn process(session: &mut Connection) -> io::Result<usize> {
    let state = session.process_new_packets();
    let state = state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(state.plaintext_bytes_to_read())
}

struct Raw<'a>(&'a TcpStream);

impl Read for Raw<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(out)
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, parts: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
