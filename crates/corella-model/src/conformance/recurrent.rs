//! Conformance rules about kept recurrent states, for requests with a common prefix.

use corella_core::SnapshotId;

use super::driver::{Driver, Script, Sequence};
use super::{SamplingParams, Suite, assert_same};
use crate::PageForm;

/// The place of the state that a rule keeps.
const PLACE: u32 = 7;

impl Suite<'_> {
    /// A request continues from the state after another request's tokens, also after the other one has ended.
    pub fn kept_states_equal_computed_ones(&self) {
        let page = self.page_size;
        for num_pages in [1, 2, 3, 64_usize.div_ceil(page), 150 / page] {
            let num_cached = num_pages * page;
            let (leader, follower) = self.leader_and_follower(num_cached);
            let expected = [self.alone(&leader), self.alone(&follower)];
            let mut driver = self.driver();
            driver.shuffle_pages();
            driver.keeps_pages = true;
            let mut first = driver.begin(0, &leader);
            keep_behind(&mut driver, &mut first, num_cached);
            driver.finish(&mut first);
            assert_same("whose state was kept", &expected[0], &first.samples);
            // The state is unchanged after another request has continued from it.
            for slot in [1, 2] {
                let mut next = go_on(&mut driver, slot, &follower, &first, num_cached);
                driver.finish(&mut next);
                let way = format!("from the state behind {num_cached} tokens");
                assert_same(&way, &expected[1], &next.samples);
            }
        }
    }

    /// A state is restored while its request continues, and overwritten in the step that restores it.
    pub fn states_are_kept_while_others_run(&self) {
        let num_cached = 2 * self.page_size;
        let (leader, follower) = self.leader_and_follower(num_cached);
        let expected = [self.alone(&leader), self.alone(&follower)];
        let mut driver = self.driver();
        driver.keeps_pages = true;
        let mut first = driver.begin(0, &leader);
        keep_behind(&mut driver, &mut first, num_cached);
        let mut second = go_on(&mut driver, 1, &follower, &first, num_cached);
        driver.advance(&mut first, 3);
        driver.advance(&mut second, 3);
        driver.batch.keep_state(0, PLACE);
        driver.step(&mut [&mut first, &mut second]);
        while !first.is_done() {
            driver.advance(&mut first, 3);
            driver.advance(&mut second, 3);
            driver.step(&mut [&mut first, &mut second]);
        }
        driver.finish(&mut second);
        assert_same("whose state was kept", &expected[0], &first.samples);
        assert_same(
            "from a state that was overwritten",
            &expected[1],
            &second.samples,
        );
    }

    /// A request continues in another executor, from pages and states that were copied there. A prompt may end
    /// anywhere.
    pub fn states_can_be_moved(&self) {
        for num_cached in [1, 5, self.page_size, 31, 64, 67, 150] {
            let (leader, follower) = self.leader_and_follower(num_cached);
            let expected = self.alone(&follower);
            let mut source = self.driver();
            source.keeps_pages = true;
            source.shuffle_pages();
            let mut first = source.begin(0, &leader);
            keep_behind(&mut source, &mut first, num_cached);
            let tables = first.first_pages(num_cached.div_ceil(self.page_size));
            let pages = tables.iter();
            let pages = pages.map(|pages| source.read_pages(pages, PageForm::Native));
            let pages: Vec<_> = pages.collect();
            let records = read_records(&source, num_cached as u32);

            let mut target = self.driver();
            let tables = target.take_tables(num_cached.div_ceil(self.page_size));
            for (table, pages) in tables.iter().zip(&pages) {
                target.write_pages(table, PageForm::Native, pages);
            }
            write_records(&target, num_cached as u32, &records);
            let mut moved = target.begin_from(0, &follower, &tables, &follower.prompt, num_cached);
            target.batch.restore_state(PLACE);
            target.finish(&mut moved);
            let way = format!("from a state behind {num_cached} tokens of another executor");
            assert_same(&way, &expected, &moved.samples);
        }
    }

    fn leader_and_follower(&self, num_cached: usize) -> (Script, Script) {
        let leader = self.script(21, num_cached + 5, SamplingParams::GREEDY);
        let mut follower = self.script(22, num_cached + 3, SamplingParams::GREEDY);
        follower.prompt[..num_cached].copy_from_slice(&leader.prompt[..num_cached]);
        (leader, follower)
    }
}

/// The records of all layers.
fn read_records(driver: &Driver, num_tokens: u32) -> Vec<Vec<u8>> {
    let pages = driver.executor.kv_pages();
    let states = pages.states().expect("the model has recurrent layers");
    let wrong = states.read(0, SnapshotId(PLACE), num_tokens + 1, &mut []);
    assert!(wrong.is_err(), "a state is read behind another token");
    let read = |layer| {
        let mut bytes = vec![0; states.num_bytes(layer, num_tokens)];
        let read = states.read(layer, SnapshotId(PLACE), num_tokens, &mut bytes);
        read.expect("the state is there");
        bytes
    };
    (0..states.num_layers()).map(read).collect()
}

fn write_records(driver: &Driver, num_tokens: u32, records: &[Vec<u8>]) {
    let pages = driver.executor.kv_pages();
    let states = pages.states().expect("the model has recurrent layers");
    for (layer, bytes) in records.iter().enumerate() {
        let written = states.write(layer as u32, SnapshotId(PLACE), num_tokens, bytes);
        written.expect("there is room for the state");
    }
}

/// Computes the first tokens of a sequence, and keeps the state after them.
fn keep_behind(driver: &mut Driver, sequence: &mut Sequence, num_tokens: usize) {
    driver.advance(sequence, num_tokens);
    driver.batch.keep_state(sequence.slot, PLACE);
    driver.step(&mut [sequence]);
}

/// Begins a sequence after tokens of another, with its pages and the kept state.
fn go_on(
    driver: &mut Driver,
    slot: u32,
    script: &Script,
    from: &Sequence,
    num_cached: usize,
) -> Sequence {
    let tables = from.first_pages(num_cached / driver.page_size());
    let sequence = driver.begin_from(slot, script, &tables, &script.prompt, num_cached);
    driver.batch.restore_state(PLACE);
    sequence
}
