//! Writes a model with quantised matrices, as a folder that vLLM reads too.
//!
//! A plan of all tensors is made first; then they are rounded and written layer by layer, with memory
//! for one matrix at a time. To compensate rounding errors (GPTQ), each layer is run over a text, by the
//! forward pass of serving and with the layers before it already rounded.

use std::ops::ControlFlow;
use std::path::Path;

use corella_cpu::{Isa, LayerCalibration};
use corella_model::{
    Checkpoint, CheckpointWriter, DecoderWeights, InverseFactor, LayerInput, LayerWeights, Place,
    PlannedTensor, QuantizeFormat, QuantizePlan, QuantizedMatrix, Tensor, TensorRole,
};
use corella_text::Tokenizer;
use serde_json::Value;

use crate::llm::{open, required_file};
use crate::{Error, ModelSource};

#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    pub format: QuantizeFormat,
    /// Matrices to leave unquantised, by whole parts of their names.
    pub keep: Vec<String>,
    /// With a text, the rounding error of each weight is compensated in others, by the inputs that
    /// layers have on this text (GPTQ). Without, each weight is rounded to the nearest integer.
    pub calibration: Option<CalibrationText>,
    pub num_threads: usize,
    /// The instruction set to process the calibration text with. Default: the best of this machine.
    pub isa: Option<Isa>,
}

#[derive(Clone, Debug)]
pub struct CalibrationText {
    pub documents: Vec<String>,
    /// Documents are cut into parts of at most this many tokens.
    pub context: usize,
    /// Most tokens of all documents together; further text is not read.
    pub max_tokens: usize,
}

#[derive(Clone, Debug)]
pub struct Quantized {
    /// Size of the new folder.
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
const COPIED: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// Reads a model and writes the folder `target`, which must not exist yet. The folder appears when it
/// is complete. `progress` may cancel the work.
pub fn quantize(
    source: &ModelSource,
    target: &Path,
    options: &QuantizeOptions,
    progress: &mut dyn FnMut(QuantizeProgress) -> ControlFlow<()>,
) -> Result<Quantized, Error> {
    let (_, checkpoint) = open(source)?;
    let weights = checkpoint.weights()?;
    let plan = QuantizePlan::new(
        checkpoint.config().architecture,
        &weights,
        options.format,
        &options.keep,
    )
    .map_err(Error::Config)?;
    if plan.matrices().next().is_none() {
        let reason =
            "there is no matrix to quantise; name fewer in --keep, or use a smaller --group-size";
        return Err(Error::Config(reason.to_owned()));
    }
    let config = config_json(&checkpoint, &weights, &plan)?;
    let parts = plan.parts();
    let mut writer = CheckpointWriter::create(target, &parts)?;
    let mut calibration = match &options.calibration {
        None => None,
        Some(text) => Some(calibration(&checkpoint, &weights, text, options)?),
    };
    let num_calibration_tokens = calibration.as_ref().map_or(0, LayerCalibration::num_tokens);
    let mut job = Job {
        writer: &mut writer,
        num_threads: options.num_threads,
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
                job.write_layer(&weights.layers[layer], together, calibration)?;
            }
            _ => together
                .iter()
                .try_for_each(|planned| job.write(planned, None).map(|_| ()))?,
        }
        rest = others;
    }
    let config = format!("{config:#}\n");
    writer.write_file("config.json", config.as_bytes())?;
    copy_files(&checkpoint, &mut writer)?;
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
) -> Result<Value, Error> {
    let mut config = match checkpoint.file("config.json")? {
        // The checkpoint was opened with it, so it is an object.
        Some(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
        None => {
            let config = checkpoint.config().to_folder_config(weights.embed.dtype);
            config
                .map_err(|reason| Error::Config(format!("no config.json can be made: {reason}")))?
        }
    };
    let is_tied = checkpoint.config().spec.tied_embeddings;
    config["quantization_config"] = plan.quantization_config(is_tied);
    Ok(config)
}

fn copy_files(checkpoint: &Checkpoint, writer: &mut CheckpointWriter) -> Result<(), Error> {
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

struct Job<'a> {
    writer: &'a mut CheckpointWriter,
    num_threads: usize,
    done: usize,
    total: usize,
    progress: &'a mut dyn FnMut(QuantizeProgress) -> ControlFlow<()>,
}

impl Job<'_> {
    /// Quantises a layer by its inputs, then computes its outputs, which are the inputs of the next
    /// layer.
    fn write_layer(
        &mut self,
        layer: &LayerWeights,
        planned: &[PlannedTensor<'_>],
        calibration: &mut LayerCalibration,
    ) -> Result<(), Error> {
        let hessians = calibration.observe(layer)?;
        let mut rounded = layer.clone();
        let mut factor: Option<(LayerInput, InverseFactor)> = None;
        for planned in planned {
            let (Place::Matrix { tensor, .. }, Some(_)) = (planned.place, planned.scheme) else {
                self.write(planned, None)?;
                continue;
            };
            let TensorRole::Matrix(input) = tensor.role() else {
                continue;
            };
            if factor.as_ref().is_none_or(|(of, _)| *of != input) {
                let made = InverseFactor::new(&hessians[input as usize], self.num_threads)
                    .map_err(|reason| Error::Config(format!("{}: {reason}", planned.name)))?;
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
    ) -> Result<Option<Tensor>, Error> {
        let Some(scheme) = planned.scheme else {
            self.copy(planned)?;
            self.count(planned)?;
            return Ok(None);
        };
        let matrix = QuantizedMatrix::new(planned.tensor, scheme, factor, self.num_threads)
            .map_err(|reason| Error::Config(format!("{}: {reason}", planned.name)))?;
        planned.tensor.release();
        for (suffix, bytes) in matrix.parts() {
            self.writer
                .write(&format!("{}.{suffix}", planned.name), &bytes)?;
        }
        self.count(planned)?;
        Ok(factor.map(|_| matrix.into_tensor()))
    }

    /// Copies a tensor row by row, since the blocks of a GGUF file are dequantised here.
    fn copy(&mut self, planned: &PlannedTensor<'_>) -> Result<(), Error> {
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

    fn count(&mut self, planned: &PlannedTensor<'_>) -> Result<(), Error> {
        self.done += num_weights(planned);
        let progress = QuantizeProgress {
            done: self.done,
            total: self.total,
        };
        match (self.progress)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => {
                Err(Error::Config("interrupted; no folder was written".into()))
            }
        }
    }
}

fn num_weights(planned: &PlannedTensor<'_>) -> usize {
    planned.tensor.shape.iter().product()
}

/// Reads the calibration text and computes the inputs of the first layer.
fn calibration(
    checkpoint: &Checkpoint,
    weights: &DecoderWeights,
    text: &CalibrationText,
    options: &QuantizeOptions,
) -> Result<LayerCalibration, Error> {
    let tokenizer = Tokenizer::from_bytes(&required_file(checkpoint, "tokenizer.json")?)?;
    let (mut sequences, mut num_tokens) = (Vec::new(), 0);
    for document in &text.documents {
        let tokens = tokenizer.encode(document, true)?;
        for part in tokens.chunks(text.context) {
            let part = &part[..part.len().min(text.max_tokens - num_tokens)];
            num_tokens += part.len();
            if !part.is_empty() {
                sequences.push(part.to_vec());
            }
        }
        if num_tokens == text.max_tokens {
            break;
        }
    }
    if num_tokens == 0 {
        let reason = "--calibration: the text is empty";
        return Err(Error::Config(reason.to_owned()));
    }
    let spec = &checkpoint.config().spec;
    Ok(LayerCalibration::new(
        spec,
        &weights.embed,
        &sequences,
        options.num_threads,
        options.isa,
    )?)
}
