//! The web pages of other servers that may read answers.

use axum::http::HeaderValue;

/// The web pages that may use the server from a browser.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AllowedOrigins {
    /// Pages of the server itself and no others.
    #[default]
    Own,
    These(Vec<HeaderValue>),
    All,
}

impl AllowedOrigins {
    /// Reads origins, `SCHEME://HOST` or `SCHEME://HOST:PORT`, or `*` for all. The error is the invalid origin.
    pub fn parse(origins: &[String]) -> Result<Self, &String> {
        if origins.is_empty() {
            return Ok(Self::Own);
        }
        if origins.iter().any(|origin| origin == "*") {
            return Ok(Self::All);
        }
        let origins = origins.iter().map(|origin| {
            let host = origin.split_once("://").map(|(_, host)| host);
            let is_host =
                |host: &str| !host.is_empty() && !host.contains(['/', '?', '#', '@', '*']);
            match HeaderValue::from_str(origin) {
                Ok(value) if host.is_some_and(is_host) => Ok(value),
                _ => Err(origin),
            }
        });
        origins.collect::<Result<_, _>>().map(Self::These)
    }

    /// Returns the header for a page of this origin. With `None`, the browser withholds answers from the page.
    pub(crate) fn answer(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        match self {
            Self::Own => None,
            Self::These(origins) => origins.contains(origin).then(|| origin.clone()),
            Self::All => Some(HeaderValue::from_static("*")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_have_a_scheme_and_a_host_and_nothing_else() {
        let parse = |origins: &[&str]| {
            let origins: Vec<_> = origins.iter().map(|&origin| origin.to_owned()).collect();
            AllowedOrigins::parse(&origins).map_err(String::clone)
        };
        assert_eq!(parse(&[]), Ok(AllowedOrigins::Own));
        assert_eq!(parse(&["https://a.example", "*"]), Ok(AllowedOrigins::All));
        let two = ["https://a.example", "http://localhost:3000"];
        let values = two.map(HeaderValue::from_static).to_vec();
        assert_eq!(parse(&two), Ok(AllowedOrigins::These(values)));
        for wrong in [
            "",
            "a.example",
            "https://",
            "https://a.example/",
            "https://a.example/page",
            "https://*.example",
            "https://me@a.example",
        ] {
            let origins = ["https://a.example", wrong];
            assert_eq!(parse(&origins), Err(wrong.to_owned()));
        }
    }
}
