//! The step log: the last batches, kept to find the cause of a failed step.

use std::collections::VecDeque;
use std::fs::{self, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;

use corella_core::Batch;

/// The last batches. A log of batches is enough to replay a run; see `Batch`.
pub(crate) struct StepLog {
    batches: VecDeque<Arc<Batch>>,
    max_len: usize,
    path: PathBuf,
}

impl StepLog {
    pub(crate) fn new(max_len: usize, path: PathBuf) -> Self {
        Self {
            batches: VecDeque::with_capacity(max_len),
            max_len,
            path,
        }
    }

    pub(crate) fn push(&mut self, batch: Arc<Batch>) {
        if self.max_len == 0 {
            return;
        }
        if self.batches.len() == self.max_len {
            self.batches.pop_front();
        }
        self.batches.push_back(batch);
    }

    /// Writes the log to its file. It replaces the previous dump, so that repeated failures cannot fill the disk.
    pub(crate) fn dump(&self, reason: &str) {
        let num_steps = self.batches.len();
        match self.write(reason) {
            Ok(()) => {
                tracing::error!(
                    reason, path = %self.path.display(), num_steps,
                    "the step log was written"
                );
            }
            Err(error) => {
                tracing::error!(
                    reason, path = %self.path.display(), %error, last = ?self.batches.back(),
                    "the step log could not be written"
                );
            }
        }
    }

    fn write(&self, reason: &str) -> io::Result<()> {
        // The dump must not be written through another user's link at this path.
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        // Batches hold the tokens of prompts, which only this user may read.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = BufWriter::new(options.open(&self.path)?);
        writeln!(file, "{reason}")?;
        for batch in &self.batches {
            writeln!(file, "{batch:?}")?;
        }
        file.flush()
    }
}
