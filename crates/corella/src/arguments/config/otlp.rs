//! The destination of traces, by option and by OpenTelemetry's variables.

use crate::Error;
use crate::client::otlp::OtlpConfig;

/// Returns the destination of traces, or `None` if no endpoint is given or a variable turns traces off. `endpoint` is
/// the value of the option or its variable. An empty variable counts as unset.
pub fn otlp(endpoint: Option<String>) -> Result<Option<OtlpConfig>, Error> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    read(endpoint, variable).map_err(Error::Config)
}

fn read(
    endpoint: Option<String>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<OtlpConfig>, String> {
    let is = |name: &str, value: &str| {
        variable(name).is_some_and(|given| given.trim().eq_ignore_ascii_case(value))
    };
    if is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none") {
        return Ok(None);
    }
    // The variable for traces has the whole address. The address for all signals has no path yet.
    let of_traces = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
    let (option, url) = match (of_traces, endpoint.filter(|endpoint| !endpoint.is_empty())) {
        (Some(url), _) => ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url),
        (None, Some(base)) => {
            let url = format!("{}/v1/traces", base.trim_end_matches('/'));
            ("--otlp-endpoint", url)
        }
        (None, None) => return Ok(None),
    };
    if !(url.starts_with("http://") || url.starts_with("https://")) {
        return Err(format!(
            "{option} is no address of OTLP over HTTP, such as http://127.0.0.1:4318: {url}"
        ));
    }
    let of_traces = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL";
    let protocol = match variable(of_traces) {
        Some(_) => of_traces,
        None => "OTEL_EXPORTER_OTLP_PROTOCOL",
    };
    if is(protocol, "grpc") {
        return Err(format!(
            "{protocol} is grpc, but traces are sent over HTTP: set it to http/json, and {option} to the address at \
             which the collector takes OTLP over HTTP, mostly port 4318, instead of {url}"
        ));
    }
    let list = |name: &str| {
        let text = variable(name).unwrap_or_default();
        pairs(&text).ok_or_else(|| format!("{name} is not a comma-separated list of NAME=VALUE"))
    };
    let headers = list("OTEL_EXPORTER_OTLP_HEADERS")?;
    let mut resource = list("OTEL_RESOURCE_ATTRIBUTES")?;
    let service = variable("OTEL_SERVICE_NAME");
    let has_name = resource.iter().any(|(name, _)| name == "service.name");
    if service.is_some() || !has_name {
        resource.retain(|(name, _)| name != "service.name");
        let service = service.unwrap_or_else(|| "corella".to_owned());
        resource.push(("service.name".to_owned(), service));
    }
    let version = env!("CARGO_PKG_VERSION").to_owned();
    resource.push(("service.version".to_owned(), version));
    Ok(Some(OtlpConfig {
        url,
        headers,
        resource,
    }))
}

/// Parses `NAME=VALUE,…`, where values may have `%20` for a space.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let parts = text.split(',').filter(|part| !part.trim().is_empty());
    let pair = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let name = name.trim();
        (!name.is_empty()).then_some((name.to_owned(), decoded(value.trim())?))
    };
    parts.map(pair).collect()
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(
        endpoint: Option<&str>,
        variables: &[(&str, &str)],
    ) -> Result<Option<OtlpConfig>, String> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        read(endpoint.map(str::to_owned), variable)
    }

    #[test]
    fn the_address_of_traces_wins_and_is_whole() {
        let url = |endpoint, variables: &[_]| Some(with(endpoint, variables).ok()??.url);
        assert_eq!(url(None, &[]), None);
        assert_eq!(url(Some(""), &[]), None);
        let base = Some("http://collector:4318/");
        assert_eq!(
            url(base, &[]).as_deref(),
            Some("http://collector:4318/v1/traces")
        );
        let whole = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://other/traces");
        assert_eq!(url(base, &[whole]).as_deref(), Some("https://other/traces"));
        assert!(with(Some("collector:4317"), &[]).is_err());
    }

    #[test]
    fn variables_turn_traces_off() {
        let endpoint = Some("http://collector:4317");
        for off in [
            ("OTEL_SDK_DISABLED", "true"),
            ("OTEL_SDK_DISABLED", "True"),
            ("OTEL_TRACES_EXPORTER", "none"),
        ] {
            let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
            assert_eq!(with(endpoint, &[off, grpc]), Ok(None), "{off:?}");
        }
        for on in [
            ("OTEL_SDK_DISABLED", "false"),
            ("OTEL_TRACES_EXPORTER", "otlp"),
        ] {
            assert!(with(endpoint, &[on]).is_ok_and(|config| config.is_some()));
        }
    }

    #[test]
    fn a_protocol_that_is_not_spoken_is_refused() {
        let endpoint = Some("http://collector:4317");
        let all = "OTEL_EXPORTER_OTLP_PROTOCOL";
        let of_traces = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL";
        for wrong in [
            vec![(all, "grpc")],
            vec![(all, "http/json"), (of_traces, "grpc")],
        ] {
            let error = with(endpoint, &wrong).expect_err("it is not spoken");
            let (name, _) = wrong[wrong.len() - 1];
            assert!(error.starts_with(&format!("{name} is grpc")), "{error}");
            assert!(error.contains("4318"), "{error}");
            assert_eq!(with(None, &wrong), Ok(None));
        }
        for right in [
            vec![(all, "http/protobuf")],
            vec![(all, "grpc"), (of_traces, "http/json")],
        ] {
            assert!(with(endpoint, &right).is_ok(), "{right:?}");
        }
    }

    #[test]
    fn headers_and_attributes_are_lists() {
        let variables = [
            (
                "OTEL_EXPORTER_OTLP_HEADERS",
                "authorization=Bearer%20a=b, x = 1",
            ),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=lost,zone=eu"),
            ("OTEL_SERVICE_NAME", "chat"),
        ];
        let config = with(Some("http://a"), &variables).expect("it is right");
        let config = config.expect("there is an address");
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let headers = [pair("authorization", "Bearer a=b"), pair("x", "1")];
        assert_eq!(config.headers, headers);
        assert_eq!(
            config.resource[..2],
            [pair("zone", "eu"), pair("service.name", "chat")]
        );
        for wrong in ["novalue", "a=%zz", "a=%f", "=b"] {
            let error = with(Some("http://a"), &[("OTEL_EXPORTER_OTLP_HEADERS", wrong)]);
            let error = error.expect_err(wrong);
            assert!(error.contains("OTEL_EXPORTER_OTLP_HEADERS"), "{error}");
            // The value may contain a key.
            assert!(!error.contains(wrong), "{error}");
        }
    }
}
