//! `/role`: this server's role among the nodes of a cluster, and its changes.

use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use crate::api_error::ApiError;
use crate::call::json_response;
use crate::cluster_status::ClusterStatus;
use crate::request_body::RequestBody;
use crate::server_state::ServerState;

/// Knows the roles of this node, and changes them while the server serves.
pub trait RoleControl: Send + Sync {
    fn status(&self) -> RoleStatus;

    /// Returns this node's status and its peers'; `None` when it serves alone.
    fn cluster(&self) -> Option<ClusterStatus>;

    /// Returns why this node can serve no request in its role, if so.
    fn obstacle(&self) -> Option<&'static str>;

    /// Begins to change at once. The future ends when the role has changed; dropping it does not
    /// stop the change.
    fn change(&self, role: &str) -> RoleChange;
}

pub type RoleChange = Pin<Box<dyn Future<Output = Result<(), RoleError>> + Send>>;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RoleStatus {
    pub role: &'static str,
    /// The next role, while the present one finishes its obligations.
    pub changing_to: Option<&'static str>,
    /// The source from which other nodes load this one's cached blocks, in the form of `kv_transfer_params`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_blocks: Option<BlockSite>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockSite {
    pub host: String,
    pub port: u16,
    /// A socket inside the host that `machine` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoleError {
    /// The role does not exist.
    Unknown,
    /// Why the server cannot have the role now, in a sentence.
    Conflict(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct RoleFields {
    role: Option<String>,
}

pub async fn role(State(state): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    Ok(json_response(&roles(&state)?.status()))
}

/// Answers when the role has changed.
pub async fn change_role(
    State(state): State<Arc<ServerState>>,
    body: Body,
) -> Result<Response, ApiError> {
    let body = RequestBody::read(body, &state).await?;
    let fields: RoleFields = body.parse()?;
    let role = { fields.role }.ok_or_else(|| ApiError::invalid("role", "is required"))?;
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
