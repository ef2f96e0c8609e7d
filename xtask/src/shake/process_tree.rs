//! A process with all of its descendants.

use std::fs;
use std::thread;
use std::time::Duration;

use super::signal::Signal;

/// The time in which a signal sent just before its sender was stopped takes effect.
const SETTLE_TIME: Duration = Duration::from_millis(2);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Process {
    id: i32,
    parent: i32,
    group: i32,
    is_stopped: bool,
    /// The time of its start, on the system's clock. Together with the id this identifies one process for good.
    started_at: u64,
}

/// The processes of a tree seen so far. A process whose parent has ended stays known.
pub struct SeenTree {
    root: i32,
    seen: Vec<Process>,
}

impl SeenTree {
    pub fn new(root: i32) -> Self {
        let seen = Vec::new();
        Self { root, seen }
    }

    pub fn look(&mut self) {
        self.seen = members(&processes(), |process| self.is_member(process));
    }

    /// Kills all processes of the tree at once.
    pub fn kill(mut self) {
        self.look();
        Signal::Kill.send_to_group(self.root);
        self.seen
            .iter()
            .for_each(|process| Signal::Kill.send(process.id));
    }

    fn is_member(&self, process: &Process) -> bool {
        let is_it =
            |other: &Process| (other.id, other.started_at) == (process.id, process.started_at);
        process.group == self.root || self.seen.iter().any(is_it)
    }
}

/// Processes that stay stopped until this is dropped.
pub struct StoppedTree(Vec<i32>);

impl StoppedTree {
    /// Stops the processes of a tree, each before its children. A process that a test has stopped by a signal of its
    /// own is stopped by then, is not stopped again, and so does not continue when this is dropped.
    pub fn stop(root: i32) -> Self {
        let mut stopped = Vec::new();
        let mut next = vec![root];
        while !next.is_empty() {
            next.iter().for_each(|&id| Signal::Stop.send(id));
            stopped.append(&mut next);
            thread::sleep(SETTLE_TIME);
            let tree = members(&processes(), |process| process.group == root);
            next = next_to_stop(&tree, &stopped);
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

/// Returns the processes for which `is_first` holds, and their descendants in any group.
fn members(processes: &[Process], is_first: impl Fn(&Process) -> bool) -> Vec<Process> {
    let mut tree: Vec<Process> = Vec::new();
    let mut left = processes.to_vec();
    loop {
        let is_member = |process: &Process| {
            is_first(process) || tree.iter().any(|parent| parent.id == process.parent)
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
    let number = |index: usize| fields.get(index)?.parse().ok();
    let state = *fields.first()?;
    let process = Process {
        id,
        parent: number(1)?,
        group: number(2)?,
        is_stopped: matches!(state, "T" | "t"),
        // The 22nd field by the manual proc(5), which counts from the id on.
        started_at: fields.get(19)?.parse().ok()?,
    };
    (!matches!(state, "Z" | "X")).then_some(process)
}

#[cfg(test)]
pub mod tests {
    use std::io::Read;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;

    /// Waits until a process has ended, whether or not its parent has reaped it.
    pub fn wait_until_gone(id: i32) {
        while processes().iter().any(|process| process.id == id) {
            thread::sleep(SETTLE_TIME);
        }
    }

    fn of(id: i32, parent: i32, group: i32) -> Process {
        let (is_stopped, started_at) = (false, 100 + id as u64);
        Process {
            id,
            parent,
            group,
            is_stopped,
            started_at,
        }
    }

    fn ids(processes: &[Process]) -> Vec<i32> {
        let mut ids: Vec<i32> = processes.iter().map(|process| process.id).collect();
        ids.sort();
        ids
    }

    #[test]
    fn a_process_is_read_whatever_its_name() {
        let rest = "3 5 5 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 107 4096";
        assert_eq!(process(7, &format!("7 (a) b) S {rest}")), Some(of(7, 3, 5)));
        assert!(process(7, &format!("7 (a) T {rest}")).unwrap().is_stopped);
        assert_eq!(process(7, &format!("7 (a) Z {rest}")), None);
        assert_eq!(process(7, "7 (a) S 3 5"), None);
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
        let tree = members(&processes, |process| process.group == 10);
        assert_eq!(ids(&tree), [10, 11, 12, 13, 14]);
    }

    #[test]
    fn a_process_that_was_seen_stays_a_member_and_its_number_does_not() {
        let mut tree = SeenTree::new(10);
        tree.seen = vec![of(10, 2, 10), of(11, 10, 11)];
        let mut orphan = of(11, 1, 11);
        assert!(tree.is_member(&orphan));
        orphan.started_at += 1;
        assert!(!tree.is_member(&orphan));
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

    #[test]
    fn what_a_process_started_ends_although_the_process_has_ended_before() {
        let mut command = Command::new("sh");
        command.args(["-c", "setsid sleep 1000 >&- & echo $!; exec >&-; read line"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut root = command.process_group(0).spawn().unwrap();
        let mut text = String::new();
        root.stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        let started: i32 = text.trim().parse().unwrap();
        let mut tree = SeenTree::new(root.id() as i32);
        tree.look();
        root.kill().unwrap();
        root.wait().unwrap();
        tree.kill();
        wait_until_gone(started);
    }
}
