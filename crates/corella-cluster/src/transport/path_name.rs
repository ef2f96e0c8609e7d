//! Names of row paths on the wire.

use std::fmt;

/// The content of an offer or an answer, besides the path's name.
pub type PathData = [u8; 32];

/// A row path's name in frames and logs, in ASCII. Zeroes fill the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PathName(pub [u8; 8]);

impl PathName {
    /// The name has at most 8 letters.
    pub const fn new(name: &str) -> Self {
        let (mut bytes, mut at) = ([0; 8], 0);
        while at < name.len() {
            bytes[at] = name.as_bytes()[at];
            at += 1;
        }
        Self(bytes)
    }
}

impl fmt::Display for PathName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.escape_ascii().to_string();
        f.write_str(name.trim_end_matches("\\x00"))
    }
}
