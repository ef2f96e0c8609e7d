//! The files for the results of a benchmark.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::BenchError;

#[derive(Clone, Debug, Default)]
pub struct ReportFiles {
    pub json: Option<PathBuf>,
    /// Whether the JSON also contains the numbers of every request.
    pub is_detailed: bool,
    /// The HTML report, with plots.
    pub html: Option<PathBuf>,
}

impl ReportFiles {
    /// Finds an unwritable file before the run. Files of an earlier run stay unchanged until this run ends.
    pub(crate) fn check(&self) -> Result<(), BenchError> {
        let files = [&self.json, &self.html];
        files.into_iter().flatten().try_for_each(|path| {
            let checked = match OpenOptions::new().write(true).create_new(true).open(path) {
                Ok(_) => std::fs::remove_file(path),
                Err(_) => OpenOptions::new().append(true).open(path).map(|_| ()),
            };
            checked.map_err(|error| BenchError::File(format!("{}: {error}", path.display())))
        })
    }

    /// Writes the files. `json` makes the JSON; its argument is `is_detailed`.
    pub(crate) fn write(
        &self,
        json: impl FnOnce(bool) -> Value,
        html: impl FnOnce() -> String,
    ) -> Result<(), BenchError> {
        if let Some(path) = &self.json {
            write(path, &format!("{}\n", json(self.is_detailed)))?;
        }
        if let Some(path) = &self.html {
            write(path, &html())?;
        }
        Ok(())
    }
}

pub(crate) fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    std::fs::write(path, text)
        .map_err(|error| BenchError::File(format!("{}: {error}", path.display())))
}
