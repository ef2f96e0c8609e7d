//! Jinja's language: sources, expressions and built-in functions.

pub(crate) mod jinja_builtin;
pub(crate) mod strftime;
pub(crate) mod template_expression;
pub(crate) mod template_nesting;
pub(crate) mod template_source;
