//! JSON as clients write and read it: the fields of requests and their check, and the description of the API.

pub mod api_error;
pub mod body_memory;
pub mod cache_explanation;
pub mod constant_answer;
pub mod cut_json;
pub mod field_check;
pub mod field_limit;
pub mod field_table;
pub mod grpc_message;
pub mod json_response;
pub mod list_page;
pub mod metric_series;
pub mod nearest_route;
pub mod number_range;
pub mod openapi;
pub mod protobuf_count;
pub mod protobuf_json;
pub mod request_body;
pub mod reset_time;
pub mod shallow_value;
pub mod short_text;
pub mod type_mismatch;
pub mod usage;
pub mod value_count;
