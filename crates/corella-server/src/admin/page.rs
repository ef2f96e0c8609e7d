//! The pages at `/` and `/docs`: the chat with the picture of the engine, and the description of the API, from files
//! that are part of the binary.

use std::sync::{Arc, OnceLock};

use axum::extract::{Path, State};
use axum::http::header::{CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;

use crate::state::server_parts::ServerParts;
use crate::wire::api_error::ApiError;
use crate::wire::constant_answer::ConstantAnswer;

/// A file of a page.
struct Asset {
    name: &'static str,
    bytes: &'static [u8],
    /// The answer is made for the first request.
    answer: OnceLock<ConstantAnswer>,
}

macro_rules! assets {
    ($($name:literal),* $(,)?) => {
        static ASSETS: [Asset; [$($name),*].len()] = [$(Asset {
            name: $name,
            bytes: include_bytes!(concat!("../../page/", $name)),
            answer: OnceLock::new(),
        }),*];
    };
}

const INDEX: &str = include_str!("../../page/index.html");
const DOCS: &str = include_str!("../../page/docs.html");

assets![
    "answer_reader.js",
    "api.js",
    "attachments.js",
    "base.css",
    "chart.js",
    "chat.css",
    "chat.js",
    "chat_store.js",
    "clipboard.js",
    "composer.css",
    "conversation.js",
    "docs.css",
    "docs.js",
    "engine.css",
    "engine.js",
    "engine_stream.js",
    "engine_view.js",
    "failure.js",
    "format.js",
    "highlight.js",
    "icon.svg",
    "icons.js",
    "latency_chart.js",
    "main.js",
    "markdown.css",
    "markdown.js",
    "markdown_inline.js",
    "math.js",
    "message_view.js",
    "models.js",
    "node_list.js",
    "page_map.js",
    "progress.js",
    "request_table.js",
    "sampling.js",
    "schema.js",
    "schema_example.js",
    "scroll_follower.js",
    "settings.css",
    "settings.js",
    "side_bar.css",
    "side_bar.js",
    "step_chart.js",
    "storage.js",
    "theme.js",
    "tier_list.js",
    "token_list.js",
    "vendor/katex/LICENSE",
    "vendor/katex/fonts/KaTeX_AMS-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Caligraphic-Bold.woff2",
    "vendor/katex/fonts/KaTeX_Caligraphic-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Fraktur-Bold.woff2",
    "vendor/katex/fonts/KaTeX_Fraktur-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Main-Bold.woff2",
    "vendor/katex/fonts/KaTeX_Main-BoldItalic.woff2",
    "vendor/katex/fonts/KaTeX_Main-Italic.woff2",
    "vendor/katex/fonts/KaTeX_Main-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Math-BoldItalic.woff2",
    "vendor/katex/fonts/KaTeX_Math-Italic.woff2",
    "vendor/katex/fonts/KaTeX_SansSerif-Bold.woff2",
    "vendor/katex/fonts/KaTeX_SansSerif-Italic.woff2",
    "vendor/katex/fonts/KaTeX_SansSerif-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Script-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Size1-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Size2-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Size3-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Size4-Regular.woff2",
    "vendor/katex/fonts/KaTeX_Typewriter-Regular.woff2",
    "vendor/katex/katex.min.css",
    "vendor/katex/katex.min.js",
];

/// The browser loads files from this server only, and runs nothing that a model writes.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Serves the chat.
pub async fn page(State(server): State<Arc<ServerParts>>, headers: HeaderMap) -> Response {
    let answer = server.page.get_or_init(|| html(INDEX, &server));
    secured(answer.respond(&headers))
}

/// Serves the description of the API.
pub async fn docs(State(server): State<Arc<ServerParts>>, headers: HeaderMap) -> Response {
    let answer = server.docs.get_or_init(|| html(DOCS, &server));
    secured(answer.respond(&headers))
}

/// Returns a page. Its links are relative, or begin with the root path: a browser may use the root path with or without
/// a final slash, and a proxy may remove it.
fn html(text: &str, server: &ServerParts) -> ConstantAnswer {
    let html = match &*server.config.root_path {
        "" => text.to_owned(),
        root_path => text
            .replace("=\"page/", &format!("=\"{root_path}/page/"))
            .replace("href=\"docs\"", &format!("href=\"{root_path}/docs\"")),
    };
    ConstantAnswer::new(html, "text/html; charset=utf-8")
}

/// A file of a page.
pub async fn page_asset(
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let asset = ASSETS.iter().find(|asset| asset.name == name);
    let asset = asset
        .ok_or_else(|| ApiError::unknown_path(&format!("/page/{name}"), "The page is at GET /."))?;
    let answer = &asset.answer;
    let answer = answer.get_or_init(|| ConstantAnswer::new(asset.bytes, content_type(asset.name)));
    Ok(secured(answer.respond(&headers)))
}

fn secured(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map(|(_, kind)| kind) {
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("woff2") => "font/woff2",
        None => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VENDOR: &str = "vendor/";
    const KATEX: &str = "vendor/katex/";

    fn text(asset: &Asset) -> &str {
        std::str::from_utf8(asset.bytes).expect("the file is text")
    }

    /// The files that were written here.
    fn texts() -> impl Iterator<Item = (&'static str, &'static str)> {
        let own = ASSETS
            .iter()
            .filter(|asset| !asset.name.starts_with(VENDOR));
        let own = own.map(|asset| (asset.name, text(asset)));
        own.chain([("index.html", INDEX), ("docs.html", DOCS)])
    }

    /// Every file that another one names is served, and every served file is named.
    #[test]
    fn files_and_references_agree() {
        let mut named: Vec<&str> = texts()
            .flat_map(|(_, text)| {
                let of_the_page = text.split("=\"page/").skip(1);
                let of_a_script = text.split("from \"./").skip(1);
                of_the_page.chain(of_a_script)
            })
            .filter_map(|rest| rest.split('"').next())
            .collect();
        named.sort_unstable();
        named.dedup();
        let served = ASSETS.iter().map(|asset| asset.name);
        let served: Vec<_> = served.filter(|name| !name.starts_with(VENDOR)).collect();
        assert_eq!(named, served);
    }

    /// KaTeX's style sheet names a font in three formats. Browsers take the first one, and nothing else is served.
    #[test]
    fn the_files_of_katex_are_those_that_it_loads() {
        let find = |name: &str| {
            let found = ASSETS.iter().find(|asset| asset.name == name);
            text(found.unwrap_or_else(|| panic!("{name} is served")))
        };
        let styles = find("vendor/katex/katex.min.css");
        let mut fonts: Vec<_> = styles
            .split("src:url(")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
            .map(|name| format!("{KATEX}{name}"))
            .collect();
        fonts.sort_unstable();
        fonts.dedup();
        let served = ASSETS.iter().map(|asset| asset.name);
        let served: Vec<_> = served.filter(|name| name.ends_with(".woff2")).collect();
        assert_eq!(fonts, served);
        for name in ["katex.min.js", "katex.min.css"] {
            assert!(
                texts().any(|(_, text)| text.contains(name)),
                "{name} is loaded"
            );
        }
        assert!(find("vendor/katex/LICENSE").contains("MIT"));
    }

    /// The page has no build step, and the binary and slow links carry all of it.
    #[test]
    fn the_page_stays_small() {
        let files: usize = ASSETS.iter().map(|asset| asset.bytes.len()).sum();
        let num_bytes = files + INDEX.len() + DOCS.len();
        assert!(num_bytes <= 900_000, "{num_bytes} bytes");
    }

    /// A path from the root would lack a proxy's prefix.
    #[test]
    fn no_reference_begins_at_the_root() {
        for (name, text) in texts() {
            for reference in ["=\"/", "\"/page/", "fetch(\"", "fetch(`", "url("] {
                assert!(!text.contains(reference), "{name}: {reference}");
            }
        }
    }

    /// The policy's violations would only show in a browser.
    #[test]
    fn no_script_or_style_is_inline() {
        for html in [INDEX, DOCS] {
            for tag in html.split("<script").skip(1) {
                assert!(
                    tag.starts_with(" src=") || tag.starts_with(" type=\"module\" src="),
                    "{tag}"
                );
            }
            for forbidden in [
                "<style",
                " style=",
                " onclick=",
                " onload=",
                "javascript:",
                "://",
            ] {
                assert!(!html.contains(forbidden), "{forbidden}");
            }
        }
    }
}
