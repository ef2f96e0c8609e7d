//! The replacement of attention in recurrent layers.

use corella_model::{GatedDeltaSpec, LayerSpec, RecurrentSpec};

use crate::dense::Epilogue;
use crate::recurrent::{ConvolutionLayer, DeltaLayer, DeltaScratch};
use crate::weights::{PackedLayer, PackedRecurrent};

use crate::step::forward::Forward;
use crate::step::layout::StepLayout;
use crate::step::profile::barrier_after;
use crate::step::profile::{Operation, Walk};

/// A layer's gated delta network in place of attention.
pub fn gated_delta(layer: &LayerSpec) -> Option<&GatedDeltaSpec> {
    match layer.recurrent.as_ref()? {
        RecurrentSpec::GatedDelta(spec) => Some(spec),
        RecurrentSpec::ShortConvolution(_) => None,
    }
}

impl Forward {
    pub(super) fn run_recurrent(
        &self,
        layout: &StepLayout,
        index: usize,
        (spec, layer): (&RecurrentSpec, &PackedLayer),
        walk: &mut Walk<'_>,
        scratch: &mut DeltaScratch,
    ) {
        let (act, grid, worker) = (&self.activations, layout.grid, walk.worker);
        let rows = act.recurrent.as_ref();
        let rows = rows.expect("a layer is recurrent, but there are no rows for it");
        let states = self.states.as_ref();
        let states = states.expect("a layer is recurrent, but there are no states");
        let out = Epilogue::Store(&rows.projected);
        self.dense(
            Operation::Qkv,
            &act.normed,
            grid,
            (&layer.qkv).into(),
            out,
            walk,
        );
        match (spec, layer.recurrent.as_ref()) {
            (RecurrentSpec::GatedDelta(spec), Some(PackedRecurrent::GatedDelta(weights))) => {
                let layer = DeltaLayer {
                    kernels: self.kernels,
                    spec,
                    weights,
                    states,
                    layer: index,
                    rows: &layout.rows.rows,
                    spans: &layout.spans,
                    span_states: &layout.states,
                    projected: &rows.projected,
                    convolved: &rows.convolved,
                    out: &act.layers[index].attended,
                    tiles: grid.tiles,
                    num_workers: self.scratch.len(),
                };
                layer.convolve(worker);
                barrier_after(Operation::Recurrent, walk);
                layer.run(worker, scratch);
                barrier_after(Operation::Recurrent, walk);
                // This writes no row that is read before the next barrier.
                layer.keep(worker);
            }
            (
                RecurrentSpec::ShortConvolution(spec),
                Some(PackedRecurrent::ShortConvolution(weights)),
            ) => {
                let layer = ConvolutionLayer {
                    kernels: self.kernels,
                    spec,
                    weights,
                    states,
                    layer: index,
                    spans: &layout.spans,
                    span_states: &layout.states,
                    projected: &rows.projected,
                    out: &act.layers[index].attended,
                    tiles: grid.tiles,
                };
                layer.run(worker);
                barrier_after(Operation::Recurrent, walk);
            }
            _ => panic!("a recurrent layer has the weights of another kind"),
        }
    }
}
