//! The Rust part of the Python package. The package's own modules, in `python/corella`, have the interface: this part
//! takes requests as JSON and returns the answers of the server's API.

mod courier;
mod engine;
mod job;

use std::ffi::OsString;

use getrandom as _;

use pyo3::prelude::*;

/// Ends the process after the command.
#[pyfunction]
fn run_command(py: Python<'_>, words: Vec<OsString>) {
    py.detach(|| -> () { corella::run_command(words) });
}

/// Returns the names of the options of a model, each with its kind: `switch`, `value` or `list`.
#[pyfunction]
fn keywords() -> Vec<(String, &'static str)> {
    let kind = |kind| match kind {
        corella::KeywordKind::Switch => "switch",
        corella::KeywordKind::Value => "value",
        corella::KeywordKind::List => "list",
    };
    let keywords = corella::keywords().into_iter();
    keywords.map(|(name, of)| (name, kind(of))).collect()
}

/// Returns the names of vLLM's options that a model also takes, besides the names of Corella's options.
#[pyfunction]
fn foreign_keywords() -> Vec<String> {
    corella::foreign_keywords()
}

/// Ends the courier, so that no thread of this module enters Python any more.
#[pyfunction]
fn stop_courier(py: Python<'_>) {
    py.detach(courier::stop);
}

#[pymodule]
fn _corella(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<job::Job>()?;
    module.add_function(wrap_pyfunction!(run_command, module)?)?;
    module.add_function(wrap_pyfunction!(keywords, module)?)?;
    module.add_function(wrap_pyfunction!(foreign_keywords, module)?)?;
    module.add_function(wrap_pyfunction!(stop_courier, module)?)
}
