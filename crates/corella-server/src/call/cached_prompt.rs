//! `Prefer: if-available`: the caller wants the answer only from a server that has the prompt in its cache. Otherwise
//! llm-d's coordinator has another server compute the prompt first.

use axum::http::HeaderMap;
use axum::http::header::HeaderName;
use corella_core::{Namespace, TokenId};
use corella_engine::Engine;

use crate::text::sampling_fields::GenerationParams;
use crate::wire::api_error::ApiError;

const PREFER: HeaderName = HeaderName::from_static("prefer");
const IF_AVAILABLE: &str = "if-available";

/// Whether one of the preferences is `if-available`. RFC 7240 separates preferences by commas, and each from its
/// parameters by a semicolon.
pub fn prefers_cached(headers: &HeaderMap) -> bool {
    let values = headers.get_all(PREFER).iter();
    let texts = values.filter_map(|value| value.to_str().ok());
    let names = texts.flat_map(|text| text.split(','));
    let mut names = names.map(|preference| preference.split(';').next().unwrap_or_default());
    names.any(|name| name.trim().eq_ignore_ascii_case(IF_AVAILABLE))
}

/// Refuses a prompt if one of its whole blocks is neither in memory nor in a tier behind it. The block of the last token
/// does not count, because that token is computed for its logits.
pub async fn check_cached(
    engine: &Engine,
    prompt: &[TokenId],
    params: &GenerationParams,
) -> Result<(), ApiError> {
    let adapter = params.adapter.as_ref();
    let namespace = Namespace {
        lora: adapter.map(|adapter| adapter.name().clone()),
        ..params.namespace.clone()
    };
    let Some((_, tokens)) = prompt.split_last() else {
        return Ok(());
    };
    let exchange = engine.block_exchange();
    let hashes = exchange.hashes(&namespace, tokens);
    let list = exchange.list(&namespace, tokens, &hashes);
    let num_blocks = list.hashes.len() as u32;
    if num_blocks == 0 {
        return Ok(());
    }
    let Some(num_here) = exchange.look_up(list.clone()).await else {
        // The engine has stopped, and says so when the call is submitted.
        return Ok(());
    };
    let num_found = num_here.max(exchange.num_on_disk(&list, num_here));
    match num_found >= num_blocks {
        true => Ok(()),
        false => Err(ApiError::prompt_not_cached(
            num_found * exchange.page_size(),
            prompt.len(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preferences_are_separated_by_commas_and_have_parameters() {
        for (value, is_meant) in [
            ("if-available", true),
            ("If-Available", true),
            ("respond-async, if-available; wait=10", true),
            ("if-available;a=\"b\"", true),
            ("not-if-available", false),
            ("wait=if-available", false),
            ("", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.append(PREFER, "return=minimal".parse().unwrap());
            headers.append(PREFER, value.parse().unwrap());
            assert_eq!(prefers_cached(&headers), is_meant, "{value}");
        }
        assert!(!prefers_cached(&HeaderMap::new()));
    }
}
