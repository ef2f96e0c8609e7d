//! JSON within gRPC messages: `google.protobuf.Struct`, whose numbers are all floating-point.

use std::collections::BTreeMap;

use prost::{Message, Oneof};
use serde_json::{Map, Number, Value as Json};

#[derive(Clone, PartialEq, Message)]
pub struct Struct {
    #[prost(btree_map = "string, message", tag = "1")]
    pub fields: BTreeMap<String, Value>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Value {
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5, 6")]
    pub kind: Option<Kind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Kind {
    /// Its only value is 0.
    #[prost(int32, tag = "1")]
    Null(i32),
    #[prost(double, tag = "2")]
    Number(f64),
    #[prost(string, tag = "3")]
    Text(String),
    #[prost(bool, tag = "4")]
    Bool(bool),
    #[prost(message, tag = "5")]
    Struct(Struct),
    #[prost(message, tag = "6")]
    List(ListValue),
}

#[derive(Clone, PartialEq, Message)]
pub struct ListValue {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

/// The whole numbers below this bound are exact in floating point.
const EXACT: f64 = 9_007_199_254_740_992.0;

impl From<Struct> for Map<String, Json> {
    fn from(fields: Struct) -> Self {
        let fields = fields.fields.into_iter();
        fields.map(|(name, value)| (name, value.into())).collect()
    }
}

impl From<Value> for Json {
    /// Whole numbers become integers. JSON has no infinite numbers, so these become `null`.
    fn from(value: Value) -> Self {
        match value.kind {
            None | Some(Kind::Null(_)) => Self::Null,
            Some(Kind::Number(number)) if number.fract() == 0.0 && number.abs() < EXACT => {
                (number as i64).into()
            }
            Some(Kind::Number(number)) => Number::from_f64(number).map_or(Self::Null, Self::Number),
            Some(Kind::Text(text)) => text.into(),
            Some(Kind::Bool(is)) => is.into(),
            Some(Kind::Struct(fields)) => Self::Object(fields.into()),
            Some(Kind::List(list)) => list.values.into_iter().map(Self::from).collect(),
        }
    }
}

impl From<Map<String, Json>> for Struct {
    fn from(fields: Map<String, Json>) -> Self {
        let fields = fields.into_iter();
        Self {
            fields: fields.map(|(name, value)| (name, value.into())).collect(),
        }
    }
}

impl From<Json> for Value {
    fn from(value: Json) -> Self {
        let kind = match value {
            Json::Null => Kind::Null(0),
            Json::Bool(is) => Kind::Bool(is),
            Json::Number(number) => Kind::Number(number.as_f64().unwrap_or_default()),
            Json::String(text) => Kind::Text(text),
            Json::Array(values) => Kind::List(ListValue {
                values: values.into_iter().map(Self::from).collect(),
            }),
            Json::Object(fields) => Kind::Struct(fields.into()),
        };
        Self { kind: Some(kind) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_comes_back_with_whole_numbers_as_integers() {
        let json = json!({"port": 7777, "ids": [[1, 2], []], "share": 0.5, "is": true, "no": null, "a": "b"});
        let value = Value::from(json.clone());
        let bytes = value.encode_to_vec();
        let read = Value::decode(&bytes[..]).expect("it is a message");
        assert_eq!(Json::from(read), json);
        let infinite = Value {
            kind: Some(Kind::Number(f64::INFINITY)),
        };
        assert_eq!(Json::from(infinite), Json::Null);
    }
}
