//! Calibration for quantisation: runs a model one layer at a time over a text and sums, for each matrix, the products
//! of its inputs with each other. The compensation of rounding errors needs these sums and the weights.

mod hessian;

use std::io;
use std::ops::Range;

use corella_core::{PageId, TokenId};
use corella_model::{
    DType, DecoderSpec, DeviceError, FeedForward, KvFormat, KvGroups, LayerInput, LayerWeights,
    PageTable, Tensor,
};

pub use self::hessian::Hessian;

use crate::dense::{Buffer, PackedRows, Tiles};
use crate::kernels::{Isa, Kernels, PRODUCT_LANES, add_products, choose_kernels};
use crate::kv::RowShape;
use crate::recurrent::StateLimits;
use crate::step::{Forward, ForwardLimits, ForwardParts, Incoming, Observer, StepLayout};
use crate::system::{Region, ThreadPool, Worker};
use crate::weights::{PackedWeights, check_spec};

/// The residual stream of all calibration tokens before the next layer. Only one layer at a time needs further memory.
pub struct LayerCalibration {
    /// The model's spec, cut down to one layer.
    spec: DecoderSpec,
    isa: Isa,
    kernels: &'static Kernels,
    pool: ThreadPool,
    /// The residual stream, `[tokens][hidden_size]`.
    rows: Vec<f32>,
    steps: Vec<CalibrationStep>,
    num_pages: usize,
}

/// Rows that are computed together: a part of one sequence, or several whole sequences.
struct CalibrationStep {
    rows: Range<usize>,
    spans: Vec<CalibrationSpan>,
}

struct CalibrationSpan {
    /// The first row's position in its sequence.
    start: usize,
    num_rows: usize,
    first_page: usize,
    num_pages: usize,
}

const MAX_ROWS: usize = 512;
const PAGE_SIZE: usize = 16;

impl LayerCalibration {
    /// Embeds the sequences, each of which starts at position 0.
    pub fn new(
        spec: &DecoderSpec,
        embed: &Tensor,
        sequences: &[Vec<TokenId>],
        num_threads: usize,
        isa: Option<Isa>,
    ) -> Result<Self, DeviceError> {
        check_spec(spec)?;
        check_calibrated(spec)?;
        let (isa, kernels) = choose_kernels(isa)?;
        let pool = ThreadPool::new(num_threads)
            .map_err(|error| DeviceError(format!("cannot start the worker threads: {error}")))?;
        let (steps, num_pages) = plan_steps(sequences.iter().map(Vec::len));
        let num_tokens: usize = sequences.iter().map(Vec::len).sum();
        let mut rows = vec![0.0; num_tokens * spec.hidden_size];
        let mut scratch = Vec::new();
        let tokens = sequences.iter().flatten();
        for (&token, row) in tokens.zip(rows.chunks_exact_mut(spec.hidden_size)) {
            if token as usize >= spec.vocab_size {
                return Err(DeviceError(format!(
                    "token {token} is not in the vocabulary"
                )));
            }
            embed.read_row(token as usize, &mut scratch, row);
            row.iter_mut()
                .for_each(|value| *value *= spec.embedding_scale);
        }
        let mut spec = spec.clone();
        spec.layers.truncate(1);
        Ok(Self {
            spec,
            isa,
            kernels,
            pool,
            rows,
            steps,
            num_pages,
        })
    }

    pub fn num_tokens(&self) -> usize {
        self.rows.len() / self.spec.hidden_size
    }

    /// Returns the second moments of the inputs of the next layer's matrices, in the order of `LayerInput::DENSE`.
    pub fn observe(&mut self, layer: &LayerWeights) -> Result<[Hessian; 4], DeviceError> {
        let sums = InputSums::new(&self.spec, self.isa).map_err(no_memory)?;
        self.run(layer, &sums, false)?;
        Ok(sums.finish())
    }

    /// Takes all rows through the next layer, computed with the given (already rounded) weights.
    pub fn advance(&mut self, layer: &LayerWeights) -> Result<(), DeviceError> {
        self.run(layer, &(), true)
    }

    fn run(
        &mut self,
        layer: &LayerWeights,
        observer: &impl Observer,
        keep: bool,
    ) -> Result<(), DeviceError> {
        let mut forward = self.forward(layer)?;
        let len = self.spec.hidden_size;
        let (mut layout, mut outgoing) = (StepLayout::default(), Vec::new());
        for step in &self.steps {
            layout.clear();
            for span in &step.spans {
                let pages = span.first_page..span.first_page + span.num_pages;
                let pages: Vec<_> = pages.map(|page| PageId(page as u32)).collect();
                let table = PageTable::new(0, &pages);
                layout.add_span(&vec![0; span.num_rows], span.start, [table]);
            }
            forward.divide(&mut layout);
            let rows = &mut self.rows[step.rows.start * len..step.rows.end * len];
            let incoming = Incoming::Rows(rows);
            self.pool
                .run(&|worker| forward.layers_with(&layout, incoming, worker, observer))
                .map_err(DeviceError)?;
            if keep {
                outgoing = forward.outgoing(step.rows.len(), outgoing);
                rows.copy_from_slice(&outgoing);
            }
        }
        Ok(())
    }

    fn forward(&mut self, layer: &LayerWeights) -> Result<Forward, DeviceError> {
        let (spec, kernels) = (&self.spec, self.kernels);
        let weights = PackedWeights::pack_layer(spec, layer, kernels, &mut self.pool)?;
        let kv_layers = KvGroups::one(spec).layers(0..1);
        Forward::new(ForwardParts {
            spec: spec.clone(),
            kernels,
            weights,
            row_shapes: RowShape::of_layers(&spec.layers, &kv_layers),
            kv_layers,
            limits: ForwardLimits {
                num_pages: self.num_pages,
                page_size: PAGE_SIZE as u32,
                kv_format: KvFormat::Float(DType::Bf16),
                max_rows: MAX_ROWS,
                max_context: spec.max_position,
                states: StateLimits::default(),
            },
            num_threads: self.pool.num_threads(),
            draws: false,
            max_adapter_rank: None,
            first_layer: 0,
        })
    }
}

/// Refuses models whose layers cannot all be calibrated in the same way.
fn check_calibrated(spec: &DecoderSpec) -> Result<(), DeviceError> {
    let first = &spec.layers[0];
    let refused = [
        (spec.encoder.is_some(), "attention that looks both ways"),
        (spec.learned_positions, "learned positions"),
        (spec.is_recurrent(), "recurrent layers"),
        (spec.per_layer().is_some(), "inputs for each layer"),
        (
            spec.layers.iter().any(|layer| layer != first),
            "layers of different kinds",
        ),
        (
            matches!(first.feed_forward, FeedForward::Experts(_)),
            "experts",
        ),
    ];
    match refused.into_iter().find(|(is_refused, _)| *is_refused) {
        Some((_, what)) => Err(DeviceError(format!(
            "the model has {what}, which calibration does not take yet; `--method nearest` rounds \
             without it"
        ))),
        None => Ok(()),
    }
}

fn no_memory(error: io::Error) -> DeviceError {
    DeviceError(format!("no memory for the calibration: {error}"))
}

/// Divides sequences of the given lengths into steps. Also returns the largest number of pages that a step needs.
fn plan_steps(lens: impl Iterator<Item = usize>) -> (Vec<CalibrationStep>, usize) {
    let (mut steps, mut next_row, mut most_pages) = (Vec::<CalibrationStep>::new(), 0, 1);
    for len in lens {
        let num_pages = len.div_ceil(PAGE_SIZE);
        let used_pages = steps
            .last()
            .and_then(|step| step.spans.last())
            .map_or(0, |span| span.first_page + span.num_pages);
        if let Some(step) = steps.last_mut()
            && step.rows.len() + len <= MAX_ROWS
            // A step that starts inside a sequence uses the pages from 0 on for the whole sequence.
            && step.spans[0].start == 0
        {
            step.spans.push(CalibrationSpan {
                start: 0,
                num_rows: len,
                first_page: used_pages,
                num_pages,
            });
            step.rows.end += len;
            next_row += len;
            most_pages = most_pages.max(used_pages + num_pages);
            continue;
        }
        most_pages = most_pages.max(num_pages);
        for start in (0..len).step_by(MAX_ROWS) {
            let num_rows = (len - start).min(MAX_ROWS);
            steps.push(CalibrationStep {
                rows: next_row..next_row + num_rows,
                spans: vec![CalibrationSpan {
                    start,
                    num_rows,
                    first_page: 0,
                    num_pages,
                }],
            });
            next_row += num_rows;
        }
    }
    (steps, most_pages)
}

/// An observer that sums the products of inputs, for each `LayerInput::DENSE`.
struct InputSums {
    isa: Isa,
    /// The rows of the observed input in f32.
    wide: Buffer,
    inputs: [Sums; 4],
}

struct Sums {
    num_columns: usize,
    /// `[padded][padded]`. Only the upper triangle, in whole blocks, is computed.
    region: Region,
}

/// The number of rows that are summed at once; they fit into the second-level cache.
const SUMMED_ROWS: usize = 128;

impl InputSums {
    fn new(spec: &DecoderSpec, isa: Isa) -> io::Result<Self> {
        let lens = LayerInput::DENSE.map(|input| input.len(&spec.layers[0], spec.hidden_size));
        let mut inputs = Vec::new();
        for num_columns in lens {
            let padded = num_columns.next_multiple_of(PRODUCT_LANES);
            inputs.push(Sums {
                num_columns,
                region: Region::new(padded * padded * size_of::<f32>())?,
            });
        }
        let inputs = inputs.try_into().map_err(|_| io::ErrorKind::Other)?;
        let longest = lens.into_iter().max().unwrap_or(0);
        Ok(Self {
            isa,
            wide: Buffer::new(MAX_ROWS, longest)?,
            inputs,
        })
    }

    fn finish(self) -> [Hessian; 4] {
        self.inputs.map(|sums| {
            let (n, padded) = (sums.num_columns, sums.padded());
            let mut dense = vec![0.0; n * n];
            for i in 0..n {
                for j in i..n {
                    // SAFETY: the element is inside the region, which is no longer written.
                    dense[i * n + j] = unsafe { *sums.ptr().add(i * padded + j) };
                }
            }
            Hessian::new(n, dense)
        })
    }
}

impl Sums {
    fn padded(&self) -> usize {
        self.num_columns.next_multiple_of(PRODUCT_LANES)
    }

    fn ptr(&self) -> *mut f32 {
        self.region.as_ptr().cast()
    }
}

impl Observer for InputSums {
    fn observe(&self, input: LayerInput, rows: &PackedRows, tiles: Tiles, worker: &Worker<'_>) {
        let sums = &self.inputs[input as usize];
        let (num_columns, padded) = (sums.num_columns, sums.padded());
        for row in worker.share(tiles.num_rows()) {
            let tile = tiles.rows(tiles.tile_of(row));
            // SAFETY: `rows` was written before the last barrier. This row of `wide` belongs to
            // this worker, and its last readers have passed a barrier since.
            unsafe {
                let wide = self.wide.row_mut(row);
                rows.read(&tile, row, &mut wide[..num_columns]);
                wide[num_columns..padded].fill(0.0);
            }
        }
        worker.barrier();
        let num_blocks = padded / PRODUCT_LANES;
        for first in (0..tiles.num_rows()).step_by(SUMMED_ROWS) {
            let num_rows = (tiles.num_rows() - first).min(SUMMED_ROWS);
            // Long and short rows of the triangle alternate, so that workers get equal amounts of work.
            for turn in worker.share(num_blocks) {
                let block = match turn % 2 {
                    0 => turn / 2,
                    _ => num_blocks - 1 - turn / 2,
                };
                let i = block * PRODUCT_LANES;
                let x = self.wide.row_ptr(first);
                // SAFETY: the rows of `wide` have `padded` elements, and these rows of the sums belong to this worker.
                unsafe {
                    let out = sums.ptr().add(i * padded);
                    let stride = self.wide.stride();
                    add_products(self.isa, x, stride, num_rows, i, padded, out);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sequences_share_a_step_and_long_ones_have_several() {
        let lens = [100, 200, 300, 1100, 5, 512, 1];
        let (steps, num_pages) = plan_steps(lens.into_iter());
        let mut next = 0;
        let mut found = vec![0; lens.len()];
        let mut sequence = 0;
        for step in &steps {
            assert_eq!(step.rows.start, next);
            next = step.rows.end;
            assert!(step.rows.len() <= MAX_ROWS);
            let spans = step.spans.iter().map(|span| span.num_rows);
            assert_eq!(spans.sum::<usize>(), step.rows.len());
            let mut next_page = 0;
            for span in &step.spans {
                assert_eq!(span.first_page, next_page);
                next_page += span.num_pages;
                assert!(next_page <= num_pages);
                assert!(span.num_pages * PAGE_SIZE >= span.start + span.num_rows);
                assert_eq!(span.start, found[sequence]);
                found[sequence] += span.num_rows;
                sequence += usize::from(found[sequence] == lens[sequence]);
            }
        }
        assert_eq!(found, lens);
    }
}
