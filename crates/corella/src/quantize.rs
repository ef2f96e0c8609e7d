//! A model written anew with its matrices as integers, as a folder that vLLM reads too.

use std::ops::ControlFlow;
use std::path::Path;

use corella_cpu::{Isa, LayerCalibration};
use corella_model::{
    Checkpoint, CheckpointWriter, DecoderWeights, InverseFactor, LayerInput, LayerWeights, Place,
    PlannedTensor, QuantizeFormat, QuantizePlan, QuantizedMatrix, Tensor,
};
use corella_text::Tokenizer;
use serde_json::Value;

use crate::llm::{open, required_file};
use crate::{Error, ModelSource};

#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    pub format: QuantizeFormat,
    /// Matrices that stay as they are, by whole parts of their names.
    pub keep: Vec<String>,
    /// With a text, rounding errors are made up for by what the layers take in while it is read.
    /// Without, each weight goes to the nearest integer.
    pub calibration: Option<CalibrationText>,
    pub num_threads: usize,
    /// That the calibration text is read with. Default: the best of this machine.
    pub isa: Option<Isa>,
}

#[derive(Clone, Debug)]
pub struct CalibrationText {
    pub documents: Vec<String>,
    /// Documents are cut into parts of so many tokens, at most.
    pub context: usize,
    /// Of all documents; the rest is not looked at.
    pub max_tokens: usize,
}

#[derive(Clone, Debug)]
pub struct Quantized {
    /// Of the new folder.
    pub num_bytes: u64,
    pub num_matrices: usize,
    /// Names of matrices that are not quantised.
    pub kept: Vec<String>,
    /// Of a quantised weight, with scales and zero points.
    pub bits_per_weight: f64,
    pub num_calibration_tokens: usize,
}

/// How far it is, in weights.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeProgress {
    pub done: usize,
    pub total: usize,
}

/// Files that are the same for any weights.
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

/// Reads a model and writes the folder `target`, which must not exist; it is there when it is
/// complete. `progress` may break it off.
pub fn quantize(
    source: &ModelSource,
    target: &Path,
    options: &QuantizeOptions,
    progress: &mut dyn FnMut(QuantizeProgress) -> ControlFlow<()>,
) -> Result<Quantized, Error> {
    let (_, checkpoint) = open(source)?;
    let weights = checkpoint.weights()?;
    let plan = QuantizePlan::new(&weights, options.format, &options.keep)
        .map_err(|reason| Error::Config(format!("--keep: {reason}")))?;
    if plan.matrices().next().is_none() {
        let reason =
            "no matrix is left to quantise; --keep names fewer, --group-size smaller groups";
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

/// What a folder has as it is, and what a GGUF file is turned into.
fn config_json(
    checkpoint: &Checkpoint,
    weights: &DecoderWeights,
    plan: &QuantizePlan<'_>,
) -> Result<Value, Error> {
    let mut config = match checkpoint.file("config.json")? {
        // It has been read before, as an object.
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
    /// A layer, rounded with an eye to what goes into it; then what comes out of it, for the next.
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
            let (Place::Matrix { index, .. }, Some(_)) = (planned.place, planned.scheme) else {
                self.write(planned, None)?;
                continue;
            };
            let input = LayerInput::OF_MATRICES[index];
            if factor.as_ref().is_none_or(|(of, _)| *of != input) {
                let made = InverseFactor::new(&hessians[input as usize], self.num_threads)
                    .map_err(|reason| Error::Config(format!("{}: {reason}", planned.name)))?;
                factor = Some((input, made));
            }
            let factor = factor.as_ref().map(|(_, factor)| factor);
            if let Some(tensor) = self.write(planned, factor)? {
                *rounded.matrices_mut()[index] = tensor;
            }
        }
        Ok(calibration.advance(&rounded)?)
    }

    /// Returns what a reader makes of a matrix that is quantised.
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

    /// Row by row, for what is stored as blocks is dequantised only here.
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
            ControlFlow::Break(()) => Err(Error::Config("interrupted; nothing is left".into())),
        }
    }
}

fn num_weights(planned: &PlannedTensor<'_>) -> usize {
    planned.tensor.shape.iter().product()
}

/// Rows for every layer to be calibrated with.
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
        let reason = "--calibration: the text has no tokens";
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
