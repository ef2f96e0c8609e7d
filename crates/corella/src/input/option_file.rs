//! A file that an option names, read whole. A device such as /dev/zero would never end, so its size has a bound.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

const MAX_BYTES: u64 = 64 << 20;

pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_within(path, MAX_BYTES)
}

pub fn read_text(path: &Path) -> io::Result<String> {
    read_text_within(path, MAX_BYTES)
}

pub fn read_text_within(path: &Path, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read_within(path, max_bytes)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8"))
}

fn read_within(path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut file = File::open(path)?.take(max_bytes + 1);
    file.read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let reason = format!("it has more than {} MiB", max_bytes >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_an_end_is_refused() {
        let error = read(Path::new("/dev/zero")).expect_err("it never ends");
        assert_eq!(error.to_string(), "it has more than 64 MiB");
        let text = read_text(Path::new(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/Cargo.toml"
        )));
        assert!(text.expect("it is there").contains("corella"));
    }
}
