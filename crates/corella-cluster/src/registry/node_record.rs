//! A node's record, which the other nodes read before they connect to the node.

use std::collections::BTreeMap;

use corella_core::PeerRecord;
use serde::{Deserialize, Serialize};

use super::url::host_and_port;

/// The limit of the bytes of one node's record.
pub(super) const MAX_RECORD_BYTES: usize = 64 << 10;
/// The limit of nodes in one registry.
pub(super) const MAX_NODES: usize = 4096;

const MAX_INSTANCE_ID_BYTES: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Unified,
    Prefill,
    Decode,
}

impl Role {
    pub fn name(self) -> &'static str {
        match self {
            Self::Unified => "unified",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        let roles = [Self::Unified, Self::Prefill, Self::Decode];
        roles.into_iter().find(|role| role.name() == name)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Stays the same when the node is restarted.
    pub instance_id: String,
    /// Differs between two starts of the node. `None` in a registry of addresses alone.
    #[serde(default)]
    pub incarnation: Option<u64>,
    /// `None` in a registry of addresses alone.
    #[serde(default)]
    pub role: Option<Role>,
    /// HOST:PORT of gRPC sessions.
    pub session_address: String,
    /// HOST:PORT of KV transfers. If absent, the node's greeting has the address.
    #[serde(default)]
    pub kv_address: Option<String>,
    /// The operator's name for the group of nodes that this node belongs to.
    #[serde(default)]
    pub group: String,
    /// The longest prompt of requests that the node takes.
    #[serde(default = "any_length")]
    pub max_prompt_tokens: u32,
    #[serde(default)]
    pub is_draining: bool,
    /// The facts of the node's greeting, by name.
    #[serde(default)]
    pub hello: BTreeMap<String, String>,
}

fn any_length() -> u32 {
    u32::MAX
}

impl NodeRecord {
    /// Returns a record with an address and no other facts.
    pub fn at(instance_id: &str, session_address: &str) -> Self {
        Self {
            instance_id: instance_id.to_owned(),
            session_address: session_address.to_owned(),
            max_prompt_tokens: u32::MAX,
            ..Self::default()
        }
    }

    /// Checks that the record can be written to every registry: an instance id becomes a file name and a key.
    pub(super) fn check(&self) -> Result<(), String> {
        let id = &self.instance_id;
        let may_stand = |c: char| c.is_ascii_alphanumeric() || "._-:[]".contains(c);
        if id.is_empty() || id.len() > MAX_INSTANCE_ID_BYTES || id.starts_with('.') {
            return Err(format!(
                "the instance id {id:?} must have 1 to {MAX_INSTANCE_ID_BYTES} characters, the \
                 first of which must not be a dot"
            ));
        }
        if !id.chars().all(may_stand) {
            return Err(format!(
                "the instance id {id:?} may only have letters, digits, and any of `._-:[]`"
            ));
        }
        for address in [Some(&self.session_address), self.kv_address.as_ref()] {
            let Some(address) = address else {
                continue;
            };
            let (host, _) = host_and_port(address)?;
            if ["0.0.0.0", "[::]"].contains(&host) {
                return Err(format!(
                    "{address} is where a node listens, not where others reach it; name one \
                     address of this machine"
                ));
            }
        }
        let num_bytes = self.to_json().len();
        if num_bytes > MAX_RECORD_BYTES {
            return Err(format!(
                "the record of node {id} has {num_bytes} bytes; a registry takes \
                 {MAX_RECORD_BYTES}"
            ));
        }
        Ok(())
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings and numbers become JSON")
    }

    /// Reads and checks a record, which any program may have written.
    pub(super) fn from_json(json: &[u8]) -> Result<Self, String> {
        if json.len() > MAX_RECORD_BYTES {
            return Err(format!("longer than {MAX_RECORD_BYTES} bytes"));
        }
        let record: Self = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        record.check()?;
        Ok(record)
    }

    pub(super) fn peer_record(&self) -> PeerRecord {
        PeerRecord {
            instance_id: self.instance_id.clone(),
            incarnation: self.incarnation,
            max_prompt_tokens: self.max_prompt_tokens,
            is_draining: self.is_draining,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_newer_node_adds_does_not_hide_it() {
        let json = r#"{"instance_id": "a", "session_address": "h:1", "colour": "blue"}"#;
        let expected = NodeRecord::at("a", "h:1");
        assert_eq!(NodeRecord::from_json(json.as_bytes()), Ok(expected));
    }

    #[test]
    fn a_record_survives_writing() {
        let mut record = NodeRecord::at("decode-1", "[::1]:9000");
        record.incarnation = Some(u64::MAX);
        record.role = Some(Role::Decode);
        record.kv_address = Some("[::1]:9001".into());
        record.group = "long".into();
        record.max_prompt_tokens = 4096;
        record.hello.insert("page_size".into(), "16".into());
        let json = record.to_json();
        assert_eq!(NodeRecord::from_json(json.as_bytes()), Ok(record));
    }

    #[test]
    fn addresses_are_those_that_others_can_use() {
        for address in [
            "0.0.0.0:9000",
            "[::]:9000",
            "decode-1",
            "decode-1:0",
            ":9000",
            "::1:9",
        ] {
            assert!(NodeRecord::at("a", address).check().is_err(), "{address}");
            let mut record = NodeRecord::at("a", "h:1");
            record.kv_address = Some(address.into());
            assert!(record.check().is_err(), "{address}");
        }
        for address in ["10.0.0.0:9000", "[::1]:9000", "decode-1.internal:9000"] {
            assert_eq!(NodeRecord::at("a", address).check(), Ok(()));
        }
    }

    #[test]
    fn instance_ids_cannot_leave_their_folder() {
        for id in ["", ".", "..", ".hidden", "a/b", "../a", "a b", "ü", "a\n"] {
            assert!(NodeRecord::at(id, "h:1").check().is_err(), "{id:?}");
        }
        assert!(NodeRecord::at(&"a".repeat(128), "h:1").check().is_ok());
        assert!(NodeRecord::at(&"a".repeat(129), "h:1").check().is_err());
        let mut record = NodeRecord::at("a", "h:1");
        record.group = "x".repeat(MAX_RECORD_BYTES);
        assert!(record.check().is_err());
    }
}
