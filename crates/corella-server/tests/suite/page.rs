//! The page at `/`, for a browser without the key.

use axum::body::{Body, to_bytes};
use axum::http::Request;
use corella_server::{ApiKey, router};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;

use crate::client::{get, head, send};
use crate::fixture::{Setup, TestServer};

#[tokio::test]
async fn page_and_its_files_need_no_key() {
    let mut setup = Setup::new();
    setup.server.api_keys = vec![ApiKey::unlimited("test", "secret")];
    let server = setup.start().await;
    let page = get(server.address, "/").await;
    assert_eq!(page.status, 200);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = page
        .header("content-security-policy")
        .expect("there is one");
    assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self';"));
    assert!(!policy.contains("unsafe"));
    assert!(!page.text().contains("secret"));
    for (path, kind) in [
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/base.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
        (
            "/page/vendor/katex/katex.min.js",
            "text/javascript; charset=utf-8",
        ),
        (
            "/page/vendor/katex/fonts/KaTeX_Main-Regular.woff2",
            "font/woff2",
        ),
        ("/page/vendor/katex/LICENSE", "text/plain; charset=utf-8"),
        ("/docs", "text/html; charset=utf-8"),
    ] {
        let file = get(server.address, path).await;
        assert_eq!(file.status, 200, "{path}");
        assert_eq!(file.header("content-type"), Some(kind));
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"));
        assert!(!file.body.is_empty());
    }
    for path in [
        "/page/",
        "/page/nothing.js",
        "/page/..%2Findex.html",
        "/page/index.html",
        "/page/vendor/katex/",
        "/page/vendor/katex/../../main.js",
    ] {
        assert_eq!(get(server.address, path).await.status, 404, "{path}");
    }
}

/// Returns the files of the page below a path, resolved like in a browser.
async fn files_from(server: &TestServer, path: &str) -> Vec<String> {
    let page = get(server.address, path).await;
    assert_eq!(page.status, 200, "{path}");
    assert!(page.header("content-security-policy").is_some());
    let (folder, _) = path.rsplit_once('/').expect("a path");
    let text = page.text();
    let references = ["src=\"", "href=\""].map(|attribute| text.split(attribute).skip(1));
    let references = references.into_iter().flatten();
    let references = references.filter_map(|rest| rest.split('"').next());
    let files = references.filter(|reference| !reference.starts_with('#'));
    let found = files.map(|file| match file.starts_with('/') {
        true => file.to_owned(),
        false => format!("{folder}/{file}"),
    });
    let found: Vec<_> = found.collect();
    assert!(found.len() > 5, "{text}");
    found
}

/// A proxy passes the path on or removes it, and a browser may end it with a slash.
#[tokio::test]
async fn the_page_finds_its_files_behind_a_proxy() {
    let mut setup = Setup::new();
    setup.server.root_path = "/llm".to_owned();
    let server = setup.start().await;
    for path in ["/llm", "/llm/", "/"] {
        for file in files_from(&server, path).await {
            let stripped = file.strip_prefix("/llm").expect("it is below the path");
            for file in [&file, stripped] {
                assert_eq!(
                    get(server.address, file).await.status,
                    200,
                    "{path}: {file}"
                );
            }
        }
    }
    // The server does not know this proxy, which removes `/other`.
    let server = TestServer::start().await;
    for file in files_from(&server, "/").await {
        assert!(file.starts_with("/page/") || file == "/docs", "{file}");
        assert_eq!(get(server.address, &file).await.status, 200);
    }
    let html = get(server.address, "/").await;
    assert!(!html.text().contains("=\"/"), "{}", html.text());
}

#[tokio::test]
async fn constant_answers_are_sent_once_to_a_client_that_keeps_them() {
    const PATHS: [&str; 6] = [
        "/",
        "/docs",
        "/page/main.js",
        "/page/base.css",
        "/page/vendor/katex/katex.min.js",
        "/openapi.json",
    ];
    let server = TestServer::start().await;
    let mut tags = Vec::new();
    for path in PATHS {
        let first = get(server.address, path).await;
        let tag = first.header("etag").expect("a tag").to_owned();
        assert_eq!(first.header("cache-control"), Some("no-cache"), "{path}");
        let known = head("GET", path, &[("if-none-match", &tag)], None);
        let known = send(server.address, &known, b"").await;
        assert_eq!((known.status, known.body.len()), (304, 0), "{path}");
        assert_eq!(known.header("etag"), Some(&*tag));
        let other = head("GET", path, &[("if-none-match", "\"other\"")], None);
        let other = send(server.address, &other, b"").await;
        assert_eq!(other.body, first.body, "{path}");
        tags.push(tag);
    }
    tags.sort_unstable();
    tags.dedup();
    assert_eq!(tags.len(), PATHS.len());
}

/// All answers share one copy of the bytes.
#[tokio::test]
async fn the_description_of_the_api_is_made_once() {
    let server = TestServer::start().await;
    let service = TowerToHyperService::new(router(server.models.clone()));
    let ask = async || {
        let request = Request::get("/openapi.json").header("host", "test");
        let request = request.body(Body::empty()).expect("a request");
        let Ok(answer) = service.call(request).await;
        let body = to_bytes(answer.into_body(), usize::MAX).await;
        body.expect("it is in memory")
    };
    let (first, second) = (ask().await, ask().await);
    assert!(first.starts_with(b"{"));
    assert_eq!(first.as_ptr(), second.as_ptr());
}
