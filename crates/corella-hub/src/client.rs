//! Requests to the hub. Every request uses [`Client::get`], which follows redirects and decides where the token is
//! sent; [`Client::retried`] repeats requests after transient failures.

use std::time::Duration;

use serde::de::DeserializeOwned;
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body, Error};

use crate::listing::{RemoteFile, Revision, TreeEntry};
use crate::uri::{encode_part, encode_path, next_page, origin, redirect};
use crate::{FetchEvent, HubConfig, HubError, ModelName, Observer};

const MAX_REDIRECTS: usize = 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// A request is given up after this number of attempts in a row without progress.
pub const MAX_ATTEMPTS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// If the hub asks for a longer pause, the request is given up.
const MAX_PAUSE: Duration = Duration::from_secs(120);

const MAX_LISTING_BYTES: u64 = 64 << 20;
const MAX_LISTING_PAGES: usize = 1000;
const MAX_FILES: usize = 100_000;

pub struct Client {
    agent: Agent,
    endpoint: String,
    origin: String,
    token: Option<String>,
}

/// The failure of an attempt.
pub enum Failure {
    /// A transient failure. The hub may have asked for this pause before the next attempt.
    Passing {
        reason: String,
        pause: Option<Duration>,
    },
    /// Nothing answered.
    Unanswered(String),
    Final(HubError),
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

impl Failure {
    pub fn passing(reason: impl Into<String>) -> Self {
        Self::Passing {
            reason: reason.into(),
            pause: None,
        }
    }
}

/// The current commit of a revision, and its files.
pub struct Listing {
    pub commit: String,
    /// The identifier of the licence, such as `apache-2.0`.
    pub licence: Option<String>,
    pub files: Vec<RemoteFile>,
}

impl Client {
    pub fn new(config: &HubConfig) -> Result<Self, HubError> {
        let endpoint = config.endpoint.trim_end_matches('/').to_owned();
        let Some(origin) = origin(&endpoint) else {
            return Err(HubError::Name(format!(
                "HF_ENDPOINT is `{endpoint}`; it must be an address such as https://huggingface.co"
            )));
        };
        let is_printable = |token: &String| token.bytes().all(|byte| byte.is_ascii_graphic());
        if !config.token.iter().all(is_printable) {
            let reason =
                "the token in HF_TOKEN or in the token file has characters that no token has";
            return Err(HubError::Name(reason.to_owned()));
        }
        let provider = rustls::crypto::ring::default_provider();
        let roots = root_certificates(config)?;
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&roots))
            .unversioned_rustls_crypto_provider(provider.into());
        let agent = Agent::config_builder()
            .tls_config(tls.build())
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(config.read_timeout))
            .timeout_per_read(Some(config.read_timeout))
            .user_agent(concat!("corella/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity");
        Ok(Self {
            agent: agent.build().new_agent(),
            endpoint,
            origin,
            token: config.token.clone(),
        })
    }

    /// Lists a repository. A branch may have another commit each time.
    pub fn listing(&self, name: &ModelName, observer: Observer<'_>) -> Result<Listing, HubError> {
        let (repository, revision) = (&name.repository, name.revision_or_main());
        let address = format!(
            "{}/api/models/{repository}/revision/{}",
            self.endpoint,
            encode_part(revision)
        );
        let (revision, _): (Revision, _) =
            self.retried(observer, || self.get_json(&address, name))?;
        let licence = revision.licence().map(str::to_owned);
        let commit = revision.sha;
        if !crate::model_name::is_commit(&commit) {
            return Err(HubError::Corrupt(format!(
                "{address} gave `{commit}`, which is no commit"
            )));
        }
        let mut page = Some(format!(
            "{}/api/models/{repository}/tree/{commit}?recursive=true&expand=false",
            self.endpoint
        ));
        let mut files = Vec::new();
        let mut num_pages = 0;
        while let Some(address) = page.take() {
            let (entries, headers): (Vec<TreeEntry>, HeaderMap) =
                self.retried(observer, || self.get_json(&address, name))?;
            for entry in entries {
                let file = entry.into_file();
                let file =
                    file.map_err(|reason| HubError::Corrupt(format!("{address}: {reason}")))?;
                files.extend(file);
            }
            num_pages += 1;
            if files.len() > MAX_FILES || num_pages > MAX_LISTING_PAGES {
                return Err(HubError::Corrupt(format!(
                    "{address}: the list of files does not end"
                )));
            }
            let next = text_of(&headers, "link").and_then(next_page);
            page = next.map(|next| redirect(&address, next)).transpose()?;
        }
        Ok(Listing {
            commit,
            licence,
            files,
        })
    }

    /// The content of a file from byte `start` on. The answer has status 200, 206 or 416.
    pub fn file(
        &self,
        name: &ModelName,
        commit: &str,
        path: &str,
        start: u64,
    ) -> Result<Response<Body>, Failure> {
        let address = format!(
            "{}/{}/resolve/{commit}/{}",
            self.endpoint,
            name.repository,
            encode_path(path)
        );
        self.get(&address, name, start)
    }

    fn get_json<T: DeserializeOwned>(
        &self,
        address: &str,
        name: &ModelName,
    ) -> Result<(T, HeaderMap), Failure> {
        let answer = self.get(address, name, 0)?;
        let (parts, mut body) = answer.into_parts();
        let body = body.with_config().limit(MAX_LISTING_BYTES).read_to_vec();
        let body = body.map_err(|error| Failure::passing(format!("{address}: {error}")))?;
        let value = serde_json::from_slice(&body).map_err(|error| {
            HubError::Corrupt(format!(
                "{address} does not answer as the hub does ({error}); check HF_ENDPOINT"
            ))
        })?;
        Ok((value, parts.headers))
    }

    /// Requests an address from byte `start` on, and follows redirects. Only the endpoint's own origin gets the token.
    fn get(&self, address: &str, name: &ModelName, start: u64) -> Result<Response<Body>, Failure> {
        let mut address = address.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&address);
            if start > 0 {
                request = request.header(header::RANGE, format!("bytes={start}-"));
            }
            let is_endpoint = origin(&address).as_ref() == Some(&self.origin);
            if let (true, Some(token)) = (is_endpoint, &self.token) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            let answer = request
                .call()
                .map_err(|error| self.transport_failure(&address, error))?;
            let status = answer.status();
            if !status.is_redirection() {
                return self.checked(answer, &address, name);
            }
            let Some(location) = text_of(answer.headers(), "location") else {
                return Err(Failure::passing(format!(
                    "{address} answered {status} and no address"
                )));
            };
            address = redirect(&address, location)?;
        }
        Err(HubError::Corrupt(format!(
            "{address}: redirected more than {MAX_REDIRECTS} times"
        ))
        .into())
    }

    fn checked(
        &self,
        answer: Response<Body>,
        address: &str,
        name: &ModelName,
    ) -> Result<Response<Body>, Failure> {
        let status = answer.status();
        if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(answer);
        }
        let may_pass = status.is_server_error()
            || matches!(
                status,
                StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS
            );
        if may_pass {
            let pause = text_of(answer.headers(), "retry-after");
            let pause = pause.and_then(|text| text.trim().parse().ok());
            return Err(Failure::Passing {
                reason: format!("{} answered {status}", shown(address)),
                pause: pause.map(Duration::from_secs),
            });
        }
        let refusal = self.refusal(status, answer.headers(), address, name);
        Err(HubError::Refused(refusal).into())
    }

    /// The error for a refusal, from the hub's error codes.
    fn refusal(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        address: &str,
        name: &ModelName,
    ) -> String {
        let (endpoint, repository) = (&self.endpoint, &name.repository);
        let message = text_of(headers, "x-error-message").unwrap_or_default();
        let code = text_of(headers, "x-error-code").unwrap_or_default();
        let has_token = self.token.is_some();
        if origin(address).as_ref() != Some(&self.origin) {
            return format!("{} answered {status}", shown(address));
        }
        match (code, status.as_u16()) {
            ("GatedRepo", _) => {
                let login = match has_token {
                    true => "with the account that HF_TOKEN belongs to",
                    false => "and set HF_TOKEN, or log in with `hf auth login`",
                };
                format!("{repository} is gated: ask for access at {endpoint}/{repository} {login}")
            }
            ("RevisionNotFound", _) => {
                format!("{repository} has no revision `{}`", name.revision_or_main())
            }
            (_, 401) if message.contains("Invalid credentials") => format!(
                "{endpoint} does not accept the token in HF_TOKEN or in the token file; make one at \
                 {endpoint}/settings/tokens"
            ),
            ("RepoNotFound", _) | ("", 401 | 404) => {
                let login = match has_token {
                    true => "it is private and this token may not read it",
                    false => "it is private; for that, set HF_TOKEN or log in with `hf auth login`",
                };
                format!("{endpoint} has no model {repository}, or {login}")
            }
            _ => {
                let colon = if message.is_empty() { "" } else { ": " };
                format!("{} answered {status}{colon}{message}", shown(address))
            }
        }
    }

    fn transport_failure(&self, address: &str, error: Error) -> Failure {
        let reason = format!("{}: {error}", shown(address));
        match error {
            Error::Rustls(_) | Error::Tls(_) | Error::Pem(_) => {
                let hint = "if your network has its own certificate authority, name its file in \
                            SSL_CERT_FILE";
                HubError::Unreachable(format!("{reason}; {hint}")).into()
            }
            Error::Io(error)
                if error
                    .get_ref()
                    .is_some_and(|inner| inner.is::<rustls::Error>()) =>
            {
                let hint = "if your network has its own certificate authority, name its file in \
                            SSL_CERT_FILE";
                HubError::Unreachable(format!("{reason}; {hint}")).into()
            }
            Error::BadUri(_)
            | Error::Http(_)
            | Error::InvalidProxyUrl
            | Error::LargeResponseHeader(..) => HubError::Corrupt(reason).into(),
            _ => Failure::Unanswered(reason),
        }
    }

    /// Repeats an attempt while its failures are transient.
    pub fn retried<T>(
        &self,
        observer: Observer<'_>,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, HubError> {
        let mut retries = Retries::default();
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                // Without a network, more attempts would only take time.
                Err(Failure::Unanswered(reason)) if retries.num_failed > 0 => {
                    let attempts = retries.num_failed + 1;
                    return Err(HubError::Unreachable(format!(
                        "{reason} ({attempts} attempts)"
                    )));
                }
                Err(failure) => retries.pause_after(failure, observer)?,
            }
        }
    }
}

/// Counts attempts without progress.
#[derive(Default)]
pub struct Retries {
    num_failed: u32,
}

impl Retries {
    /// Forgets earlier failures, because data arrived.
    pub fn reset(&mut self) {
        self.num_failed = 0;
    }

    /// Waits before the next attempt. Returns an error if there must be no further attempt.
    pub fn pause_after(
        &mut self,
        failure: Failure,
        observer: Observer<'_>,
    ) -> Result<(), HubError> {
        let (reason, asked) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Passing { reason, pause } => (reason, pause),
            Failure::Unanswered(reason) => (reason, None),
        };
        self.num_failed += 1;
        let own = FIRST_PAUSE * 2_u32.pow(self.num_failed - 1);
        let pause = asked.map_or(own, |asked| asked.max(own));
        if self.num_failed >= MAX_ATTEMPTS {
            return Err(HubError::Unreachable(format!(
                "{reason} ({MAX_ATTEMPTS} attempts)"
            )));
        }
        if pause > MAX_PAUSE {
            let seconds = pause.as_secs();
            return Err(HubError::Unreachable(format!(
                "{reason}, and asks to wait {seconds} s"
            )));
        }
        observer(FetchEvent::Retrying {
            reason: &reason,
            pause_s: pause.as_secs_f64(),
        });
        std::thread::sleep(pause);
        Ok(())
    }
}

pub fn text_of<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// An address without its query, which may be a signature that grants access.
fn shown(address: &str) -> &str {
    address.split(['?', '#']).next().unwrap_or(address)
}

/// The trusted authorities: from the user's file, or else the system's.
fn root_certificates(config: &HubConfig) -> Result<Vec<Certificate<'static>>, HubError> {
    let found = match &config.ca_file {
        Some(file) => rustls_native_certs::load_certs_from_paths(Some(file), None),
        None => rustls_native_certs::load_native_certs(),
    };
    if let (Some(file), true) = (&config.ca_file, found.certs.is_empty()) {
        let why = found
            .errors
            .first()
            .map_or("it has none".to_owned(), ToString::to_string);
        return Err(HubError::Name(format!(
            "{} has no certificates in PEM format: {why}",
            file.display()
        )));
    }
    let certificates = found.certs.iter();
    Ok(certificates
        .map(|one| Certificate::from_der(one).to_owned())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_grows_and_ends() {
        let told = std::sync::Mutex::new(Vec::new());
        let observer = |event: FetchEvent<'_>| {
            if let FetchEvent::Retrying { pause_s, .. } = event {
                told.lock().unwrap().push(pause_s);
            }
        };
        let mut retries = Retries::default();
        assert!(
            retries
                .pause_after(Failure::passing("x"), &observer)
                .is_ok()
        );
        assert!(
            retries
                .pause_after(Failure::passing("x"), &observer)
                .is_ok()
        );
        assert_eq!(*told.lock().unwrap(), [0.5, 1.0]);
        let asked = Failure::Passing {
            reason: "x answered 429".to_owned(),
            pause: Some(Duration::from_secs(3600)),
        };
        let error = retries.pause_after(asked, &observer).unwrap_err();
        assert_eq!(error.to_string(), "x answered 429, and asks to wait 3600 s");
    }

    #[test]
    fn signatures_are_not_shown() {
        assert_eq!(shown("https://cdn/x?Signature=secret"), "https://cdn/x");
    }
}
