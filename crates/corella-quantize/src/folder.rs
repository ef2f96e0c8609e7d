//! Writes a model with quantised matrices, as a folder that vLLM reads too.
//!
//! A plan of all tensors is made first; then they are rounded and written layer by layer, with memory
//! for one matrix at a time. To compensate rounding errors (GPTQ), each layer is run over a text, by the
//! forward pass of serving and with the layers before it already rounded.

use std::ops::ControlFlow;
use std::path::Path;

use corella_core::TokenId;
use corella_cpu::{Isa, LayerCalibration};
use corella_model::{
    Checkpoint, CheckpointWriter, DecoderWeights, LayerInput, LayerWeights, Tensor, TensorRole,
};
use serde_json::Value;

use crate::{
    InverseFactor, PlannedTensor, QuantizeError, QuantizeFormat, QuantizePlan, QuantizedMatrix,
    TensorScope,
};

/// The settings of a quantisation.
#[derive(Clone, Debug)]
pub struct QuantizeJob {
    pub format: QuantizeFormat,
    /// Matrices to leave unquantised, by whole parts of their names.
    pub keep: Vec<String>,
    /// With a text, the rounding error of each weight is compensated in other weights, by the inputs that layers have
    /// on this text (GPTQ). Without a text, each weight is rounded to the nearest integer.
    pub calibration: Option<Calibration>,
    pub num_threads: usize,
}

/// The text that layers are run over.
#[derive(Clone, Debug)]
pub struct Calibration {
    pub sequences: Vec<Vec<TokenId>>,
    /// The instruction set to process the text with. Default: the best of this machine.
    pub isa: Option<Isa>,
}

#[derive(Clone, Debug)]
pub struct Quantized {
    /// The size of the new folder, in bytes.
    pub num_bytes: u64,
    pub num_matrices: usize,
    /// Names of the matrices that were not quantised.
    pub kept: Vec<String>,
    /// Mean bits per quantised weight, including scales and zero points.
    pub bits_per_weight: f64,
    pub num_calibration_tokens: usize,
}

/// Progress, counted in weights.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeProgress {
    pub done: usize,
    pub total: usize,
}

/// Files that do not depend on the weights, and are copied.
const COPIED: [&str; 10] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// Writes the folder `target`, which must not exist yet. The folder appears when it is complete.
/// `progress` may cancel the work.
pub fn quantize(
    checkpoint: &Checkpoint,
    target: &Path,
    job: &QuantizeJob,
    progress: &mut dyn FnMut(QuantizeProgress) -> ControlFlow<()>,
) -> Result<Quantized, QuantizeError> {
    let weights = checkpoint.weights()?;
    let plan = QuantizePlan::new(checkpoint.config(), &weights, job.format, &job.keep)
        .map_err(QuantizeError::Config)?;
    if plan.matrices().next().is_none() {
        let reason =
            "there is no matrix to quantise; name fewer in --keep, or use a smaller --group-size";
        return Err(QuantizeError::Config(reason.to_owned()));
    }
    let config = config_json(checkpoint, &weights, &plan)?;
    let parts = plan.parts();
    let mut writer = CheckpointWriter::create(target, &parts)?;
    let mut calibration = match &job.calibration {
        None => None,
        Some(text) => Some(LayerCalibration::new(
            &checkpoint.config().spec,
            &weights.embed,
            &text.sequences,
            job.num_threads,
            text.isa,
        )?),
    };
    let num_calibration_tokens = calibration.as_ref().map_or(0, LayerCalibration::num_tokens);
    let mut work = Work {
        writer: &mut writer,
        num_threads: job.num_threads,
        done: 0,
        total: plan.tensors.iter().map(num_weights).sum(),
        progress,
    };
    let mut rest = &plan.tensors[..];
    while let Some(first) = rest.first() {
        let is_with_first = |next: &&PlannedTensor<'_>| next.layer() == first.layer();
        let len = rest.iter().take_while(is_with_first).count();
        let (together, others) = rest.split_at(len);
        match (first.layer(), &mut calibration) {
            (Some(layer), Some(calibration)) => {
                work.write_layer(&weights.layers[layer], together, calibration)?;
            }
            _ => together
                .iter()
                .try_for_each(|planned| work.write(planned, None).map(|_| ()))?,
        }
        rest = others;
    }
    let config = format!("{config:#}\n");
    writer.write_file("config.json", config.as_bytes())?;
    copy_files(checkpoint, &mut writer)?;
    Ok(Quantized {
        num_bytes: writer.finish()?,
        num_matrices: plan.matrices().count(),
        kept: plan.kept().map(str::to_owned).collect(),
        bits_per_weight: plan.bits_per_weight(),
        num_calibration_tokens,
    })
}

/// The model's `config.json`, or the one that the metadata of a GGUF file becomes.
fn config_json(
    checkpoint: &Checkpoint,
    weights: &DecoderWeights,
    plan: &QuantizePlan<'_>,
) -> Result<Value, QuantizeError> {
    let mut config = match checkpoint.file("config.json")? {
        // The checkpoint was opened with this file, so it is a JSON object.
        Some(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
        None => {
            let config = checkpoint.config().to_folder_config(weights.embed.dtype);
            config.map_err(|reason| {
                QuantizeError::Config(format!("no config.json can be made: {reason}"))
            })?
        }
    };
    let is_tied = checkpoint.config().spec.tied_embeddings;
    // config.json ties the head, but the checkpoint has a separate one, which the new folder keeps.
    if !is_tied && config["tie_word_embeddings"] == true {
        config["tie_word_embeddings"] = false.into();
    }
    config["quantization_config"] = plan.quantization_config(is_tied);
    Ok(config)
}

fn copy_files(checkpoint: &Checkpoint, writer: &mut CheckpointWriter) -> Result<(), QuantizeError> {
    for name in COPIED {
        if let Some(bytes) = checkpoint.file(name)? {
            writer.write_file(name, &bytes)?;
        }
    }
    if checkpoint.file("config.json")?.is_none() {
        let generation = checkpoint.config().to_folder_generation_config();
        let generation = format!("{generation:#}\n");
        writer.write_file("generation_config.json", generation.as_bytes())?;
    }
    Ok(())
}

struct Work<'a> {
    writer: &'a mut CheckpointWriter,
    num_threads: usize,
    done: usize,
    total: usize,
    progress: &'a mut dyn FnMut(QuantizeProgress) -> ControlFlow<()>,
}

impl Work<'_> {
    /// Quantises a layer by its inputs, then computes its outputs, which are the inputs of the next layer.
    fn write_layer(
        &mut self,
        layer: &LayerWeights,
        planned: &[PlannedTensor<'_>],
        calibration: &mut LayerCalibration,
    ) -> Result<(), QuantizeError> {
        let hessians = calibration.observe(layer)?;
        let mut rounded = layer.clone();
        let mut factor: Option<(LayerInput, InverseFactor)> = None;
        for planned in planned {
            let (TensorScope::Matrix { tensor, .. }, Some(_)) = (planned.scope, planned.scheme)
            else {
                self.write(planned, None)?;
                continue;
            };
            let TensorRole::Matrix(input) = tensor.role() else {
                continue;
            };
            if factor.as_ref().is_none_or(|(of, _)| *of != input) {
                let made = InverseFactor::new(&hessians[input as usize], self.num_threads)
                    .map_err(|reason| {
                        QuantizeError::Config(format!("{}: {reason}", planned.name))
                    })?;
                factor = Some((input, made));
            }
            let factor = factor.as_ref().map(|(_, factor)| factor);
            if let Some(values) = self.write(planned, factor)? {
                rounded.insert(tensor, values);
            }
        }
        Ok(calibration.advance(&rounded)?)
    }

    /// Writes a tensor. If it was quantised by GPTQ, returns it as a reader will see it.
    fn write(
        &mut self,
        planned: &PlannedTensor<'_>,
        factor: Option<&InverseFactor>,
    ) -> Result<Option<Tensor>, QuantizeError> {
        let Some(scheme) = planned.scheme else {
            self.copy(planned)?;
            self.count(planned)?;
            return Ok(None);
        };
        let matrix = QuantizedMatrix::new(planned.tensor, scheme, factor, self.num_threads)
            .map_err(|reason| QuantizeError::Config(format!("{}: {reason}", planned.name)))?;
        planned.tensor.release();
        for (suffix, bytes) in matrix.parts() {
            self.writer
                .write(&format!("{}.{suffix}", planned.name), &bytes)?;
        }
        self.count(planned)?;
        Ok(factor.map(|_| matrix.into_tensor()))
    }

    /// Copies a tensor row by row, since the blocks of a GGUF file are dequantised here.
    fn copy(&mut self, planned: &PlannedTensor<'_>) -> Result<(), QuantizeError> {
        const AT_ONCE: usize = 1 << 20;
        let tensor = planned.tensor;
        if tensor.shape.len() < 2 {
            return Ok(self.writer.write(&planned.name, tensor.bytes())?);
        }
        let (mut scratch, mut bytes) = (Vec::new(), Vec::new());
        for row in 0..tensor.shape[0] {
            bytes.extend_from_slice(tensor.row(row, &mut scratch));
            if bytes.len() >= AT_ONCE {
                self.writer.write(&planned.name, &bytes)?;
                bytes.clear();
            }
        }
        self.writer.write(&planned.name, &bytes)?;
        tensor.release();
        Ok(())
    }

    fn count(&mut self, planned: &PlannedTensor<'_>) -> Result<(), QuantizeError> {
        self.done += num_weights(planned);
        let progress = QuantizeProgress {
            done: self.done,
            total: self.total,
        };
        match (self.progress)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(QuantizeError::Config(
                "interrupted; no folder was written".into(),
            )),
        }
    }
}

fn num_weights(planned: &PlannedTensor<'_>) -> usize {
    planned.tensor.shape.iter().product()
}
