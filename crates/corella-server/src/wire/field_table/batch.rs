//! The fields of OpenAI's batch API.

use super::FieldTable;

pub static BODY: FieldTable = FieldTable {
    read: &[
        "input_file_id",
        "endpoint",
        "completion_window",
        "metadata",
        "output_expires_after",
    ],
    read_at: &[],
    no_effect: &[],
    refused: &[],
};

/// The members of `output_expires_after`.
pub static EXPIRY: FieldTable = FieldTable {
    read: &["anchor", "seconds"],
    read_at: &[],
    no_effect: &[],
    refused: &[],
};
