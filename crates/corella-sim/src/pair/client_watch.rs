//! The check of clients' events: the tokens of the lone run, one end, and no long silence.

use std::collections::BTreeMap;

use corella_core::session::{AbortReason, ClientEvent, SessionFinish};
use corella_core::{AdmissionError, FinishReason, NodeId, RequestError, SessionId};

use crate::check::verdict::{Verdict, ensure};
use crate::executor::UNDEFINED;
use crate::pair::pair_workload::{PairCall, PairWorkload};

pub struct ClientWatch<'a> {
    calls: &'a [PairCall],
    falls_back: bool,
    resumes_locally: bool,
    max_silence_us: u64,
    clients: BTreeMap<SessionId, Client>,
}

#[derive(Debug)]
struct Client {
    call: usize,
    num_seen: usize,
    last_event_us: u64,
    cancelled: bool,
    /// Whether the engine of the prefill node has accepted the request.
    is_accepted: bool,
    /// Whether a step that computed the request on the prefill node has failed.
    has_failed: bool,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Ended,
    /// The prefill node died.
    Lost,
}

impl<'a> ClientWatch<'a> {
    pub fn new(workload: &'a PairWorkload) -> Self {
        Self {
            calls: &workload.calls,
            falls_back: workload.sessions.falls_back,
            resumes_locally: workload.sessions.resumes_locally,
            max_silence_us: max_silence_us(workload),
            clients: BTreeMap::new(),
        }
    }

    pub fn submitted(&mut self, session: SessionId, call: usize, now_us: u64) {
        let client = Client {
            call,
            num_seen: 0,
            last_event_us: now_us,
            cancelled: false,
            is_accepted: false,
            has_failed: false,
            state: State::Waiting,
        };
        self.clients.insert(session, client);
    }

    pub fn cancelled(&mut self, session: SessionId) {
        if let Some(client) = self.clients.get_mut(&session) {
            client.cancelled = true;
        }
    }

    pub fn accepted(&mut self, session: SessionId) {
        if let Some(client) = self.clients.get_mut(&session) {
            client.is_accepted = true;
        }
    }

    pub fn failed(&mut self, session: SessionId) {
        if let Some(client) = self.clients.get_mut(&session) {
            client.has_failed = true;
        }
    }

    pub fn node_lost(&mut self, node: NodeId) -> u64 {
        let mut num_lost = 0;
        for client in self.clients.values_mut() {
            if client.state == State::Waiting && self.calls[client.call].node == node {
                client.state = State::Lost;
                num_lost += 1;
            }
        }
        num_lost
    }

    pub fn is_waiting(&self, session: SessionId) -> bool {
        let client = self.clients.get(&session);
        client.is_some_and(|client| client.state == State::Waiting)
    }

    /// Rules 32, 38 and 58: an accepted request meets no queue limit again, and its tokens are those of the lone run,
    /// each once and in order.
    pub fn told(&mut self, session: SessionId, event: &ClientEvent, now_us: u64) -> Verdict {
        let client = self.clients.get_mut(&session);
        let client = client.ok_or_else(|| format!("no client waits for session {session}"))?;
        ensure(client.state == State::Waiting, || {
            format!(
                "session {session} is {:?} and is told {event:?}",
                client.state
            )
        })?;
        let call = &self.calls[client.call];
        if let Some(sample) = &event.sample {
            let should = call.output.get(client.num_seen).copied();
            let token = (sample.token != UNDEFINED).then_some(sample.token);
            ensure(token.is_some() && token == should, || {
                let at = client.num_seen;
                format!("token {at} of session {session} is {token:?}, alone it is {should:?}")
            })?;
            client.num_seen += 1;
        }
        let counts_are_right = event.num_output_tokens as usize == client.num_seen
            && event.num_prompt_tokens as usize == call.request.prompt.len();
        ensure(counts_are_right, || {
            format!("{event:?} after {} tokens", client.num_seen)
        })?;
        client.last_event_us = now_us;
        let Some(finish) = &event.finish else {
            return Ok(());
        };
        client.state = State::Ended;
        let is_whole = client.num_seen == call.output.len();
        let has_reason = match finish {
            SessionFinish::Finished(FinishReason::Aborted) => client.cancelled,
            SessionFinish::Finished(FinishReason::Error(RequestError::StepFailed(_))) => {
                client.has_failed
            }
            SessionFinish::Finished(FinishReason::Error(_)) => false,
            SessionFinish::Finished(finish) => *finish == call.finish && is_whole,
            SessionFinish::DeadlinePassed => call.deadline_us == Some(now_us),
            SessionFinish::DecodeLost(reason) => {
                !self.resumes_locally && client.num_seen > 0 && *reason != AbortReason::Finished
            }
            SessionFinish::Refused(AdmissionError::NoDecodeNode) => {
                !self.falls_back && call.goes_remote && client.num_seen == 0
            }
            SessionFinish::Refused(AdmissionError::ObjectiveMissed(missed)) => {
                let objective_us = call.request.objectives.tpot_us;
                !self.falls_back
                    && client.num_seen == 0
                    && objective_us == Some(missed.objective_us)
                    && missed.expected_us > missed.objective_us
            }
            SessionFinish::Refused(
                AdmissionError::QueueFull { .. } | AdmissionError::QueuedTokensFull { .. },
            ) => !client.is_accepted && client.num_seen == 0,
            SessionFinish::Refused(_) => false,
        };
        ensure(has_reason, || {
            let (num_seen, num_tokens) = (client.num_seen, call.output.len());
            format!(
                "session {session} ends with {finish:?} after {num_seen} tokens of {num_tokens}"
            )
        })
    }

    pub fn check_silence(&self, now_us: u64) -> Verdict {
        let waiting = self.clients.iter();
        let mut waiting = waiting.filter(|(_, client)| client.state == State::Waiting);
        let silent =
            waiting.find(|(_, client)| now_us > client.last_event_us + self.max_silence_us);
        ensure(silent.is_none(), || {
            format!("a client hears nothing for too long: {silent:?}")
        })
    }

    pub fn check_ended(&self) -> Verdict {
        let mut clients = self.clients.iter();
        let waiting = clients.find(|(_, client)| client.state == State::Waiting);
        ensure(waiting.is_none(), || {
            format!("a client waits for ever: {waiting:?}")
        })
    }
}

/// Returns the longest time between two events of a client: all work in sequence, and each fault that one request can
/// meet.
fn max_silence_us(workload: &PairWorkload) -> u64 {
    let num_tokens: u64 = workload
        .calls
        .iter()
        .map(|call| call.request.prompt.len() as u64 + call.output.len() as u64)
        .sum();
    let nodes = workload.nodes.iter();
    let token_us = nodes.map(|node| node.per_step_us + node.per_token_us).max();
    let sessions = &workload.sessions;
    let attempt_us = sessions.allocate_budget_us + sessions.lost_after_us;
    // A choice may wait for its sibling's rows before it loads rows itself.
    let load_us = sessions.load_timeout_us(60);
    // Requests wait for blocks that their node loads.
    let blocks_us = if workload.fleet.fetches { 1_000_000 } else { 0 };
    2 * num_tokens * token_us.unwrap_or(0) + 2 * attempt_us + 2 * load_us + blocks_us
}
