//! The fields of OpenAI's batch API.

use serde_json::json;

use super::schema::{Schema, constant, integer, object, one_of, text};
use super::{FieldTable, read};
use crate::wire::field_limit::{
    BATCH_ENDPOINTS, MAX_FILE_LIFE_S, MAX_KEY_CHARS, MAX_NUM_PAIRS, MAX_VALUE_CHARS,
    MIN_FILE_LIFE_S,
};

pub static BODY: FieldTable = FieldTable::body("BatchesRequest").of(&[&[
    read("input_file_id", text)
        .required()
        .about("A file with the purpose \"batch\"."),
    read("endpoint", |_| one_of(BATCH_ENDPOINTS))
        .required()
        .about("The path of all requests."),
    read("completion_window", text)
        .required()
        .about("A time such as 24h or 90m, up to 30 days."),
    read("metadata", |_| {
        Schema::of(json!({
            "type": "object",
            "maxProperties": MAX_NUM_PAIRS,
            "propertyNames": {"maxLength": MAX_KEY_CHARS},
            "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
        }))
    })
    .about("Repeated in the batch's status."),
    read("output_expires_after", |_| object(&EXPIRY)).about("The life of the files of answers."),
]]);

pub static EXPIRY: FieldTable = FieldTable::object("BatchExpiry").of(&[&[
    read("anchor", |_| constant("created_at")).required(),
    read("seconds", |_| {
        integer(MIN_FILE_LIFE_S as i64..=MAX_FILE_LIFE_S as i64)
    })
    .required(),
]]);
