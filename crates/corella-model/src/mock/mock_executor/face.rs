//! The mock's interface to the engine: steps are submitted, sampled, and returned when their time is over.

use std::sync::Arc;
use std::time::Instant;

use corella_core::{Batch, BatchOutput, StepId};

use crate::{
    Adapters, Executor, ExecutorError, ExecutorInfo, KvLayout, KvPages, StepWaker, TokenMask,
};

use super::step_time::sleep_until;
use super::step_timer::StepTimer;
use super::{Inflight, MockExecutor, lost};

impl Executor for MockExecutor {
    fn info(&self) -> ExecutorInfo {
        ExecutorInfo {
            device: "mock".into(),
            isa: "none".into(),
            num_threads: 1,
            weight_bytes: 0,
        }
    }

    fn kv_layout(&self) -> KvLayout {
        KvLayout {
            num_pages: self.config.num_pages,
            page_size: self.config.page_size,
            format: self.kv.geometry().format,
            page_bytes: self.kv.geometry().page_bytes(),
            groups: self.config.kv_groups.clone(),
        }
    }

    fn warm_up(&mut self) -> Result<(), ExecutorError> {
        Ok(())
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        self.inflight.push_back(Inflight {
            checked: self.check.submit(&batch),
            time: self.clock.plan(&self.config, &batch, Instant::now()),
            batch,
            masks: None,
            precedes_bad_news: false,
            begun: None,
        });
        Ok(())
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        let inflight = self
            .inflight
            .iter_mut()
            .find(|inflight| inflight.batch.step == step);
        match inflight {
            Some(inflight) => {
                inflight.masks = Some(masks);
                if let Some(timer) = &self.timer {
                    for layer in 0..self.kv.num_layers() {
                        timer.wake_at(inflight.time.ready_at(layer));
                    }
                    timer.wake_at(inflight.time.done_at);
                }
                Ok(())
            }
            None => Err(ExecutorError::Lost {
                reason: format!("step {step} is sampled but not in flight"),
            }),
        }
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        let Some(mut oldest) = self.inflight.pop_front() else {
            return Err(lost("no step is in flight"));
        };
        let now = Instant::now();
        self.advance(&mut oldest, now);
        let is_done = now >= oldest.time.done_at && oldest.masks.is_some();
        if !is_done || !self.config.gate.try_pass() {
            self.inflight.push_front(oldest);
            return Ok(None);
        }
        self.finish_timed(oldest).map(Some)
    }

    fn set_waker(&mut self, waker: StepWaker) {
        self.config.gate.add_waker(waker.clone());
        self.timer = Some(StepTimer::start(waker));
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        let Some(mut oldest) = self.inflight.pop_front() else {
            return Err(lost("no step is in flight"));
        };
        for layer in 0..self.kv.num_layers() {
            let ready_at = oldest.time.ready_at(layer);
            sleep_until(ready_at);
            self.advance(&mut oldest, ready_at);
        }
        sleep_until(oldest.time.done_at);
        self.config.gate.pass();
        self.finish_timed(oldest)
    }

    fn adapters(&self) -> Option<Arc<dyn Adapters>> {
        Some(self.adapters.clone())
    }

    fn kv_pages(&self) -> Arc<dyn KvPages> {
        Arc::clone(&self.kv) as _
    }
}

impl MockExecutor {
    fn finish_timed(&mut self, step: Inflight) -> Result<BatchOutput, ExecutorError> {
        let begun = Instant::now();
        let output = self.finish(step);
        self.clock.note_own_work(begun.elapsed());
        output
    }
}
