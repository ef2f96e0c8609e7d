//! Lists in OpenAI's shape, a page at a time.

use axum::http::Uri;
use serde_json::{Value, json};

use crate::wire::api_error::ApiError;

/// The requested part of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListQuery {
    pub limit: usize,
    /// The id of the last object before the page.
    pub after: Option<String>,
    pub is_ascending: bool,
    /// The values of the endpoint's own parameters.
    pub others: Vec<(&'static str, String)>,
}

const DEFAULT_LIMIT: usize = 20;

impl ListQuery {
    /// Reads `limit`, `after`, `order`, which is descending by default, and the parameters in `others`.
    pub fn parse(
        uri: &Uri,
        max_limit: usize,
        others: &[&'static str],
        allow_unknown: bool,
    ) -> Result<Self, ApiError> {
        let mut query = Self {
            limit: DEFAULT_LIMIT,
            after: None,
            is_ascending: false,
            others: Vec::new(),
        };
        for pair in uri.query().unwrap_or_default().split('&') {
            if pair.is_empty() {
                continue;
            }
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (name, value) = (decoded(name)?, decoded(value)?);
            match name.as_str() {
                "limit" => {
                    let limit = value.parse().ok();
                    let limit = limit.filter(|limit| (1..=max_limit).contains(limit));
                    query.limit = limit.ok_or_else(|| {
                        let message = format!("must be between 1 and {max_limit}");
                        ApiError::invalid("limit", message)
                    })?;
                }
                "after" => query.after = Some(value),
                "order" => {
                    query.is_ascending = match value.as_str() {
                        "asc" => true,
                        "desc" => false,
                        _ => {
                            let message = "must be \"asc\" or \"desc\"";
                            return Err(ApiError::invalid("order", message));
                        }
                    };
                }
                name => match others.iter().find(|other| **other == name) {
                    Some(other) => query.others.push((other, value)),
                    None if allow_unknown => {}
                    None => return Err(ApiError::unknown_field("", name, None)),
                },
            }
        }
        Ok(query)
    }

    /// Returns the requested page of `objects`, which come in ascending order.
    pub fn page(&self, mut objects: Vec<Value>) -> Result<Value, ApiError> {
        if !self.is_ascending {
            objects.reverse();
        }
        if let Some(after) = &self.after {
            let at = objects.iter().position(|object| object["id"] == **after);
            let Some(at) = at else {
                return Err(ApiError::invalid(
                    "after",
                    "is not the id of an object in this list",
                ));
            };
            objects.drain(..=at);
        }
        let has_more = objects.len() > self.limit;
        objects.truncate(self.limit);
        let id = |object: Option<&Value>| object.map(|object| object["id"].clone());
        Ok(json!({
            "object": "list",
            "first_id": id(objects.first()),
            "last_id": id(objects.last()),
            "has_more": has_more,
            "data": objects,
        }))
    }
}

/// Undoes the encoding of a query: `%2F` is `/`, and `+` is a space.
pub fn decoded(text: &str) -> Result<String, ApiError> {
    let malformed = || ApiError::malformed("The query of the URL is malformed.");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, others @ ..] = rest {
        rest = others;
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits = rest.get(..2).and_then(|digits| str::from_utf8(digits).ok());
                let digits = digits.filter(|digits| !digits.starts_with('+'));
                rest = rest.get(2..).unwrap_or_default();
                digits
                    .and_then(|digits| u8::from_str_radix(digits, 16).ok())
                    .ok_or_else(malformed)?
            }
            byte => *byte,
        });
    }
    String::from_utf8(bytes).map_err(|_| malformed())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(query: &str) -> Result<ListQuery, ApiError> {
        let uri = format!("/x?{query}").parse().expect("it is a URI");
        ListQuery::parse(&uri, 100, &["purpose"], false)
    }

    #[test]
    fn pages_follow_each_other() {
        let objects: Vec<Value> = (0..5).map(|id| json!({"id": format!("{id}")})).collect();
        let ids = |query: &str| {
            let page = parse(query).expect("it parses").page(objects.clone());
            let page = page.expect("it has a page");
            let ids: Vec<Value> = page["data"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|object| object["id"].clone())
                .collect();
            (json!(ids), page["has_more"].clone())
        };
        assert_eq!(ids("limit=2"), (json!(["4", "3"]), json!(true)));
        assert_eq!(ids("limit=2&after=3"), (json!(["2", "1"]), json!(true)));
        assert_eq!(ids("after=1"), (json!(["0"]), json!(false)));
        assert_eq!(ids("order=asc&after=3"), (json!(["4"]), json!(false)));
        assert_eq!(ids("after=0"), (json!([]), json!(false)));
        let page = parse("after=9").expect("it parses").page(objects.clone());
        assert_eq!(page.expect_err("there is none").param(), Some("after"));
    }

    #[test]
    fn parameters_are_decoded_and_checked() {
        let query = parse("purpose=a%20b+%C3%A9&limit=100").expect("it parses");
        assert_eq!(query.others, [("purpose", "a b é".to_owned())]);
        for wrong in [
            "limit=0",
            "limit=101",
            "limit=x",
            "order=up",
            "wish=1",
            "after=%zz",
            "after=%f",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
