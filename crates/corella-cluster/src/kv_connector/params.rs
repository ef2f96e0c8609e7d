//! `kv_transfer_params`: the fields with vLLM's names and Corella's values.
//!
//! Proxies read at most `do_remote_decode` and `do_remote_prefill` and pass all other fields on, so `remote_engine_id`
//! and `remote_request_id` have a format of Corella's:
//!
//! ```text
//! remote_engine_id    corella-3-FINGERPRINT-ARITHMETIC-INCARNATION
//! remote_request_id   SESSION-ROWS-DIGEST, or SESSION-ROWS-DIGEST-ADAPTER
//! ```
//!
//! `ADAPTER` is the fingerprint of the adapter that the rows were computed with, because each node names adapters
//! differently. `ARITHMETIC` tells which bits the rows have, and the sender's greeting must confirm it. Ids of version
//! 1 lack the adapter, and ids of version 2 lack the arithmetic. Their rows cannot be checked, so this version does not
//! read such ids.
//!
//! The digest covers the tokens whose rows are kept. The decode node tokenizes the prompt again and may get other
//! tokens, for example because a chat template writes the date.

use std::net::SocketAddr;

use corella_core::session::SessionKey;
use corella_core::{Arithmetic, Incarnation, Namespace, PageHash, SessionId, TokenId};
use serde_json::{Map, Value, json};

use super::allowed_peers::AllowedPeers;
use super::block_site;
use crate::transport::PeerAddress;

/// The prefix of the engine ids that this version understands.
const ENGINE: &str = "corella-3-";
/// A DNS name has at most 253 characters.
pub(super) const MAX_HOST_BYTES: usize = 255;
pub(super) const MAX_ID_BYTES: usize = 256;
/// Linux limits a socket's name to this length.
pub(super) const MAX_SOCKET_BYTES: usize = 107;
/// The prefix of the names of nodes' sockets. A request must not make a node connect to another program.
pub const SOCKET_PREFIX: &str = "corella-kv-";

/// The transfer that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Whether the prompt's rows are kept for another node.
    pub keeps: bool,
    /// The rows to fetch before the prompt is computed.
    pub fetch: Option<Fetch>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetch {
    Prompt(Source),
    /// The prompt's prefix, from the cached blocks of a node.
    Blocks(Site),
}

/// The address from which a node sends rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    pub host: String,
    /// 0 if rows are not sent over the network.
    pub port: u16,
    /// The source for nodes on the same host, if they can reach the rows without the network.
    pub near: Option<NearSource>,
}

/// The source of kept rows, as named by the node that keeps the rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub site: Site,
    /// `None` if the ids come from another engine, or from a version of Corella that this node does not understand.
    pub rows: Option<KeptRows>,
}

/// A source of rows inside a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NearSource {
    pub socket: String,
    /// The name of the host.
    pub machine: String,
}

/// The kept rows of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptRows {
    pub model_fingerprint: u128,
    pub arithmetic: Arithmetic,
    pub incarnation: u64,
    pub session: SessionId,
    pub num_rows: u32,
    pub digest: u128,
    /// The fingerprint of the adapter that the rows were computed with.
    pub adapter: Option<u128>,
}

/// A field of the parameters that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {message}")]
pub struct ParamError {
    pub field: &'static str,
    pub message: String,
}

impl ParamError {
    pub(super) fn new(field: &'static str, message: impl Into<String>) -> Self {
        Self {
            field,
            message: message.into(),
        }
    }
}

impl KeptRows {
    pub fn key(&self) -> SessionKey {
        SessionKey {
            session: self.session,
            attempt: 0,
            prefill_incarnation: Incarnation(self.incarnation),
            decode_incarnation: Incarnation::ANY,
        }
    }

    fn parse(engine_id: &str, request_id: &str) -> Option<Self> {
        let (fingerprint, rest) = engine_id.strip_prefix(ENGINE)?.split_once('-')?;
        let (arithmetic, incarnation) = rest.split_once('-')?;
        let mut parts = request_id.split('-');
        let session = parts.next()?;
        let num_rows = parts.next()?;
        let digest = parts.next()?;
        let adapter = parts
            .next()
            .map(|adapter| u128::from_str_radix(adapter, 16));
        if parts.next().is_some() {
            return None;
        }
        Some(Self {
            model_fingerprint: u128::from_str_radix(fingerprint, 16).ok()?,
            arithmetic: Arithmetic(u64::from_str_radix(arithmetic, 16).ok()?),
            incarnation: u64::from_str_radix(incarnation, 16).ok()?,
            session: SessionId(u128::from_str_radix(session, 16).ok()?),
            num_rows: num_rows.parse().ok()?,
            digest: u128::from_str_radix(digest, 16).ok()?,
            adapter: adapter.transpose().ok()?,
        })
    }
}

impl Source {
    /// Returns the fields for the answer of the node that keeps the rows.
    pub fn to_params(&self) -> Map<String, Value> {
        let Some(rows) = &self.rows else {
            return Map::new();
        };
        let engine_id = format!(
            "{ENGINE}{:032x}-{:x}-{:x}",
            rows.model_fingerprint, rows.arithmetic.0, rows.incarnation
        );
        let mut request_id = format!(
            "{:032x}-{}-{:032x}",
            rows.session.0, rows.num_rows, rows.digest
        );
        if let Some(adapter) = rows.adapter {
            request_id.push_str(&format!("-{adapter:032x}"));
        }
        let mut params = Map::new();
        params.insert("do_remote_prefill".to_owned(), true.into());
        params.insert("do_remote_decode".to_owned(), false.into());
        params.insert("remote_engine_id".to_owned(), engine_id.into());
        params.insert("remote_request_id".to_owned(), request_id.into());
        // The session names the rows. Some proxies check whether the list of blocks is empty.
        params.insert("remote_block_ids".to_owned(), json!([0]));
        params.insert("remote_host".to_owned(), self.site.host.as_str().into());
        params.insert("remote_port".to_owned(), self.site.port.into());
        if let Some(near) = &self.site.near {
            params.insert("remote_socket".to_owned(), near.socket.as_str().into());
            params.insert("remote_machine".to_owned(), near.machine.as_str().into());
        }
        params
    }
}

impl Site {
    /// Returns the address from which a node on `machine` loads the rows. The error says why there is none.
    pub async fn address(
        &self,
        machine: Option<&str>,
        allowed: &AllowedPeers,
    ) -> Result<PeerAddress, String> {
        if let Some(near) = &self.near
            && machine == Some(near.machine.as_str())
        {
            return Ok(PeerAddress::Unix(near.socket.clone()));
        }
        if self.port == 0 {
            return Err("it sends rows only inside its host".to_owned());
        }
        let name = format!("{}:{}", self.host, self.port);
        let found = match name.parse::<SocketAddr>() {
            Ok(address) => vec![address],
            Err(_) => tokio::net::lookup_host(name)
                .await
                .map_err(|error| error.to_string())?
                .collect(),
        };
        let first = *found.first().ok_or("its name has no address")?;
        let address = found
            .into_iter()
            .find(|address| allowed.allow(address.ip()));
        address
            .map(PeerAddress::Tcp)
            .ok_or_else(|| format!("--kv-peer-allow does not allow {}", first.ip()))
    }

    /// The node's name in logs.
    pub fn name(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// Returns a digest of these tokens, which the keeping and the fetching node compare.
pub fn prompt_digest(namespace: &Namespace, tokens: &[TokenId]) -> u128 {
    PageHash::root(0, namespace).next(0, tokens).0
}

/// Reads a request's parameters. Unknown fields are ignored, because other systems add their own.
pub fn parse(fields: &Map<String, Value>) -> Result<Option<Transfer>, ParamError> {
    let keeps = flag(fields, "do_remote_decode")?;
    let fetches = flag(fields, "do_remote_prefill")?;
    let engine_id = text(fields, "remote_engine_id", MAX_ID_BYTES)?;
    let request_id = text(fields, "remote_request_id", MAX_ID_BYTES)?;
    let has_blocks = match fields.get("remote_block_ids") {
        None | Some(Value::Null) => false,
        Some(Value::Array(_)) => true,
        Some(_) => return Err(ParamError::new("remote_block_ids", "must be an array")),
    };
    let host = text(fields, "remote_host", MAX_HOST_BYTES)?;
    // The host is logged. With control characters in it, a client could write lines of its own into the log.
    if host.is_some_and(|host| host.contains(char::is_control)) {
        return Err(ParamError::new(
            "remote_host",
            "must not have control characters",
        ));
    }
    let port = match fields.get("remote_port") {
        None | Some(Value::Null) => None,
        Some(port) => {
            let message = "must be a number from 0 to 65535";
            Some(port_of(port).ok_or_else(|| ParamError::new("remote_port", message))?)
        }
    };
    let socket = text(fields, "remote_socket", MAX_SOCKET_BYTES)?;
    let machine = text(fields, "remote_machine", MAX_ID_BYTES)?;
    if keeps && fetches {
        return Err(ParamError::new(
            "do_remote_prefill",
            "must not be true together with do_remote_decode",
        ));
    }
    if !fetches {
        let fetch = block_site::parse(fields)?.map(Fetch::Blocks);
        return Ok((keeps || fetch.is_some()).then_some(Transfer { keeps, fetch }));
    }
    let missing = |field| move || ParamError::new(field, "is required with do_remote_prefill");
    let engine_id = engine_id.ok_or_else(missing("remote_engine_id"))?;
    let request_id = request_id.ok_or_else(missing("remote_request_id"))?;
    if !has_blocks {
        return Err(missing("remote_block_ids")());
    }
    let host = host.ok_or_else(missing("remote_host"))?;
    let port = port.ok_or_else(missing("remote_port"))?;
    let near = near_source("remote_socket", socket, machine)?;
    let host = host.to_owned();
    let source = Source {
        site: Site { host, port, near },
        rows: KeptRows::parse(engine_id, request_id),
    };
    Ok(Some(Transfer {
        keeps: false,
        fetch: Some(Fetch::Prompt(source)),
    }))
}

/// A request must not make a node connect to another program's socket.
pub(super) fn near_source(
    field: &'static str,
    socket: Option<&str>,
    machine: Option<&str>,
) -> Result<Option<NearSource>, ParamError> {
    if socket.is_some_and(|socket| !socket.starts_with(SOCKET_PREFIX)) {
        return Err(ParamError::new(field, "must be a socket of a Corella node"));
    }
    Ok(socket.zip(machine).map(|(socket, machine)| NearSource {
        socket: socket.to_owned(),
        machine: machine.to_owned(),
    }))
}

/// Dynamo passes a port on as a string or as a floating-point number.
pub(super) fn port_of(value: &Value) -> Option<u16> {
    match value {
        Value::String(digits) => digits.parse().ok(),
        Value::Number(number) => match number.as_u64() {
            Some(port) => u16::try_from(port).ok(),
            None => {
                let port = number.as_f64()?;
                (port.fract() == 0.0 && (0.0..=65535.0).contains(&port)).then_some(port as u16)
            }
        },
        _ => None,
    }
}

fn flag(fields: &Map<String, Value>, field: &'static str) -> Result<bool, ParamError> {
    match fields.get(field) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(ParamError::new(field, "must be true or false")),
    }
}

pub(super) fn text<'a>(
    fields: &'a Map<String, Value>,
    field: &'static str,
    max_bytes: usize,
) -> Result<Option<&'a str>, ParamError> {
    match fields.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if (1..=max_bytes).contains(&text.len()) => Ok(Some(text)),
        Some(_) => {
            let message = format!("must be a string of 1 to {max_bytes} bytes");
            Err(ParamError::new(field, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(params: Value) -> Result<Option<Transfer>, ParamError> {
        parse(params.as_object().expect("an object"))
    }

    const KEEP: Transfer = Transfer {
        keeps: true,
        fetch: None,
    };

    fn fetch_prompt(source: Source) -> Transfer {
        Transfer {
            keeps: false,
            fetch: Some(Fetch::Prompt(source)),
        }
    }

    /// The parameters that llm-d's sidecar sends to a prefill node.
    fn asked() -> Value {
        json!({
            "do_remote_decode": true,
            "do_remote_prefill": false,
            "remote_engine_id": null,
            "remote_block_ids": null,
            "remote_host": null,
            "remote_port": null,
        })
    }

    fn source() -> Source {
        Source {
            site: Site {
                host: "10.0.0.6".to_owned(),
                port: 9000,
                near: None,
            },
            rows: Some(KeptRows {
                model_fingerprint: 0xfeed,
                arithmetic: Arithmetic(u64::MAX - 2),
                incarnation: 1_790_000_000_000_000,
                session: SessionId(u128::MAX - 5),
                num_rows: 37,
                digest: 3,
                adapter: None,
            }),
        }
    }

    /// A node is reached at an allowed address only, even if its name resolves to another one.
    #[tokio::test]
    async fn an_address_that_is_not_allowed_is_not_found() {
        let none = AllowedPeers::new([]);
        let some = AllowedPeers::new(["10.0.0.0/8".parse().unwrap()]);
        for (host, allowed, is_found) in [
            ("127.0.0.1", &none, true),
            ("10.0.0.1", &none, false),
            ("10.0.0.1", &some, true),
            ("0.0.0.0", &some, false),
            ("169.254.169.254", &some, false),
        ] {
            let mut source = source();
            source.site.host = host.to_owned();
            match source.site.address(None, allowed).await {
                Ok(PeerAddress::Tcp(_)) if is_found => {}
                Err(reason) if !is_found => {
                    assert_eq!(reason, format!("--kv-peer-allow does not allow {host}"));
                }
                other => panic!("{host}: {other:?}"),
            }
        }
    }

    #[test]
    fn what_a_sidecar_asks_for_is_kept() {
        assert_eq!(read(asked()), Ok(Some(KEEP)));
        let flag = json!({"do_remote_decode": true});
        assert_eq!(read(flag), Ok(Some(KEEP)));
    }

    #[test]
    fn without_a_flag_nothing_is_asked_for() {
        assert_eq!(read(json!({})), Ok(None));
        let flags = json!({"do_remote_decode": false, "do_remote_prefill": null});
        assert_eq!(read(flags), Ok(None));
    }

    #[test]
    fn what_one_node_answers_is_read_by_the_other() {
        let mut near = source();
        near.site.near = Some(NearSource {
            socket: "corella-kv-7-1b".to_owned(),
            machine: "0b-1 pid:[4026531836]".to_owned(),
        });
        let mut adapted = source();
        adapted.rows = adapted.rows.map(|rows| KeptRows {
            adapter: Some(u128::MAX - 9),
            ..rows
        });
        for source in [source(), near, adapted] {
            let mut params = source.to_params();
            // Other systems may add fields.
            params.insert("tp_size".to_owned(), json!([1, {"a": 2}]));
            let params = serde_json::to_string(&params).expect("it is JSON");
            let params = serde_json::from_str(&params).expect("it is JSON");
            assert_eq!(read(params), Ok(Some(fetch_prompt(source))));
        }
    }

    #[test]
    fn numbers_that_dynamo_has_passed_on_are_read() {
        for (port, blocks) in [
            (json!("9000"), json!([0.0])),
            (json!(9000.0), json!([0.0, 1.0])),
            // vLLM lists the blocks of each group of layers.
            (json!(9000), json!([[0, 1], [2]])),
        ] {
            let mut params = Value::Object(source().to_params());
            params["remote_port"] = port;
            params["remote_block_ids"] = blocks;
            // Members that vLLM's connectors add.
            params["tp_size"] = json!(1.0);
            params["remote_num_tokens"] = json!("37");
            params["remote_bootstrap_addr"] = json!(null);
            assert_eq!(read(params), Ok(Some(fetch_prompt(source()))));
        }
    }

    #[test]
    fn each_wrong_field_is_named() {
        let good = Value::Object(source().to_params());
        let cases = [
            ("do_remote_decode", json!(true), "do_remote_prefill"),
            ("do_remote_decode", json!("no"), "do_remote_decode"),
            ("do_remote_prefill", json!(1), "do_remote_prefill"),
            ("remote_engine_id", json!(7), "remote_engine_id"),
            ("remote_engine_id", json!(null), "remote_engine_id"),
            ("remote_request_id", json!([]), "remote_request_id"),
            ("remote_request_id", json!(null), "remote_request_id"),
            ("remote_block_ids", json!(3), "remote_block_ids"),
            ("remote_block_ids", json!(null), "remote_block_ids"),
            ("remote_host", json!(""), "remote_host"),
            ("remote_host", json!("h".repeat(256)), "remote_host"),
            ("remote_host", json!("a\nERROR forged"), "remote_host"),
            ("remote_host", json!("\u{1b}[2J"), "remote_host"),
            ("remote_host", json!(null), "remote_host"),
            ("remote_port", json!(65536), "remote_port"),
            ("remote_port", json!(-1), "remote_port"),
            ("remote_port", json!("9000x"), "remote_port"),
            ("remote_port", json!(9000.5), "remote_port"),
            ("remote_port", json!(null), "remote_port"),
            ("remote_socket", json!(false), "remote_socket"),
            (
                "remote_socket",
                json!("corella-kv-".repeat(10)),
                "remote_socket",
            ),
            ("remote_socket", json!("other-program"), "remote_socket"),
            ("remote_machine", json!({}), "remote_machine"),
        ];
        for (field, value, named) in cases {
            let mut params = good.clone();
            params[field] = value.clone();
            let error = read(params).expect_err(field);
            assert_eq!(error.field, named, "{field} = {value}");
        }
    }

    /// Another engine's ids are no fault of the request: its prompt is computed here.
    #[test]
    fn ids_of_other_engines_name_no_rows() {
        let good = source().to_params();
        let cases = [
            ("remote_engine_id", "vllm-7f3a"),
            ("remote_engine_id", "corella-1-feed-7"),
            ("remote_engine_id", "corella-2-feed-7"),
            ("remote_engine_id", "corella-3-feed-7"),
            ("remote_request_id", "cmpl-1"),
            ("remote_request_id", "1-2"),
            ("remote_request_id", "1-2-3-4-5"),
            ("remote_request_id", "1-2-3-"),
            ("remote_request_id", "1-2-3-x"),
            ("remote_request_id", "1-99999999999-3"),
            ("remote_request_id", "x-2-3"),
        ];
        for (field, value) in cases {
            let mut params = good.clone();
            params.insert(field.to_owned(), value.into());
            match parse(&params) {
                Ok(Some(Transfer {
                    keeps: false,
                    fetch: Some(Fetch::Prompt(source)),
                })) => assert_eq!(source.rows, None, "{value}"),
                other => panic!("{value}: {other:?}"),
            }
        }
    }

    #[test]
    fn other_tokens_and_other_namespaces_have_other_digests() {
        let digest = |tokens: &[TokenId]| prompt_digest(&Namespace::default(), tokens);
        assert_ne!(digest(&[1, 2, 3]), digest(&[1, 2, 4]));
        assert_ne!(digest(&[1, 2]), digest(&[1, 2, 0]));
        let salted = Namespace {
            cache_salt: Some("a".into()),
            ..Namespace::default()
        };
        assert_ne!(digest(&[1]), prompt_digest(&salted, &[1]));
    }
}
