//! Load generator and reports.
