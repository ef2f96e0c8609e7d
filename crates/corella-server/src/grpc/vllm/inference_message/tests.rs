//! Compares the messages with the table of vLLM's fields, which comes from its proto file.

use serde_json::Value;

use super::*;

/// A message, a field, its number, its type, its label, its oneof, and its treatment.
struct Row {
    message: String,
    field: String,
    number: u64,
    kind: String,
    label: String,
    oneof: String,
    is_ignored: bool,
}

fn rows() -> Vec<Row> {
    let table = include_str!("../../../../../../tests/wires/vllm.json");
    let table: Vec<[Value; 7]> = serde_json::from_str(table).expect("rows of seven");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let rows = table.iter().map(|row| Row {
        message: text(&row[0]),
        field: text(&row[1]),
        number: row[2].as_u64().expect("a number"),
        kind: text(&row[3]),
        label: text(&row[4]),
        oneof: text(&row[5]),
        is_ignored: text(&row[6]).starts_with("ignored"),
    });
    rows.collect()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value > 0x7f {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn with_length(bytes: Vec<u8>) -> Vec<u8> {
    [varint(bytes.len() as u64), bytes].concat()
}

fn field(number: u64, wire: u64, value: Vec<u8>) -> Vec<u8> {
    [varint(number << 3 | wire), value].concat()
}

/// Returns the wire type of a kind, a value that only this kind keeps, and the value that a field without presence
/// leaves out.
fn scalar(kind: &str) -> Option<(u64, Vec<u8>, Vec<u8>)> {
    let zero = vec![0];
    Some(match kind {
        "bool" => (0, vec![1], zero),
        "uint32" => (0, varint(u32::MAX.into()), zero),
        "int32" => (0, varint(-1_i64 as u64), zero),
        "int64" => (0, varint(1 << 40), zero),
        "FinishReason" => (0, vec![2], zero),
        "float" => (5, 1.5_f32.to_le_bytes().to_vec(), vec![0; 4]),
        "string" => (2, with_length("é".into()), zero),
        _ => return None,
    })
}

/// Returns the bytes of a message of this kind with one field.
fn message_of(kind: &str, rows: &[Row]) -> Vec<u8> {
    match kind {
        "google.protobuf.Struct" => {
            let number = field(2, 1, 1.5_f64.to_le_bytes().to_vec());
            let name = field(1, 2, with_length(b"a".to_vec()));
            let entry = [name, field(2, 2, with_length(number))].concat();
            field(1, 2, with_length(entry))
        }
        "map<uint32, float>" => {
            let value = 1.5_f32.to_le_bytes().to_vec();
            [field(1, 0, vec![7]), field(2, 5, value)].concat()
        }
        "MediaItem" => field(2, 2, with_length(b"url".to_vec())),
        _ => {
            let is_of = |row: &&Row| row.message.rsplit('.').next() == Some(kind);
            let first = rows.iter().find(|row| is_of(row) && !row.is_ignored);
            bytes_of(first.expect("a field of the message"), rows).0
        }
    }
}

/// Returns a message with only this field, and one in which the field is 0, if it may be.
fn bytes_of(row: &Row, rows: &[Row]) -> (Vec<u8>, Option<Vec<u8>>) {
    let Some((wire, value, zero)) = scalar(&row.kind) else {
        let message = message_of(&row.kind, rows);
        return (field(row.number, 2, with_length(message)), None);
    };
    match &*row.label {
        "repeated" if row.kind != "string" => {
            let packed = [value.clone(), value].concat();
            (field(row.number, 2, with_length(packed)), None)
        }
        "repeated" => (field(row.number, wire, value), None),
        _ => (
            field(row.number, wire, value),
            Some(field(row.number, wire, zero)),
        ),
    }
}

fn again<M: Message + Default>(bytes: &[u8]) -> Vec<u8> {
    M::decode(bytes).expect("it is a message").encode_to_vec()
}

fn read_and_written(message: &str, bytes: &[u8]) -> Vec<u8> {
    match message {
        "GenerateRequest" => again::<GenerateRequest>(bytes),
        "RandomSampling" => again::<RandomSampling>(bytes),
        "DecodingParameters" => again::<DecodingParameters>(bytes),
        "DecodingParameters.StringChoices" => again::<StringChoices>(bytes),
        "StoppingCriteria" => again::<StoppingCriteria>(bytes),
        "ResponseOptions" => again::<ResponseOptions>(bytes),
        "KVCacheParameters" => again::<KvCacheParameters>(bytes),
        "CandidateTokens" => again::<CandidateTokens>(bytes),
        "GenerateResponse" => again::<GenerateResponse>(bytes),
        "SequenceOutput" => again::<SequenceOutput>(bytes),
        "PromptInfo" => again::<PromptInfo>(bytes),
        "FinishInfo" => again::<FinishInfo>(bytes),
        "CandidateTokenInfo" => again::<CandidateTokenInfo>(bytes),
        "CandidateTokenInfo.TokenInfo" => again::<TokenInfo>(bytes),
        "TokenIds" => again::<TokenIds>(bytes),
        _ => panic!("{message} has no counterpart"),
    }
}

#[test]
fn the_fields_are_those_of_vllm() {
    let rows = rows();
    assert!(rows.len() > 80, "the table is whole");
    for row in &rows {
        let name = format!("{}.{}", row.message, row.field);
        let (bytes, with_zero) = bytes_of_ignored(row, &rows);
        let expected = match row.is_ignored {
            true => Vec::new(),
            false => bytes.clone(),
        };
        assert_eq!(read_and_written(&row.message, &bytes), expected, "{name}");
        let Some(with_zero) = with_zero.filter(|_| !row.is_ignored) else {
            continue;
        };
        let has_presence = row.label == "optional" || !row.oneof.is_empty();
        let expected = match has_presence {
            true => with_zero.clone(),
            false => Vec::new(),
        };
        assert_eq!(
            read_and_written(&row.message, &with_zero),
            expected,
            "{name} = 0"
        );
    }
}

/// The messages of ignored fields are not in the table.
fn bytes_of_ignored(row: &Row, rows: &[Row]) -> (Vec<u8>, Option<Vec<u8>>) {
    match row.is_ignored && scalar(&row.kind).is_none() {
        true => (field(row.number, 2, with_length(vec![8, 1])), None),
        false => bytes_of(row, rows),
    }
}
