//! A registry in a folder that all nodes can write to. Each node has one file there, whose
//! modification time is the node's heartbeat.
//!
//! The folder is polled and not watched, so that it may be on any file system.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::NodeRecord;
use super::node_record::{MAX_NODES, MAX_RECORD_BYTES};
use super::source::{Exchange, Following, Source};

const EXTENSION: &str = "json";

pub(super) struct Folder {
    timing: FolderTiming,
    /// File operations may hang, so the state is moved to a blocking thread for each operation and moved back
    /// afterwards. `None` during the operation.
    state: Option<FolderState>,
    path: PathBuf,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct FolderTiming {
    /// Time between two reads of the folder, and two touches of this node's own file.
    pub interval: Duration,
    /// A file untouched for this long belongs to a dead node.
    pub stale: Duration,
}

/// The known state of the folder's files.
struct FolderState {
    path: PathBuf,
    stale: Duration,
    own: Option<NodeRecord>,
    /// This node's record, as last written to the folder.
    written: Option<NodeRecord>,
    /// Whether the folder has been read. If the folder vanishes after that, its nodes are lost, and the folder is not
    /// created again.
    has_read: bool,
    files: BTreeMap<PathBuf, NodeFile>,
}

struct NodeFile {
    modified: SystemTime,
    /// When this node last saw the file's modification time change. This is measured with the local
    /// clock, because other machines' clocks may differ. `None` if no change has been seen yet.
    changed_at: Option<Instant>,
    node: Option<NodeRecord>,
}

impl Folder {
    pub fn new(path: PathBuf, timing: FolderTiming) -> Self {
        Self {
            timing,
            state: None,
            path,
        }
    }

    async fn follow_folder(&mut self, exchange: &mut Exchange) -> String {
        let mut tick = tokio::time::interval(self.timing.interval);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut own = exchange.own();
        loop {
            tokio::select! {
                _ = tick.tick() => {}
                () = exchange.own_changed() => own = exchange.own(),
            }
            let mut state = self.state.take().unwrap_or_else(|| FolderState {
                path: self.path.clone(),
                stale: self.timing.stale,
                own: None,
                written: None,
                has_read: false,
                files: BTreeMap::new(),
            });
            state.own.clone_from(&own);
            let worked = tokio::task::spawn_blocking(move || {
                let outcome = state.work();
                (state, outcome)
            });
            let Ok((state, outcome)) = worked.await else {
                return format!("reading {} was given up", self.path.display());
            };
            self.state = Some(state);
            match outcome {
                Ok(nodes) => {
                    exchange.set_published(own.is_some());
                    exchange.give(nodes);
                }
                Err(reason) => return reason,
            }
        }
    }
}

impl Source for Folder {
    fn follow<'a>(&'a mut self, exchange: &'a mut Exchange) -> Following<'a> {
        Box::pin(self.follow_folder(exchange))
    }
}

impl FolderState {
    fn work(&mut self) -> Result<Vec<NodeRecord>, String> {
        let publish = self.publish();
        publish.map_err(|error| format!("cannot write to {}: {error}", self.path.display()))?;
        let nodes = self.read();
        let nodes =
            nodes.map_err(|error| format!("cannot read {}: {error}", self.path.display()))?;
        self.has_read = true;
        Ok(nodes)
    }

    fn publish(&mut self) -> io::Result<()> {
        if let Some(written) = &self.written
            && self
                .own
                .as_ref()
                .is_none_or(|own| own.instance_id != written.instance_id)
        {
            match fs::remove_file(self.file(written)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => self.written = None,
            }
        }
        if !self.has_read {
            // The first node finds no folder. It may read the folder before it has something to publish.
            fs::create_dir_all(&self.path)?;
        }
        let Some(own) = &self.own else {
            return Ok(());
        };
        let file = self.file(own);
        if self.written.as_ref() == Some(own) {
            let touched = File::options()
                .write(true)
                .open(&file)
                .and_then(|file| file.set_modified(SystemTime::now()));
            match touched {
                // The file was removed from the folder, so it is written anew below.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                touched => return touched,
            }
        }
        fs::create_dir_all(&self.path)?;
        // The record is written to a draft and then renamed, so that readers see either the whole old record or the
        // whole new one. Readers ignore the draft because its name begins with a dot.
        let draft = self
            .path
            .join(format!(".{}.{}", own.instance_id, std::process::id()));
        fs::write(&draft, own.to_json())?;
        fs::rename(&draft, &file)?;
        self.written = Some(own.clone());
        Ok(())
    }

    fn file(&self, node: &NodeRecord) -> PathBuf {
        self.path.join(format!("{}.{EXTENSION}", node.instance_id))
    }

    fn read(&mut self) -> io::Result<Vec<NodeRecord>> {
        let mut present = HashSet::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            let is_hidden = path
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if is_hidden
                || path
                    .extension()
                    .is_none_or(|extension| extension != EXTENSION)
            {
                continue;
            }
            if present.len() >= MAX_NODES {
                return Err(io::Error::other(format!(
                    "more than {MAX_NODES} files; remove those of nodes that are gone"
                )));
            }
            // A file may vanish while the folder is read.
            if let Ok(metadata) = fs::metadata(&path)
                && let Ok(modified) = metadata.modified()
            {
                self.note_file(&path, &metadata, modified);
                present.insert(path);
            }
        }
        self.files.retain(|path, _| present.contains(path));
        let is_alive = |file: &&NodeFile| {
            file.changed_at
                .is_some_and(|changed_at| changed_at.elapsed() < self.stale)
        };
        let alive = self.files.values().filter(is_alive);
        Ok(alive.filter_map(|file| file.node.clone()).collect())
    }

    fn note_file(&mut self, path: &Path, metadata: &Metadata, modified: SystemTime) {
        let known = self.files.get(path);
        if known.is_some_and(|known| known.modified == modified) {
            return;
        }
        let node = read_node(path, metadata);
        if let Err(reason) = &node {
            tracing::debug!("{} has no record of a node: {reason}", path.display());
        }
        // A file that already looks stale when it is first seen is ignored until its modification time changes. If it
        // looked stale only because the clocks disagree, the node's next heartbeat brings it in.
        let is_old = known.is_none() && modified.elapsed().is_ok_and(|age| age >= self.stale);
        let file = NodeFile {
            modified,
            changed_at: (!is_old).then(Instant::now),
            node: node.ok(),
        };
        self.files.insert(path.to_owned(), file);
    }
}

fn read_node(path: &Path, metadata: &Metadata) -> Result<NodeRecord, String> {
    if metadata.len() > MAX_RECORD_BYTES as u64 {
        return Err(format!("longer than {MAX_RECORD_BYTES} bytes"));
    }
    let json = fs::read(path).map_err(|error| error.to_string())?;
    let node = NodeRecord::from_json(&json)?;
    let stem = path.file_stem().unwrap_or_default();
    match *stem == *node.instance_id {
        true => Ok(node),
        false => Err(format!("it is of node {}", node.instance_id)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_node_makes_the_folder_and_a_lost_one_is_told() {
        let name = format!("corella-registry-{}", std::process::id());
        let path = std::env::temp_dir().join(name).join("nodes");
        let mut state = FolderState {
            path: path.clone(),
            stale: Duration::MAX,
            own: None,
            written: None,
            has_read: false,
            files: BTreeMap::new(),
        };
        assert_eq!(state.work().map(|nodes| nodes.len()), Ok(0));
        fs::remove_dir(&path).unwrap();
        let reason = state.work().err().unwrap();
        assert!(reason.starts_with("cannot read "), "{reason}");
        fs::remove_dir(path.parent().unwrap()).unwrap();
    }
}
