//! The node whose cached blocks a request wants, by the member of `kv_transfer_params` that names it:
//!
//! ```text
//! cached_blocks      {"host": …, "port": …}, with `socket` and `machine` if the node has them
//! remote_kv_source   {"kv_request_id": …, "remote_host": …, "remote_port": …}, from llm-d's sidecar
//! ```
//!
//! `cached_blocks` knows more and takes precedence. `kv_request_id` names the request in logs of vLLM; the blocks
//! themselves are found by the prompt's tokens.

use serde_json::{Map, Value};

use super::params::{
    MAX_HOST_BYTES, MAX_ID_BYTES, MAX_SOCKET_BYTES, ParamError, Site, near_source, port_of, text,
};

/// Reads the node, or `None` if the parameters name none.
pub fn parse(fields: &Map<String, Value>) -> Result<Option<Site>, ParamError> {
    match cached_blocks(fields)? {
        Some(site) => Ok(Some(site)),
        None => remote_kv_source(fields),
    }
}

fn cached_blocks(fields: &Map<String, Value>) -> Result<Option<Site>, ParamError> {
    const FIELD: &str = "cached_blocks";
    let Some(fields) = object(fields, FIELD, "must be an object with host and port")? else {
        return Ok(None);
    };
    let within = |error| within(FIELD, error);
    let (host, port) = address(fields, FIELD, ("host", "port"))?;
    let socket = text(fields, "socket", MAX_SOCKET_BYTES).map_err(within)?;
    let machine = text(fields, "machine", MAX_ID_BYTES).map_err(within)?;
    let near = near_source(FIELD, socket, machine)?;
    Ok(Some(Site { host, port, near }))
}

fn remote_kv_source(fields: &Map<String, Value>) -> Result<Option<Site>, ParamError> {
    const FIELD: &str = "remote_kv_source";
    let expected = "must be an object with remote_host and remote_port";
    let Some(fields) = object(fields, FIELD, expected)? else {
        return Ok(None);
    };
    let (host, port) = address(fields, FIELD, ("remote_host", "remote_port"))?;
    Ok(Some(Site {
        host,
        port,
        near: None,
    }))
}

fn object<'a>(
    fields: &'a Map<String, Value>,
    field: &'static str,
    expected: &str,
) -> Result<Option<&'a Map<String, Value>>, ParamError> {
    match fields.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(fields)) => Ok(Some(fields)),
        Some(_) => Err(ParamError::new(field, expected)),
    }
}

/// Reads the members `names` of the member `field`.
fn address(
    fields: &Map<String, Value>,
    field: &'static str,
    names: (&'static str, &'static str),
) -> Result<(String, u16), ParamError> {
    let host = text(fields, names.0, MAX_HOST_BYTES).map_err(|error| within(field, error))?;
    let host = host.ok_or_else(|| ParamError::new(field, format!("needs a {}", names.0)))?;
    // The host is logged.
    if host.contains(char::is_control) {
        let message = format!("has a {} with control characters", names.0);
        return Err(ParamError::new(field, message));
    }
    let port = fields
        .get(names.1)
        .and_then(port_of)
        .ok_or_else(|| ParamError::new(field, format!("needs a {} from 0 to 65535", names.1)))?;
    Ok((host.to_owned(), port))
}

fn within(field: &'static str, error: ParamError) -> ParamError {
    let message = format!("its field {} {}", error.field, error.message);
    ParamError::new(field, message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::params::{self, Fetch, NearSource, Transfer};
    use super::*;

    fn read(params: Value) -> Result<Option<Transfer>, ParamError> {
        params::parse(params.as_object().expect("an object"))
    }

    fn fetch(keeps: bool, host: &str, near: Option<NearSource>) -> Transfer {
        let host = host.to_owned();
        Transfer {
            keeps,
            fetch: Some(Fetch::Blocks(Site {
                host,
                port: 9000,
                near,
            })),
        }
    }

    #[test]
    fn a_request_names_a_node_that_has_its_blocks() {
        let far = json!({"cached_blocks": {"host": "10.0.0.6", "port": "9000", "later": 1}});
        assert_eq!(read(far), Ok(Some(fetch(false, "10.0.0.6", None))));
        let near = json!({"cached_blocks": {
            "host": "10.0.0.6", "port": 9000, "socket": "corella-kv-7-1b", "machine": "m",
        }});
        let source = NearSource {
            socket: "corella-kv-7-1b".to_owned(),
            machine: "m".to_owned(),
        };
        assert_eq!(read(near), Ok(Some(fetch(false, "10.0.0.6", Some(source)))));
        assert_eq!(read(json!({"cached_blocks": null})), Ok(None));
        for wrong in [
            json!("10.0.0.6:9000"),
            json!({"port": 9000}),
            json!({"host": "10.0.0.6"}),
            json!({"host": "10.0.0.6", "port": 70_000}),
            json!({"host": "10.0.0.6\n", "port": 9000}),
            json!({"host": "10.0.0.6", "port": 9000, "socket": "/run/other", "machine": "m"}),
        ] {
            let error = read(json!({"cached_blocks": wrong})).unwrap_err();
            assert_eq!(error.field, "cached_blocks");
        }
    }

    #[test]
    fn llm_ds_sidecar_names_a_node_that_has_the_blocks() {
        let source = json!({
            "kv_request_id": "3f", "remote_host": "10.0.0.6", "remote_port": 9000, "later": [1],
        });
        let alone = json!({"remote_kv_source": source, "later": {}});
        assert_eq!(read(alone), Ok(Some(fetch(false, "10.0.0.6", None))));
        // A prefill node fetches first and keeps afterwards.
        let kept = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_kv_source": source,
        });
        assert_eq!(read(kept), Ok(Some(fetch(true, "10.0.0.6", None))));
        let both = json!({
            "remote_kv_source": source, "cached_blocks": {"host": "10.0.0.7", "port": 9000.0},
        });
        assert_eq!(read(both), Ok(Some(fetch(false, "10.0.0.7", None))));
        assert_eq!(read(json!({"remote_kv_source": null})), Ok(None));
        for wrong in [
            json!("10.0.0.6:9000"),
            json!({"remote_port": 9000}),
            json!({"host": "10.0.0.6", "port": 9000}),
            json!({"remote_host": "10.0.0.6", "remote_port": 70_000}),
            json!({"remote_host": "a\nERROR forged", "remote_port": 9000}),
            json!({"remote_host": 7, "remote_port": 9000}),
        ] {
            let error = read(json!({"remote_kv_source": wrong})).unwrap_err();
            assert_eq!(error.field, "remote_kv_source", "{wrong}");
        }
    }
}
