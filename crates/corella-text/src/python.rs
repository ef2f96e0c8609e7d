//! Values, texts and methods as Python has them, and their cost.

pub(crate) mod python_argument;
pub(crate) mod python_attribute;
pub(crate) mod python_format;
pub(crate) mod python_iterable;
pub(crate) mod python_json;
pub(crate) mod python_method;
pub(crate) mod python_number;
pub(crate) mod python_order;
pub(crate) mod python_string;
pub(crate) mod python_text;
pub(crate) mod template_cost;
