//! Submissions of callers.

use std::sync::Arc;

use corella_core::{
    LatencyObjectives, Namespace, Request, RequestId, Retention, SamplingParams, StoppingCriteria,
    TokenId,
};

use crate::adapter::LoadedAdapter;
use crate::token_constraint::TokenConstraint;
use crate::trace::TraceScope;

/// A generation. Each choice becomes a request of its own.
#[derive(Clone, Debug)]
pub struct Submission {
    pub prompt: Vec<TokenId>,
    /// Tokens that were drawn on another node: they count as output, and are not emitted again.
    pub output: Vec<TokenId>,
    /// Another node reads the KV of the prompt: [`Engine::subscribe_kv_facts`](crate::Engine::subscribe_kv_facts)
    /// reports the rows.
    pub exports_kv: bool,
    /// The parameters of the first choice. The other choices differ only in `choice`, which counts up from the value
    /// for the first choice.
    pub sampling: SamplingParams,
    pub num_choices: u32,
    pub stopping: StoppingCriteria,
    /// Urgency under the policy `priority`: a smaller number is more urgent.
    pub priority: i32,
    pub objectives: LatencyObjectives,
    pub namespace: Namespace,
    /// The beginnings of the prompt that the cache retains, the shortest first.
    pub retentions: Vec<Retention>,
    /// The constraint on every choice's answer.
    pub constraint: Option<Arc<dyn TokenConstraint>>,
    /// The adapter for the tokens, if any.
    pub adapter: Option<Arc<LoadedAdapter>>,
    /// The name of the submission in the logs of every node that serves it.
    pub trace_id: Option<Arc<str>>,
    /// The parent span of the generation, if the submission is traced.
    pub trace: Option<TraceScope>,
}

impl Submission {
    /// Generates the most likely tokens after a prompt, at most `max_tokens`.
    pub fn new(prompt: Vec<TokenId>, max_tokens: u32) -> Self {
        Request::greedy(RequestId(0), prompt, max_tokens).into()
    }

    /// The request of the first choice.
    pub fn into_request(mut self, id: RequestId, arrival_us: u64) -> Request {
        if let Some(adapter) = &self.adapter {
            self.namespace.lora = Some(Arc::clone(adapter.name()));
        }
        Request {
            id,
            prompt: self.prompt,
            output: self.output,
            exports_kv: self.exports_kv,
            is_masked: self.constraint.is_some(),
            sampling: self.sampling,
            stopping: self.stopping,
            priority: self.priority,
            arrival_us,
            objectives: self.objectives,
            namespace: self.namespace,
            retentions: self.retentions,
        }
    }
}

/// A submission of one choice without a constraint and without an adapter. The request's id and time of arrival are
/// dropped, because an engine assigns them.
impl From<Request> for Submission {
    fn from(request: Request) -> Self {
        Self {
            prompt: request.prompt,
            output: request.output,
            exports_kv: request.exports_kv,
            sampling: request.sampling,
            num_choices: 1,
            stopping: request.stopping,
            priority: request.priority,
            objectives: request.objectives,
            namespace: request.namespace,
            retentions: request.retentions,
            constraint: None,
            adapter: None,
            trace_id: None,
            trace: None,
        }
    }
}
