//! A request that holds a conversation.

use serde::de::DeserializeOwned;

use crate::text::chat_fields::ChatFields;
use crate::text::sampling_fields::SamplingFields;
use crate::text::served_model::ServedModel;
use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::Endpoint;
use crate::wire::request_body::RequestBody;

/// The fields of such a request, parsed. Unknown fields have been refused.
pub struct ConversationFields<F> {
    pub sampling: SamplingFields,
    /// The endpoint's own fields.
    pub fields: F,
    pub check: FieldCheck,
    /// The caller's name of the model.
    pub model: String,
}

impl<F: DeserializeOwned> ConversationFields<F> {
    pub fn parse(
        served: &ServedModel,
        body: &RequestBody,
        endpoint: Endpoint,
    ) -> Result<Self, ApiError> {
        ChatFields::check_num_messages(body, served)?;
        let sampling: SamplingFields = body.parse()?;
        let fields = body.parse()?;
        let check = served.field_check(endpoint);
        body.check_fields(check)?;
        let model = served.check_name(sampling.model.as_deref())?;
        Ok(Self {
            sampling,
            fields,
            check,
            model,
        })
    }
}
