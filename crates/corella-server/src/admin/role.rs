//! `/role`: this server's role among the nodes of a cluster, and its changes.

use axum::response::Response;
use serde::Deserialize;

use crate::model_set::model_use::UsedModel;
use crate::state::role_control::{RoleControl, RoleError};
use crate::state::server_state::ServerState;
use crate::wire::api_error::{ApiError, required};
use crate::wire::json_response::json_response;
use crate::wire::request_body::SentBody;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct RoleFields {
    role: Option<String>,
}

pub async fn role(UsedModel(state): UsedModel) -> Result<Response, ApiError> {
    Ok(json_response(&roles(&state)?.status()))
}

/// Answers when the role has changed.
pub async fn change_role(
    UsedModel(state): UsedModel,
    body: SentBody,
) -> Result<Response, ApiError> {
    let body = state.parts.bodies.read(body).await?;
    let fields: RoleFields = body.parse()?;
    let role = required("role", fields.role)?;
    let roles = roles(&state)?;
    roles.change(&role).await.map_err(|error| match error {
        RoleError::Unknown => {
            ApiError::invalid("role", r#"must be "unified", "prefill" or "decode""#)
        }
        RoleError::Conflict(reason) => ApiError::conflict(reason),
    })?;
    Ok(json_response(&roles.status()))
}

fn roles(state: &ServerState) -> Result<&dyn RoleControl, ApiError> {
    let roles = state.roles.as_deref();
    roles.ok_or_else(|| ApiError::conflict("This server serves alone, and has no other role."))
}
