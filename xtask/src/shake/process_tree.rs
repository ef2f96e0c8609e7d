//! A process with all of its descendants.

use std::fs;
use std::thread;
use std::time::Duration;

// Linux's numbers on all its supported architectures, and macOS's where they differ.
const KILL: i32 = 9;
const CONTINUE: i32 = if cfg!(target_os = "linux") { 18 } else { 19 };
const STOP: i32 = if cfg!(target_os = "linux") { 19 } else { 17 };

unsafe extern "C" {
    fn kill(process_id: i32, signal: i32) -> i32;
}

/// Sends a signal to a process. The process may have ended meanwhile.
fn send(signal: i32, process_id: i32) {
    assert!(
        process_id > 0,
        "0 and negative numbers are groups of processes"
    );
    // SAFETY: kill takes no memory.
    unsafe { kill(process_id, signal) };
}

/// Kills a process and its descendants.
pub fn kill_tree(root: i32) {
    let tree = descendants(&processes(), root);
    tree.iter().for_each(|process| send(KILL, process.id));
}

/// The time in which a signal sent just before its sender was stopped takes effect.
const SETTLE_TIME: Duration = Duration::from_millis(2);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Process {
    id: i32,
    parent: i32,
    is_stopped: bool,
}

/// Processes that stay stopped until this is dropped.
pub struct StoppedTree(Vec<i32>);

impl StoppedTree {
    /// Stops the processes of a tree, each before its children. A process that is already stopped, by a test, is left
    /// out, so that it does not continue when this value is dropped.
    pub fn stop(root: i32) -> Self {
        let mut stopped = Vec::new();
        let mut next = vec![root];
        while !next.is_empty() {
            next.iter().for_each(|&id| send(STOP, id));
            stopped.append(&mut next);
            thread::sleep(SETTLE_TIME);
            let tree = descendants(&processes(), root);
            next = next_to_stop(&tree, &stopped);
        }
        Self(stopped)
    }
}

impl Drop for StoppedTree {
    fn drop(&mut self) {
        self.0.iter().rev().for_each(|&id| send(CONTINUE, id));
    }
}

/// Returns the running processes whose parents are stopped or gone.
fn next_to_stop(tree: &[Process], stopped: &[i32]) -> Vec<i32> {
    let runs = |process: &&Process| !process.is_stopped && !stopped.contains(&process.id);
    let has_live_parent = |process: &&Process| {
        let parent = tree.iter().find(|other| other.id == process.parent);
        parent.is_some_and(|parent| !parent.is_stopped && !stopped.contains(&parent.id))
    };
    let next = tree
        .iter()
        .filter(runs)
        .filter(|process| !has_live_parent(process));
    next.map(|process| process.id).collect()
}

/// Returns a process and its descendants.
fn descendants(processes: &[Process], root: i32) -> Vec<Process> {
    let mut tree: Vec<Process> = Vec::new();
    let mut left = processes.to_vec();
    loop {
        let is_member = |process: &Process| {
            process.id == root || tree.iter().any(|parent| parent.id == process.parent)
        };
        let (members, others): (Vec<_>, Vec<_>) = left.into_iter().partition(is_member);
        left = others;
        if members.is_empty() {
            return tree;
        }
        tree.extend(members);
    }
}

/// Returns all processes in Linux's `/proc`; none on other systems.
fn processes() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let status = |entry: fs::DirEntry| {
        let id = entry.file_name().to_str()?.parse().ok()?;
        process(id, &fs::read_to_string(entry.path().join("stat")).ok()?)
    };
    entries.flatten().filter_map(status).collect()
}

/// Parses a process from the line in its file `stat`; returns `None` for a zombie.
fn process(id: i32, stat: &str) -> Option<Process> {
    // The name in parentheses, before these fields, may contain any character.
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split(' ').collect();
    let state = *fields.first()?;
    let process = Process {
        id,
        parent: fields.get(1)?.parse().ok()?,
        is_stopped: matches!(state, "T" | "t"),
    };
    (!matches!(state, "Z" | "X")).then_some(process)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Waits until a process has ended, whether or not its parent has reaped it.
    pub fn wait_until_gone(id: i32) {
        while processes().iter().any(|process| process.id == id) {
            thread::sleep(SETTLE_TIME);
        }
    }

    fn of(id: i32, parent: i32) -> Process {
        let is_stopped = false;
        Process {
            id,
            parent,
            is_stopped,
        }
    }

    #[test]
    fn a_process_is_read_whatever_its_name() {
        assert_eq!(process(7, "7 (a) b) S 3 5 5"), Some(of(7, 3)));
        assert!(process(7, "7 (a) T 3 5 5").unwrap().is_stopped);
        assert_eq!(process(7, "7 (a) Z 3 5 5"), None);
        assert_eq!(process(7, "7 (a) S"), None);
        assert_eq!(process(7, "7"), None);
    }

    #[test]
    fn a_tree_has_all_that_its_members_started() {
        let processes = [of(1, 0), of(12, 11), of(10, 2), of(11, 10), of(2, 1)];
        let tree = descendants(&processes, 10);
        let ids: Vec<i32> = tree.iter().map(|process| process.id).collect();
        assert_eq!(ids, [10, 11, 12]);
    }

    #[test]
    fn a_process_stops_before_those_that_it_started_and_held_ones_stay() {
        let mut tree = [of(10, 2), of(11, 10), of(12, 11), of(13, 1), of(14, 10)];
        tree[4].is_stopped = true;
        assert_eq!(next_to_stop(&tree, &[]), [10, 13]);
        assert_eq!(next_to_stop(&tree, &[10]), [11, 13]);
        assert_eq!(next_to_stop(&tree, &[10, 11, 13]), [12]);
        assert!(next_to_stop(&tree, &[10, 11, 12, 13]).is_empty());
    }
}
