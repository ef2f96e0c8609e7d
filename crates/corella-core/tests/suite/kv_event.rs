//! KV events of a scheduler's cached blocks.

use corella_core::{
    Arithmetic, Batch, BatchOutput, BlockHasher, KvEvent, Namespace, Request, RequestId, Sample,
    Scheduler, SchedulerConfig, TokenId,
};

/// Nine tokens fill two pages of four. Their blocks are announced once the step that computes them has returned.
#[test]
fn blocks_are_told_in_order_when_they_are_computed() {
    let mut scheduler = Scheduler::new(SchedulerConfig::new(8, 4, 64)).unwrap();
    scheduler.watch_kv(7);
    assert_eq!(scheduler.poll_kv_event(), Some(KvEvent::Cleared));
    let tokens: Vec<_> = (0..9).collect();
    let request = Request::greedy(RequestId(1), tokens.clone(), 1);
    scheduler.add_requests(vec![request]).unwrap();
    let batch = scheduler.schedule(0).unwrap();
    assert_eq!(scheduler.poll_kv_event(), None);
    let sample = sample(90);
    scheduler.update_from_output(&drawn(&batch, sample));
    let namespace = Namespace::default();
    let hashes = BlockHasher::new(7).hashes(&namespace, &tokens, 4);
    let mut parent = None;
    for (page, tokens) in hashes.zip(tokens.chunks_exact(4)) {
        let stored = KvEvent::Stored {
            page,
            parent: parent.replace(page),
            tokens: tokens.into(),
            namespace: namespace.clone(),
        };
        assert_eq!(scheduler.poll_kv_event(), Some(stored));
    }
    assert_eq!(scheduler.poll_kv_event(), None);
}

fn sample(token: TokenId) -> Sample {
    Sample {
        token,
        logprobs: None,
    }
}

fn drawn(batch: &Batch, sample: Sample) -> BatchOutput {
    BatchOutput {
        step: batch.step,
        samples: vec![(batch.spans[0].slot, sample)],
        logprobs: Vec::new(),
        hidden_states: Vec::new(),
        undrawn: Vec::new(),
    }
}

/// No request of this node's clients can hit such blocks.
#[test]
fn blocks_of_another_arithmetic_are_not_told() {
    for (arithmetic, num_told) in [(None, 2), (Some(Arithmetic(3)), 0)] {
        // A subscription begins with the present blocks, and goes on with new ones.
        for watches_first in [true, false] {
            let mut scheduler = Scheduler::new(SchedulerConfig::new(8, 4, 64)).unwrap();
            if watches_first {
                scheduler.watch_kv(7);
            }
            let request = Request {
                namespace: Namespace {
                    arithmetic,
                    ..Namespace::default()
                },
                ..Request::greedy(RequestId(1), (0..9).collect(), 2)
            };
            scheduler.reserve(request, 1000).unwrap();
            assert!(scheduler.handle_kv_arrived(RequestId(1), 90));
            let batch = scheduler.schedule(0).unwrap();
            scheduler.update_from_output(&drawn(&batch, sample(91)));
            if !watches_first {
                scheduler.watch_kv(7);
            }
            scheduler.check_invariants();
            assert_eq!(scheduler.poll_kv_event(), Some(KvEvent::Cleared));
            let told = std::iter::from_fn(|| scheduler.poll_kv_event());
            assert_eq!(told.count(), num_told, "{arithmetic:?}, {watches_first}");
            scheduler.reset_prefix_cache().unwrap();
            scheduler.check_invariants();
        }
    }
}
