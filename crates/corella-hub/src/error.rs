//! The errors about models, for the user who asked for one.

use std::fmt;
use std::io;
use std::path::Path;

#[derive(Debug)]
pub enum HubError {
    /// The name is malformed, or has no match in the model's repository.
    Name(String),
    /// The table of short names has the name, but not with this tag.
    Tag(String),
    /// The hub reports that the model or revision does not exist, or is closed to this user.
    Refused(String),
    /// The hub was not reached, or failed.
    Unreachable(String),
    /// The hub's data differ from its announcement.
    Corrupt(String),
    /// The model is not in the cache, and fetching is disabled.
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
            | Self::Tag(reason)
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
