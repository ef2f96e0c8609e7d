//! The check of the outputs about a request's prompt.

use std::collections::BTreeMap;

use corella_core::{FinishReason, RequestId, RequestOutput};

use crate::check::verdict::{Checker, Verdict, ensure};
use crate::executor::{lone_hidden_state, lone_scores};
use crate::workload::Answer;

/// A request for the log-probabilities of its prompt gets the log-probabilities of a lone run, each once, in order and
/// before its first token. Other requests get none. The same holds for hidden states.
#[derive(Default)]
pub struct PromptCheck {
    to_come: BTreeMap<RequestId, Vec<(u32, u32)>>,
    hidden_states: BTreeMap<RequestId, f32>,
}

impl Checker for PromptCheck {
    fn rule(&self) -> &'static str {
        "log-probabilities and hidden states of a prompt come once and are right"
    }

    fn queued(&mut self, answer: &Answer) {
        let mut scores = lone_scores(&answer.request);
        scores.reverse();
        self.to_come.insert(answer.request.id, scores);
        let state = lone_hidden_state(&answer.request);
        self.hidden_states
            .extend(state.map(|state| (answer.request.id, state)));
    }

    fn told(&mut self, output: &RequestOutput, _: u64) -> Verdict {
        let id = output.request;
        let to_come = self.to_come.entry(id).or_default();
        for told in &output.prompt_logprobs {
            let (told, should) = ((told.token, told.logprobs.rank), to_come.pop());
            ensure(Some(told) == should, || {
                format!("request {id} is told {told:?}, alone it is {should:?}")
            })?;
        }
        let is_cut_short = matches!(
            output.finish,
            Some(FinishReason::Aborted | FinishReason::Error(_))
        );
        if let Some(told) = &output.hidden_state {
            let should = self.hidden_states.remove(&id);
            ensure(should.is_some_and(|should| told[..] == [should]), || {
                format!("request {id} is told the hidden state {told:?}, alone it is {should:?}")
            })?;
        }
        let has_all = output.finish.is_none() || !self.hidden_states.contains_key(&id);
        ensure(is_cut_short || has_all, || {
            format!("request {id} ends without its hidden state")
        })?;
        let wants_more = output.sample.is_none() && output.finish.is_none();
        ensure(is_cut_short || wants_more || to_come.is_empty(), || {
            format!("request {id} goes on without {} scores", to_come.len())
        })
    }
}
