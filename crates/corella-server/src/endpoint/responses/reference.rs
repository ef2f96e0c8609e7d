//! Replaces each item of `input` that names an item of a kept response by the named item.

use serde_json::{Map, Value};

use crate::call::call_context::CallContext;
use crate::store::response_store::{ResponseKey, ResponseStore};
use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::responses::REFERENCE;

/// Limits the JSON of kept responses that is read for one request.
const MAX_READ_BYTES: usize = 64 << 20;

pub struct References<'a> {
    store: &'a ResponseStore,
    context: &'a CallContext,
    /// Limits the size of the items that take the place of references.
    max_bytes: usize,
    /// The items that were read last, because consecutive references mostly name items of one response.
    last: Option<(ItemList, Vec<Map<String, Value>>)>,
    num_bytes_read: usize,
    /// The size of the items that took the place of references.
    num_bytes: usize,
}

/// A list of items: the output of a response, or the input of its request.
#[derive(Clone, PartialEq)]
struct ItemList {
    response: String,
    is_input: bool,
}

impl<'a> References<'a> {
    pub fn new(store: &'a ResponseStore, context: &'a CallContext, max_bytes: usize) -> Self {
        Self {
            store,
            context,
            max_bytes,
            last: None,
            num_bytes_read: 0,
            num_bytes: 0,
        }
    }

    pub fn resolve(
        &mut self,
        items: &mut [Map<String, Value>],
        check: FieldCheck,
    ) -> Result<(), ApiError> {
        for (index, item) in items.iter_mut().enumerate() {
            if !is_reference(item) {
                continue;
            }
            let path = format!("input[{index}]");
            check.check(&REFERENCE, &path, item)?;
            let path = format!("{path}.id");
            let Some(id) = item.get("id").and_then(Value::as_str) else {
                return Err(ApiError::invalid(path, "must be a string"));
            };
            let found = self.find(id).map_err(|error| error.with_param(&path))?;
            self.num_bytes += serde_json::to_vec(&found).map_or(0, |json| json.len());
            let limit = self.max_bytes;
            if self.num_bytes > limit {
                let message = format!("the items named up to here have more than {limit} bytes");
                return Err(ApiError::invalid(path, message));
            }
            *item = found;
        }
        Ok(())
    }

    fn find(&mut self, id: &str) -> Result<Map<String, Value>, ApiError> {
        let unknown = || ApiError::item_not_found(id, "belongs to no answer of this server");
        let (kind, rest) = id.split_once('_').ok_or_else(unknown)?;
        let (response, index) = rest.rsplit_once('_').ok_or_else(unknown)?;
        let index: usize = index.parse().map_err(|_| unknown())?;
        let list = ItemList {
            response: response.to_owned(),
            is_input: kind == INPUT_ITEM,
        };
        let items = match &self.last {
            Some((last, items)) if *last == list => items,
            _ => {
                let items = self.read(&list)?;
                &self.last.insert((list.clone(), items)).1
            }
        };
        let item = items.get(index).ok_or_else(unknown)?;
        match item.get("id").and_then(Value::as_str) {
            Some(known) if known == id => Ok(item.clone()),
            None if list.is_input => Ok(item.clone()),
            _ => Err(unknown()),
        }
    }

    fn read(&mut self, list: &ItemList) -> Result<Vec<Map<String, Value>>, ApiError> {
        let key = ResponseKey {
            owner: self.context.owner(),
            id: list.response.as_str().into(),
        };
        let kept = self.store.find(&key);
        let turn = kept.map_err(ApiError::into_item_error)?.turn;
        self.num_bytes_read += turn.num_bytes();
        if self.num_bytes_read > MAX_READ_BYTES {
            let message = format!(
                "the responses whose items are named up to here have more than {MAX_READ_BYTES} bytes"
            );
            return Err(ApiError::invalid("input", message));
        }
        Ok(match list.is_input {
            true => turn.input_items(),
            false => turn.output_items(),
        })
    }
}

/// The first part of the id under which an item of a request's input is listed.
pub const INPUT_ITEM: &str = "item";

/// Returns whether an item is a reference, whose type may be left out.
fn is_reference(item: &Map<String, Value>) -> bool {
    match item.get("type") {
        None | Some(Value::Null) => item.contains_key("id") && !item.contains_key("role"),
        Some(kind) => kind == "item_reference",
    }
}
