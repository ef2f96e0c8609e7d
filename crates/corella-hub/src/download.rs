//! Fetches one file into the cache: resumes an earlier attempt, and admits only files with the listed size and
//! checksum.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use ureq::Body;
use ureq::http::{Response, StatusCode};

use crate::client::{Client, Failure, Retries, text_of};
use crate::listing::RemoteFile;
use crate::{Digest, FetchEvent, HubError, ModelName, Observer};

const BUFFER_BYTES: usize = 256 << 10;

/// The least number of bytes that counts as progress.
const MIN_PROGRESS_BYTES: u64 = 64 << 10;

/// A file to fetch.
pub struct Download<'a> {
    pub client: &'a Client,
    pub name: &'a ModelName,
    pub commit: &'a str,
    pub file: &'a RemoteFile,
    pub observer: Observer<'a>,
    /// Set when another download failed, so that this one can stop.
    pub is_stopped: &'a AtomicBool,
}

impl Download<'_> {
    /// Writes the file to `part`, after its present content, and moves it to `blob` when it is complete and verified.
    /// The caller holds the file's lock.
    pub fn run(&self, part: &Path, blob: &Path) -> Result<(), HubError> {
        let mut part = Part::open(part, self.file)?;
        self.tell_received(part.len);
        let mut is_continued = part.len > 0;
        let mut may_start_again = true;
        let mut retries = Retries::default();
        loop {
            let before = part.len;
            let received = self.receive(&mut part);
            if part.len >= before + MIN_PROGRESS_BYTES {
                retries.reset();
            }
            match received {
                Ok(()) => {}
                Err(failure) => {
                    is_continued = true;
                    retries.pause_after(failure, self.observer)?;
                    continue;
                }
            }
            let found = part.hasher.hex();
            if found == self.file.digest.as_str() {
                return part.finish(blob);
            }
            self.restart(&mut part)?;
            // The resumed part may not have been the beginning of this file.
            if !(is_continued && std::mem::take(&mut may_start_again)) {
                part.discard()?;
                return Err(HubError::Corrupt(format!(
                    "{}: the checksum of what arrived is {found} instead of {}",
                    self.file.path,
                    self.file.digest.as_str()
                )));
            }
        }
    }

    fn receive(&self, part: &mut Part) -> Result<(), Failure> {
        let expected = self.file.num_bytes;
        if part.len == expected {
            return Ok(());
        }
        let answer = self
            .client
            .file(self.name, self.commit, &self.file.path, part.len)?;
        let total = match answer.status() {
            StatusCode::PARTIAL_CONTENT => {
                let range = content_range(&answer);
                let range = range.filter(|&(start, _)| start == part.len);
                let Some((_, total)) = range else {
                    self.restart(part)?;
                    return Err(Failure::passing(format!(
                        "{}: the answer is not the part that was asked for",
                        self.file.path
                    )));
                };
                total
            }
            StatusCode::RANGE_NOT_SATISFIABLE => {
                self.restart(part)?;
                return Err(Failure::passing(format!(
                    "{}: cannot be continued",
                    self.file.path
                )));
            }
            _ => {
                if part.len > 0 {
                    // A server without support for ranges sends the whole file.
                    self.restart(part)?;
                }
                answer.body().content_length()
            }
        };
        if total.is_some_and(|total| total != expected) {
            return Err(self.wrong_size(total.unwrap_or_default()).into());
        }
        let mut body = answer
            .into_body()
            .into_with_config()
            .limit(u64::MAX)
            .reader();
        let mut buffer = vec![0; BUFFER_BYTES];
        while !self.is_stopped.load(Ordering::Relaxed) {
            let num_bytes = match body.read(&mut buffer) {
                Ok(0) if part.len == expected => return Ok(()),
                Ok(0) => return Err(self.cut(part, "the connection ended")),
                Ok(num_bytes) => num_bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.cut(part, &error.to_string())),
            };
            if part.len + num_bytes as u64 > expected {
                self.restart(part)?;
                part.discard()?;
                return Err(self.wrong_size(part.len + num_bytes as u64).into());
            }
            part.write(&buffer[..num_bytes])?;
            self.tell_received(num_bytes as u64);
        }
        Err(HubError::Unreachable(format!("{}: stopped", self.file.path)).into())
    }

    fn cut(&self, part: &Part, reason: &str) -> Failure {
        Failure::passing(format!(
            "{}: {reason} after {} of {} bytes",
            self.file.path, part.len, self.file.num_bytes
        ))
    }

    fn wrong_size(&self, num_bytes: u64) -> HubError {
        HubError::Corrupt(format!(
            "{}: the hub listed {} bytes and sends {num_bytes} or more",
            self.file.path, self.file.num_bytes
        ))
    }

    fn restart(&self, part: &mut Part) -> Result<(), HubError> {
        (self.observer)(FetchEvent::Discarded {
            num_bytes: part.len,
        });
        part.restart()
    }

    fn tell_received(&self, num_bytes: u64) {
        if num_bytes > 0 {
            (self.observer)(FetchEvent::Received { num_bytes });
        }
    }
}

/// The first byte of the answer's part, and the length of the whole file if the server knows it.
fn content_range(answer: &Response<Body>) -> Option<(u64, Option<u64>)> {
    let range = text_of(answer.headers(), "content-range")?;
    let (range, total) = range.strip_prefix("bytes ")?.split_once('/')?;
    let (start, _) = range.split_once('-')?;
    Some((start.parse().ok()?, total.parse().ok()))
}

/// The arrived part of a file, on disk.
struct Part {
    path: PathBuf,
    file: File,
    len: u64,
    num_bytes: u64,
    digest: Digest,
    hasher: Hasher,
}

impl Part {
    /// Opens the part of an earlier attempt, and reads it for the checksum.
    fn open(path: &Path, remote: &RemoteFile) -> Result<Self, HubError> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(path);
        let file = file.map_err(HubError::disk("open", path))?;
        let mut part = Self {
            path: path.to_owned(),
            file,
            len: 0,
            num_bytes: remote.num_bytes,
            digest: remote.digest.clone(),
            hasher: Hasher::new(&remote.digest, remote.num_bytes),
        };
        let on_disk = part
            .file
            .metadata()
            .map_err(HubError::disk("read", path))?
            .len();
        match on_disk <= part.num_bytes {
            true => part.hash_what_is_there(on_disk)?,
            false => part.restart()?,
        }
        Ok(part)
    }

    fn hash_what_is_there(&mut self, on_disk: u64) -> Result<(), HubError> {
        let mut buffer = vec![0; BUFFER_BYTES];
        while self.len < on_disk {
            let read = self
                .file
                .read(&mut buffer)
                .map_err(HubError::disk("read", &self.path))?;
            if read == 0 {
                break;
            }
            self.hasher.update(&buffer[..read]);
            self.len += read as u64;
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file
            .write_all(bytes)
            .map_err(HubError::disk("write", &self.path))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn restart(&mut self) -> Result<(), HubError> {
        self.len = 0;
        self.hasher = Hasher::new(&self.digest, self.num_bytes);
        let empty = self
            .file
            .set_len(0)
            .and_then(|()| self.file.seek(SeekFrom::Start(0)));
        empty
            .map(|_| ())
            .map_err(HubError::disk("empty", &self.path))
    }

    fn discard(&self) -> Result<(), HubError> {
        fs::remove_file(&self.path).map_err(HubError::disk("delete", &self.path))
    }

    fn finish(self, blob: &Path) -> Result<(), HubError> {
        // After a power cut, no name in the cache may stand for content that never reached the disk.
        self.file
            .sync_data()
            .map_err(HubError::disk("write", &self.path))?;
        fs::rename(&self.path, blob).map_err(HubError::disk("write", blob))
    }
}

enum Hasher {
    Sha256(Box<Sha256>),
    GitSha1(Box<Sha1>),
}

impl Hasher {
    fn new(digest: &Digest, num_bytes: u64) -> Self {
        match digest {
            Digest::Sha256(_) => Self::Sha256(Box::default()),
            Digest::GitSha1(_) => {
                let mut hasher = Sha1::new();
                hasher.update(format!("blob {num_bytes}\0"));
                Self::GitSha1(Box::new(hasher))
            }
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitSha1(hasher) => hasher.update(bytes),
        }
    }

    fn hex(&self) -> String {
        let bytes = match self {
            Self::Sha256(hasher) => hasher.clone().finalize().to_vec(),
            Self::GitSha1(hasher) => hasher.clone().finalize().to_vec(),
        };
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(digest: &Digest, content: &[u8]) -> String {
        let mut hasher = Hasher::new(digest, content.len() as u64);
        hasher.update(content);
        hasher.hex()
    }

    #[test]
    fn digests_are_those_of_git_and_sha256sum() {
        // `printf hello | git hash-object --stdin`, and `printf hello | sha256sum`.
        let git = Digest::GitSha1(String::new());
        assert_eq!(
            hex(&git, b"hello"),
            "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"
        );
        let sha256 = Digest::Sha256(String::new());
        assert_eq!(
            hex(&sha256, b"hello"),
            "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
        );
    }
}
