//! The value of `--kv-events-config`, in vLLM's JSON.

use serde_json::{Map, Value};

/// The value of `--kv-events-config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    pub(super) endpoint: Endpoint,
    /// The host and port for replays.
    pub(super) replay_endpoint: Option<String>,
    /// Limits the batches kept for replay.
    pub(super) buffer_steps: usize,
    /// The number of batches that a subscriber may be behind before it skips some.
    pub(super) hwm: usize,
    pub(super) topic: String,
}

/// The host and port for subscribers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// Subscribers connect to this server.
    Bind(String),
    /// This server connects to a subscriber.
    Connect(String),
}

const KEYS: [&str; 8] = [
    "enable_kv_cache_events",
    "publisher",
    "endpoint",
    "replay_endpoint",
    "buffer_steps",
    "hwm",
    "max_queue_size",
    "topic",
];
const DEFAULT_ENDPOINT: &str = "tcp://*:5557";
const DEFAULT_BUFFER_STEPS: usize = 10_000;
const DEFAULT_HWM: usize = 100_000;
/// Larger counts are refused: they would promise more batches than the history's byte limit lets it keep.
const MAX_COUNT: u64 = 1_000_000;
const MAX_TOPIC_BYTES: usize = 255;

impl KvEventsConfig {
    /// Reads the option's value. Returns `None` when it asks for no events. The error names the wrong key.
    pub fn parse(json: &str) -> Result<Option<Self>, String> {
        let fields: Value = serde_json::from_str(json)
            .map_err(|error| format!("it is no JSON: {error}; for example {EXAMPLE}"))?;
        let Value::Object(fields) = fields else {
            return Err(format!("it is no JSON object; for example {EXAMPLE}"));
        };
        if let Some(unknown) = fields.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(format!(
                "{unknown}: no such key; there are {}",
                KEYS.join(", ")
            ));
        }
        // All keys are checked, even if the events are off.
        let is_enabled = flag(&fields, "enable_kv_cache_events")?;
        let publisher = text(&fields, "publisher")?;
        let publishes = match publisher {
            None | Some("zmq") => true,
            Some("null") => false,
            Some(other) => return Err(format!("publisher: {other} is neither zmq nor null")),
        };
        let endpoint = text(&fields, "endpoint")?.unwrap_or(DEFAULT_ENDPOINT);
        let replay_endpoint = text(&fields, "replay_endpoint")?;
        let topic = text(&fields, "topic")?.unwrap_or_default();
        if topic.len() > MAX_TOPIC_BYTES {
            return Err(format!("topic: it is longer than {MAX_TOPIC_BYTES} bytes"));
        }
        count(&fields, "max_queue_size", 1)?;
        let config = Self {
            endpoint: match address("endpoint", endpoint)? {
                (address, true) => Endpoint::Bind(address),
                (address, false) => Endpoint::Connect(address),
            },
            replay_endpoint: match replay_endpoint {
                Some(endpoint) => Some(address("replay_endpoint", endpoint)?.0),
                None => None,
            },
            buffer_steps: count(&fields, "buffer_steps", 0)?.unwrap_or(DEFAULT_BUFFER_STEPS),
            hwm: count(&fields, "hwm", 1)?.unwrap_or(DEFAULT_HWM),
            topic: topic.to_owned(),
        };
        Ok((is_enabled && publishes).then_some(config))
    }
}

const EXAMPLE: &str = r#"{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}"#;

fn flag(fields: &Map<String, Value>, key: &str) -> Result<bool, String> {
    match fields.get(key) {
        None => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(other) => Err(format!("{key}: {other} is neither true nor false")),
    }
}

fn text<'a>(fields: &'a Map<String, Value>, key: &str) -> Result<Option<&'a str>, String> {
    match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(value)) => Ok(Some(value)),
        Some(other) => Err(format!("{key}: {other} is no text")),
    }
}

fn count(fields: &Map<String, Value>, key: &str, min: u64) -> Result<Option<usize>, String> {
    let Some(value) = fields.get(key) else {
        return Ok(None);
    };
    let count = value
        .as_u64()
        .filter(|count| (min..=MAX_COUNT).contains(count));
    match count {
        Some(count) => Ok(Some(count as usize)),
        None => Err(format!(
            "{key}: {value} is no number from {min} to {MAX_COUNT}"
        )),
    }
}

/// Returns `HOST:PORT`, and whether this server binds it. As in vLLM, this server binds the hosts `*` and `0.0.0.0`,
/// and every host that contains `::`.
fn address(key: &str, endpoint: &str) -> Result<(String, bool), String> {
    let wrong = |why: &str| format!("{key}: {endpoint} {why}; for example {DEFAULT_ENDPOINT}");
    let Some(address) = endpoint.strip_prefix("tcp://") else {
        return Err(wrong("is no address that begins with tcp://"));
    };
    let (host, port) = address
        .rsplit_once(':')
        .ok_or_else(|| wrong("has no port"))?;
    let port: u16 = port.parse().map_err(|_| wrong("has no port"))?;
    let is_whole = !host.is_empty() && (host.starts_with('[') == host.ends_with(']'));
    if !is_whole || (host.contains(':') && !host.starts_with('[')) {
        return Err(wrong("has no host"));
    }
    let binds = matches!(host, "*" | "0.0.0.0") || host.contains("::");
    let host = if host == "*" { "0.0.0.0" } else { host };
    Ok((format!("{host}:{port}"), binds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_vllm() {
        let config = KvEventsConfig::parse(r#"{"enable_kv_cache_events": true}"#);
        let expected = KvEventsConfig {
            endpoint: Endpoint::Bind("0.0.0.0:5557".into()),
            replay_endpoint: None,
            buffer_steps: 10_000,
            hwm: 100_000,
            topic: String::new(),
        };
        assert_eq!(config, Ok(Some(expected)));
    }

    #[test]
    fn without_a_publisher_there_are_no_events() {
        for json in [
            "{}",
            r#"{"endpoint": "tcp://*:1"}"#,
            r#"{"enable_kv_cache_events": false, "publisher": "zmq"}"#,
            r#"{"enable_kv_cache_events": true, "publisher": "null"}"#,
        ] {
            assert_eq!(KvEventsConfig::parse(json), Ok(None), "{json}");
        }
    }

    #[test]
    fn an_endpoint_is_bound_if_it_stands_for_all_addresses() {
        for (endpoint, expected) in [
            ("tcp://*:1", Endpoint::Bind("0.0.0.0:1".into())),
            ("tcp://0.0.0.0:1", Endpoint::Bind("0.0.0.0:1".into())),
            ("tcp://[::]:1", Endpoint::Bind("[::]:1".into())),
            ("tcp://router:1", Endpoint::Connect("router:1".into())),
            ("tcp://127.0.0.1:1", Endpoint::Connect("127.0.0.1:1".into())),
        ] {
            let json = format!(r#"{{"enable_kv_cache_events": true, "endpoint": "{endpoint}"}}"#);
            let config = KvEventsConfig::parse(&json).expect(endpoint);
            assert_eq!(config.expect("it is on").endpoint, expected);
        }
    }

    #[test]
    fn an_error_begins_with_the_key() {
        for (json, key) in [
            (
                r#"{"enable_kv_cache_event": true}"#,
                "enable_kv_cache_event: no such key",
            ),
            (
                r#"{"enable_kv_cache_events": "yes"}"#,
                "enable_kv_cache_events: ",
            ),
            (r#"{"publisher": "kafka"}"#, "publisher: kafka"),
            (r#"{"endpoint": 5557}"#, "endpoint: 5557"),
            (
                r#"{"endpoint": "ipc:///tmp/kv"}"#,
                "endpoint: ipc:///tmp/kv",
            ),
            (
                r#"{"endpoint": "tcp://*"}"#,
                "endpoint: tcp://* has no port",
            ),
            (
                r#"{"endpoint": "tcp://*:70000"}"#,
                "endpoint: tcp://*:70000 has no port",
            ),
            (
                r#"{"endpoint": "tcp://:1"}"#,
                "endpoint: tcp://:1 has no host",
            ),
            (
                r#"{"endpoint": "tcp://::1:5557"}"#,
                "endpoint: tcp://::1:5557 has no host",
            ),
            (r#"{"replay_endpoint": "5558"}"#, "replay_endpoint: 5558"),
            (r#"{"buffer_steps": -1}"#, "buffer_steps: -1"),
            (r#"{"hwm": 0}"#, "hwm: 0"),
            (r#"{"max_queue_size": 1.5}"#, "max_queue_size: 1.5"),
            (r#"{"topic": null, "hwm": 1e9}"#, "hwm: "),
        ] {
            let error = KvEventsConfig::parse(json).expect_err(json);
            assert!(error.starts_with(key), "{json}: {error}");
        }
        for json in ["", "[]", "{", "true"] {
            let error = KvEventsConfig::parse(json).expect_err(json);
            assert!(error.contains(EXAMPLE), "{json}: {error}");
        }
    }
}
