//! Responses kept in memory for a while, so that later requests can name them. A response is a turn, which later
//! responses of the conversation share. A turn's bytes count until the last response that shares it is gone, so that
//! the limit is exact.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::wire::api_error::ApiError;

/// Keeps the most recently used responses, up to a number of bytes. A response belongs to the API key that asked for
/// it, and does not exist for other keys.
pub struct ResponseStore {
    max_bytes: usize,
    /// The bytes of all turns, including those of dropped responses that later responses share.
    num_bytes: Arc<AtomicUsize>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    responses: HashMap<ResponseKey, Entry>,
    /// The key of the least recently used response comes first.
    by_use: BTreeMap<u64, ResponseKey>,
    num_uses: u64,
    /// Why earlier responses are gone, the newest last.
    gone: VecDeque<(ResponseKey, Loss)>,
}

struct Entry {
    response: KeptResponse,
    last_use: u64,
}

/// A response's owner and id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ResponseKey {
    /// The name of the API key; `None` if the server requires none.
    pub owner: Option<Arc<str>>,
    pub id: Arc<str>,
}

/// A response, with the earlier turns of its conversation.
#[derive(Clone, Debug)]
pub struct KeptResponse {
    pub before: Vec<Arc<Turn>>,
    pub turn: Arc<Turn>,
}

/// A request's input and its answer, as JSON. Later responses share the turn.
#[derive(Debug)]
pub struct Turn {
    /// The items of `input`.
    input: Vec<u8>,
    /// The response object.
    object: Vec<u8>,
    counted: Counted,
}

/// The bytes of a turn. They count towards the total until this value is dropped.
#[derive(Debug)]
struct Counted {
    num_bytes: usize,
    total: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.total.fetch_sub(self.num_bytes, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    Deleted,
    Dropped,
    /// With its earlier turns, the response would have exceeded the whole store.
    TooLarge,
}

/// Limits the remembered ids of removed responses.
const MAX_NUM_GONE: usize = 4096;
/// Approximate size of a response in the tables, besides its JSON.
const OVERHEAD_BYTES: usize = 512;

impl Turn {
    /// Returns the items of the turn: its input, then the output of its response.
    pub fn items(&self) -> Vec<Map<String, Value>> {
        let mut items = self.input_items();
        items.append(&mut self.output_items());
        items
    }

    pub fn output_items(&self) -> Vec<Map<String, Value>> {
        #[derive(Deserialize)]
        struct Object {
            output: Vec<Map<String, Value>>,
        }
        let object = serde_json::from_slice::<Object>(&self.object);
        object.map_or_else(|_| Vec::new(), |object| object.output)
    }

    pub fn num_bytes(&self) -> usize {
        self.counted.num_bytes
    }

    pub fn input_items(&self) -> Vec<Map<String, Value>> {
        serde_json::from_slice(&self.input).unwrap_or_default()
    }

    /// Returns the response object as answered.
    pub fn object(&self) -> Value {
        serde_json::from_slice(&self.object).unwrap_or_default()
    }
}

impl ResponseStore {
    /// With 0 bytes, nothing is kept.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            num_bytes: Arc::default(),
            table: Mutex::default(),
        }
    }

    pub fn is_on(&self) -> bool {
        self.max_bytes > 0
    }

    /// Returns the bytes that responses take now.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes.load(Ordering::Relaxed)
    }

    /// Keeps a response, and drops the least recently used ones until it fits. A conversation larger than the whole
    /// store is not kept, and no response is dropped for it.
    pub fn keep(
        &self,
        key: ResponseKey,
        before: Vec<Arc<Turn>>,
        input: &[Map<String, Value>],
        object: &Value,
    ) {
        let json = |value: serde_json::Result<Vec<u8>>| value.unwrap_or_default();
        let input = json(serde_json::to_vec(input));
        let object = json(serde_json::to_vec(object));
        let num_bytes = OVERHEAD_BYTES
            + input.len()
            + object.len()
            + 3 * key.id.len()
            + size_of_val(before.as_slice());
        let before_bytes: usize = before.iter().map(|turn| turn.counted.num_bytes).sum();
        if num_bytes + before_bytes > self.max_bytes {
            let mut table = self.table();
            table.remove(&key);
            table.lose(key, Loss::TooLarge);
            return;
        }
        self.num_bytes.fetch_add(num_bytes, Ordering::Relaxed);
        let counted = Counted {
            num_bytes,
            total: self.num_bytes.clone(),
        };
        let turn = Arc::new(Turn {
            input,
            object,
            counted,
        });
        let mut table = self.table();
        let last_use = table.next_use();
        let response = KeptResponse { before, turn };
        table.remove(&key);
        table.by_use.insert(last_use, key.clone());
        table.responses.insert(key, Entry { response, last_use });
        while self.num_bytes() > self.max_bytes
            && let Some((_, oldest)) = table.by_use.pop_first()
        {
            table.responses.remove(&oldest);
            table.lose(oldest, Loss::Dropped);
        }
    }

    /// The error says why the response is missing.
    pub fn find(&self, key: &ResponseKey) -> Result<KeptResponse, ApiError> {
        let mut table = self.table();
        let now = table.next_use();
        let Some(entry) = table.responses.get_mut(key) else {
            return Err(self.missing(&table, key));
        };
        let last_use = std::mem::replace(&mut entry.last_use, now);
        let response = entry.response.clone();
        table.by_use.remove(&last_use);
        table.by_use.insert(now, key.clone());
        Ok(response)
    }

    pub fn delete(&self, key: &ResponseKey) -> Result<(), ApiError> {
        let mut table = self.table();
        match table.remove(key) {
            true => {
                table.lose(key.clone(), Loss::Deleted);
                Ok(())
            }
            false => Err(self.missing(&table, key)),
        }
    }

    fn missing(&self, table: &Table, key: &ResponseKey) -> ApiError {
        let mut gone = table.gone.iter().rev();
        let reason = match gone.find(|(gone, _)| gone == key) {
            _ if !self.is_on() => {
                "is not kept: this server keeps no responses (--max-stored-response-bytes 0)".into()
            }
            Some((_, Loss::Deleted)) => "was deleted".to_owned(),
            Some((_, Loss::Dropped)) => format!(
                "was dropped as the least recently used response, because all responses may \
                 take {} bytes together (--max-stored-response-bytes)",
                self.max_bytes
            ),
            Some((_, Loss::TooLarge)) => format!(
                "was not kept, because its conversation is larger than the {} bytes that all may take together \
                 (--max-stored-response-bytes)",
                self.max_bytes
            ),
            None => "is not kept here: it never was, it was answered with `store` false, or the \
                     server has been restarted since"
                .to_owned(),
        };
        ApiError::response_not_found(&key.id, &reason)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn next_use(&mut self) -> u64 {
        self.num_uses += 1;
        self.num_uses
    }

    /// Returns whether the response was there.
    fn remove(&mut self, key: &ResponseKey) -> bool {
        let removed = self.responses.remove(key);
        if let Some(entry) = &removed {
            self.by_use.remove(&entry.last_use);
        }
        removed.is_some()
    }

    fn lose(&mut self, key: ResponseKey, loss: Loss) {
        if self.gone.len() == MAX_NUM_GONE {
            self.gone.pop_front();
        }
        self.gone.push_back((key, loss));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const MAX_BYTES: usize = 100_000;

    fn key(owner: &str, id: usize) -> ResponseKey {
        ResponseKey {
            owner: Some(owner.into()),
            id: format!("resp_{id}").into(),
        }
    }

    fn keep(store: &ResponseStore, key: ResponseKey, before: Vec<Arc<Turn>>, num_bytes: usize) {
        let input = [Map::from_iter([(
            "text".to_owned(),
            json!("x".repeat(num_bytes)),
        )])];
        store.keep(key, before, &input, &json!({"output": []}));
    }

    fn reason(store: &ResponseStore, key: &ResponseKey) -> String {
        let missing = store.find(key).expect_err("it is not there");
        missing.message().to_owned()
    }

    #[test]
    fn the_bound_holds_whatever_is_kept() {
        let store = ResponseStore::new(MAX_BYTES);
        for id in 0..10_000 {
            keep(&store, key("a", id), Vec::new(), id % 1000);
            assert!(store.num_bytes() <= MAX_BYTES);
        }
        assert!(store.num_bytes() > MAX_BYTES - 2000);
        assert!(store.find(&key("a", 9_999)).is_ok());
        assert!(reason(&store, &key("a", 9_000)).contains("was dropped"));
        // The record of this response's removal is forgotten.
        assert!(reason(&store, &key("a", 1)).contains("never was"));
    }

    #[test]
    fn what_never_fits_drops_nothing() {
        let store = ResponseStore::new(MAX_BYTES);
        keep(&store, key("a", 0), Vec::new(), 60_000);
        keep(&store, key("b", 1), Vec::new(), MAX_BYTES);
        assert!(reason(&store, &key("b", 1)).contains("is larger than the 100000 bytes"));
        // A whole conversation is too large, too, although its parts would fit.
        let before = vec![store.find(&key("a", 0)).expect("it is there").turn];
        keep(&store, key("a", 2), before, 60_000);
        assert!(reason(&store, &key("a", 2)).contains("is larger"));
        assert!(store.find(&key("a", 0)).is_ok());
        assert!((60_000..62_000).contains(&store.num_bytes()));
    }

    #[test]
    fn what_is_used_stays() {
        let store = ResponseStore::new(MAX_BYTES);
        for id in 0..1000 {
            keep(&store, key("a", id), Vec::new(), 0);
            assert!(store.find(&key("a", 0)).is_ok(), "{id}");
        }
        assert!(store.find(&key("a", 1)).is_err());
    }

    #[test]
    fn turns_that_a_conversation_needs_count_until_it_is_gone() {
        let store = ResponseStore::new(MAX_BYTES);
        keep(&store, key("a", 0), Vec::new(), 60_000);
        let first = store.find(&key("a", 0)).expect("it is there");
        keep(&store, key("a", 1), vec![first.turn.clone()], 0);
        drop(first);
        store.delete(&key("a", 0)).expect("it is there");
        assert!(reason(&store, &key("a", 0)).contains("was deleted"));
        assert!(store.num_bytes() > 60_000);
        let second = store.find(&key("a", 1)).expect("it is there");
        assert_eq!(
            second.before[0].input_items()[0]["text"],
            "x".repeat(60_000)
        );
        drop(second);
        keep(&store, key("a", 2), Vec::new(), 60_000);
        assert!(store.find(&key("a", 1)).is_err());
        assert!(store.find(&key("a", 2)).is_ok());
        assert!(store.num_bytes() < 70_000);
    }

    #[test]
    fn others_have_other_responses() {
        let store = ResponseStore::new(MAX_BYTES);
        keep(&store, key("a", 0), Vec::new(), 1);
        assert!(reason(&store, &key("b", 0)).contains("never was"));
        assert!(store.delete(&key("b", 0)).is_err());
        keep(&store, key("b", 0), Vec::new(), 9);
        store.delete(&key("b", 0)).expect("it is there");
        assert!(store.find(&key("a", 0)).is_ok());
        let off = ResponseStore::new(0);
        assert!(reason(&off, &key("a", 0)).contains("keeps no responses"));
    }
}
