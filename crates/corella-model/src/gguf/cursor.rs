//! A place in a file that never moves past its end.

pub struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub fn position(&self) -> usize {
        self.position
    }

    /// Of the whole file.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// The next bytes. `what` they are part of, in case they are not there.
    pub fn take(&mut self, num_bytes: u64, what: &str) -> Result<&'a [u8], String> {
        let len = usize::try_from(num_bytes).ok();
        let Some(len) = len.filter(|&len| len <= self.remaining()) else {
            return Err(format!(
                "is truncated or damaged: {} bytes, and {what} goes on past them",
                self.bytes.len()
            ));
        };
        let taken = &self.bytes[self.position..][..len];
        self.position += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let taken = self.take(N as u64, what)?;
        Ok(taken.try_into().expect("as many were taken"))
    }

    pub fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A length and as many bytes. Within, it may not be UTF-8.
    pub fn text(&mut self, what: &str) -> Result<Result<&'a str, std::str::Utf8Error>, String> {
        let len = self.u64(what)?;
        Ok(std::str::from_utf8(self.take(len, what)?))
    }

    /// What there are `count` of must fit into the file.
    pub fn check_count(&self, count: u64, min_bytes: u64, what: &str) -> Result<(), String> {
        match count.checked_mul(min_bytes) {
            Some(bytes) if bytes <= self.remaining() as u64 => Ok(()),
            _ => Err(format!(
                "is truncated or damaged: {} bytes cannot hold the {count} {what} it announces",
                self.bytes.len()
            )),
        }
    }
}
