//! Every message is unchanged after the wire. Errors name missing fields.

use corella_core::session::{
    AbortReason, Finish as CoreFinish, Mismatch, Refusal, ToDecode, ToPrefill,
};
use prost::Message;

use super::*;

fn facts() -> core::Hello {
    core::Hello {
        instance: "node-1".into(),
        incarnation: Incarnation(u64::MAX - 3),
        protocol_major: 1,
        protocol_minor: 2,
        model_fingerprint: u128::MAX - 5,
        tokenizer_digest: 7,
        kv_shape: core::KvShape {
            num_layers: 28,
            num_kv_heads: 8,
            head_dim: 128,
            num_ranks: 1,
            window_digest: 77,
        },
        kv_format: "bf16".into(),
        page_size: 16,
        element_order: "plain".into(),
        weight_format: "int4".into(),
        instruction_set: "avx2".into(),
        group: "long".into(),
    }
}

fn sample(token: u32, has_logprobs: bool) -> Sample {
    Sample {
        token,
        logprobs: has_logprobs.then(|| {
            Box::new(Logprobs {
                token: -0.25,
                rank: 7,
                top: vec![(token, -0.25), (3, -1.5)],
            })
        }),
    }
}

/// Encodes and decodes a message.
fn over_the_wire(body: Body) -> Body {
    let envelope = Envelope {
        key: None,
        body: Some(body),
    };
    let bytes = envelope.encode_to_vec();
    let envelope = Envelope::decode(&bytes[..]).expect("what was encoded can be decoded");
    envelope.body.expect("a body was sent")
}

#[test]
fn a_prefill_nodes_messages_arrive_as_they_were() {
    let allocate = core::Allocate {
        prompt: vec![0, 1, u32::MAX],
        output: vec![u32::MAX, 2],
        sampling: SamplingParams {
            temperature: 0.7,
            top_k: 5,
            top_p: 0.9,
            min_p: 0.05,
            presence_penalty: -1.0,
            frequency_penalty: 0.5,
            repetition_penalty: 1.25,
            seed: u64::MAX,
            choice: 3,
            logprobs: Some(0),
            rules: Some(Arc::new(
                TokenRules::new()
                    .with_bias(vec![(3, -100.0), (u32::MAX, 0.5)])
                    .with_allowed(Vec::new())
                    .with_banned(vec![vec![1], vec![2, 3, 2]]),
            )),
            prompt_logprobs: None,
            pooling: None,
            second_text: None,
        },
        stopping: StoppingCriteria {
            max_tokens: Some(9),
            min_tokens: 2,
            end_token_ids: vec![1],
            stop_token_ids: vec![4, 5],
        },
        priority: -7,
        namespace: Namespace {
            cache_salt: Some("".into()),
            ..Namespace::default()
        },
        remaining_us: Some(0),
        max_tpot_us: Some(7),
        siblings: Some(SessionId(1 << 100)),
        adapter: Some(1 << 127),
        constraint: Some("{\"Regex\":\"a+\"}".into()),
        trace_id: Some("trace-7".into()),
    };
    let messages = [
        ToDecode::Hello(Box::new(facts())),
        ToDecode::Allocate(Box::new(allocate.clone())),
        ToDecode::Allocate(Box::new(core::Allocate {
            namespace: Namespace::default(),
            remaining_us: None,
            max_tpot_us: None,
            siblings: None,
            adapter: None,
            constraint: None,
            trace_id: None,
            stopping: StoppingCriteria::default(),
            sampling: SamplingParams::GREEDY,
            ..allocate
        })),
        ToDecode::FirstToken(Box::new(core::FirstToken {
            sample: sample(11, true),
            num_cached_tokens: 48,
        })),
        ToDecode::Compute,
        ToDecode::Heartbeat,
        ToDecode::Abort(AbortReason::HoldExpired),
    ];
    for message in messages {
        let body = over_the_wire(to_decode(message.clone(), &KvAddress::default()));
        assert_eq!(from_prefill(body), Ok(message));
    }
}

#[test]
fn a_decode_nodes_messages_arrive_as_they_were() {
    let ends = [
        FinishReason::EndToken,
        FinishReason::StopToken,
        FinishReason::Length,
        FinishReason::Aborted,
        FinishReason::Error(RequestError::Elsewhere("no numbers".into())),
    ];
    let finishes = ends.map(|reason| {
        ToPrefill::Finish(CoreFinish {
            reason,
            num_output_tokens: 5,
        })
    });
    let refusals = [
        Refusal::Exhausted,
        Refusal::Never,
        Refusal::TooSlow(MissedObjective {
            kind: ObjectiveKind::Tpot,
            expected_us: 14_000,
            objective_us: 1_000,
        }),
        Refusal::Unsuitable,
        Refusal::StaleIncarnation,
        Refusal::Ended,
        Refusal::Draining,
    ];
    let aborts = [
        AbortReason::Cancelled,
        AbortReason::Finished,
        AbortReason::DeadlinePassed,
        AbortReason::PeerLost,
        AbortReason::AllocateTimedOut,
        AbortReason::FirstTokenTimedOut,
        AbortReason::LoadFailed,
        AbortReason::LoadTimedOut,
        AbortReason::HoldExpired,
        AbortReason::OutOfPages,
        AbortReason::DecodeFailed("why".into()),
        AbortReason::ProtocolViolated,
    ];
    let others = [
        ToPrefill::Hello(Box::new(facts())),
        ToPrefill::Allocated(core::Allocated {
            num_cached_rows: 32,
            granted_as: Some(1 << 40),
        }),
        ToPrefill::LoadDone,
        ToPrefill::Tokens(core::Tokens {
            first_position: 1,
            samples: vec![sample(1, true), sample(2, false)],
        }),
        ToPrefill::Heartbeat,
    ];
    let messages = finishes
        .into_iter()
        .chain(refusals.map(ToPrefill::Refused))
        .chain(aborts.map(ToPrefill::Abort))
        .chain(others);
    for message in messages {
        let body = over_the_wire(to_prefill(message.clone(), &facts()));
        assert_eq!(from_decode(body, &facts()), Ok(message));
    }
}

/// Each node reports its facts, and sees the difference from its own side.
#[test]
fn what_is_incompatible_is_seen_from_the_receivers_side() {
    let own = facts();
    let other = core::Hello {
        model_fingerprint: 1,
        ..facts()
    };
    let seen_there = Mismatch::Model(1, own.model_fingerprint);
    let message = ToPrefill::Refused(Refusal::Incompatible(seen_there));
    let body = over_the_wire(to_prefill(message, &other));
    let seen_here = Mismatch::Model(own.model_fingerprint, 1);
    let expected = ToPrefill::Refused(Refusal::Incompatible(seen_here));
    assert_eq!(from_decode(body.clone(), &own), Ok(expected));
    // A refusal is not believed if the facts do not differ.
    assert!(from_decode(body, &other).is_err());
}

#[test]
fn what_a_peer_leaves_out_is_named() {
    let missing = |body| from_prefill(body).unwrap_err().to_string();
    let allocate = Body::Allocate(Allocate::default());
    assert_eq!(missing(allocate), "how to sample is missing or wrong");
    let allocate = Body::Allocate(Allocate {
        sampling: Some(Sampling {
            rules: Some(Rules {
                biased_tokens: vec![1, 2],
                biases: vec![0.5],
                ..Rules::default()
            }),
            ..Sampling::default()
        }),
        stopping: Some(Stopping::default()),
        ..Allocate::default()
    });
    assert_eq!(
        missing(allocate),
        "the number of biases is missing or wrong"
    );
    let first = Body::FirstToken(FirstToken::default());
    assert_eq!(missing(first), "the first token is missing or wrong");
    let hello = Body::Hello(Hello::default());
    assert_eq!(missing(hello), "the KV shape is missing or wrong");
    let abort = Body::Abort(Abort::default());
    assert_eq!(
        missing(abort),
        "why a session was aborted is missing or wrong"
    );
    let tokens = Body::Tokens(Tokens::default());
    assert_eq!(
        missing(tokens),
        "a prefill node's message is missing or wrong"
    );
    let key = Key {
        session: vec![0; 15],
        ..Key::default()
    };
    assert!(core::SessionKey::try_from(key).is_err());
}
