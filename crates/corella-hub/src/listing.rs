//! The files of a model's repository at one commit, as the hub lists them.

use serde::Deserialize;

use crate::model_name::{is_lower_hex, is_safe_path};

/// The checksum of a file's content. Its text is the name of the file's blob in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Digest {
    /// SHA-256 of the content: files in the hub's large file storage.
    Sha256(String),
    /// SHA-1 of git's header for a blob and the content: files in the git repository itself.
    GitSha1(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// The path within the repository, with `/`.
    pub path: String,
    pub num_bytes: u64,
    pub digest: Digest,
}

#[derive(Deserialize)]
pub struct Revision {
    pub sha: String,
    #[serde(default)]
    tags: Vec<String>,
}

impl Revision {
    /// The identifier of the licence, such as `apache-2.0`.
    pub fn licence(&self) -> Option<&str> {
        self.tags
            .iter()
            .find_map(|tag| tag.strip_prefix("license:"))
    }
}

/// An entry of `/api/models/…/tree/…`.
#[derive(Deserialize)]
pub struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    oid: String,
    #[serde(default)]
    size: u64,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    oid: String,
    size: u64,
}

impl Digest {
    pub fn as_str(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitSha1(hex) => hex,
        }
    }
}

impl TreeEntry {
    /// The file, or `None` for another kind of entry. The error is the reason why an entry is refused: its path would
    /// lead out of a folder, or it has no checksum.
    pub fn into_file(self) -> Result<Option<RemoteFile>, String> {
        if self.kind != "file" {
            return Ok(None);
        }
        if !is_safe_path(&self.path) {
            return Err(format!("the file name {:?} is not safe", self.path));
        }
        let is_hex = |text: &str, len: usize| text.len() == len && is_lower_hex(text);
        let (digest, num_bytes) = match self.lfs {
            Some(large) if is_hex(&large.oid, 64) => (Digest::Sha256(large.oid), large.size),
            None if is_hex(&self.oid, 40) => (Digest::GitSha1(self.oid), self.size),
            _ => return Err(format!("{} has no checksum", self.path)),
        };
        Ok(Some(RemoteFile {
            path: self.path,
            num_bytes,
            digest,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(json: &str) -> Result<Option<RemoteFile>, String> {
        serde_json::from_str::<TreeEntry>(json).unwrap().into_file()
    }

    #[test]
    fn a_large_file_has_the_digest_of_its_content_and_not_of_its_pointer() {
        let (sha1, sha256) = ("1".repeat(40), "2".repeat(64));
        let small =
            format!(r#"{{"type":"file","path":"a","oid":"{sha1}","size":3,"xetHash":null}}"#);
        let small = file(&small).unwrap().unwrap();
        assert_eq!(
            (small.digest, small.num_bytes),
            (Digest::GitSha1(sha1.clone()), 3)
        );
        let large = format!(
            r#"{{"type":"file","path":"b/c","oid":"{sha1}","size":9,"lfs":{{"oid":"{sha256}","size":9,"pointerSize":130}}}}"#
        );
        let large = file(&large).unwrap().unwrap();
        assert_eq!((large.digest, large.num_bytes), (Digest::Sha256(sha256), 9));
        assert_eq!(
            file(r#"{"type":"directory","path":"b","oid":"x","size":0}"#),
            Ok(None)
        );
    }

    #[test]
    fn what_would_leave_the_folder_or_cannot_be_checked_is_refused() {
        let sha1 = "1".repeat(40);
        for path in ["../a", "/a", "a/../b", "a\\\\b", "a//b", ""] {
            let entry = format!(r#"{{"type":"file","path":"{path}","oid":"{sha1}","size":3}}"#);
            assert!(file(&entry).is_err(), "{path}");
        }
        assert!(file(r#"{"type":"file","path":"a","size":3}"#).is_err());
        assert!(file(r#"{"type":"file","path":"a","oid":"../../../../../../../../etc/passwd......","size":3}"#).is_err());
    }
}
