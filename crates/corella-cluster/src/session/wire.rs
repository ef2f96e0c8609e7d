//! Converts the messages of the session machines to and from the wire.
//!
//! Every field is optional on the wire. A missing or wrong field is an error that names the field and ends the session.
//! Unknown fields are skipped, so that minor versions may add fields.

use std::sync::Arc;

use corella_core::session as core;
use corella_core::{
    FinishReason, Incarnation, LoadReport, Logprobs, MissedObjective, Namespace, ObjectiveKind,
    RequestError, Sample, SamplingParams, SessionId, StoppingCriteria, TokenRules,
};

use crate::transport::PeerAddress;

mod schema;

pub use schema::{
    Abort, AbortKind, Allocate, Allocated, Body, DrawnToken, Empty, Envelope, Finish, FinishKind,
    FirstToken, Hello, Key, KvShape, NodeLoad, RefusalKind, Refused, Rules, Sampling, Stopping,
    TokenList, Tokens,
};

/// The addresses from which other nodes load a node's rows.
#[derive(Clone, Debug, Default)]
pub struct KvAddress {
    /// HOST:PORT, for nodes on any host.
    pub address: String,
    /// The abstract name of a socket, for nodes on the same host. Empty without such a socket.
    pub socket: String,
    /// The name of the host.
    pub host: String,
}

impl KvAddress {
    /// Returns the address for a node on `host`, if that node can reach one. If `host` is `None`, rows are not loaded
    /// inside a host.
    pub fn reach(&self, host: Option<&str>) -> Option<PeerAddress> {
        let is_near = host.is_some_and(|host| host == self.host);
        if is_near && !self.socket.is_empty() {
            return Some(PeerAddress::Unix(self.socket.clone()));
        }
        // The peer must not make this node connect to a socket of this host.
        self.address
            .parse()
            .ok()
            .filter(|address| !matches!(address, PeerAddress::Unix(_)))
    }
}

impl From<&Hello> for KvAddress {
    fn from(hello: &Hello) -> Self {
        Self {
            address: hello.kv_address.clone(),
            socket: hello.kv_socket.clone(),
            host: hello.host.clone(),
        }
    }
}

/// The limit of a constraint's source. A request with a longer source stays on the prefill node.
pub const MAX_CONSTRAINT_BYTES: usize = 1 << 20;

/// The field that makes a message invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is missing or wrong")]
pub struct WireError(pub &'static str);

impl From<LoadReport> for NodeLoad {
    fn from(report: LoadReport) -> Self {
        Self {
            num_free_pages: report.num_free_pages,
            num_running: report.num_running,
            num_waiting: report.num_waiting,
            num_reservations: report.num_reservations,
            is_draining: report.is_draining,
            prefill_us: report.prefill_us,
            tpot_us: report.tpot_us,
            max_prompt_tokens: report.max_prompt_tokens,
        }
    }
}

impl From<NodeLoad> for LoadReport {
    fn from(load: NodeLoad) -> Self {
        Self {
            num_free_pages: load.num_free_pages,
            num_running: load.num_running,
            num_waiting: load.num_waiting,
            num_reservations: load.num_reservations,
            is_draining: load.is_draining,
            prefill_us: load.prefill_us,
            tpot_us: load.tpot_us,
            max_prompt_tokens: load.max_prompt_tokens,
        }
    }
}

impl From<core::SessionKey> for Key {
    fn from(key: core::SessionKey) -> Self {
        Self {
            session: key.session.0.to_be_bytes().into(),
            attempt: key.attempt,
            prefill_incarnation: key.prefill_incarnation.0,
            decode_incarnation: key.decode_incarnation.0,
        }
    }
}

impl TryFrom<Key> for core::SessionKey {
    type Error = WireError;

    fn try_from(key: Key) -> Result<Self, WireError> {
        Ok(Self {
            session: SessionId(number(&key.session, "the session's id")?),
            attempt: key.attempt,
            prefill_incarnation: Incarnation(key.prefill_incarnation),
            decode_incarnation: Incarnation(key.decode_incarnation),
        })
    }
}

/// Encodes a node's facts and the source of its rows.
pub fn hello(hello: &core::Hello, kv: &KvAddress) -> Hello {
    let shape = hello.kv_shape;
    Hello {
        instance: hello.instance.to_string(),
        incarnation: hello.incarnation.0,
        protocol_major: hello.protocol_major,
        protocol_minor: hello.protocol_minor,
        model_fingerprint: hello.model_fingerprint.to_be_bytes().into(),
        tokenizer_digest: hello.tokenizer_digest.to_be_bytes().into(),
        kv_shape: Some(KvShape {
            num_layers: shape.num_layers,
            num_kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            num_ranks: shape.num_ranks,
            window_digest: shape.window_digest,
        }),
        kv_format: hello.kv_format.to_string(),
        page_size: hello.page_size,
        element_order: hello.element_order.to_string(),
        weight_format: hello.weight_format.to_string(),
        instruction_set: hello.instruction_set.to_string(),
        kv_address: kv.address.clone(),
        load: None,
        kv_socket: kv.socket.clone(),
        host: kv.host.clone(),
        group: hello.group.to_string(),
    }
}

impl TryFrom<Hello> for core::Hello {
    type Error = WireError;

    fn try_from(hello: Hello) -> Result<Self, WireError> {
        let shape = hello.kv_shape.ok_or(WireError("the KV shape"))?;
        Ok(Self {
            instance: hello.instance.into(),
            incarnation: Incarnation(hello.incarnation),
            protocol_major: hello.protocol_major,
            protocol_minor: hello.protocol_minor,
            model_fingerprint: number(&hello.model_fingerprint, "the model's fingerprint")?,
            tokenizer_digest: number(&hello.tokenizer_digest, "the tokenizer's digest")?,
            kv_shape: core::KvShape {
                num_layers: shape.num_layers,
                num_kv_heads: shape.num_kv_heads,
                head_dim: shape.head_dim,
                num_ranks: shape.num_ranks,
                window_digest: shape.window_digest,
            },
            kv_format: hello.kv_format.into(),
            page_size: hello.page_size,
            element_order: hello.element_order.into(),
            weight_format: hello.weight_format.into(),
            instruction_set: hello.instruction_set.into(),
            group: hello.group.into(),
        })
    }
}

/// Encodes a message to a decode node, which loads rows from `kv`.
pub fn to_decode(message: core::ToDecode, kv: &KvAddress) -> Body {
    match message {
        core::ToDecode::Hello(facts) => Body::Hello(hello(&facts, kv)),
        core::ToDecode::Allocate(allocate) => Body::Allocate((*allocate).into()),
        core::ToDecode::FirstToken(first) => Body::FirstToken(FirstToken {
            sample: Some(first.sample.into()),
            num_cached_tokens: first.num_cached_tokens,
        }),
        core::ToDecode::Compute => Body::Compute(Empty {}),
        core::ToDecode::Heartbeat => Body::Heartbeat(Empty {}),
        core::ToDecode::Abort(reason) => Body::Abort(reason.into()),
    }
}

/// Decodes a message of a prefill node.
pub fn from_prefill(body: Body) -> Result<core::ToDecode, WireError> {
    Ok(match body {
        Body::Hello(hello) => core::ToDecode::Hello(Box::new(hello.try_into()?)),
        Body::Allocate(allocate) => core::ToDecode::Allocate(Box::new(allocate.try_into()?)),
        Body::FirstToken(first) => core::ToDecode::FirstToken(Box::new(core::FirstToken {
            sample: first
                .sample
                .ok_or(WireError("the first token"))?
                .try_into()?,
            num_cached_tokens: first.num_cached_tokens,
        })),
        Body::Compute(_) => core::ToDecode::Compute,
        Body::Heartbeat(_) => core::ToDecode::Heartbeat,
        Body::Abort(abort) => core::ToDecode::Abort(abort.try_into()?),
        _ => return Err(WireError("a prefill node's message")),
    })
}

/// Encodes a message to a prefill node. A refusal includes this node's facts, `own`.
pub fn to_prefill(message: core::ToPrefill, own: &core::Hello) -> Body {
    match message {
        core::ToPrefill::Hello(facts) => Body::Hello(hello(&facts, &KvAddress::default())),
        core::ToPrefill::Allocated(allocated) => Body::Allocated(Allocated {
            num_cached_rows: allocated.num_cached_rows,
            granted_as: allocated.granted_as,
        }),
        core::ToPrefill::Refused(refusal) => {
            let (expected_us, objective_us) = match refusal {
                core::Refusal::TooSlow(missed) => (missed.expected_us, missed.objective_us),
                _ => (0, 0),
            };
            let kind = match refusal {
                core::Refusal::Exhausted => RefusalKind::Exhausted,
                core::Refusal::Never => RefusalKind::Never,
                core::Refusal::TooSlow(_) => RefusalKind::TooSlow,
                core::Refusal::Unsuitable => RefusalKind::Unsuitable,
                core::Refusal::Incompatible(_) => RefusalKind::Incompatible,
                core::Refusal::StaleIncarnation => RefusalKind::StaleIncarnation,
                core::Refusal::Ended => RefusalKind::Ended,
                core::Refusal::Draining => RefusalKind::Draining,
            };
            Body::Refused(Refused {
                kind: kind.into(),
                hello: (kind == RefusalKind::Incompatible)
                    .then(|| hello(own, &KvAddress::default())),
                expected_us,
                objective_us,
            })
        }
        core::ToPrefill::LoadDone => Body::LoadDone(Empty {}),
        core::ToPrefill::Tokens(tokens) => Body::Tokens(Tokens {
            first_position: tokens.first_position,
            samples: tokens.samples.into_iter().map(Into::into).collect(),
        }),
        core::ToPrefill::Finish(finish) => Body::Finish(finish.into()),
        core::ToPrefill::Heartbeat => Body::Heartbeat(Empty {}),
        core::ToPrefill::Abort(reason) => Body::Abort(reason.into()),
    }
}

/// Decodes a message from a decode node. `own` has this node's facts.
pub fn from_decode(body: Body, own: &core::Hello) -> Result<core::ToPrefill, WireError> {
    Ok(match body {
        Body::Hello(hello) => core::ToPrefill::Hello(Box::new(hello.try_into()?)),
        Body::Allocated(allocated) => core::ToPrefill::Allocated(core::Allocated {
            num_cached_rows: allocated.num_cached_rows,
            granted_as: allocated.granted_as,
        }),
        Body::Refused(refused) => core::ToPrefill::Refused(match refused.kind() {
            RefusalKind::Unknown => return Err(WireError("the kind of a refusal")),
            RefusalKind::Exhausted => core::Refusal::Exhausted,
            RefusalKind::Never => core::Refusal::Never,
            RefusalKind::TooSlow => core::Refusal::TooSlow(MissedObjective {
                kind: ObjectiveKind::Tpot,
                expected_us: refused.expected_us,
                objective_us: refused.objective_us,
            }),
            RefusalKind::Unsuitable => core::Refusal::Unsuitable,
            RefusalKind::Incompatible => {
                let theirs = refused.hello.ok_or(WireError("what is incompatible"))?;
                match own.check(&theirs.try_into()?) {
                    Err(mismatch) => core::Refusal::Incompatible(mismatch),
                    Ok(()) => return Err(WireError("what is incompatible")),
                }
            }
            RefusalKind::StaleIncarnation => core::Refusal::StaleIncarnation,
            RefusalKind::Ended => core::Refusal::Ended,
            RefusalKind::Draining => core::Refusal::Draining,
        }),
        Body::LoadDone(_) => core::ToPrefill::LoadDone,
        Body::Tokens(tokens) => core::ToPrefill::Tokens(core::Tokens {
            first_position: tokens.first_position,
            samples: tokens
                .samples
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
        }),
        Body::Finish(finish) => core::ToPrefill::Finish(finish.try_into()?),
        Body::Heartbeat(_) => core::ToPrefill::Heartbeat,
        Body::Abort(abort) => core::ToPrefill::Abort(abort.try_into()?),
        Body::Allocate(_) | Body::FirstToken(_) | Body::Compute(_) => {
            return Err(WireError("a decode node's message"));
        }
    })
}

impl From<core::Allocate> for Allocate {
    fn from(allocate: core::Allocate) -> Self {
        let core::Allocate {
            prompt,
            output,
            sampling,
            stopping,
            priority,
            namespace,
            remaining_us,
            max_tpot_us,
            siblings,
            adapter,
            constraint,
            trace_id,
        } = allocate;
        let text = |text: Option<Arc<str>>| text.map(|text| text.to_string());
        Self {
            prompt,
            output,
            sampling: Some(Sampling {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                repetition_penalty: sampling.repetition_penalty,
                seed: sampling.seed,
                choice: sampling.choice,
                logprobs: sampling.logprobs,
                rules: sampling.rules.as_deref().map(Rules::from),
            }),
            stopping: Some(Stopping {
                max_tokens: stopping.max_tokens,
                min_tokens: stopping.min_tokens,
                end_token_ids: stopping.end_token_ids,
                stop_token_ids: stopping.stop_token_ids,
            }),
            priority,
            cache_salt: text(namespace.cache_salt),
            remaining_us,
            max_tpot_us,
            siblings: siblings.map(|session| session.0.to_be_bytes().into()),
            adapter: adapter.map(|fingerprint| fingerprint.to_be_bytes().into()),
            constraint: text(constraint),
            trace_id: text(trace_id),
        }
    }
}

impl TryFrom<Allocate> for core::Allocate {
    type Error = WireError;

    fn try_from(allocate: Allocate) -> Result<Self, WireError> {
        let sampling = allocate.sampling.ok_or(WireError("how to sample"))?;
        let stopping = allocate.stopping.ok_or(WireError("when to stop"))?;
        let rules = sampling.rules.map(TokenRules::try_from);
        // Servers limit trace ids to 128 bytes.
        let trace_id = allocate.trace_id.filter(|id| id.len() <= 128);
        let adapter = allocate
            .adapter
            .map(|fingerprint| number(&fingerprint, "the adapter's fingerprint"));
        let constraint = allocate.constraint;
        if constraint
            .as_ref()
            .is_some_and(|source| source.len() > MAX_CONSTRAINT_BYTES)
        {
            return Err(WireError("the size of the constraint"));
        }
        let siblings = allocate
            .siblings
            .map(|session| number(&session, "the siblings' id"));
        Ok(Self {
            prompt: allocate.prompt,
            output: allocate.output,
            sampling: SamplingParams {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                repetition_penalty: sampling.repetition_penalty,
                seed: sampling.seed,
                choice: sampling.choice,
                logprobs: sampling.logprobs,
                rules: rules.transpose()?.map(Arc::new),
                // A request for log-probabilities of the prompt has no session.
                prompt_logprobs: None,
                pooling: None,
                second_text: None,
            },
            stopping: StoppingCriteria {
                max_tokens: stopping.max_tokens,
                min_tokens: stopping.min_tokens,
                end_token_ids: stopping.end_token_ids,
                stop_token_ids: stopping.stop_token_ids,
            },
            priority: allocate.priority,
            namespace: Namespace {
                cache_salt: allocate.cache_salt.map(Into::into),
                ..Namespace::default()
            },
            remaining_us: allocate.remaining_us,
            max_tpot_us: allocate.max_tpot_us,
            siblings: siblings.transpose()?.map(SessionId),
            adapter: adapter.transpose()?,
            constraint: constraint.map(Into::into),
            trace_id: trace_id.map(Into::into),
        })
    }
}

impl From<&TokenRules> for Rules {
    fn from(rules: &TokenRules) -> Self {
        let list = |tokens: &[u32]| TokenList {
            tokens: tokens.to_vec(),
        };
        let (biased_tokens, biases) = rules.bias().iter().copied().unzip();
        Self {
            biased_tokens,
            biases,
            allowed: rules.allowed().map(list),
            banned: rules.banned().iter().map(|banned| list(banned)).collect(),
        }
    }
}

impl TryFrom<Rules> for TokenRules {
    type Error = WireError;

    fn try_from(rules: Rules) -> Result<Self, WireError> {
        if rules.biased_tokens.len() != rules.biases.len() {
            return Err(WireError("the number of biases"));
        }
        let bias = rules.biased_tokens.into_iter().zip(rules.biases).collect();
        let banned = rules.banned.into_iter().map(|banned| banned.tokens);
        let made = Self::new().with_bias(bias).with_banned(banned.collect());
        Ok(match rules.allowed {
            Some(allowed) => made.with_allowed(allowed.tokens),
            None => made,
        })
    }
}

impl From<Sample> for DrawnToken {
    fn from(sample: Sample) -> Self {
        let logprobs = sample.logprobs;
        let top = logprobs.iter().flat_map(|logprobs| &logprobs.top);
        let (top_tokens, top_logprobs) = top.copied().unzip();
        Self {
            token: sample.token,
            logprob: logprobs.as_ref().map(|logprobs| logprobs.token),
            rank: logprobs.as_ref().map_or(0, |logprobs| logprobs.rank),
            top_tokens,
            top_logprobs,
        }
    }
}

impl TryFrom<DrawnToken> for Sample {
    type Error = WireError;

    fn try_from(drawn: DrawnToken) -> Result<Self, WireError> {
        if drawn.top_tokens.len() != drawn.top_logprobs.len() {
            return Err(WireError("the number of log-probabilities"));
        }
        let top = drawn.top_tokens.into_iter().zip(drawn.top_logprobs);
        Ok(Self {
            token: drawn.token,
            logprobs: drawn.logprob.map(|token| {
                Box::new(Logprobs {
                    token,
                    rank: drawn.rank,
                    top: top.collect(),
                })
            }),
        })
    }
}

impl From<core::Finish> for Finish {
    fn from(finish: core::Finish) -> Self {
        let kind = match &finish.reason {
            FinishReason::EndToken => FinishKind::EndToken,
            FinishReason::StopToken => FinishKind::StopToken,
            FinishReason::Length => FinishKind::Length,
            FinishReason::Aborted => FinishKind::Aborted,
            FinishReason::Error(_) => FinishKind::Error,
        };
        Self {
            kind: kind.into(),
            num_output_tokens: finish.num_output_tokens,
            error: match finish.reason {
                FinishReason::Error(error) => error.to_string(),
                _ => String::new(),
            },
        }
    }
}

impl TryFrom<Finish> for core::Finish {
    type Error = WireError;

    fn try_from(finish: Finish) -> Result<Self, WireError> {
        Ok(Self {
            reason: match finish.kind() {
                FinishKind::Unknown => return Err(WireError("how a request has ended")),
                FinishKind::EndToken => FinishReason::EndToken,
                FinishKind::StopToken => FinishReason::StopToken,
                FinishKind::Length => FinishReason::Length,
                FinishKind::Aborted => FinishReason::Aborted,
                FinishKind::Error => {
                    let reason = finish.error.into_boxed_str();
                    FinishReason::Error(RequestError::Elsewhere(reason))
                }
            },
            num_output_tokens: finish.num_output_tokens,
        })
    }
}

impl From<core::AbortReason> for Abort {
    fn from(reason: core::AbortReason) -> Self {
        let mut error = String::new();
        let kind = match reason {
            core::AbortReason::Cancelled => AbortKind::Cancelled,
            core::AbortReason::Finished => AbortKind::Finished,
            core::AbortReason::DeadlinePassed => AbortKind::DeadlinePassed,
            core::AbortReason::PeerLost => AbortKind::PeerLost,
            core::AbortReason::AllocateTimedOut => AbortKind::AllocateTimedOut,
            core::AbortReason::FirstTokenTimedOut => AbortKind::FirstTokenTimedOut,
            core::AbortReason::LoadFailed => AbortKind::LoadFailed,
            core::AbortReason::LoadTimedOut => AbortKind::LoadTimedOut,
            core::AbortReason::HoldExpired => AbortKind::HoldExpired,
            core::AbortReason::OutOfPages => AbortKind::OutOfPages,
            core::AbortReason::DecodeFailed(reason) => {
                error = reason.into_string();
                AbortKind::DecodeFailed
            }
            core::AbortReason::ProtocolViolated => AbortKind::ProtocolViolated,
        };
        Self {
            kind: kind.into(),
            error,
        }
    }
}

impl TryFrom<Abort> for core::AbortReason {
    type Error = WireError;

    fn try_from(abort: Abort) -> Result<Self, WireError> {
        Ok(match abort.kind() {
            AbortKind::Unknown => return Err(WireError("why a session was aborted")),
            AbortKind::Cancelled => Self::Cancelled,
            AbortKind::Finished => Self::Finished,
            AbortKind::DeadlinePassed => Self::DeadlinePassed,
            AbortKind::PeerLost => Self::PeerLost,
            AbortKind::AllocateTimedOut => Self::AllocateTimedOut,
            AbortKind::FirstTokenTimedOut => Self::FirstTokenTimedOut,
            AbortKind::LoadFailed => Self::LoadFailed,
            AbortKind::LoadTimedOut => Self::LoadTimedOut,
            AbortKind::HoldExpired => Self::HoldExpired,
            AbortKind::OutOfPages => Self::OutOfPages,
            AbortKind::DecodeFailed => Self::DecodeFailed(abort.error.into_boxed_str()),
            AbortKind::ProtocolViolated => Self::ProtocolViolated,
        })
    }
}

fn number(bytes: &[u8], what: &'static str) -> Result<u128, WireError> {
    let bytes = bytes.try_into().map_err(|_| WireError(what))?;
    Ok(u128::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests;
