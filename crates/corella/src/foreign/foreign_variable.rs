//! Environment variables of other servers. Corella does not read them, because both programs may run on one machine. At
//! start, a warning names each set variable that has a counterpart. If the only API key is in another server's
//! variable, Corella refuses to listen on the network.

use std::net::IpAddr;

use crate::Error;
use crate::foreign::flag_table::{self, Variable};

/// Either of these sets the key of another server.
const KEYS: [&str; 2] = ["VLLM_API_KEY", "LLAMA_API_KEY"];

/// A server that is about to start.
pub struct Start {
    pub has_key: bool,
    /// `None` for a Unix domain socket.
    pub host: Option<IpAddr>,
}

/// Returns a warning for each variable with a counterpart. Fails if the server would be open to other machines although
/// a key was meant to lock it.
pub fn check(is_set: impl Fn(&str) -> bool, start: &Start) -> Result<Vec<String>, Error> {
    let mut warnings = Vec::new();
    for key in KEYS.into_iter().filter(|key| is_set(key)) {
        if start.has_key {
            continue;
        }
        if start.host.is_some_and(|host| !host.is_loopback()) {
            return Err(Error::Config(format!(
                "{key} is set, but not read, so that this server would need no key: set CORELLA_API_KEY, or unset \
                 {key} to serve everybody"
            )));
        }
        warnings.push(format!(
            "{key} is not read, and no key is needed: --api-key or CORELLA_API_KEY sets one"
        ));
    }
    let variables = flag_table::ollama_variables().into_iter();
    for (name, Variable { option, why }) in variables.chain(flag_table::vllm_variables()) {
        if let Some(option) = option
            && is_set(&name)
            && !KEYS.contains(&name.as_str())
        {
            let why = match why.as_str() {
                "" => String::new(),
                why => format!("; {}", why.replace('`', "")),
            };
            warnings.push(format!("{name} is not read: {option} sets that here{why}"));
        }
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(has_key: bool, host: Option<&str>) -> Start {
        Start {
            has_key,
            host: host.map(|host| host.parse().unwrap()),
        }
    }

    #[test]
    fn a_key_by_another_name_leaves_no_server_open() {
        let is_set = |name: &str| name == "VLLM_API_KEY";
        let error = check(is_set, &start(false, Some("0.0.0.0"))).unwrap_err();
        assert!(error.to_string().contains("set CORELLA_API_KEY"), "{error}");
        for host in [Some("127.0.0.1"), None] {
            let warnings = check(is_set, &start(false, host)).unwrap();
            assert_eq!(warnings.len(), 1);
            assert!(
                warnings[0].starts_with("VLLM_API_KEY is not read"),
                "{warnings:?}"
            );
        }
        assert_eq!(
            check(is_set, &start(true, Some("0.0.0.0"))).unwrap().len(),
            0
        );
    }

    #[test]
    fn variables_with_a_counterpart_are_told() {
        let is_set =
            |name: &str| ["OLLAMA_HOST", "OLLAMA_DEBUG", "VLLM_CPU_KVCACHE_SPACE"].contains(&name);
        let warnings = check(is_set, &start(false, Some("0.0.0.0"))).unwrap();
        let expected = [
            "OLLAMA_HOST is not read: --host sets that here; and --port for the port, which is 8000 unless it is set",
            "VLLM_CPU_KVCACHE_SPACE is not read: --kv-cache-memory sets that here; 4 is 4G",
        ];
        assert_eq!(warnings, expected);
    }
}
