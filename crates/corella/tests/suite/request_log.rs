//! The log line of each answered request.

use crate::server::Server;

#[test]
fn the_log_has_a_line_for_each_request_but_none_for_probes_and_files_of_the_page() {
    let mut server = Server::start(&["--device", "mock"]);
    for path in ["/health", "/ready", "/metrics", "/", "/page/main.js"] {
        server.get(path, "probe");
    }
    server.get("/v1/models?key=query", "list");
    let body = r#"{"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": true}"#;
    server.complete(body);
    // A line is written when the body of its response is dropped, which may be after its last byte was sent.
    let lines = [server.line_with(" answered"), server.line_with(" answered")];
    for parts in [
        &[
            "INFO",
            "id=\"list\"",
            "method=\"GET\"",
            "path=\"/v1/models\"",
            "status=200",
            "prompt_tokens=0",
            "output_tokens=0",
            "seconds=",
        ][..],
        &[
            "INFO",
            "id=\"",
            "method=\"POST\"",
            "path=\"/v1/completions\"",
            "model=\"corella-nano\"",
            "status=200",
            "prompt_tokens=3",
            "cached_tokens=0",
            "output_tokens=5",
            "finish=\"length\"",
            "ttft=",
            "seconds=",
        ],
    ] {
        let has_all = |line: &&String| parts.iter().all(|part| line.contains(part));
        assert!(lines.iter().any(|line| has_all(&line)), "{lines:?}");
    }
}

#[test]
fn the_line_of_each_request_can_be_left_out() {
    for option in ["--no-log-requests", "--disable-log-requests"] {
        let mut server = Server::start(&["--device", "mock", option]);
        server.get("/v1/models", "quiet");
        server.terminate();
        let rest: Vec<String> = server.log.by_ref().map(|line| line.unwrap()).collect();
        assert!(
            rest.iter().any(|line| line.contains("draining")),
            "{rest:?}"
        );
        assert!(
            !rest.iter().any(|line| line.contains("answered")),
            "{rest:?}"
        );
    }
}
