//! The log on its way to standard error. A thread that logs never waits for the log's reader.
//!
//! A line is written at once if standard error takes it without waiting, so that a crash loses no line. Otherwise it
//! waits in a queue for a thread that writes. Lines that find the queue full are lost, and counted in a line of their
//! own. Once a line is lost, all further ones are, until the queue is empty: a reader sees one gap, not many.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::terminal::progress_line::{LogWriter, without_line};

/// Some thousands of lines, for a reader that pauses.
const MAX_QUEUED_BYTES: usize = 1 << 20;
/// At its end, the process waits this long for a reader that takes no line.
const PATIENCE: Duration = Duration::from_secs(1);
/// A flush waits this many times as long for a slow reader, or for lines that others log meanwhile.
const MAX_PATIENCES: u32 = 10;

static QUEUE: LazyLock<LogQueue<Stderr>> = LazyLock::new(|| LogQueue::new(Stderr::open()));

thread_local! {
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
}

/// Takes whole lines of the log.
pub struct QueuedLog;

impl Write for QueuedLog {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match IS_WRITER.get() {
            // The writer's thread only logs the line about lost lines, which must stand in their place.
            true => QUEUE.stream.write(line),
            false => QUEUE.push(line),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line that is not a log event, in its order among the log's lines.
pub fn print_line(text: &str) {
    QUEUE.push(format!("{text}\n").as_bytes());
}

/// Waits until all lines are written, before the process ends. A reader that takes no line is given up.
pub fn flush() {
    QUEUE.flush(PATIENCE);
}

/// Panics are lines of the log, too: Rust's own message would wait for the reader.
pub fn take_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("<unnamed>");
        let backtrace = std::backtrace::Backtrace::capture();
        print_line(&match backtrace.status() {
            std::backtrace::BacktraceStatus::Captured => {
                format!("thread '{name}' {panic}\nstack backtrace:\n{backtrace}")
            }
            _ => format!("thread '{name}' {panic}"),
        });
        // A panic of the main thread ends the process.
        flush();
    }));
}

/// The place where lines go.
trait Stream: Sync {
    /// Writes the part of a line that is taken without waiting, and returns its length.
    fn try_write(&self, line: &[u8]) -> usize;
    /// Writes a line, and may wait.
    fn write(&self, line: &[u8]);
    /// Writes the line about lost lines, and may wait.
    fn report_lost(&self, num_lines: u64);
}

struct LogQueue<S> {
    state: Mutex<State>,
    changed: Condvar,
    stream: S,
}

#[derive(Default)]
struct State {
    lines: VecDeque<Vec<u8>>,
    num_bytes: usize,
    /// Lines lost since the last report.
    num_lost: u64,
    has_writer: bool,
    /// Whether the writer has a line in hand.
    is_writing: bool,
    num_written: u64,
}

impl State {
    fn is_idle(&self) -> bool {
        self.lines.is_empty() && self.num_lost == 0 && !self.is_writing
    }
}

impl<S: Stream + Send + 'static> LogQueue<S> {
    fn new(stream: S) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            stream,
        }
    }

    fn push(&'static self, line: &[u8]) {
        let mut state = self.lock();
        let num_taken = match state.is_idle() {
            true => self.stream.try_write(line),
            false => 0,
        };
        let rest = &line[num_taken..];
        if rest.is_empty() {
            return;
        }
        let has_room = state.num_lost == 0 && state.num_bytes + rest.len() <= MAX_QUEUED_BYTES;
        match has_room {
            true => {
                state.num_bytes += rest.len();
                state.lines.push_back(rest.to_vec());
            }
            false => state.num_lost += 1,
        }
        // Few processes ever need the thread. If none can be started, the next line tries again.
        if !state.has_writer {
            let writer = thread::Builder::new().name("corella-log".to_owned());
            state.has_writer = writer.spawn(move || self.write_lines()).is_ok();
        }
        self.changed.notify_all();
    }

    /// Runs on the writer's thread.
    fn write_lines(&self) {
        IS_WRITER.set(true);
        let mut state = self.lock();
        loop {
            let line = state.lines.pop_front();
            let num_lost = match line {
                Some(_) => 0,
                None => std::mem::take(&mut state.num_lost),
            };
            state.is_writing = line.is_some() || num_lost > 0;
            if !state.is_writing {
                state = self.wait(state);
                continue;
            }
            state.num_bytes -= line.as_ref().map_or(0, Vec::len);
            drop(state);
            match line {
                Some(line) => self.stream.write(&line),
                None => self.stream.report_lost(num_lost),
            }
            state = self.lock();
            state.is_writing = false;
            state.num_written += 1;
            self.changed.notify_all();
        }
    }

    fn flush(&self, patience: Duration) {
        let start = Instant::now();
        let mut state = self.lock();
        while !state.is_idle() && start.elapsed() < patience.saturating_mul(MAX_PATIENCES) {
            let num_written = state.num_written;
            let is_stuck = |state: &mut State| state.num_written == num_written;
            let waited = self.changed.wait_timeout_while(state, patience, is_stuck);
            let (next, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return;
            }
            state = next;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let woken = self.changed.wait(state);
        woken.unwrap_or_else(PoisonError::into_inner)
    }
}

struct Stderr {
    /// Standard error, as a file to which writes never block. `None` for a socket, which cannot be opened as one.
    at_once: Option<File>,
}

impl Stderr {
    fn open() -> Self {
        Self {
            at_once: Self::open_at_once().ok().flatten(),
        }
    }

    fn open_at_once() -> io::Result<Option<File>> {
        let same = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        let kind = same.metadata()?.file_type();
        if kind.is_file() {
            return Ok(Some(same));
        }
        if !kind.is_fifo() && !kind.is_char_device() {
            return Ok(None);
        }
        // The flag belongs to this opening alone: other processes write to the same pipe or terminal, and may wait.
        let mut options = OpenOptions::new();
        options
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        options.open("/proc/self/fd/2").map(Some)
    }
}

impl Stream for Stderr {
    fn try_write(&self, line: &[u8]) -> usize {
        let Some(mut stream) = self.at_once.as_ref() else {
            return 0;
        };
        match without_line(|| stream.write(line)) {
            Some(Ok(num_taken)) => num_taken,
            Some(Err(error))
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                0
            }
            // A closed pipe or a full disk takes no further line, so the line is dropped and counts as written.
            Some(Err(_)) => line.len(),
            None => 0,
        }
    }

    fn write(&self, line: &[u8]) {
        let _ = LogWriter.write_all(line);
    }

    fn report_lost(&self, num_lines: u64) {
        tracing::warn!("{num_lines} log lines were lost: the log was not read");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// Only ends a test that would hang.
    const LONG: Duration = Duration::from_secs(300);

    /// A pipe that holds no byte: each line waits until the test reads it.
    struct Unread {
        is_open: Mutex<bool>,
        lines: Mutex<Sender<String>>,
        reader: Mutex<Receiver<()>>,
        num_at_once: usize,
    }

    impl Unread {
        fn say(&self, line: String) {
            if self.reader.lock().unwrap().recv().is_ok() {
                self.lines.lock().unwrap().send(line).unwrap();
            }
        }
    }

    impl Stream for Unread {
        fn try_write(&self, line: &[u8]) -> usize {
            match *self.is_open.lock().unwrap() {
                true => {
                    let text = format!("at once: {}", String::from_utf8_lossy(line));
                    self.lines.lock().unwrap().send(text).unwrap();
                    line.len()
                }
                false => self.num_at_once.min(line.len()),
            }
        }

        fn write(&self, line: &[u8]) {
            self.say(String::from_utf8_lossy(line).into_owned());
        }

        fn report_lost(&self, num_lines: u64) {
            self.say(format!("lost: {num_lines}"));
        }
    }

    struct Reader {
        queue: &'static LogQueue<Unread>,
        ready: Sender<()>,
        lines: Receiver<String>,
    }

    impl Reader {
        fn new(num_at_once: usize) -> Self {
            let (ready, reader) = channel();
            let (sender, lines) = channel();
            let queue = LogQueue::new(Unread {
                is_open: Mutex::new(false),
                lines: Mutex::new(sender),
                reader: Mutex::new(reader),
                num_at_once,
            });
            Self {
                queue: Box::leak(Box::new(queue)),
                ready,
                lines,
            }
        }

        fn next(&self) -> String {
            self.ready.send(()).unwrap();
            self.lines.recv().unwrap()
        }
    }

    #[test]
    fn lines_beyond_the_limit_are_counted_where_they_are_missing() {
        let reader = Reader::new(0);
        let line = [b'x'; 1 << 10];
        // The writer may have taken one line out of the queue.
        let num_lines = 5000;
        for _ in 0..num_lines {
            reader.queue.push(&line);
        }
        let mut num_read = 0;
        let lost = loop {
            match reader.next().strip_prefix("lost: ") {
                Some(number) => break number.parse::<usize>().unwrap(),
                None => num_read += 1,
            }
        };
        assert!((1024..=1025).contains(&num_read), "{num_read}");
        assert_eq!(num_read + lost, num_lines);
        reader.queue.push(b"later");
        assert_eq!(reader.next(), "later");
    }

    #[test]
    fn a_line_follows_its_own_first_part_and_those_in_the_queue() {
        let reader = Reader::new(2);
        reader.queue.push(b"one");
        *reader.queue.stream.is_open.lock().unwrap() = true;
        reader.queue.push(b"two");
        assert_eq!(
            (reader.next().as_str(), reader.next().as_str()),
            ("e", "two")
        );
        reader.queue.flush(LONG);
        reader.queue.push(b"three");
        assert_eq!(reader.lines.recv().unwrap(), "at once: three");
    }

    #[test]
    fn the_end_waits_for_lines_and_not_for_a_lost_reader() {
        let reader = Reader::new(0);
        reader.queue.push(b"one");
        reader.queue.push(b"two");
        reader.queue.flush(Duration::from_millis(1));
        assert!(!reader.queue.lock().is_idle());
        reader.ready.send(()).unwrap();
        reader.ready.send(()).unwrap();
        reader.queue.flush(LONG);
        assert!(reader.queue.lock().is_idle());
        assert_eq!(reader.lines.try_iter().collect::<Vec<_>>(), ["one", "two"]);
    }
}
