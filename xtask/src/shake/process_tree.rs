//! A process with all that it has started.

use std::fs;
use std::thread;
use std::time::Duration;

use super::signal::Signal;

/// The time in which a signal that a process has sent just before it was stopped has its effect.
const SETTLE_TIME: Duration = Duration::from_millis(2);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Process {
    id: i32,
    parent: i32,
    group: i32,
    is_stopped: bool,
}

/// Processes that are stopped until this is dropped.
pub struct StoppedTree(Vec<i32>);

impl StoppedTree {
    /// Stops the processes of a tree, each before those that it has started: what a test holds still by a signal of
    /// its own has that signal by then, is not stopped again, and so does not go on when this is dropped.
    pub fn stop(root: i32) -> Self {
        let mut stopped = Vec::new();
        let mut next = vec![root];
        while !next.is_empty() {
            next.iter().for_each(|&id| Signal::Stop.send(id));
            stopped.append(&mut next);
            thread::sleep(SETTLE_TIME);
            next = next_to_stop(&tree(&processes(), root), &stopped);
        }
        Self(stopped)
    }
}

impl Drop for StoppedTree {
    fn drop(&mut self) {
        self.0
            .iter()
            .rev()
            .for_each(|&id| Signal::Continue.send(id));
    }
}

/// The processes that run although those that started them are stopped, or are gone.
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

/// Ends all processes of a tree at once, and what was left of its group.
pub fn kill(root: i32) {
    let tree = tree(&processes(), root);
    Signal::Kill.send_to_group(root);
    tree.iter()
        .for_each(|process| Signal::Kill.send(process.id));
}

/// The members of the group that the root leads, and what these have started, in whatever group.
fn tree(processes: &[Process], root: i32) -> Vec<Process> {
    let mut tree: Vec<Process> = Vec::new();
    let mut left = processes.to_vec();
    loop {
        let is_member = |process: &Process| {
            process.id == root
                || process.group == root
                || tree.iter().any(|parent| parent.id == process.parent)
        };
        let (members, others): (Vec<_>, Vec<_>) = left.into_iter().partition(is_member);
        left = others;
        if members.is_empty() {
            return tree;
        }
        tree.extend(members);
    }
}

/// All processes, by what Linux says in `/proc`; none on other systems.
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

/// A process by the line in its file `stat`; nothing if it has ended and was not waited for yet.
fn process(id: i32, stat: &str) -> Option<Process> {
    // The name in parentheses, before these fields, may contain anything.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let group = fields.next()?.parse().ok()?;
    let is_stopped = matches!(state, "T" | "t");
    (!matches!(state, "Z" | "X")).then_some(Process {
        id,
        parent,
        group,
        is_stopped,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(id: i32, parent: i32, group: i32) -> Process {
        Process {
            id,
            parent,
            group,
            is_stopped: false,
        }
    }

    fn ids(processes: &[Process]) -> Vec<i32> {
        let mut ids: Vec<i32> = processes.iter().map(|process| process.id).collect();
        ids.sort();
        ids
    }

    #[test]
    fn a_process_is_read_whatever_its_name() {
        assert_eq!(process(7, "7 (a) b) S 3 5 5 0 -1 4"), Some(of(7, 3, 5)));
        let stopped = process(7, "7 (a) T 3 5 5 0").unwrap();
        assert!(stopped.is_stopped);
        assert_eq!(process(7, "7 (a) Z 3 5 5 0"), None);
        assert_eq!(process(7, "7"), None);
    }

    #[test]
    fn a_tree_has_the_group_and_all_that_its_members_started() {
        let processes = [
            of(1, 0, 1),
            of(12, 11, 12),
            of(10, 2, 10),
            of(11, 10, 10),
            of(13, 1, 10),
            of(14, 13, 14),
            of(2, 1, 2),
            of(20, 2, 20),
        ];
        assert_eq!(ids(&tree(&processes, 10)), [10, 11, 12, 13, 14]);
    }

    #[test]
    fn a_process_stops_before_those_that_it_started_and_held_ones_stay() {
        let mut tree = [
            of(10, 2, 10),
            of(11, 10, 10),
            of(12, 11, 10),
            of(13, 1, 10),
            of(14, 10, 10),
        ];
        tree[4].is_stopped = true;
        assert_eq!(next_to_stop(&tree, &[]), [10, 13]);
        assert_eq!(next_to_stop(&tree, &[10]), [11, 13]);
        assert_eq!(next_to_stop(&tree, &[10, 11, 13]), [12]);
        assert!(next_to_stop(&tree, &[10, 11, 12, 13]).is_empty());
    }
}
