//! A line at the bottom of a terminal that shows the progress of some work. Log lines appear above it.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::time::Duration;

/// The shown text, if any. There is one standard error, and so one line.
static SHOWN: Mutex<Option<String>> = Mutex::new(None);

/// Goes to the beginning of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Shows text until dropped. If standard error supports no control sequences, it shows nothing.
pub struct ProgressLine {
    is_shown: bool,
}

impl ProgressLine {
    pub fn new() -> Self {
        Self {
            is_shown: is_controllable(&io::stderr()),
        }
    }

    /// Replaces the shown text. A text longer than a line of the terminal is cut, because a wrapped line could not be
    /// cleared.
    pub fn show(&self, text: &str) {
        if !self.is_shown {
            return;
        }
        let text: String = text
            .chars()
            .take(terminal_columns(&io::stderr()) - 1)
            .collect();
        let mut shown = lock();
        let mut err = io::stderr().lock();
        // A closed terminal needs no progress.
        let _ = write!(err, "{CLEAR}{text}");
        let _ = err.flush();
        *shown = Some(text);
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if lock().take().is_some() {
            let _ = io::stderr().lock().write_all(CLEAR.as_bytes());
        }
    }
}

/// Returns whether a stream is a terminal with control sequences.
pub fn is_controllable(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("TERM").is_none_or(|name| name != "dumb")
}

/// Writes while no text is shown. Returns `None` if a text is shown or is being written.
pub fn without_line<T>(write: impl FnOnce() -> T) -> Option<T> {
    let shown = SHOWN.try_lock().ok()?;
    shown.is_none().then(write)
}

/// Writes whole log lines to standard error, above the progress line.
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let shown = lock();
        let mut err = io::stderr().lock();
        match &*shown {
            None => err.write_all(line)?,
            Some(text) => {
                err.write_all(CLEAR.as_bytes())?;
                err.write_all(line)?;
                err.write_all(text.as_bytes())?;
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

fn lock() -> std::sync::MutexGuard<'static, Option<String>> {
    SHOWN
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Returns the width of a stream's terminal; 80 if it is unknown.
pub fn terminal_columns(stream: &impl AsRawFd) -> usize {
    const USUAL: usize = 80;
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: `size` is a valid place for the answer.
    let asked = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCGWINSZ, &mut size) };
    match asked == 0 && size.ws_col > 1 {
        true => size.ws_col.into(),
        false => USUAL,
    }
}

/// Returns a bar of `width` characters, filled to `share`, which is from 0 to 1.
pub fn bar(share: f64, width: usize) -> String {
    let num_full = (share.clamp(0.0, 1.0) * width as f64) as usize;
    format!("[{}{}]", "=".repeat(num_full), " ".repeat(width - num_full))
}

/// Formats a time: `7 s`, `3 min 12 s`, `2 h 05 min`.
pub fn display_time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_units_at_most() {
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min 00 s"),
            (3599, "59 min 59 s"),
            (3600, "1 h 00 min"),
            (93_784, "26 h 03 min"),
        ] {
            assert_eq!(display_time(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn a_bar_keeps_its_width() {
        assert_eq!(bar(0.0, 4), "[    ]");
        assert_eq!(bar(0.5, 4), "[==  ]");
        assert_eq!(bar(1.0, 4), "[====]");
        assert_eq!(bar(1.5, 4), "[====]");
    }
}
