//! The events of a fetch.

use crate::ModelName;

/// An event of a fetch, for display. Events come from several threads.
#[derive(Clone, Debug, PartialEq)]
pub enum FetchEvent<'a> {
    /// The files to be fetched. This event precedes the fetch of weights.
    Started {
        name: &'a ModelName,
        /// The missing file, if it is the only one.
        file: Option<&'a str>,
        num_files: usize,
        num_bytes: u64,
        /// The identifier of the licence, such as `apache-2.0`.
        licence: Option<&'a str>,
        /// The hub's page about the model.
        page: &'a str,
    },
    /// The total of some files, before they are fetched.
    Planned { num_bytes: u64 },
    /// Bytes arrived and were written.
    Received { num_bytes: u64 },
    /// Bytes that were counted as received are not usable, and are fetched again.
    Discarded { num_bytes: u64 },
    /// A request failed and is repeated after a pause.
    Retrying { reason: &'a str, pause_s: f64 },
    /// Another process fetches this file, and this one waits for it.
    Waiting { path: &'a str },
}

/// Takes the events of a fetch.
pub type Observer<'a> = &'a (dyn Fn(FetchEvent<'_>) + Sync);
