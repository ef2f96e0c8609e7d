//! The value of `--registry`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

const FORMS: &str = "static:HOST:PORT,…, file:DIR, dns:NAME:PORT, etcd:HOST:PORT,…/PREFIX or \
                     kubernetes:NAMESPACE/SERVICE";
const STATIC_FORM: &str = "static:HOST:PORT,HOST:PORT";
const FILE_FORM: &str = "file:DIR, a folder that all nodes can write to";
const DNS_FORM: &str = "dns:NAME:PORT, for example dns:decode.internal:9000";
const ETCD_FORM: &str = "etcd:HOST:PORT/PREFIX, for example etcd:127.0.0.1:2379/corella";
const KUBERNETES_FORM: &str = "kubernetes:NAMESPACE/SERVICE:PORT_NAME@HOST:PORT, where all but \
                               SERVICE may be left out";

/// The default address of `kubectl proxy`.
const DEFAULT_KUBERNETES_API: &str = "127.0.0.1:8001";

/// The place where nodes are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistryUrl {
    /// The addresses of the nodes' sessions.
    Static(Vec<String>),
    File(PathBuf),
    Dns {
        name: String,
        port: u16,
    },
    Etcd {
        /// HOST:PORT of each member of one etcd cluster.
        endpoints: Vec<String>,
        prefix: String,
    },
    Kubernetes {
        /// `None` means the pod's own namespace.
        namespace: Option<String>,
        service: String,
        /// `None` means the only port of the slices.
        port_name: Option<String>,
        /// HOST:PORT of the API, without TLS.
        api: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RegistryUrlError(String);

impl FromStr for RegistryUrl {
    type Err = RegistryUrlError;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        let wrong = |reason: String, form: &str| {
            RegistryUrlError(format!("{url:?} is no registry: {reason}; write {form}"))
        };
        let Some((scheme, rest)) = url.split_once(':') else {
            return Err(wrong("it does not say of which kind".into(), FORMS));
        };
        let (parsed, form) = match scheme {
            "static" => (static_nodes(rest), STATIC_FORM),
            "file" => (folder(rest), FILE_FORM),
            "dns" => (name_and_port(rest), DNS_FORM),
            "etcd" => (etcd(rest), ETCD_FORM),
            "kubernetes" => (kubernetes(rest), KUBERNETES_FORM),
            _ => (Err(format!("there is no kind {scheme:?}")), FORMS),
        };
        parsed.map_err(|reason| wrong(reason, form))
    }
}

impl fmt::Display for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static(addresses) => write!(f, "static:{}", addresses.join(",")),
            Self::File(folder) => write!(f, "file:{}", folder.display()),
            Self::Dns { name, port } => write!(f, "dns:{name}:{port}"),
            Self::Etcd { endpoints, prefix } => write!(f, "etcd:{}/{prefix}", endpoints.join(",")),
            Self::Kubernetes {
                namespace,
                service,
                port_name,
                api,
            } => {
                f.write_str("kubernetes:")?;
                if let Some(namespace) = namespace {
                    write!(f, "{namespace}/")?;
                }
                f.write_str(service)?;
                if let Some(port_name) = port_name {
                    write!(f, ":{port_name}")?;
                }
                write!(f, "@{api}")
            }
        }
    }
}

fn static_nodes(rest: &str) -> Result<RegistryUrl, String> {
    let mut addresses = Vec::new();
    for address in rest.split(',') {
        host_and_port(address)?;
        if addresses.iter().any(|other| other == address) {
            return Err(format!("{address} is there twice"));
        }
        addresses.push(address.to_owned());
    }
    Ok(RegistryUrl::Static(addresses))
}

fn folder(rest: &str) -> Result<RegistryUrl, String> {
    match rest {
        "" => Err("no folder is named".into()),
        folder => Ok(RegistryUrl::File(folder.into())),
    }
}

fn name_and_port(rest: &str) -> Result<RegistryUrl, String> {
    let (name, port) = host_and_port(rest)?;
    Ok(RegistryUrl::Dns {
        name: name.to_owned(),
        port,
    })
}

fn etcd(rest: &str) -> Result<RegistryUrl, String> {
    let (endpoints, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let endpoints = endpoints.split(',').map(|endpoint| {
        host_and_port(endpoint)?;
        Ok(endpoint.to_owned())
    });
    let endpoints = endpoints.collect::<Result<_, String>>()?;
    let prefix = prefix.trim_matches('/');
    if prefix.is_empty() {
        return Err("no prefix says which keys are this fleet's".into());
    }
    Ok(RegistryUrl::Etcd {
        endpoints,
        prefix: prefix.to_owned(),
    })
}

fn kubernetes(rest: &str) -> Result<RegistryUrl, String> {
    let (rest, api) = rest
        .split_once('@')
        .unwrap_or((rest, DEFAULT_KUBERNETES_API));
    host_and_port(api)?;
    let (namespace, rest) = match rest.split_once('/') {
        Some((namespace, rest)) => (Some(label(namespace, "namespace")?), rest),
        None => (None, rest),
    };
    let (service, port_name) = match rest.split_once(':') {
        Some((service, port_name)) => (service, Some(label(port_name, "port name")?)),
        None => (rest, None),
    };
    Ok(RegistryUrl::Kubernetes {
        namespace,
        service: label(service, "service")?,
        port_name,
        api: api.to_owned(),
    })
}

/// A Kubernetes name (RFC 1123), which becomes part of a path.
fn label(name: &str, what: &str) -> Result<String, String> {
    let may_stand = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > 63 || !name.chars().all(may_stand) {
        return Err(format!(
            "{name:?} is no {what}: those have small letters, digits and `-`"
        ));
    }
    Ok(name.to_owned())
}

/// `HOST:PORT`, with an IPv6 address in brackets.
pub(crate) fn host_and_port(address: &str) -> Result<(&str, u16), String> {
    let (host, port) = address
        .rsplit_once(':')
        .ok_or_else(|| format!("{address:?} has no port"))?;
    let is_bracketed = host.starts_with('[') && host.ends_with(']');
    if host.contains(':') && !is_bracketed {
        return Err(format!(
            "in {address:?} the IPv6 address must stand in brackets"
        ));
    }
    let may_stand = |c: char| c.is_ascii_alphanumeric() || "._-:[]".contains(c);
    if host.is_empty() || !host.chars().all(may_stand) {
        return Err(format!("{address:?} has no host before the port"));
    }
    match port.parse() {
        Ok(port) if port > 0 => Ok((host, port)),
        _ => Err(format!("{port:?} is no port: those go from 1 to 65535")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> RegistryUrl {
        url.parse().unwrap()
    }

    fn reason(url: &str) -> String {
        url.parse::<RegistryUrl>().unwrap_err().to_string()
    }

    #[test]
    fn every_form_is_read() {
        let addresses = ["a:1", "[::1]:2", "10.0.0.1:3"].map(String::from);
        assert_eq!(
            parse("static:a:1,[::1]:2,10.0.0.1:3"),
            RegistryUrl::Static(addresses.into())
        );
        assert_eq!(
            parse("file:/run/corella"),
            RegistryUrl::File("/run/corella".into())
        );
        assert_eq!(
            parse("dns:decode.internal:9000"),
            RegistryUrl::Dns {
                name: "decode.internal".into(),
                port: 9000
            }
        );
        assert_eq!(
            parse("etcd:a:2379,b:2379/corella/test/"),
            RegistryUrl::Etcd {
                endpoints: vec!["a:2379".into(), "b:2379".into()],
                prefix: "corella/test".into()
            }
        );
        assert_eq!(
            parse("kubernetes:serving/decode:session@127.0.0.1:8080"),
            RegistryUrl::Kubernetes {
                namespace: Some("serving".into()),
                service: "decode".into(),
                port_name: Some("session".into()),
                api: "127.0.0.1:8080".into()
            }
        );
        assert_eq!(
            parse("kubernetes:decode"),
            RegistryUrl::Kubernetes {
                namespace: None,
                service: "decode".into(),
                port_name: None,
                api: DEFAULT_KUBERNETES_API.into()
            }
        );
    }

    #[test]
    fn what_is_written_is_read_again() {
        for url in [
            "static:a:1,[::1]:2",
            "file:/run/corella",
            "dns:decode:9000",
            "etcd:a:2379,b:2379/corella",
            "kubernetes:serving/decode:session@127.0.0.1:8080",
            "kubernetes:decode@127.0.0.1:8001",
        ] {
            assert_eq!(parse(url).to_string(), url);
        }
    }

    #[test]
    fn an_error_says_what_to_write() {
        for (url, problem, form) in [
            ("", "does not say", FORMS),
            ("etcd", "does not say", FORMS),
            ("redis:a:1", "no kind \"redis\"", FORMS),
            ("http://a:1", "no kind \"http\"", FORMS),
            ("static:", "no port", STATIC_FORM),
            ("static:a", "no port", STATIC_FORM),
            ("static:a:0", "no port", STATIC_FORM),
            ("static:a:65536", "no port", STATIC_FORM),
            ("static::1", "no host", STATIC_FORM),
            ("static:a:1,", "no port", STATIC_FORM),
            ("static:a:1,a:1", "twice", STATIC_FORM),
            ("static:::1:80", "brackets", STATIC_FORM),
            ("file:", "no folder", FILE_FORM),
            ("dns:decode", "no port", DNS_FORM),
            ("etcd:127.0.0.1:2379", "no prefix", ETCD_FORM),
            ("etcd:127.0.0.1:2379/", "no prefix", ETCD_FORM),
            ("etcd:127.0.0.1/corella", "no port", ETCD_FORM),
            ("etcd:http://a:2379/corella", "no port", ETCD_FORM),
            ("kubernetes:", "no service", KUBERNETES_FORM),
            ("kubernetes:a/b/c", "no service", KUBERNETES_FORM),
            ("kubernetes:A/b", "no namespace", KUBERNETES_FORM),
            ("kubernetes:a@b", "no port", KUBERNETES_FORM),
        ] {
            let reason = reason(url);
            assert!(reason.contains(problem), "{url}: {reason}");
            assert!(reason.ends_with(form), "{url}: {reason}");
        }
    }
}
