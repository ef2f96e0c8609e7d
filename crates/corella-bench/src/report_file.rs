//! Where the results of a benchmark go, besides the terminal.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::BenchError;

#[derive(Clone, Debug, Default)]
pub struct ReportFiles {
    pub json: Option<PathBuf>,
    /// Whether the JSON has the numbers of every request, too.
    pub is_detailed: bool,
    /// A page with plots.
    pub page: Option<PathBuf>,
}

impl ReportFiles {
    /// What cannot be written is found out before the run rather than after it.
    pub(crate) fn create(&self) -> Result<(), BenchError> {
        let files = [&self.json, &self.page];
        files
            .into_iter()
            .flatten()
            .try_for_each(|path| write(path, ""))
    }

    /// `json` is told whether to be detailed.
    pub(crate) fn write(
        &self,
        json: impl FnOnce(bool) -> Value,
        page: impl FnOnce() -> String,
    ) -> Result<(), BenchError> {
        if let Some(path) = &self.json {
            write(path, &format!("{}\n", json(self.is_detailed)))?;
        }
        if let Some(path) = &self.page {
            write(path, &page())?;
        }
        Ok(())
    }
}

fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    std::fs::write(path, text)
        .map_err(|error| BenchError::File(format!("{}: {error}", path.display())))
}
