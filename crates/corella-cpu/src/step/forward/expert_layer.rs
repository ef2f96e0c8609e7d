//! The feed-forward part of layers with experts.

use std::io;

use corella_model::{DecoderSpec, ExpertSpec, FeedForward, LayerSpec};

use crate::dense::{Buffer, Epilogue, Grid, PackedRows, Part, Tiles, gemm};
use crate::kernels::{Form, Kernels, PANEL_LANES};
use crate::weights::{PackedExperts, PackedMatrix, PackedNorm};

use crate::step::activation_memory::LayerRows;
use crate::step::expert_plan::{Choices, ExpertPlan, choose, sigmoid};
use crate::step::forward::Forward;
use crate::step::forward::norm::RowNorm;
use crate::step::layout::StepLayout;
use crate::step::profile::barrier_after;
use crate::step::profile::{Operation, Walk};

/// The memory of layers with experts.
pub struct ExpertRows {
    /// The layer's input, normed, in f32.
    input: Buffer,
    /// The same input in the form that the router reads.
    router_input: PackedRows,
    /// The router's outputs, which are turned into scores.
    scores: Buffer,
    choices: Choices,
    /// The input rows, by expert.
    gathered: PackedRows,
    /// The inputs of down projections, as long as the longest one of any layer.
    gated: PackedRows,
    /// The experts' outputs.
    outputs: Buffer,
}

impl ExpertRows {
    /// Allocates the memory of layers with experts, if any.
    pub fn new(
        spec: &DecoderSpec,
        kernels: &Kernels,
        max_rows: usize,
        packed: impl Fn(usize, usize) -> io::Result<PackedRows>,
    ) -> io::Result<Option<Self>> {
        let most = |count: fn(&ExpertSpec) -> usize| {
            let experts = spec.layers.iter().filter_map(experts_of);
            experts.map(count).max().unwrap_or(0)
        };
        let num_experts = most(|experts| experts.num_experts);
        if num_experts == 0 {
            return Ok(None);
        }
        let per_token = most(|experts| experts.num_experts_per_token);
        let (num_gathered, hidden) = (max_rows * per_token, spec.hidden_size);
        let router_rows = max_rows.next_multiple_of(kernels.rows_at_once(Form::Columns));
        Ok(Some(Self {
            input: Buffer::new(max_rows, hidden)?,
            router_input: PackedRows::new(router_rows, hidden, Form::Columns, false)?,
            scores: Buffer::new(max_rows, num_experts + 1)?,
            choices: Choices::new(max_rows, per_token)?,
            gathered: packed(num_gathered, hidden)?,
            gated: packed(
                num_gathered,
                most(|experts| experts.expert.intermediate_size),
            )?,
            outputs: Buffer::new(num_gathered, hidden)?,
        }))
    }

    /// The inputs of a layer's down projections.
    pub fn gated_of(&self, layer: &LayerSpec) -> Option<PackedRows> {
        let experts = experts_of(layer)?;
        Some(self.gated.shortened(experts.expert.intermediate_size))
    }
}

fn experts_of(layer: &LayerSpec) -> Option<&ExpertSpec> {
    match &layer.feed_forward {
        FeedForward::Experts(experts) => Some(experts),
        FeedForward::Mlp(_) => None,
    }
}

/// The inputs and outputs of one layer's experts.
struct ExpertLayer<'a> {
    spec: &'a ExpertSpec,
    weights: &'a PackedExperts,
    rows: &'a ExpertRows,
    layer_rows: &'a LayerRows,
}

impl Forward {
    /// Writes the experts' input. The router reads it in f32, whatever the form of the layers' rows.
    pub(super) fn enter_experts(
        &self,
        layout: &StepLayout,
        [norm, router_norm]: [Option<&PackedNorm>; 2],
        walk: &Walk<'_>,
    ) {
        let rows = self.expert_rows();
        let grid = self.column_grid(layout);
        for row in layout.grid.own_rows(walk.worker.index()) {
            let tile = grid.tiles.rows(grid.tiles.tile_of(row));
            // SAFETY: the residual stream is not written before the next barrier, and the row of the input belongs to
            // this worker.
            let (x, input) = unsafe { (self.activations.hidden.row(row), rows.input.row_mut(row)) };
            let x = &x[..self.spec.hidden_size];
            RowNorm::new(self.kernels, norm, x).for_each_part(x, |first, values| {
                input[first..][..values.len()].copy_from_slice(values);
            });
            RowNorm::new(self.kernels, router_norm, x).for_each_part(x, |first, values| {
                // SAFETY: the row belongs to this worker.
                unsafe {
                    rows.router_input
                        .write(self.kernels, &tile, row, first, values)
                };
            });
        }
    }

    /// Computes the experts of a layer. The experts' input has been written before the last barrier.
    pub(super) fn experts(
        &self,
        layout: &StepLayout,
        index: usize,
        weights: &PackedExperts,
        after: Option<&PackedNorm>,
        plan: &mut ExpertPlan,
        walk: &mut Walk<'_>,
    ) {
        let spec = &self.spec.layers[index];
        let layer = ExpertLayer {
            spec: experts_of(spec).expect("the layer has experts"),
            weights,
            rows: self.expert_rows(),
            layer_rows: &self.activations.layers[index],
        };
        self.route(layout, &layer, walk);
        self.gather(layout, &layer, plan, walk);
        self.run_experts(&layer, plan, walk);
        self.run_shared(layout, &layer, walk);
        self.combine(layout, &layer, plan, (after, spec.residual_scale), walk);
    }

    fn expert_rows(&self) -> &ExpertRows {
        let rows = self.activations.experts.as_ref();
        rows.expect("a layer has experts, but no rows for them")
    }

    /// The division of the step's rows for dense layers that read `Form::Columns`, whatever the form of the other
    /// layers.
    pub(super) fn column_grid(&self, layout: &StepLayout) -> Grid {
        let tile_rows = self.kernels.rows_at_once(Form::Columns);
        Grid::new(
            Tiles::new(layout.rows.rows.len(), tile_rows),
            self.scratch.len(),
        )
    }

    /// Chooses the experts of all rows.
    fn route(&self, layout: &StepLayout, layer: &ExpertLayer<'_>, walk: &mut Walk<'_>) {
        let (rows, spec) = (layer.rows, layer.spec);
        let (grid, out) = (self.column_grid(layout), Epilogue::Store(&rows.scores));
        let router = &layer.weights.router;
        self.dense(
            Operation::Route,
            &rows.router_input,
            grid,
            router.into(),
            out,
            walk,
        );
        let bias = layer.weights.selection_bias.as_deref();
        for row in layout.grid.own_rows(walk.worker.index()) {
            // SAFETY: the scores are complete since the last barrier, and the row belongs to this worker.
            let (scores, chosen) = unsafe {
                (
                    rows.scores.row_mut(row),
                    rows.choices.row_mut(row, spec.num_experts_per_token),
                )
            };
            choose(spec, &mut scores[..spec.num_experts], bias, chosen);
            if let Some(scales) = &layer.weights.scales {
                for choice in chosen {
                    choice.weight *= scales[choice.expert as usize];
                }
            }
        }
        barrier_after(Operation::Route, walk);
    }

    /// Copies rows to their experts. Each worker makes the plan for itself, which is faster than waiting for another
    /// worker's plan.
    fn gather(
        &self,
        layout: &StepLayout,
        layer: &ExpertLayer<'_>,
        plan: &mut ExpertPlan,
        walk: &mut Walk<'_>,
    ) {
        let (rows, per_token) = (layer.rows, layer.spec.num_experts_per_token);
        // SAFETY: choices are complete since the last barrier.
        let of_row = |row| unsafe { rows.choices.row(row, per_token) };
        plan.build(
            layer.spec,
            layout.rows.rows.len(),
            self.expert_tile_rows,
            of_row,
        );
        for row in walk.worker.share(plan.num_rows()) {
            let tiles = plan.expert_of(row).tiles;
            let tile = tiles.rows(tiles.tile_of(row));
            // SAFETY: the input is complete since the last barrier, and the gathered row belongs to this worker.
            unsafe {
                let x = &rows.input.row(plan.sources[row])[..self.spec.hidden_size];
                rows.gathered.write(self.kernels, &tile, row, 0, x);
                let weights = &layer.weights.experts.gate_up;
                rows.gathered.complete(self.kernels, &tile, row, weights);
            }
        }
        barrier_after(Operation::Route, walk);
    }

    fn run_experts(&self, layer: &ExpertLayer<'_>, plan: &ExpertPlan, walk: &mut Walk<'_>) {
        let (rows, mlp) = (layer.rows, &layer.spec.expert);
        let weights = &layer.weights.experts;
        let gated = layer.layer_rows.expert_gated.as_ref();
        let gated = gated.expect("a layer has experts, but no rows for them");
        let num_experts = layer.spec.num_experts;
        let out = Epilogue::activate(gated, mlp);
        self.expert_gemm(
            &rows.gathered,
            plan,
            (&weights.gate_up, num_experts),
            out,
            walk,
        );
        barrier_after(Operation::GateUp, walk);
        if gated.needs_completion() {
            for row in walk.worker.share(plan.num_rows()) {
                let tiles = plan.expert_of(row).tiles;
                let tile = tiles.rows(tiles.tile_of(row));
                // SAFETY: the row was written before the last barrier, and belongs to this worker.
                unsafe { gated.complete(self.kernels, &tile, row, &weights.down) };
            }
            barrier_after(Operation::Quantise, walk);
        }
        let out = Epilogue::Store(&rows.outputs);
        self.expert_gemm(gated, plan, (&weights.down, num_experts), out, walk);
        barrier_after(Operation::Down, walk);
    }

    /// Multiplies the rows of each expert by the expert's part of the weights. Workers share the panels of all active
    /// experts, so that one worker reads each panel.
    fn expert_gemm(
        &self,
        rows: &PackedRows,
        plan: &ExpertPlan,
        (weights, num_experts): (&PackedMatrix, usize),
        out: Epilogue<'_>,
        walk: &Walk<'_>,
    ) {
        let num_panels = weights.num_panels / num_experts;
        let num_units = plan.experts.len() * num_panels;
        let num_threads = self.scratch.len();
        let at = |owner: usize| owner * num_units / num_threads;
        walk.worker.take_shares(
            |owner| at(owner + 1) - at(owner),
            |owner, taken| {
                let (mut unit, end) = (at(owner) + taken.start, at(owner) + taken.end);
                while unit < end {
                    let expert = &plan.experts[unit / num_panels];
                    let first = unit % num_panels;
                    let panels = first..num_panels.min(first + end - unit);
                    unit += panels.len();
                    let next = plan.experts.get(unit / num_panels).filter(|_| unit < end);
                    let base = expert.expert * num_panels;
                    let panels = base + panels.start..base + panels.end;
                    let taken = 0..expert.tiles.len();
                    let mut part = Part::new(self.kernels, rows, expert.tiles, taken, panels);
                    part.first_panel = base;
                    part.next_panel = next.map(|next| next.expert * num_panels + unit % num_panels);
                    let units = 0..part.num_units();
                    gemm(self.kernels, rows, &part, units, weights.into(), out);
                }
            },
        );
        let flops = 2 * plan.num_rows() * rows.k * num_panels * PANEL_LANES;
        let bytes = weights.num_bytes() / num_experts * plan.experts.len();
        walk.count(
            match out {
                Epilogue::Store(_) => Operation::Down,
                _ => Operation::GateUp,
            },
            flops,
            bytes,
        );
    }

    fn run_shared(&self, layout: &StepLayout, layer: &ExpertLayer<'_>, walk: &mut Walk<'_>) {
        if let (Some(shared), Some(weights)) = (&layer.spec.shared, &layer.weights.shared) {
            let out = Epilogue::Store(self.branch());
            let gated = &layer.layer_rows.gated;
            self.run_mlp(
                layout,
                None,
                (&shared.mlp, weights),
                (gated, out),
                walk,
                &(),
            );
        }
    }

    /// Adds the experts' outputs in the order of the experts' ids, so that the step's other rows do not affect a sum.
    fn combine(
        &self,
        layout: &StepLayout,
        layer: &ExpertLayer<'_>,
        plan: &ExpertPlan,
        (after, residual_scale): (Option<&PackedNorm>, f32),
        walk: &mut Walk<'_>,
    ) {
        let (rows, spec, hidden) = (layer.rows, layer.spec, self.spec.hidden_size);
        let per_token = spec.num_experts_per_token;
        for row in layout.grid.own_rows(walk.worker.index()) {
            // The input is no longer needed, and has room for the sum. SAFETY: outputs and choices are complete since
            // the last barrier; the row belongs to this worker.
            unsafe {
                let sum = &mut rows.input.row_mut(row)[..hidden];
                sum.fill(0.0);
                let places = &plan.places[row * per_token..][..per_token];
                for (choice, &place) in rows.choices.row(row, per_token).iter().zip(places) {
                    add_scaled(sum, &rows.outputs.row(place)[..hidden], choice.weight);
                }
                let own_norms = layer.weights.own_norms.as_ref();
                if let Some(norms) = own_norms {
                    RowNorm::new(self.kernels, Some(&norms.output), sum).apply(sum);
                }
                if let Some(shared) = &spec.shared {
                    let weight = match shared.is_weighed {
                        true => sigmoid(rows.scores.row(row)[spec.num_experts]),
                        false => 1.0,
                    };
                    let x = &self.branch().row(row)[..hidden];
                    let norm = own_norms.map(|norms| &norms.shared_output);
                    RowNorm::new(self.kernels, norm, x).for_each_part(x, |first, values| {
                        add_scaled(&mut sum[first..][..values.len()], values, weight);
                    });
                }
                self.add_to_row(row, after, residual_scale, sum);
            }
        }
        walk.note(Operation::Combine);
    }
}

fn add_scaled(sum: &mut [f32], x: &[f32], scale: f32) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += x * scale;
    }
}
