//! Reads numbers and texts of a file, one after the other.

/// A read position in a file. It never moves past the file's end.
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

    /// The length of the whole file, in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// Takes the next bytes. `what` names the part of the file that they belong to, for the error
    /// message.
    pub fn take(&mut self, num_bytes: u64, what: &str) -> Result<&'a [u8], String> {
        let len = usize::try_from(num_bytes).ok();
        let Some(len) = len.filter(|&len| len <= self.remaining()) else {
            return Err(format!(
                "is truncated or damaged: it has {} bytes, and {what} continues beyond them",
                self.bytes.len()
            ));
        };
        let taken = &self.bytes[self.position..][..len];
        self.position += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let taken = self.take(N as u64, what)?;
        Ok(taken
            .try_into()
            .expect("`take` returned another number of bytes"))
    }

    pub fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Takes a length and that many bytes of text. The inner result is an error if the bytes are not UTF-8.
    pub fn text(&mut self, what: &str) -> Result<Result<&'a str, std::str::Utf8Error>, String> {
        let len = self.u64(what)?;
        Ok(std::str::from_utf8(self.take(len, what)?))
    }

    /// Checks that the file has room for `count` entries of at least `min_bytes` bytes each.
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
