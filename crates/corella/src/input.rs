//! Texts that users give: files, variables, and names with typing errors.

pub(crate) mod environment;
pub(crate) mod nearest_name;
pub(crate) mod option_file;
pub(crate) mod option_value;
