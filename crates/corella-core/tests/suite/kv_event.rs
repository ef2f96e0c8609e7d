//! KV events of a scheduler's cached blocks.

use corella_core::{
    BatchOutput, BlockHasher, KvEvent, Namespace, Request, RequestId, Sample, Scheduler,
    SchedulerConfig,
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
    let sample = Sample {
        token: 90,
        logprobs: None,
    };
    scheduler.update_from_output(&BatchOutput {
        step: batch.step,
        samples: vec![(batch.spans[0].slot, sample)],
        logprobs: Vec::new(),
        hidden_states: Vec::new(),
        undrawn: Vec::new(),
    });
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
