//! Why a model cannot be had, in words for the person who asked for it.

use std::fmt;
use std::io;
use std::path::Path;

#[derive(Debug)]
pub enum HubError {
    /// The name is none, or names nothing in the model's repository.
    Name(String),
    /// The hub says that there is no such model or revision, or that this user may not have it.
    Refused(String),
    /// The hub was not reached, or failed.
    Unreachable(String),
    /// What the hub sent is not what it had announced.
    Corrupt(String),
    /// The model is not in the cache, and nothing may be fetched.
    Offline(String),
    Disk(String, io::Error),
}

impl HubError {
    pub(crate) fn disk(what: &str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let what = format!("cannot {what} {}", path.display());
        move |error| Self::Disk(what, error)
    }
}

impl fmt::Display for HubError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(reason)
            | Self::Refused(reason)
            | Self::Unreachable(reason)
            | Self::Corrupt(reason)
            | Self::Offline(reason) => f.write_str(reason),
            Self::Disk(what, error) if error.kind() == io::ErrorKind::StorageFull => write!(
                f,
                "{what}: the disk is full; free some space (`corella list` shows models, `corella rm` \
                 deletes them), or set HF_HOME to a folder on another disk. What has arrived is kept"
            ),
            Self::Disk(what, error) => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for HubError {}
