//! Quantises a model, with a calibration text, from the user's arguments.

use std::ops::ControlFlow;
use std::path::Path;

use corella_core::TokenId;
use corella_cpu::Isa;
use corella_model::Checkpoint;
use corella_quantize::{Calibration, QuantizeFormat, QuantizeJob, QuantizeProgress, Quantized};
use corella_text::Tokenizer;

use crate::model::model_file::open;
use crate::{Error, ModelSource};

#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    pub format: QuantizeFormat,
    /// Matrices to leave unquantised, by whole parts of their names.
    pub keep: Vec<String>,
    /// With a text, GPTQ compensates the rounding error of each weight in other weights, according to the layers'
    /// inputs on this text. `None` rounds each weight to the nearest integer.
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
    /// Limits the tokens of all documents together; further text is not read.
    pub max_tokens: usize,
}

/// Reads a model and writes the folder `target`, which must not exist yet. The folder appears when it
/// is complete. `progress` may cancel the work.
pub fn quantize(
    source: &ModelSource,
    target: &Path,
    options: &QuantizeOptions,
    progress: &mut dyn FnMut(QuantizeProgress) -> ControlFlow<()>,
) -> Result<Quantized, Error> {
    let (_, checkpoint) = open(source)?;
    if checkpoint.config().spec.encoder.is_some() {
        return Err(Error::Config(
            "encoders are not quantised to folders yet; `corella serve --dtype int8` rounds \
             their weights at start"
                .to_owned(),
        ));
    }
    let calibration = match &options.calibration {
        None => None,
        Some(text) => Some(Calibration {
            sequences: sequences(&checkpoint, text)?,
            isa: options.isa,
        }),
    };
    let job = QuantizeJob {
        format: options.format,
        keep: options.keep.clone(),
        calibration,
        num_threads: options.num_threads,
    };
    Ok(corella_quantize::quantize(
        &checkpoint,
        target,
        &job,
        progress,
    )?)
}

/// The tokens of a calibration text.
fn sequences(checkpoint: &Checkpoint, text: &CalibrationText) -> Result<Vec<Vec<TokenId>>, Error> {
    let tokenizer = Tokenizer::from_bytes(&checkpoint.required_file("tokenizer.json")?)?;
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
    Ok(sequences)
}
