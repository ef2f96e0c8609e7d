//! Finds the model that a request names, and has it loaded if necessary.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use tokio::time::timeout;

use crate::call::account::Account;
use crate::call::call_context::CallContext;
use crate::call::sse::{SILENCE_PERIOD, event_stream};
use crate::config::keep_alive::KeepAlive;
use crate::endpoint::ollama;
use crate::http::waiting_stream::{StreamForm, WaitingStream};
use crate::model_set::driver::ModelSet;
use crate::model_set::model_loader::ModelId;
use crate::model_set::model_use::{ModelUse, UsedModel};
use crate::wire::api_error::ApiError;
use crate::wire::body_memory::MIDDLING_BODY_BYTES;
use crate::wire::list_page::decoded;
use crate::wire::request_body::RequestBody;
use crate::wire::shallow_value::{Emptiness, ShallowValue};

/// Gives a handler the model that the request's body names. The model stays loaded until the answer has ended.
pub async fn use_model(State(models): State<ModelSet>, request: Request, next: Next) -> Response {
    match choose(&models, request).await {
        Ok(Choice::Use(model_use, request)) => run(model_use, request, next).await,
        Ok(Choice::Answer(response)) => response,
        Ok(Choice::Wait(wait)) => wait.answer(models, next).await,
        Err(error) => error.into_response(),
    }
}

async fn run(model_use: ModelUse, mut request: Request, next: Next) -> Response {
    let model = UsedModel(model_use.state().clone());
    request.extensions_mut().insert(model);
    let mut response = next.run(request).await;
    // The layer that counts requests keeps the use until the body has ended.
    response.extensions_mut().insert(Arc::new(model_use));
    response
}

/// A request whose model may have to be loaded.
struct ModelWait {
    model: ModelId,
    keep_alive: Option<KeepAlive>,
    request: Request,
    /// `None` if the answer is no stream of events.
    form: Option<StreamForm>,
}

impl ModelWait {
    /// A stream begins after a while, even if the model is still being loaded.
    async fn answer(self, models: ModelSet, next: Next) -> Response {
        let Self {
            model,
            keep_alive,
            request,
            form,
        } = self;
        let mut wait = Box::pin(async move { models.use_model(model, keep_alive).await });
        let waited = match form {
            None => Ok(wait.as_mut().await),
            Some(_) => timeout(SILENCE_PERIOD, wait.as_mut()).await,
        };
        match (waited, form) {
            (Ok(Ok(model_use)), _) => run(model_use, request, next).await,
            (Ok(Err(error)), _) => error.into_response(),
            (Err(_), form) => {
                let waiting = async move {
                    match wait.await {
                        Ok(model_use) => run(model_use, request, next).await,
                        Err(error) => error.into_response(),
                    }
                };
                let form = form.unwrap_or(StreamForm::OpenAi);
                event_stream(Body::new(WaitingStream::new(form, Box::pin(waiting))))
            }
        }
    }
}

/// Gives a handler a loaded model without a use: the one that `model` in the query names, or the first.
pub async fn look_at_model(
    State(models): State<ModelSet>,
    context: CallContext,
    request: Request,
    next: Next,
) -> Response {
    // A client that is slow to send a body must not hold the model.
    let (mut parts, body) = request.into_parts();
    match models.parts().bodies.read(body).await {
        Ok(body) => body.leave_in(&mut parts.extensions),
        Err(error) => return error.into_response(),
    }
    let mut request = Request::from_parts(parts, Body::empty());
    let query = request.uri().query().unwrap_or_default();
    let mut pairs = query.split('&');
    let name = pairs.find_map(|pair| pair.strip_prefix("model="));
    let found = match name {
        Some(name) => match decoded(name) {
            Ok(name) => {
                models.find_or_add(&context, &name).await;
                models.check_key(&context, Some(&name))
            }
            Err(error) => Err(error),
        },
        None if models.has_several() => models.check_key(&context, None),
        // A question about the server's only model names none, and any key may ask it.
        None => Ok(ModelId(0)),
    };
    match found.and_then(|model| models.look_at(model)) {
        Ok(state) => {
            request.extensions_mut().insert(UsedModel(state));
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

enum Choice {
    Use(ModelUse, Request),
    Wait(ModelWait),
    /// The request is answered without the model.
    Answer(Response),
}

/// The fields that decide about the model. Handlers check them once more, with the others, and bound the number of
/// values. No bound is needed here, because nothing large is kept.
#[derive(Default, Deserialize)]
#[serde(expecting = "a JSON object")]
struct ChoiceFields {
    model: Option<ShallowValue>,
    /// Ollama's older name of `model`.
    name: Option<ShallowValue>,
    keep_alive: Option<ShallowValue>,
    stream: Option<ShallowValue>,
    prompt: Option<Emptiness>,
    messages: Option<Emptiness>,
}

/// Large bodies are parsed by a text thread, as everywhere.
async fn parse_fields(
    models: &ModelSet,
    body: RequestBody,
) -> Result<(ChoiceFields, RequestBody), ApiError> {
    let parse = |body: RequestBody| {
        let fields = match body.num_bytes() {
            0 => ChoiceFields::default(),
            _ => body.count()?,
        };
        Ok((fields, body))
    };
    match body.num_bytes() {
        0..MIDDLING_BODY_BYTES => parse(body),
        num_bytes => {
            let text_threads = &models.parts().text_threads;
            text_threads.run(num_bytes, move |_| parse(body)).await
        }
    }
}

async fn choose(models: &ModelSet, request: Request) -> Result<Choice, ApiError> {
    let is_ollama = request.uri().path().starts_with("/api/");
    let first = ModelId(0);
    // Ollama's requests say how long the model stays.
    let may_choose = models.has_several() || is_ollama && models.takes_keep_alive(first);
    // The error about an unknown name must not show a key the names that it may not use.
    let account = request.extensions().get::<Arc<Account>>();
    let has_own_names = account.is_some_and(|account| account.has_own_models());
    if !may_choose
        && !has_own_names
        && let Some(model_use) = models.try_use(first)
    {
        return Ok(Choice::Use(model_use, request));
    }
    if models.parts().is_draining() {
        return Err(ApiError::draining());
    }
    let (mut parts, body) = request.into_parts();
    let context = CallContext::from_request_parts(&mut parts, &()).await?;
    let body = models.parts().bodies.read(body).await?;
    let (fields, body) = parse_fields(models, body).await?;
    let mut name = fields.model.as_ref().and_then(ShallowValue::as_str);
    let mut keep_alive = None;
    if is_ollama {
        name = name.or(fields.name.as_ref().and_then(ShallowValue::as_str));
        if let Some(tagged) = name {
            name = Some(models.untagged(&context, tagged).await);
        }
        keep_alive = ollama::keep_alive(fields.keep_alive.as_ref())?;
    } else if let Some(name) = name {
        models.find_or_add(&context, name).await;
    }
    let model = match name {
        None if !may_choose => first,
        name => models.check_key(&context, name)?,
    };
    let path = parts.uri.path();
    if keep_alive == Some(KeepAlive::NONE)
        && models.takes_keep_alive(model)
        && let Some(answer) = ollama::unloaded_answer(
            path,
            name.unwrap_or_default(),
            fields.prompt,
            fields.messages,
        )
    {
        models.keep_alive(model, KeepAlive::NONE);
        return Ok(Choice::Answer(answer));
    }
    let form = match fields.stream {
        Some(ShallowValue::Bool(true)) => stream_form(path),
        _ => None,
    };
    body.leave_in(&mut parts.extensions);
    Ok(Choice::Wait(ModelWait {
        model,
        keep_alive,
        request: Request::from_parts(parts, Body::empty()),
        form,
    }))
}

/// Returns the form of an endpoint's streams of events, if it has any. Ollama's streams are none.
fn stream_form(path: &str) -> Option<StreamForm> {
    let path = path.strip_prefix("/v1").unwrap_or(path);
    match path {
        "/messages" => Some(StreamForm::Anthropic),
        "/chat/completions" | "/completions" | "/completion" | "/infill" | "/responses" => {
            Some(StreamForm::OpenAi)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_endpoints_with_streams_of_events_have_their_form() {
        for (path, is_stream) in [
            ("/v1/chat/completions", true),
            ("/chat/completions", true),
            ("/v1/completions", true),
            ("/completion", true),
            ("/infill", true),
            ("/v1/responses", true),
            ("/v1/embeddings", false),
            ("/v1/messages/count_tokens", false),
            ("/tokenize", false),
            ("/v1/rerank", false),
            ("/api/chat", false),
        ] {
            let form = stream_form(path);
            assert_eq!(
                matches!(form, Some(StreamForm::OpenAi)),
                is_stream,
                "{path}"
            );
            assert_eq!(form.is_some(), is_stream, "{path}");
        }
        assert!(matches!(
            stream_form("/v1/messages"),
            Some(StreamForm::Anthropic)
        ));
    }
}
