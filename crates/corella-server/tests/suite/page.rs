//! The page at `/`, as a browser without the key gets it.

use corella_server::ApiKey;

use crate::client::get;
use crate::fixture::Setup;

#[tokio::test]
async fn page_and_its_files_need_no_key() {
    let mut setup = Setup::new();
    setup.serve.api_keys = vec![ApiKey::unlimited("test", "secret")];
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
    ] {
        assert_eq!(get(server.address, path).await.status, 404, "{path}");
    }
}
