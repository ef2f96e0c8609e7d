//! The page at `/`: the chat and the picture of the engine, from files that are part of the binary.

use std::sync::{Arc, OnceLock};

use axum::extract::{Path, State};
use axum::http::header::{CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;

use crate::api_error::ApiError;
use crate::constant_answer::ConstantAnswer;
use crate::server_state::ServerState;

/// A file of the page.
struct Asset {
    name: &'static str,
    bytes: &'static [u8],
    /// Made for the first request.
    answer: OnceLock<ConstantAnswer>,
}

macro_rules! assets {
    ($($name:literal),* $(,)?) => {
        [$(Asset {
            name: $name,
            bytes: include_bytes!(concat!("../page/", $name)),
            answer: OnceLock::new(),
        }),*]
    };
}

const INDEX: &str = include_str!("../page/index.html");

static ASSETS: [Asset; 31] = assets![
    "answer_reader.js",
    "api.js",
    "base.css",
    "chart.js",
    "chat.css",
    "chat.js",
    "chat_list.js",
    "chat_store.js",
    "clipboard.js",
    "conversation.js",
    "engine.css",
    "engine.js",
    "engine_stream.js",
    "failure.js",
    "format.js",
    "icon.svg",
    "latency_chart.js",
    "main.js",
    "markdown.js",
    "markdown_inline.js",
    "message_view.js",
    "node_list.js",
    "page_map.js",
    "progress.js",
    "request_table.js",
    "sampling.js",
    "settings.js",
    "step_chart.js",
    "storage.js",
    "theme.js",
    "token_list.js",
];

/// The browser loads files from this server only, and runs nothing that a model writes.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page. Its files are relative to it, or below the root path: a browser may use that path with or without a final
/// slash, and a proxy may remove it.
pub async fn page(State(state): State<Arc<ServerState>>, headers: HeaderMap) -> Response {
    let answer = state.page.get_or_init(|| {
        let html = match &*state.config.root_path {
            "" => INDEX.to_owned(),
            root_path => INDEX.replace("=\"page/", &format!("=\"{root_path}/page/")),
        };
        ConstantAnswer::new(html, "text/html; charset=utf-8")
    });
    secured(answer.respond(&headers))
}

/// A file of the page.
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
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts() -> impl Iterator<Item = (&'static str, &'static str)> {
        let text = |asset: &'static Asset| {
            let text = std::str::from_utf8(asset.bytes).expect("files are text");
            (asset.name, text)
        };
        ASSETS.iter().map(text).chain([("index.html", INDEX)])
    }

    /// Every file that another one names is served, and every served file is named.
    #[test]
    fn files_and_references_agree() {
        let mut named: Vec<&str> = { texts() }
            .flat_map(|(_, text)| {
                let of_the_page = text.split("=\"page/").skip(1);
                let of_a_script = text.split("from \"./").skip(1);
                of_the_page.chain(of_a_script)
            })
            .filter_map(|rest| rest.split('"').next())
            .collect();
        named.sort_unstable();
        named.dedup();
        let served: Vec<_> = ASSETS.iter().map(|asset| asset.name).collect();
        assert_eq!(named, served);
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
        for tag in INDEX.split("<script").skip(1) {
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
            assert!(!INDEX.contains(forbidden), "{forbidden}");
        }
    }
}
