//! A request's use of a model, which stays loaded until the use ends.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::model_set::driver::ModelSet;
use crate::model_set::model_loader::ModelId;
use crate::state::server_state::ServerState;
use crate::wire::api_error::ApiError;

/// Ends when it is dropped. It lives as long as the body of the answer.
pub struct ModelUse {
    set: ModelSet,
    model: ModelId,
    /// `None` only while the use ends.
    state: Option<Arc<ServerState>>,
}

impl ModelUse {
    pub fn new(set: ModelSet, model: ModelId, state: Arc<ServerState>) -> Self {
        Self {
            set,
            model,
            state: Some(state),
        }
    }

    pub fn state(&self) -> &Arc<ServerState> {
        let state = self.state.as_ref();
        state.expect("the use has not ended")
    }
}

impl Drop for ModelUse {
    fn drop(&mut self) {
        // From the end of the last use on, the model may be unloaded, which waits for all holders of the state.
        self.state = None;
        self.set.end_use(self.model);
    }
}

/// The model that answers a request. A layer before the handler has found it.
#[derive(Clone)]
pub struct UsedModel(pub Arc<ServerState>);

impl<S: Sync> FromRequestParts<S> for UsedModel {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let model = parts.extensions.get::<Self>().cloned();
        model.ok_or_else(|| ApiError::engine("The request has no model."))
    }
}
