//! JSON as clients write and read it: the fields of requests and their check, and the description of the API.

pub mod constant_answer;
pub mod cut_json;
pub mod field_check;
pub mod field_table;
pub mod nearest_route;
pub mod openapi;
pub mod short_text;
pub mod type_mismatch;
pub mod value_count;
