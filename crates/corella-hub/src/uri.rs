//! Addresses: their origins, the targets of redirects, and the encoding of names.

use crate::HubError;

/// Scheme, host and port: the text before the first `/` behind the `//`.
pub fn origin(address: &str) -> Option<String> {
    let (scheme, rest) = address.split_once("://")?;
    let scheme = scheme.to_ascii_lowercase();
    let authority = rest.split(['/', '?', '#']).next()?.to_ascii_lowercase();
    // The text before an `@` is a user, not a host.
    let host = authority.rsplit('@').next()?;
    let default_port = match scheme.as_str() {
        "https" => ":443",
        "http" => ":80",
        _ => return None,
    };
    let host = host.strip_suffix(default_port).unwrap_or(host);
    (!host.is_empty()).then(|| format!("{scheme}://{host}"))
}

/// The address to which `location`, a header of the answer from `base`, leads.
pub fn redirect(base: &str, location: &str) -> Result<String, HubError> {
    let wrong = || {
        HubError::Corrupt(format!(
            "{base} redirects to `{location}`, which is no address"
        ))
    };
    let base_origin = origin(base).ok_or_else(wrong)?;
    let scheme = base_origin.split(':').next().unwrap_or_default();
    let target = if location.contains("://") {
        location.to_owned()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{base_origin}{location}")
    } else {
        let path = base.split(['?', '#']).next().unwrap_or(base);
        let folder = path.rsplit_once('/').map_or(path, |(folder, _)| folder);
        format!("{folder}/{location}")
    };
    let target_origin = origin(&target).ok_or_else(wrong)?;
    if scheme == "https" && !target_origin.starts_with("https:") {
        return Err(HubError::Corrupt(format!(
            "{base_origin} redirects to {target_origin}, which does not encrypt"
        )));
    }
    Ok(target)
}

/// Writes a name as one part of a path, slashes included.
pub fn encode_part(text: &str) -> String {
    encode(text, b"-._~")
}

/// Writes a path of several parts.
pub fn encode_path(text: &str) -> String {
    encode(text, b"-._~/")
}

fn encode(text: &str, plain: &[u8]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte.is_ascii_alphanumeric() || plain.contains(&byte) {
            true => encoded.push(char::from(byte)),
            false => encoded += &format!("%{byte:02X}"),
        }
    }
    encoded
}

/// The address of the next page, from a `Link` header of the form `<address>; rel="next"`.
pub fn next_page(link: &str) -> Option<&str> {
    let next = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    next.trim().strip_prefix('<')?.split('>').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = [
            "https://Hub.example/a/b",
            "https://hub.example:443",
            "HTTPS://hub.example?x",
            "https://user@hub.example/",
        ];
        for address in same {
            assert_eq!(
                origin(address).as_deref(),
                Some("https://hub.example"),
                "{address}"
            );
        }
        let others = [
            "http://hub.example/a",
            "https://hub.example:8443/a",
            "https://hub.example.evil/a",
            "https://hub.example@evil/a",
        ];
        for address in others {
            assert_ne!(
                origin(address).as_deref(),
                Some("https://hub.example"),
                "{address}"
            );
        }
        assert_eq!(origin("file:///etc/passwd"), None);
        assert_eq!(origin("hub.example/a"), None);
    }

    #[test]
    fn a_redirect_may_be_relative_and_never_stops_encrypting() {
        let from = |location| redirect("https://h/a/b?c=d", location).ok();
        assert_eq!(from("/x").as_deref(), Some("https://h/x"));
        assert_eq!(from("x").as_deref(), Some("https://h/a/x"));
        assert_eq!(from("//cdn/x").as_deref(), Some("https://cdn/x"));
        assert_eq!(from("https://cdn/x?y").as_deref(), Some("https://cdn/x?y"));
        assert_eq!(from("http://h/x"), None);
        assert_eq!(from("file:///x"), None);
        assert_eq!(
            redirect("http://h/a", "https://h/x").unwrap(),
            "https://h/x"
        );
    }

    #[test]
    fn names_are_encoded() {
        assert_eq!(encode_part("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(encode_path("a b/ü.gguf"), "a%20b/%C3%BC.gguf");
    }

    #[test]
    fn the_next_page_is_found_among_links() {
        let link = "<https://h/a?cursor=1>; rel=\"prev\", <https://h/a?cursor=3>; rel=\"next\"";
        assert_eq!(next_page(link), Some("https://h/a?cursor=3"));
        assert_eq!(next_page("<https://h/a>; rel=\"prev\""), None);
    }
}
