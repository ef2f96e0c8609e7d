//! Storing the whole cache.

use crossbeam_channel::{Receiver, TryRecvError};

use super::*;

/// The length of a file's beginning, and of a page of the mock with its header.
const LABEL_BYTES: u64 = 4096;
const SLOT_BYTES: u64 = 1024;

fn prompt(first: TokenId) -> Vec<TokenId> {
    (first..first + 26).collect()
}

impl Bench {
    fn store_all(&mut self) -> Receiver<()> {
        let (reply, answer) = bounded(1);
        self.disk.store_all(reply);
        answer
    }

    /// Stores paths until none is left.
    fn store_paths(&mut self) {
        loop {
            self.disk.store_next(&mut self.scheduler, self.now_us);
            if self.disk.path.is_none() {
                return;
            }
            self.run_until("a part is stored", |bench| {
                bench.disk.path.as_ref().is_none_or(|path| !path.is_busy)
            });
        }
    }

    /// The number of a prompt's blocks on the disk.
    fn num_stored(&self, prompt: Vec<TokenId>) -> u32 {
        let limits = self.scheduler.config();
        let (hasher, page_size) = (limits.block_hasher, limits.page_size);
        let list = BlockList::new(Namespace::default(), prompt, &hasher, page_size);
        self.disk.tier.num_usable(&list, 0, limits)
    }
}

#[test]
fn the_prompt_of_a_cancelled_request_is_stored_when_its_step_has_returned() {
    let mut bench = Bench::new("cancelled");
    let request = bench.request_of(prompt(0));
    let id = request.id;
    bench.scheduler.add_requests(vec![request]).unwrap();
    let batch = bench.scheduler.schedule(bench.now_us).unwrap();
    assert!(bench.scheduler.abort_request(id));
    let answer = bench.store_all();
    bench.store_paths();
    assert_eq!(answer.try_recv(), Err(TryRecvError::Empty));
    let sample = Sample {
        token: 1,
        logprobs: None,
    };
    bench.scheduler.update_from_output(&BatchOutput {
        step: batch.step,
        samples: vec![(batch.spans[0].slot, sample)],
        logprobs: Vec::new(),
        hidden_states: Vec::new(),
        undrawn: Vec::new(),
    });
    bench.store_paths();
    assert_eq!(answer.try_recv(), Ok(()));
    assert_eq!(u64::from(bench.num_stored(prompt(0))), NUM_BLOCKS);
}

/// The file has room for one of three prompts, and has the oldest of them.
#[test]
fn a_full_file_keeps_the_prompt_of_the_latest_use() {
    let max_bytes = LABEL_BYTES + NUM_BLOCKS * SLOT_BYTES;
    let mut bench = Bench::with_tier("full", 64, max_bytes, |_, _| {});
    for first in [0, 0, 30, 60] {
        let request = bench.request_of(prompt(first));
        bench.answer(request, 1_000);
        bench.store_paths();
    }
    let stored = |bench: &Bench| [0, 30, 60].map(|first| bench.num_stored(prompt(first)));
    assert_eq!(stored(&bench), [NUM_BLOCKS as u32, 0, 0]);
    let answer = bench.store_all();
    bench.store_paths();
    assert_eq!(answer.try_recv(), Err(TryRecvError::Disconnected));
    assert_eq!(stored(&bench), [0, 0, NUM_BLOCKS as u32]);
}

/// The file has room for one prompt. The latest prompt was stored at its second use, and another has taken its slots.
#[test]
fn a_prompt_whose_slots_another_has_taken_is_stored_again() {
    let max_bytes = LABEL_BYTES + NUM_BLOCKS * SLOT_BYTES;
    let mut bench = Bench::with_tier("taken", 64, max_bytes, |_, _| {});
    for first in [0, 0, 30, 30, 0] {
        let request = bench.request_of(prompt(first));
        bench.answer(request, 1_000);
        bench.store_paths();
    }
    assert_eq!(u64::from(bench.num_stored(prompt(30))), NUM_BLOCKS);
    let _answer = bench.store_all();
    bench.store_paths();
    assert_eq!(u64::from(bench.num_stored(prompt(0))), NUM_BLOCKS);
}

#[test]
fn a_path_that_was_begun_before_and_is_given_up_is_stored_with_all_others() {
    let mut bench = Bench::new("begun");
    bench.compute();
    bench.compute();
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    let answer = bench.store_all();
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    bench.now_us += HOLD_US;
    bench.scheduler.note_time(bench.now_us);
    assert!(bench.scheduler.poll_ended_hold().is_some());
    bench.run_until("the path is given up", |bench| bench.disk.path.is_none());
    assert_eq!(bench.disk.tier.stats().num_dropped, 1);
    bench.store_paths();
    assert_eq!(answer.try_recv(), Ok(()));
    assert_eq!(bench.disk.tier.stats().num_stored, NUM_BLOCKS);
}
