//! The endpoints of vLLM, llama-server and Ollama, and their counterparts in `corella serve`.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::foreign::flag_table::{parse, published};

const TABLE: &str = include_str!("../../flags/endpoints.toml");

/// The servers, with their names in the published lists and for readers.
pub const SERVERS: [(&str, &str); 3] = [
    ("vllm", "vLLM"),
    ("llama_server", "llama-server"),
    ("ollama", "Ollama"),
];

#[derive(Debug, PartialEq)]
pub enum Service {
    /// The same endpoint, with a note on differences.
    Same {
        note: String,
    },
    /// Another endpoint does the same.
    Other {
        endpoint: String,
        why: String,
    },
    Refused {
        why: String,
    },
}

#[derive(Deserialize)]
struct Table {
    same: BTreeMap<String, String>,
    other: BTreeMap<String, OtherEndpoint>,
    refused: Vec<RefusedGroup>,
}

#[derive(Deserialize)]
struct OtherEndpoint {
    endpoint: String,
    why: String,
}

#[derive(Deserialize)]
struct RefusedGroup {
    why: String,
    endpoints: Vec<String>,
}

/// Returns each endpoint, such as `GET /health`, in the order of the table.
pub fn endpoints() -> Vec<(String, Service)> {
    let table: Table = parse(TABLE);
    let mut all = Vec::new();
    for (endpoint, note) in table.same {
        all.push((endpoint, Service::Same { note }));
    }
    for (name, OtherEndpoint { endpoint, why }) in table.other {
        all.push((name, Service::Other { endpoint, why }));
    }
    for RefusedGroup { why, endpoints } in table.refused {
        let refused = endpoints.into_iter();
        all.extend(refused.map(|endpoint| (endpoint, Service::Refused { why: why.clone() })));
    }
    all
}

/// Returns the names of the servers with an endpoint.
pub fn servers_of(endpoint: &str) -> Vec<&'static str> {
    let has = |key: &str| published()[key].endpoints.iter().any(|one| one == endpoint);
    let servers = SERVERS.iter().filter(|(key, _)| has(key));
    servers.map(|(_, name)| *name).collect()
}

mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Each published endpoint is in the table once, and the table has no others. tests/client/test_served_endpoints.py
    /// tests that a server behaves like the table.
    #[test]
    fn the_table_has_every_endpoint() {
        let rows = endpoints();
        let mut known = HashSet::new();
        for (endpoint, service) in &rows {
            assert!(known.insert(endpoint.clone()), "{endpoint} is there twice");
            if let Service::Refused { why } = service {
                assert!(!why.is_empty(), "{endpoint}");
            }
        }
        let mut listed = HashSet::new();
        for (key, _) in SERVERS {
            let endpoints = &published()[key].endpoints;
            assert!(endpoints.len() > 25, "{key}");
            listed.extend(endpoints.iter().cloned());
        }
        assert_eq!(known, listed);
    }

    /// An endpoint named as a replacement is one of the same table, or OpenAI's own.
    #[test]
    fn advice_leads_to_an_endpoint() {
        let rows = endpoints();
        let is_served = |wanted: &str| {
            let row = rows.iter().find(|(endpoint, _)| endpoint == wanted);
            row.is_some_and(|(_, service)| matches!(service, Service::Same { .. }))
        };
        const OWN: [&str; 2] = ["POST /v1/batches", "GET /openapi.json"];
        for (name, service) in &rows {
            if let Service::Other { endpoint, .. } = service {
                assert!(
                    is_served(endpoint) || OWN.contains(&&**endpoint),
                    "{name} leads to {endpoint}"
                );
            }
        }
    }
}
