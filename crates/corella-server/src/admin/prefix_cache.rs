//! `POST /reset_prefix_cache`: forgets cached prefixes.

use axum::body::Body;
use axum::extract::State;
use corella_engine::ResetError;
use serde::Deserialize;

use crate::model_set::driver::ModelSet;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;

/// The body may be missing.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct ResetFields {
    /// Whether blocks outside of the KV cache are erased as well.
    tiers: Option<bool>,
}

/// Resets the caches of all loaded models, one after the other. Answers 409 at the first model whose requests hold
/// cached pages.
pub async fn reset_prefix_cache(
    State(models): State<ModelSet>,
    body: Body,
) -> Result<(), ApiError> {
    let body = models.parts().bodies.read(body).await?;
    let fields: ResetFields = match body.num_bytes() {
        0 => ResetFields::default(),
        _ => body.parse()?,
    };
    let with_tiers = fields.tiers == Some(true);
    let mut done = Vec::new();
    for model in models.ids() {
        // A model that waits for its turn may be unloaded.
        let Ok(state) = models.look_at(model) else {
            continue;
        };
        let name = models.name(model);
        let what = what_was_reset(&done, &name);
        let engine = state.engine.clone();
        let reset = move |_: &ServedModel, _: &Caller| {
            let reset = match with_tiers {
                true => engine.reset_prefix_cache_and_tiers(),
                false => engine.reset_prefix_cache(),
            };
            reset.map_err(|error| match error {
                ResetError::Busy => ApiError::conflict(format!("{what}: {error}.")),
                ResetError::Lost(reason) => ApiError::not_ready(&reason),
            })
        };
        state.run_blocking(0, reset).await?;
        done.push(name);
    }
    Ok(())
}

/// The first part of the error about a model, after the caches of `done` were reset.
fn what_was_reset(done: &[String], name: &str) -> String {
    match done {
        [] => "Nothing was reset".to_owned(),
        done => format!("Only `{}` was reset. `{name}` was not", done.join("`, `")),
    }
}
