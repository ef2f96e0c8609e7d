//! One HTTP connection for each request, encrypted if the URL says so.

use std::future::Future;
use std::io;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, LOCATION, USER_AGENT};
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::client::event_stream::ChunkedBody;
use crate::client::tls_client::client_tls;

/// Limits the time to connect, since an absent server never answers. An answer may take any time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// The address of a server, and the common parts of requests to it.
pub struct Address {
    /// The URL without its path.
    shown: String,
    host: String,
    port: u16,
    path: String,
    host_header: HeaderValue,
    authorization: Option<HeaderValue>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// A response whose body has not been read. Dropping it closes the connection, which ends the request.
pub struct RemoteResponse {
    response: hyper::Response<Incoming>,
    shown: String,
}

impl Address {
    /// Reads `--url`, which may lack `http://`.
    pub fn parse(url: &str, api_key: Option<&str>) -> Result<Self, String> {
        let wrong = |reason: &str| {
            format!("--url {url}: {reason}; it should look like http://127.0.0.1:8000")
        };
        let whole = match url.contains("://") {
            true => url.to_owned(),
            false => format!("http://{url}"),
        };
        let uri: Uri = whole.parse().map_err(|_| wrong("not a URL"))?;
        let is_encrypted = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("only http and https are supported")),
        };
        if uri.query().is_some() {
            return Err(wrong("a query is not part of a server's address"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong(
                "a user and a password are not supported; --api-key is",
            ));
        }
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        if host.is_empty() {
            return Err(wrong("no host"));
        }
        let authorization = api_key.map(|key| {
            let mut header = HeaderValue::try_from(format!("Bearer {key}"))
                .map_err(|_| "--api-key has control characters".to_owned())?;
            header.set_sensitive(true);
            Ok::<_, String>(header)
        });
        let tls = match is_encrypted {
            true => {
                let name = ServerName::try_from(host.clone());
                let name = name.map_err(|_| wrong("not the name of a host"))?;
                Some((TlsConnector::from(client_tls()?), name))
            }
            false => None,
        };
        Ok(Self {
            shown: format!("{}://{authority}", uri.scheme_str().unwrap_or("http")),
            host,
            port: authority.port_u16().unwrap_or(match is_encrypted {
                true => 443,
                false => 80,
            }),
            path: uri.path().trim_end_matches('/').to_owned(),
            host_header: HeaderValue::try_from(authority.as_str())
                .map_err(|_| wrong("not the name of a host"))?,
            authorization: authorization.transpose()?,
            tls,
        })
    }

    /// Returns the server's name in errors.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Returns the path of the URL, without a final slash.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub async fn get(&self, path: &str) -> Result<RemoteResponse, String> {
        self.send(Method::GET, path, String::new()).await
    }

    pub async fn post(&self, path: &str, json: String) -> Result<RemoteResponse, String> {
        self.send(Method::POST, path, json).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<RemoteResponse, String> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.host_header)
            .header(USER_AGENT, concat!("corella/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "text/event-stream, application/json")
            .header(CONTENT_TYPE, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request.body(Full::new(Bytes::from(body)));
        let request = request.map_err(|error| error.to_string())?;
        let stream = self.in_time(self.connect()).await?;
        let response = match &self.tls {
            None => exchange(stream, request).await,
            Some((connector, name)) => {
                let encrypted = connector.connect(name.clone(), stream);
                let encrypted = self
                    .in_time(async { encrypted.await.map_err(|error| self.tls_failure(&error)) });
                exchange(encrypted.await?, request).await
            }
        };
        let response = response.map_err(|error| broken(&self.shown, &error))?;
        Ok(RemoteResponse {
            response,
            shown: self.shown.clone(),
        })
    }

    async fn connect(&self) -> Result<TcpStream, String> {
        let (shown, host) = (&self.shown, &self.host);
        let addresses = lookup_host((host.as_str(), self.port)).await;
        let addresses: Vec<_> = addresses
            .map_err(|error| {
                format!("{shown}: the host {host} is not found ({error}); check --url")
            })?
            .collect();
        let stream = TcpStream::connect(addresses.as_slice()).await;
        let stream = stream.map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => format!(
                "no server listens at {shown}; start it (`corella serve`), or check the port in --url"
            ),
            _ => format!("{shown} cannot be reached: {error}; check --url"),
        })?;
        // A request is written in one piece and must not wait for an acknowledgement.
        stream
            .set_nodelay(true)
            .map_err(|error| error.to_string())?;
        Ok(stream)
    }

    fn tls_failure(&self, error: &io::Error) -> String {
        use tokio_rustls::rustls::Error as TlsError;
        let shown = &self.shown;
        let inner = error
            .get_ref()
            .and_then(|inner| inner.downcast_ref::<TlsError>());
        let hint = match inner {
            Some(TlsError::InvalidMessage(_)) => {
                "it does not seem to speak TLS; try http:// in --url"
            }
            _ => {
                "if its certificate is your own or your network's, name the authority's file in \
                 SSL_CERT_FILE"
            }
        };
        format!("{shown}: {error}; {hint}")
    }

    async fn in_time<T>(
        &self,
        future: impl Future<Output = Result<T, String>>,
    ) -> Result<T, String> {
        match tokio::time::timeout(CONNECT_TIMEOUT, future).await {
            Ok(outcome) => outcome,
            Err(_) => Err(format!(
                "{} does not answer within {} s; check --url, and whether a firewall is between",
                self.shown,
                CONNECT_TIMEOUT.as_secs()
            )),
        }
    }
}

impl RemoteResponse {
    pub fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// Returns the target of a redirect.
    pub fn location(&self) -> Option<String> {
        let location = self.response.headers().get(LOCATION)?;
        Some(location.to_str().ok()?.to_owned())
    }
}

impl ChunkedBody for RemoteResponse {
    async fn chunk(&mut self) -> Result<Option<Vec<u8>>, String> {
        loop {
            match self.response.body_mut().frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(broken(&self.shown, &error)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data.into()));
                    }
                }
            }
        }
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: Request<Full<Bytes>>,
) -> Result<hyper::Response<Incoming>, hyper::Error> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The task ends when the sender and the body are dropped. They also receive the connection's errors.
    tokio::spawn(connection);
    sender.send_request(request).await
}

/// Describes an error of a connection that ended, or of a peer that does not speak HTTP. The reason is among the causes
/// of hyper's error.
fn broken(shown: &str, error: &hyper::Error) -> String {
    let mut reason = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        reason = format!("{reason}: {error}");
        cause = error.source();
    }
    let hint = match error.is_parse() {
        true => "it does not seem to speak HTTP; check the port in --url, and try https://",
        false => "see the server's log",
    };
    format!("the connection to {shown} broke ({reason}); {hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_people_write_it() {
        for (url, shown, host, port, path) in [
            (
                "http://127.0.0.1:8000",
                "http://127.0.0.1:8000",
                "127.0.0.1",
                8000,
                "",
            ),
            (
                "localhost:11434/",
                "http://localhost:11434",
                "localhost",
                11434,
                "",
            ),
            ("http://box/v1/", "http://box", "box", 80, "/v1"),
            (
                "https://api.example.com/openai/v1",
                "https://api.example.com",
                "api.example.com",
                443,
                "/openai/v1",
            ),
            (
                "http://[::1]:8000/v1",
                "http://[::1]:8000",
                "::1",
                8000,
                "/v1",
            ),
        ] {
            let address = Address::parse(url, None).unwrap();
            let read = (
                address.shown(),
                &*address.host,
                address.port,
                address.path(),
            );
            assert_eq!(read, (shown, host, port, path), "{url}");
        }
    }

    #[test]
    fn an_address_that_leads_nowhere_is_refused() {
        for (url, reason) in [
            ("ftp://box", "only http and https"),
            ("http://", "not a URL"),
            ("http://a b", "not a URL"),
            ("http://box/v1?key=1", "a query"),
            ("http://me:secret@box", "a user and a password"),
        ] {
            let error = Address::parse(url, None).err().unwrap();
            assert!(
                error.starts_with(&format!("--url {url}: {reason}")),
                "{error}"
            );
        }
        let error = Address::parse("http://box", Some("a\nb")).err().unwrap();
        assert_eq!(error, "--api-key has control characters");
    }
}
