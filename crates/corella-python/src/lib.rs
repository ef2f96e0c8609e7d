//! The part of the Python package that is written in Rust. The package's own modules, in `python/corella`, give
//! it its interface: this one takes requests as JSON and hands back what the server's API answers.

mod courier;
mod engine;
mod job;

use std::ffi::OsString;

use getrandom as _;

use pyo3::prelude::*;

/// Ends the process when the command has.
#[pyfunction]
fn run_command(py: Python<'_>, words: Vec<OsString>) {
    py.detach(|| -> () { corella::run_command(words) });
}

/// The names of the options of a model, and whether each is a `switch`, a `value` or a `list`.
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

/// Lets no thread of this module enter Python any more.
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
    module.add_function(wrap_pyfunction!(stop_courier, module)?)
}
