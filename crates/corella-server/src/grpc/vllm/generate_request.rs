//! A request of `vllm.Inference` as a call.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use serde_json::Value;

use super::generate_answer::AnswerForm;
use super::inference_message::{
    CandidateTokens, DecodingParameters, GenerateRequest, Prompt, ResponseOptions, Select,
    StoppingCriteria, StructuredOutput, TokenIds,
};
use crate::endpoint::generating_endpoint::Call;
use crate::text::prompt;
use crate::text::prompt_tokens::{check_token_ids, tokenize_prompt};
use crate::text::sampling_fields::{
    EndpointFields, GenerationParams, SamplingFields, check_logprobs,
};
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_limit::MAX_BAD_WORDS;

/// The fields of other endpoints, and their places in this request.
const PLACES: [(&str, &str); 21] = [
    ("n", "sampling.num_sequences"),
    ("top_k", "sampling.top_k"),
    ("top_p", "sampling.top_p"),
    ("min_p", "sampling.min_p"),
    ("presence_penalty", "decoding.presence_penalty"),
    ("frequency_penalty", "decoding.frequency_penalty"),
    ("repetition_penalty", "decoding.repetition_penalty"),
    ("logit_bias", "decoding.logit_bias"),
    ("allowed_token_ids", "decoding.allowed_token_ids"),
    ("guided_json", "decoding.json"),
    ("guided_json_object", "decoding.json_object"),
    ("guided_regex", "decoding.regex"),
    ("guided_choice", "decoding.choice"),
    ("guided_grammar", "decoding.grammar"),
    ("max_tokens", "stopping.max_new_tokens"),
    ("min_tokens", "stopping.min_new_tokens"),
    ("stop", "stopping.stop_strings"),
    ("stop_token_ids", "stopping.stop_token_ids"),
    ("cache_salt", "kv.cache_salt"),
    ("kv_transfer_params", "kv.kv_transfer_params"),
    ("prompt_logprobs", "response.prompt_candidates"),
];

/// Gives an error's field its place in the request.
pub fn in_place(error: ApiError) -> ApiError {
    let field = error.param().unwrap_or_default();
    let name = field.split(['.', '[']).next().unwrap_or_default();
    match PLACES.iter().find(|(known, _)| *known == name) {
        Some((from, to)) => error.renamed(from, to),
        None => error,
    }
}

/// Checks and tokenises a request.
pub fn call_of(
    mut request: GenerateRequest,
    stream: bool,
    served: &ServedModel,
    caller: &Caller,
) -> Result<Call<AnswerForm>, ApiError> {
    refuse_unserved(&request)?;
    let model = model_name(&request, served)?;
    let prompt = match required("prompt", request.prompt.take())? {
        Prompt::Text(text) => prompt::Prompt::Text(text),
        Prompt::TokenIds(TokenIds { ids }) => prompt::Prompt::Tokens(ids),
    };
    let response = request.response.take().unwrap_or_default();
    let mut form = answer_form(&response, served)?;
    let banned = match &mut request.decoding {
        Some(decoding) => std::mem::take(&mut decoding.bad_words_token_ids),
        None => Vec::new(),
    };
    let own = EndpointFields {
        logprobs: form.output_candidates,
        ..EndpointFields::default()
    };
    let mut fields = sampling_fields(request)?;
    fields.prompt_logprobs = form.prompt_candidates;
    fields.skip_special_tokens = response.skip_special_tokens;
    let mut params = fields.validate(served, caller, own)?;
    ban(banned, &mut params, served)?;
    params.set_text_constraint(served, caller)?;
    form.end_token_ids
        .clone_from(&params.stopping.end_token_ids);
    params.stream = stream;
    params.each_token = true;
    params.returns_token_ids = true;
    if !stream && params.num_choices > 1 {
        let reason = "must be 1 in Generate; GenerateStream serves more";
        return Err(ApiError::invalid("n", reason));
    }
    let prompt = tokenize_prompt(served, prompt, false, true, caller)?;
    Ok(Call {
        prompts: vec![prompt],
        params,
        model,
        format: form,
    })
}

/// Refuses fields whose neglect would change the answer.
fn refuse_unserved(request: &GenerateRequest) -> Result<(), ApiError> {
    let refuse = |is_set: bool, field: &str| match is_set {
        true => Err(ApiError::unsupported(field, "leave it out")),
        false => Ok(()),
    };
    refuse(!request.media.is_empty(), "media")?;
    let cut = request.truncate_prompt_tokens > 0;
    refuse(cut, "truncate_prompt_tokens")?;
    let kv = request.kv.as_ref();
    let encoder = kv.and_then(|kv| kv.ec_transfer_params.as_ref());
    let has_encoder = encoder.is_some_and(|params| !params.fields.is_empty());
    refuse(has_encoder, "kv.ec_transfer_params")?;
    let stopping = request.stopping.as_ref();
    let budget = stopping.and_then(|stopping| stopping.thinking_token_budget);
    let has_budget = budget.is_some_and(|budget| budget != -1);
    refuse(has_budget, "stopping.thinking_token_budget")?;
    let decoding = request.decoding.as_ref();
    let output = decoding.and_then(|decoding| decoding.structured_output.as_ref());
    let is_tag = matches!(output, Some(StructuredOutput::StructuralTag(_)));
    refuse(is_tag, "decoding.structural_tag")
}

fn model_name(request: &GenerateRequest, served: &ServedModel) -> Result<String, ApiError> {
    let given = |name: &'_ str| (!name.is_empty()).then(|| name.to_owned());
    // Both names are checked, and the adapter's is the one that counts.
    let model = served.check_name(given(&request.model).as_deref())?;
    match given(&request.lora_name) {
        None => Ok(model),
        Some(adapter) if served.adapters.get(&adapter).is_some() => Ok(adapter),
        Some(adapter) => {
            let names = &served.config.served_model_names;
            Err(ApiError::model_not_found(&adapter, names).with_param("lora_name"))
        }
    }
}

fn answer_form(response: &ResponseOptions, served: &ServedModel) -> Result<AnswerForm, ApiError> {
    let candidates = |field: &str, is_asked: bool, candidates: &Option<CandidateTokens>| {
        let select = candidates
            .as_ref()
            .and_then(|candidates| candidates.select.as_ref());
        match select {
            None | Some(Select::All(false)) => Ok(is_asked.then_some(0)),
            Some(Select::TopN(number)) => check_logprobs(field, *number, &served.config).map(Some),
            Some(Select::All(true) | Select::TokenIds(_)) => {
                Err(ApiError::unsupported(field, "use top_n"))
            }
        }
    };
    Ok(AnswerForm {
        prompt_token_ids: response.prompt_token_ids,
        prompt_candidates: candidates(
            "response.prompt_candidates",
            response.prompt_logprobs,
            &response.prompt_candidates,
        )?,
        output_text: response.output_text.unwrap_or(true),
        output_token_ids: response.output_token_ids,
        output_candidates: candidates(
            "response.output_candidates",
            response.output_logprobs,
            &response.output_candidates,
        )?,
        end_token_ids: Vec::new(),
    })
}

fn sampling_fields(request: GenerateRequest) -> Result<SamplingFields, ApiError> {
    let sampling = request.sampling.unwrap_or_default();
    let mut fields = SamplingFields {
        // Greedy without the field, as in vLLM.
        temperature: Some(f64::from(request.temperature.unwrap_or(0.0))),
        n: Some(sampling.num_sequences.max(1)),
        top_k: sampling.top_k.map(i64::from),
        top_p: sampling.top_p.map(f64::from),
        min_p: sampling.min_p.map(f64::from),
        seed: sampling.seed,
        priority: Some(request.priority),
        ..SamplingFields::default()
    };
    set_decoding(&mut fields, request.decoding.unwrap_or_default());
    set_stopping(&mut fields, request.stopping.unwrap_or_default());
    if let Some(kv) = request.kv {
        let params = kv
            .kv_transfer_params
            .filter(|params| !params.fields.is_empty());
        fields.kv_transfer_params = params.map(Into::into);
        fields.cache_salt = match kv.bypass_prefix_cache {
            true => Some(own_salt()),
            false => Some(kv.cache_salt).filter(|salt| !salt.is_empty()),
        };
    }
    Ok(fields)
}

/// A salt of no other call, which finds nothing in the prefix cache. A disk or another node may have blocks of an earlier
/// process, so the salt has a random part.
fn own_salt() -> String {
    static RUN: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("\0bypass {:x} {count}", *RUN)
}

fn set_decoding(fields: &mut SamplingFields, decoding: DecodingParameters) {
    fields.presence_penalty = Some(decoding.presence_penalty.into());
    fields.frequency_penalty = Some(decoding.frequency_penalty.into());
    fields.repetition_penalty = Some(match decoding.repetition_penalty {
        0.0 => 1.0,
        penalty => penalty.into(),
    });
    let bias = decoding.logit_bias.into_iter();
    let bias = bias.map(|(token, bias)| (token.to_string(), bias.into()));
    fields.logit_bias = Some(bias.collect());
    let allowed = decoding.allowed_token_ids;
    fields.allowed_token_ids = Some(allowed).filter(|allowed| !allowed.is_empty());
    match decoding.structured_output {
        None | Some(StructuredOutput::StructuralTag(_)) => {}
        Some(StructuredOutput::Json(schema)) => fields.guided_json = Some(Value::String(schema)),
        Some(StructuredOutput::Regex(regex)) => fields.guided_regex = Some(regex),
        Some(StructuredOutput::Choice(texts)) => fields.guided_choice = Some(texts.choices),
        Some(StructuredOutput::Grammar(grammar)) => fields.guided_grammar = Some(grammar),
        Some(StructuredOutput::JsonObject(is_on)) => fields.guided_json_object = Some(is_on),
    }
}

fn set_stopping(fields: &mut SamplingFields, stopping: StoppingCriteria) {
    // vLLM's comment promises 20 for 0, but its server leaves the limit to the context, as gateways expect.
    fields.set_max_tokens(Some(stopping.max_new_tokens).filter(|&limit| limit > 0));
    fields.min_tokens = Some(stopping.min_new_tokens);
    fields.set_stop(Some(stopping.stop_strings).filter(|stop| !stop.is_empty()));
    fields.stop_token_ids = Some(stopping.stop_token_ids);
    fields.include_stop_str_in_output = Some(stopping.include_stop_strings);
    fields.ignore_eos = Some(stopping.ignore_eos);
}

/// Bans sequences of tokens, beside the rules of other fields.
fn ban(
    banned: Vec<TokenIds>,
    params: &mut GenerationParams,
    served: &ServedModel,
) -> Result<(), ApiError> {
    const FIELD: &str = "decoding.bad_words_token_ids";
    if banned.is_empty() {
        return Ok(());
    }
    if banned.len() > MAX_BAD_WORDS {
        let reason = format!("at most {MAX_BAD_WORDS} are allowed");
        return Err(ApiError::invalid(FIELD, reason));
    }
    for (at, TokenIds { ids }) in banned.iter().enumerate() {
        let field = format!("{FIELD}[{at}]");
        if ids.is_empty() {
            return Err(ApiError::invalid(field, "must have at least one token"));
        }
        check_token_ids(&field, ids, served.config.vocab_size)?;
    }
    let rules = params.sampling.rules.take().and_then(Arc::into_inner);
    let rules = rules.unwrap_or_default();
    let banned = banned.into_iter().map(|banned| banned.ids).collect();
    params.sampling.rules = Some(Arc::new(rules.with_banned(banned)));
    Ok(())
}
