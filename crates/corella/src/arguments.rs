//! The command line and files of options, as configuration.

pub(crate) mod api_key_file;
pub(crate) mod args;
pub(crate) mod config;
pub(crate) mod config_file;
pub(crate) mod log_format;
