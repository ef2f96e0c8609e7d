//! Benchmarks of single kernels, run by the thread pool on matrices and KV caches of realistic
//! sizes. `bench kernels` prints them beside the machine's limits.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use corella_core::PageId;
use corella_model::{
    AttentionSpec, BlockFormat, DType, DeviceError, KvFormat, KvLayer, PageTable, RotarySpec,
    RowOrder, Storage, StoredMatrices, StoredMatrix, Tensor, WeightFormat,
};

use crate::attention::{
    AttentionLayer, AttentionPlan, AttentionScratch, Queries, Spans, TaskShape,
};
use crate::dense::{Buffer, Epilogue, Grid, PackedRows, Tiles, shared_gemm};
use crate::kernels::{DELTA_CHUNK, DeltaRow, DeltaRows, Isa, Kernels, StateUpdate, choose_kernels};
use crate::kv::{HeadPage, KvMemory, RowShape, Rows, Side};
use crate::system::{ThreadPool, Worker};
use crate::weights::{FormatPlan, Lane, PackedMatrix, Packing, Role};

/// The speed of a kernel for one shape, as the median of some runs.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSpeed {
    pub name: String,
    pub flops_per_s: f64,
    /// The bytes of weights, or of keys and values, that are read per second.
    pub bytes_per_s: f64,
    /// `flops_per_s` is compared with the peak of this format.
    pub format: WeightFormat,
}

/// The number of input channels of the dense layers.
const K: usize = 1024;
/// The number of output channels of the dense layers.
const NUM_LANES: usize = 4096;
/// The size of all weights together, larger than any cache.
const WEIGHT_BYTES: usize = 256 << 20;
const NUM_RUNS: usize = 7;
/// The layers and the page size of attention's keys and values.
const NUM_LAYERS: usize = 4;
const PAGE_SIZE: u32 = 16;

/// Measures dense layers for 1 to 512 rows in all formats, then attention, then gated delta networks. Takes some
/// seconds.
pub fn measure_kernels(
    num_threads: usize,
    isa: Option<Isa>,
) -> Result<Vec<KernelSpeed>, DeviceError> {
    let (_, kernels) = choose_kernels(isa)?;
    let pool = ThreadPool::new(num_threads).map_err(out_of_memory)?;
    let mut bench = Bench { kernels, pool };
    let mut speeds = Vec::new();
    let formats = [
        WeightFormat::Float(DType::F32),
        WeightFormat::Float(DType::Bf16),
        WeightFormat::Int8,
        WeightFormat::INT8_GROUPED,
        WeightFormat::INT4,
    ];
    for format in formats {
        bench.dense(format, &mut speeds)?;
    }
    bench.mxfp4(&mut speeds)?;
    for format in [KvFormat::Float(DType::Bf16), KvFormat::Int8] {
        for (num_rows, start) in [(512, 0), (2048, 0), (1, 4095), (1, 16_383)] {
            speeds.push(bench.attention(format, num_rows, start)?);
        }
    }
    for num_rows in [1, DELTA_CHUNK] {
        speeds.push(bench.gated_delta(num_rows)?);
    }
    Ok(speeds)
}

struct Bench {
    kernels: &'static Kernels,
    pool: ThreadPool,
}

impl Bench {
    /// The plan for a model in bf16.
    fn plan(&self, wanted: Option<WeightFormat>) -> Result<FormatPlan, DeviceError> {
        let stored = StoredMatrix::floats(DType::Bf16);
        let model = StoredMatrices {
            layers: vec![stored],
            experts: Vec::new(),
            head: stored,
        };
        FormatPlan::new(wanted, &model, self.kernels.tile_gemm.is_some())
    }

    fn dense(
        &mut self,
        format: WeightFormat,
        out: &mut Vec<KernelSpeed>,
    ) -> Result<(), DeviceError> {
        let name = match format {
            WeightFormat::Int8 => "int8",
            WeightFormat::Int8Grouped { .. } => "int8-grouped",
            WeightFormat::Int4 { .. } => "int4",
            WeightFormat::Float(DType::Bf16) => "bf16",
            WeightFormat::Float(_) => "f32",
        };
        let stored = StoredMatrix::floats(DType::Bf16);
        let packing = self
            .plan(Some(format))?
            .packing(Role::Projection, &[stored], K);
        let bytes = (0..K * NUM_LANES).map(|i| i.wrapping_mul(2_654_435_761) >> 7);
        let tensor = Tensor {
            dtype: DType::Bf16,
            shape: vec![NUM_LANES, K],
            // The bit patterns are bf16 values between -2 and 2.
            storage: Arc::new(Storage::Owned(
                bytes
                    .flat_map(|bits| (0x3c00 | (bits & 0x83ff) as u16).to_le_bytes())
                    .collect(),
            )),
            range: 0..2 * K * NUM_LANES,
        };
        self.dense_of(name, &tensor, packing, format, out)
    }

    /// Measures dense layers with 4-bit floats of a checkpoint.
    fn mxfp4(&mut self, out: &mut Vec<KernelSpeed>) -> Result<(), DeviceError> {
        let block = BlockFormat::Mxfp4;
        let num_blocks = K * NUM_LANES / block.block_len();
        let bytes = (0..num_blocks * block.block_bytes()).map(|i| {
            // A block begins with an exponent.
            match i % block.block_bytes() {
                0 => 120 + (i / 7 % 8) as u8,
                _ => (i.wrapping_mul(2_654_435_761) >> 7) as u8,
            }
        });
        let bytes: Vec<u8> = bytes.collect();
        let range = 0..bytes.len();
        let storage = Arc::new(Storage::Owned(bytes));
        let shape = vec![NUM_LANES, K];
        let tensor = Tensor::of_blocks(&storage, range, block, RowOrder::AsStored, shape);
        let stored = StoredMatrix::from(&tensor);
        let model = StoredMatrices {
            layers: vec![stored],
            experts: Vec::new(),
            head: stored,
        };
        let plan = FormatPlan::new(None, &model, self.kernels.tile_gemm.is_some())?;
        let packing = plan.packing(Role::Projection, &[stored], K);
        let format = WeightFormat::Int4 {
            group_len: block.block_len(),
        };
        self.dense_of("mxfp4", &tensor, packing, format, out)
    }

    fn dense_of(
        &mut self,
        name: &str,
        tensor: &Tensor,
        packing: Packing,
        format: WeightFormat,
        out: &mut Vec<KernelSpeed>,
    ) -> Result<(), DeviceError> {
        let form = packing.form;
        let lanes: Vec<_> = (0..NUM_LANES)
            .map(|row| {
                Some(Lane {
                    weight: tensor,
                    bias: None,
                    row,
                })
            })
            .collect();
        let num_bytes = format.num_bytes(K * NUM_LANES);
        let (kernels, pool) = (self.kernels, &mut self.pool);
        let matrices = (0..WEIGHT_BYTES / num_bytes)
            .map(|_| PackedMatrix::pack(&lanes, packing, kernels, pool))
            .collect::<Result<Vec<_>, _>>()
            .map_err(out_of_memory)?;
        for num_rows in [1, 8, 32, 512] {
            let tiles = Tiles::new(num_rows, self.kernels.rows_at_once(form));
            let rows = PackedRows::new(num_rows, K, form, packing.groups.is_some())
                .map_err(out_of_memory)?;
            let values: Vec<f32> = (0..K).map(|i| (i % 17) as f32 - 8.0).collect();
            for row in 0..num_rows {
                let tile = tiles.rows(tiles.tile_of(row));
                // SAFETY: no other thread uses these rows.
                unsafe {
                    rows.write(self.kernels, &tile, row, 0, &values);
                    rows.complete(self.kernels, &tile, row, &matrices[0]);
                }
            }
            let to = Buffer::new(num_rows, NUM_LANES).map_err(out_of_memory)?;
            let kernels = self.kernels;
            let grid = Grid::new(tiles, self.pool.num_threads());
            let seconds = self.median(&|worker| {
                for matrix in &matrices {
                    let out = Epilogue::Store(&to);
                    shared_gemm(kernels, &rows, &grid, matrix.into(), out, worker);
                    worker.barrier();
                }
            })?;
            let weights = matrices.len() * K * NUM_LANES;
            out.push(KernelSpeed {
                name: format!("dense {name}, {num_rows} rows"),
                flops_per_s: 2.0 * (weights * num_rows) as f64 / seconds,
                bytes_per_s: format.num_bytes(weights) as f64 / seconds,
                format,
            });
        }
        Ok(())
    }

    /// Measures attention for `num_rows` rows of one sequence, the first at position `start`, in
    /// the shape of Qwen3-0.6B.
    fn attention(
        &mut self,
        format: KvFormat,
        num_rows: usize,
        start: usize,
    ) -> Result<KernelSpeed, DeviceError> {
        let (kernels, attention) = (self.kernels, &attention_spec());
        let head_dim = attention.head_dim;
        let num_positions = start + num_rows;
        let num_pages = num_positions.div_ceil(PAGE_SIZE as usize);
        let kv = filled_kv(kernels, attention, num_pages, format)?;
        let rows = kv.rows_of(attention);
        let pages: Vec<PageId> = (0..num_pages as u32).map(PageId).collect();
        let mut spans = Spans::default();
        spans.add(num_rows, start, [PageTable::new(0, &pages)]);
        let num_threads = self.pool.num_threads();
        let form = self.plan(None)?.form(Role::Projection);
        let tiles = Tiles::new(num_rows, kernels.rows_at_once(form));
        let shape = TaskShape::new(kernels, &kv);
        let mut plan = AttentionPlan::default();
        plan.build(&spans, attention, shape, num_threads);
        let width = attention.num_heads * head_dim;
        let queries = Queries::new(kernels, width, &kv, num_rows).map_err(out_of_memory)?;
        let out = PackedRows::new(num_rows, width, form, false).map_err(out_of_memory)?;
        let scratch: Vec<_> = (0..num_threads)
            .map(|_| AttentionScratch::new(kernels, &kv).map(Mutex::new))
            .collect::<Result<_, _>>()
            .map_err(out_of_memory)?;
        let seconds = self.median(&|worker| {
            let scratch = &scratch[worker.index()];
            let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
            for in_page in 0..NUM_LAYERS {
                let layer = AttentionLayer {
                    sinks: &[],
                    kernels,
                    spec: attention,
                    kv: rows,
                    kv_layer: KvLayer {
                        group: 0,
                        in_page,
                        in_place: 0,
                        num_in_place: 1,
                    },
                    spans: &spans,
                    plan: &plan,
                    gates: None,
                    queries: &queries,
                    out: &out,
                    tiles,
                };
                layer.run(worker, &mut scratch);
                worker.barrier();
            }
        })?;
        let pairs: usize = (start + 1..=num_positions).sum();
        let row_bytes = 2 * attention.num_kv_heads * format.row_bytes(head_dim);
        let format_name = match format {
            KvFormat::Int8 => "int8",
            KvFormat::Float(_) => "bf16",
        };
        Ok(KernelSpeed {
            name: format!("attention, {num_rows} rows from position {start}, {format_name}"),
            flops_per_s: (NUM_LAYERS * 4 * width * pairs) as f64 / seconds,
            bytes_per_s: (NUM_LAYERS * num_positions * row_bytes) as f64 / seconds,
            format: match kv.tile_attention(kernels) {
                Some(_) => WeightFormat::Float(DType::Bf16),
                None => WeightFormat::Float(DType::F32),
            },
        })
    }

    /// Measures a gated delta network in the shape of Qwen3-Next: the last row of half a chunk, as in decoding, or a
    /// whole chunk and the state after it, as in a prompt.
    fn gated_delta(&mut self, num_rows: usize) -> Result<KernelSpeed, DeviceError> {
        const DIM: usize = 128;
        const STATE_LEN: usize = DIM * DIM;
        const NUM_STATES: usize = WEIGHT_BYTES / size_of::<f32>() / STATE_LEN;
        let is_whole = num_rows == DELTA_CHUNK;
        let num_tokens = if is_whole {
            DELTA_CHUNK
        } else {
            DELTA_CHUNK / 2
        };
        let states = Buffer::new(NUM_STATES, STATE_LEN).map_err(out_of_memory)?;
        // Unwritten pages would all be the same zero page.
        for index in 0..NUM_STATES {
            // SAFETY: no other thread uses this memory, and the row has this many elements.
            unsafe { std::slice::from_raw_parts_mut(states.row_ptr(index), STATE_LEN).fill(0.01) };
        }
        // Queries and keys have length 1.
        let vector = [1.0 / (DIM as f32).sqrt(); DIM];
        let decays: Vec<f32> = (1..=num_tokens).map(|token| -0.01 * token as f32).collect();
        let kernels = self.kernels;
        let seconds = self.median(&|worker| {
            let keys = &[vector.as_ptr(); DELTA_CHUNK][..num_tokens];
            let row = DeltaRow {
                query: vector.as_ptr(),
                value: vector.as_ptr(),
                strength: 0.5,
            };
            let mut updates = [0.0; DELTA_CHUNK * DIM];
            let mut out = [0.0; DELTA_CHUNK * DIM];
            for index in worker.share(NUM_STATES) {
                let state = states.row_ptr(index);
                // SAFETY: the state belongs to this worker, and all rows have the given number of elements.
                unsafe {
                    (kernels.delta_rows)(DeltaRows {
                        state,
                        key_dim: DIM,
                        value_dim: DIM,
                        keys,
                        decays: &decays,
                        first: num_tokens - num_rows,
                        rows: &[row; DELTA_CHUNK][..num_rows],
                        updates: updates.as_mut_ptr(),
                        out: out.as_mut_ptr(),
                    });
                    if is_whole {
                        (kernels.update_state)(StateUpdate {
                            from: state,
                            to: state,
                            key_dim: DIM,
                            value_dim: DIM,
                            keys,
                            decays: &decays,
                            updates: updates.as_ptr(),
                        });
                    }
                }
            }
        })?;
        // Each row multiplies its query and its key with the state and with the tokens in front of it, and sums the
        // updates of these tokens twice.
        let of_row = |token: usize| 2 * STATE_LEN + 2 * (2 * token + 1) * DIM;
        let rows: usize = (num_tokens - num_rows..num_tokens).map(of_row).sum();
        let update = if is_whole { num_tokens * STATE_LEN } else { 0 };
        let num_written = if is_whole { 1 } else { 0 };
        let state_bytes = STATE_LEN * size_of::<f32>();
        Ok(KernelSpeed {
            name: format!("gated delta, {num_rows} rows"),
            flops_per_s: (2 * NUM_STATES * (rows + update)) as f64 / seconds,
            bytes_per_s: (NUM_STATES * state_bytes * (1 + num_written)) as f64 / seconds,
            format: WeightFormat::Float(DType::F32),
        })
    }

    /// The median duration of the job, in seconds.
    fn median(&mut self, job: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<f64, DeviceError> {
        let mut seconds = Vec::with_capacity(NUM_RUNS);
        for _ in 0..NUM_RUNS {
            let start = Instant::now();
            self.pool.run(&|worker| job(worker)).map_err(DeviceError)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[NUM_RUNS / 2])
    }
}

/// Attention in the shape of Qwen3-0.6B. Neither norms nor RoPE are measured.
fn attention_spec() -> AttentionSpec {
    AttentionSpec::plain(16, 8, 128, RotarySpec::plain(1e6, 128))
}

/// Memory of keys and values whose pages are written: unwritten pages would all be the same zero page.
fn filled_kv(
    kernels: &Kernels,
    spec: &AttentionSpec,
    num_pages: usize,
    format: KvFormat,
) -> Result<KvMemory, DeviceError> {
    let shapes = [RowShape::new(spec, 1)];
    let kv = KvMemory::for_kernels(kernels, NUM_LAYERS, &shapes, num_pages, PAGE_SIZE, format)
        .map_err(out_of_memory)?;
    let rows = kv.rows_of(spec);
    let values: Vec<f32> = (0..spec.head_dim).map(|i| i as f32 / 64.0).collect();
    let row = Rows {
        first: values.as_ptr(),
        stride: spec.head_dim,
        len: 1,
    };
    for page in 0..num_pages {
        for layer in 0..NUM_LAYERS {
            for head in 0..spec.num_kv_heads {
                let at = HeadPage { layer, page, head };
                for offset in 0..PAGE_SIZE as usize {
                    // SAFETY: no other thread uses this memory.
                    unsafe {
                        rows.write(kernels, Side::Keys, at, offset, row);
                        rows.write(kernels, Side::Values, at, offset, row);
                    }
                }
            }
        }
    }
    Ok(kv)
}

fn out_of_memory(error: std::io::Error) -> DeviceError {
    DeviceError(format!("no memory for the measurement: {error}"))
}
