//! `/openapi.json`: the description of the API.

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;

use crate::config::serve_config::ServeConfig;
use crate::model_set::driver::ModelSet;
use crate::wire::constant_answer::ConstantAnswer;
use crate::wire::openapi::document;

pub async fn openapi(State(models): State<ModelSet>, headers: HeaderMap) -> Response {
    let server = models.parts();
    let answer = server.openapi.get_or_init(|| {
        let needs_key = !server.config.api_keys.is_empty();
        let document = document(&described(&models), needs_key);
        ConstantAnswer::new(document.to_string(), "application/json")
    });
    answer.respond(&headers)
}

/// Returns the configuration that the description shows. The bounds of several models differ, so none of them is shown.
fn described(models: &ModelSet) -> ServeConfig {
    let views = models.views();
    if let [view] = &*views
        && let Some(card) = &view.card
    {
        return ServeConfig::clone(&card.config);
    }
    let names = views.into_iter().flat_map(|view| view.setting.names);
    ServeConfig {
        served_model_names: names.collect(),
        ..ServeConfig::new("", u32::MAX, u32::MAX as usize, 1)
    }
}
