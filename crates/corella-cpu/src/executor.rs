//! The `Executor` face: hands batches to a thread that runs them one after the other.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use corella_core::{Batch, BatchOutput, PageId, Sample, StepId};
use corella_model::{
    DType, DecoderSpec, DecoderWeights, Executor, ExecutorError, ExecutorInfo, KvLayout, TokenMask,
    sample,
};

use crate::forward::Forward;
use crate::kernels::{Isa, detect_isa, kernels};
use crate::kv_memory::{KvMemory, kv_page_bytes};
use crate::slot::{SlotLimits, Slots};
use crate::step_plan::{SamplePlan, StepPlan};
use crate::thread_pool::ThreadPool;
use crate::weights::PackedWeights;

#[derive(Clone, Debug)]
pub struct CpuConfig {
    pub num_threads: usize,
    /// Of the packed matrices. `None` keeps the checkpoint's, so that nothing is rounded.
    pub weight_dtype: Option<DType>,
    pub kv_dtype: DType,
    pub num_pages: u32,
    pub page_size: u32,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub max_model_len: u32,
    /// `None`: the best that this machine has.
    pub isa: Option<Isa>,
}

/// A model or a configuration that the executor cannot run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuError(pub String);

impl fmt::Display for CpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CpuError {}

pub struct CpuExecutor {
    info: ExecutorInfo,
    kv_layout: KvLayout,
    commands: Option<SyncSender<Command>>,
    results: Receiver<Result<BatchOutput, ExecutorError>>,
    thread: Option<JoinHandle<()>>,
}

/// More than any number of steps in flight needs.
const QUEUE_LEN: usize = 64;

enum Command {
    Submit(Arc<Batch>),
    Sample(StepId, Vec<TokenMask>),
    WarmUp(SyncSender<Result<(), String>>),
    ReadPage(PageId, SyncSender<Vec<u8>>),
    WritePage(PageId, Vec<u8>),
}

impl CpuExecutor {
    /// Packs the weights and allocates all memory.
    pub fn new(
        spec: DecoderSpec,
        weights: DecoderWeights,
        config: CpuConfig,
    ) -> Result<Self, CpuError> {
        check_config(&config)?;
        let isa = config.isa.unwrap_or_else(detect_isa);
        let kernels = kernels(isa)
            .ok_or_else(|| CpuError(format!("this machine has no {isa} instructions")))?;
        let no_memory =
            |what: &'static str| move |error| CpuError(format!("no memory for {what}: {error}"));
        let mut pool = ThreadPool::new(config.num_threads)
            .map_err(|error| CpuError(format!("cannot start the worker threads: {error}")))?;
        let packed = PackedWeights::pack(&spec, &weights, config.weight_dtype, &mut pool)?;
        drop(weights);
        // One page more, for warm-up.
        let num_pages = config.num_pages as usize + 1;
        let kv = KvMemory::new(&spec, num_pages, config.page_size, config.kv_dtype)
            .map_err(no_memory("the KV pages"))?;
        let kv_layout = KvLayout {
            num_pages: config.num_pages,
            page_size: config.page_size,
            dtype: config.kv_dtype,
            page_bytes: kv_page_bytes(&spec, config.page_size, config.kv_dtype),
        };
        let limits = SlotLimits {
            max_num_seqs: config.max_num_seqs,
            max_model_len: config.max_model_len,
            num_pages: config.num_pages,
            page_size: config.page_size,
            vocab_size: spec.vocab_size,
        };
        let max_rows = config.max_num_batched_tokens as usize;
        let forward = Forward::new(spec, kernels, packed, kv, max_rows, pool.num_threads())
            .map_err(no_memory("the activations"))?;
        let info = ExecutorInfo {
            device: String::from("cpu"),
            isa: isa.to_string(),
            num_threads: pool.num_threads(),
            weight_bytes: forward.weight_bytes(),
        };
        let (commands, receiver) = sync_channel(QUEUE_LEN);
        let (sender, results) = sync_channel(QUEUE_LEN);
        let driver = Driver {
            forward,
            pool,
            slots: Slots::new(limits),
            plan: StepPlan::default(),
            max_num_batched_tokens: config.max_num_batched_tokens,
            commands: receiver,
            postponed: VecDeque::new(),
            results: sender,
        };
        let thread = std::thread::Builder::new()
            .name(String::from("corella-cpu-0"))
            .spawn(move || driver.run())
            .map_err(|error| CpuError(format!("cannot start the executor thread: {error}")))?;
        Ok(Self {
            info,
            kv_layout,
            commands: Some(commands),
            results,
            thread: Some(thread),
        })
    }

    fn send(&self, command: Command) -> Result<(), ExecutorError> {
        let sent = self.commands.as_ref().map(|sender| sender.send(command));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(lost()),
        }
    }
}

impl Drop for CpuExecutor {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // Its panics, if any, have been reported as a lost executor.
            let _ = thread.join();
        }
    }
}

impl Executor for CpuExecutor {
    fn info(&self) -> ExecutorInfo {
        self.info.clone()
    }

    fn kv_layout(&self) -> KvLayout {
        self.kv_layout.clone()
    }

    fn warm_up(&mut self) -> Result<(), ExecutorError> {
        let (sender, receiver) = sync_channel(1);
        self.send(Command::WarmUp(sender))?;
        let result = receiver.recv().map_err(|_| lost())?;
        result.map_err(|reason| ExecutorError::Lost { reason })
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        self.send(Command::Submit(batch))
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        self.send(Command::Sample(step, masks))
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        self.results.recv().unwrap_or_else(|_| Err(lost()))
    }

    fn read_page(&mut self, page: PageId, out: &mut [u8]) -> Result<(), ExecutorError> {
        self.check_page(page, out.len());
        let (sender, receiver) = sync_channel(1);
        self.send(Command::ReadPage(page, sender))?;
        out.copy_from_slice(&receiver.recv().map_err(|_| lost())?);
        Ok(())
    }

    fn write_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), ExecutorError> {
        self.check_page(page, bytes.len());
        self.send(Command::WritePage(page, bytes.to_vec()))
    }
}

impl CpuExecutor {
    /// A wrong page or size is a mistake in the caller's code, not a state of the executor.
    fn check_page(&self, page: PageId, num_bytes: usize) {
        assert!(page.0 < self.kv_layout.num_pages, "page {page}");
        assert_eq!(num_bytes, self.kv_layout.page_bytes);
    }
}

fn lost() -> ExecutorError {
    ExecutorError::Lost {
        reason: String::from("the executor thread has ended"),
    }
}

fn check_config(config: &CpuConfig) -> Result<(), CpuError> {
    let counts = [
        ("num_threads", config.num_threads),
        ("num_pages", config.num_pages as usize),
        ("page_size", config.page_size as usize),
        ("max_num_seqs", config.max_num_seqs as usize),
        (
            "max_num_batched_tokens",
            config.max_num_batched_tokens as usize,
        ),
        ("max_model_len", config.max_model_len as usize),
    ];
    match counts.iter().find(|(_, count)| *count == 0) {
        Some((name, _)) => Err(CpuError(format!("{name} must be at least 1"))),
        None => Ok(()),
    }
}

/// The executor's thread, which is also worker 0 of the pool.
struct Driver {
    forward: Forward,
    pool: ThreadPool,
    slots: Slots,
    plan: StepPlan,
    max_num_batched_tokens: u32,
    commands: Receiver<Command>,
    /// What came while a step waited for its masks.
    postponed: VecDeque<Command>,
    results: SyncSender<Result<BatchOutput, ExecutorError>>,
}

impl Driver {
    fn run(mut self) {
        while let Some(command) = self.next_command() {
            match command {
                Command::Submit(batch) => {
                    let result = self.step(&batch);
                    if self.results.send(result).is_err() {
                        return;
                    }
                }
                // Of a step that drew nothing, or failed before it could.
                Command::Sample(..) => {}
                // A caller that no longer waits for its answer needs none.
                Command::WarmUp(reply) => {
                    let _ = reply.send(self.warm_up());
                }
                Command::ReadPage(page, reply) => {
                    let mut bytes = vec![0; self.forward.kv.page_bytes()];
                    self.forward.kv.read_page(page.0 as usize, &mut bytes);
                    let _ = reply.send(bytes);
                }
                Command::WritePage(page, bytes) => {
                    self.forward.kv.write_page(page.0 as usize, &bytes);
                }
            }
        }
    }

    fn next_command(&mut self) -> Option<Command> {
        let postponed = self.postponed.pop_front();
        postponed.or_else(|| self.commands.recv().ok())
    }

    fn step(&mut self, batch: &Batch) -> Result<BatchOutput, ExecutorError> {
        let step = batch.step;
        let result = catch_unwind(AssertUnwindSafe(|| self.compute(batch)));
        let result = result.unwrap_or_else(|_| Err(String::from("the executor's code panicked")));
        result.map_err(|reason| {
            self.slots.handle_step_failed(batch);
            ExecutorError::StepFailed { step, reason }
        })
    }

    fn compute(&mut self, batch: &Batch) -> Result<BatchOutput, String> {
        self.slots.apply(batch)?;
        self.copy_pages(batch)?;
        self.plan.clear();
        self.plan
            .add_spans(batch, &mut self.slots, self.max_num_batched_tokens)?;
        self.run_layers()?;
        let samples = std::mem::take(&mut self.plan.samples);
        let drawn = self.draw(batch.step, &samples);
        self.plan.samples = samples;
        drawn
    }

    fn copy_pages(&mut self, batch: &Batch) -> Result<(), String> {
        let kv = &mut self.forward.kv;
        for copy in &batch.copies {
            let (from, to) = (copy.from.0 as usize, copy.to.0 as usize);
            // The last page is for warm-up.
            if from.max(to) + 1 >= kv.num_pages() || copy.num_rows as usize > kv.page_size() {
                return Err(format!("impossible copy: {copy:?}"));
            }
            kv.copy_rows(from, to, copy.num_rows as usize);
        }
        Ok(())
    }

    fn run_layers(&mut self) -> Result<(), String> {
        if self.plan.rows.is_empty() {
            return Ok(());
        }
        self.plan.finish(
            &self.forward.spec().attention,
            self.forward.kernels().tile_rows,
            self.pool.num_threads(),
        );
        let (forward, plan) = (&self.forward, &self.plan);
        self.pool.run(&|worker| forward.layers(plan, worker))
    }

    /// Logits block by block, so that their memory does not grow with the step. The first
    /// block is computed before the masks are waited for.
    fn draw(&mut self, step: StepId, samples: &[SamplePlan]) -> Result<BatchOutput, String> {
        // What a step that was planned ahead computes for a request that ends here.
        const NOTHING: corella_core::TokenId = 0;
        let mut output = BatchOutput {
            step,
            samples: Vec::with_capacity(samples.len()),
            undrawn: Vec::new(),
        };
        let mut masks = None;
        for block in samples.chunks(self.forward.logit_rows()) {
            let rows: Vec<usize> = block.iter().map(|sample| sample.row).collect();
            let forward = &self.forward;
            self.pool.run(&|worker| forward.logits(&rows, worker))?;
            if masks.is_none() {
                masks = Some(self.wait_for_masks(step)?);
            }
            let masks = masks.as_deref().unwrap_or_default();
            for (plan, drawn) in block.iter().zip(self.draw_block(block, masks)?) {
                let token = drawn.as_ref().map_or(NOTHING, |sample| sample.token);
                self.slots.get_mut(plan.slot)?.set_drawn(step, token);
                match drawn {
                    Ok(sample) => output.samples.push((plan.slot, sample)),
                    Err(reason) => output.undrawn.push((plan.slot, reason.into())),
                }
            }
        }
        Ok(output)
    }

    fn draw_block(
        &mut self,
        block: &[SamplePlan],
        masks: &[TokenMask],
    ) -> Result<Vec<Result<Sample, String>>, String> {
        let (forward, slots) = (&self.forward, &self.slots);
        let draw = |index: usize| {
            let id = block[index].slot;
            let mask = masks.iter().find(|mask| mask.slot == id);
            let request = slots
                .get(id)?
                .sample_request(mask.map(|mask| &*mask.allowed));
            // SAFETY: each index is drawn by one worker.
            let logits = unsafe { forward.logits_mut(index) };
            sample(logits, request).map_err(|error| error.to_string())
        };
        let results: Vec<_> = block.iter().map(|_| Mutex::new(None)).collect();
        self.pool.run(&|worker| {
            for index in worker.share(block.len()) {
                let mut result = results[index]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                *result = Some(draw(index));
            }
        })?;
        let results = results.into_iter().map(|result| {
            let result = result.into_inner().unwrap_or_else(PoisonError::into_inner);
            result.unwrap_or_else(|| Err(String::from("a row was not drawn")))
        });
        Ok(results.collect())
    }

    fn wait_for_masks(&mut self, step: StepId) -> Result<Vec<TokenMask>, String> {
        let is_it = |command: &Command| matches!(command, Command::Sample(s, _) if *s == step);
        if let Some(index) = self.postponed.iter().position(is_it)
            && let Some(Command::Sample(_, masks)) = self.postponed.remove(index)
        {
            return Ok(masks);
        }
        loop {
            match self.commands.recv() {
                Ok(Command::Sample(s, masks)) if s == step => return Ok(masks),
                Ok(command) => self.postponed.push_back(command),
                Err(_) => return Err(String::from("the executor was dropped")),
            }
        }
    }

    /// A step of one row and one of several tiles, on the page that no request gets.
    fn warm_up(&mut self) -> Result<(), String> {
        let page = PageId(self.forward.kv.num_pages() as u32 - 1);
        let max_rows = (self.forward.kernels().tile_rows + 1)
            .min(self.forward.kv.page_size())
            .min(self.max_num_batched_tokens as usize);
        for num_rows in [1, max_rows] {
            self.plan.clear();
            self.plan.add_span(&vec![0; num_rows], 0, &[page]);
            self.run_layers()?;
            let forward = &self.forward;
            self.pool.run(&|worker| forward.logits(&[0], worker))?;
        }
        Ok(())
    }
}
