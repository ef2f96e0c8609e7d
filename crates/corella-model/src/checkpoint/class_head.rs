//! Scores of a text's classes: the heads of cross-encoders and classifiers, and the answers of decoders that rerank.

use corella_core::{Pooling, TokenId};

use crate::arch::{FolderFields, HeadPart};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::vector_head::HeadFile;
use crate::json::file_name::CONFIG;
use crate::json::json_object::{self, JsonObject};
use crate::{CheckpointError, HeadActivation, HeadStep, VectorHead};

/// Turns the pooled hidden state of a text, or of a pair of texts, into scores of classes.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassHead {
    pub pooling: Pooling,
    pub head: VectorHead,
    /// The names of the classes.
    pub labels: Vec<String>,
    /// Whether a text may belong to several classes, each with a probability of its own.
    pub is_multi_label: bool,
    /// Whether scores of a single class are unbounded numbers (regression).
    pub is_regression: bool,
    /// The activation for the score of a pair, if the model sets it.
    pub score_activation: Option<HeadActivation>,
}

impl ClassHead {
    /// Reads the head of a model; `None` if config.json names a class without one.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Option<Self>, CheckpointError> {
        let config = checkpoint.config();
        let parts = config.architecture.folder_layout().class_head;
        if config.spec.encoder.is_none() || parts.is_empty() {
            return Ok(None);
        }
        let Some(bytes) = checkpoint.file(CONFIG)? else {
            return Ok(None);
        };
        let label = checkpoint.label(CONFIG);
        let fields = json_object::parse(&label, &bytes)?;
        let fields = FolderFields::new(JsonObject::new(&label, &fields));
        let fields = fields.object();
        let class = fields
            .get("architectures")
            .and_then(|list| list[0].as_str());
        if !class.is_some_and(|class| class.ends_with("ForSequenceClassification")) {
            return Ok(None);
        }
        let mut head = VectorHead::default();
        let mut len = config.spec.hidden_size;
        for &part in parts {
            let from = (checkpoint, &HeadFile::Model);
            match part {
                HeadPart::Dense(name, activation) => {
                    // ModernBERT's configuration may name another function than GELU.
                    let named = match activation {
                        HeadActivation::Gelu => named_activation(fields, "classifier_activation")?,
                        _ => None,
                    };
                    let activation = named.unwrap_or(activation);
                    head.push_dense(from, name, len, activation)?;
                }
                HeadPart::Norm(name) => head.push_norm(from, name, len, config.spec.norm.eps)?,
            }
            len = head.output_len(len);
        }
        let problem = fields.try_text("problem_type")?;
        Ok(Some(Self {
            pooling: match fields.try_text("classifier_pooling")? {
                None | Some("cls") => Pooling::FirstToken,
                Some("mean") => Pooling::Mean,
                Some(_) => {
                    return Err(fields.refuse("classifier_pooling", "supported are cls, mean"));
                }
            },
            labels: labels(fields.try_object("id2label")?, len),
            head,
            is_multi_label: problem == Some("multi_label_classification"),
            is_regression: problem == Some("regression"),
            score_activation: score_activation(fields)?,
        }))
    }

    /// Scores a decoder's answer: the logit of `yes` after the last token of a prompt, minus the logit of `no`, if
    /// given. The score is the product of the hidden state and the difference of two rows of the output head.
    pub(crate) fn of_tokens(
        checkpoint: &Checkpoint,
        yes: TokenId,
        no: Option<TokenId>,
    ) -> Result<Self, CheckpointError> {
        let config = checkpoint.config();
        if !config.has_head || config.spec.logit_soft_cap.is_some() {
            let problem = "scores need an output head, and logits without a soft cap";
            return Err(CheckpointError::new(checkpoint.label(CONFIG), problem));
        }
        let weights = checkpoint.weights()?;
        let head = weights.lm_head.as_ref().unwrap_or(&weights.embed);
        let row_of = |token: TokenId| {
            let mut row = vec![0.0; config.spec.hidden_size];
            head.read_row(token as usize, &mut Vec::new(), &mut row);
            row
        };
        let mut weight = row_of(yes);
        if let Some(no) = no {
            let others = row_of(no).into_iter();
            weight
                .iter_mut()
                .zip(others)
                .for_each(|(x, other)| *x -= other);
        }
        weight
            .iter_mut()
            .for_each(|x| *x *= config.spec.logit_scale);
        let step = HeadStep::Dense {
            weight,
            bias: vec![0.0],
            activation: HeadActivation::None,
        };
        Ok(Self {
            pooling: Pooling::LastToken,
            head: VectorHead::new(vec![step]),
            labels: labels(None, 1),
            is_multi_label: false,
            is_regression: false,
            score_activation: None,
        })
    }

    /// The model's score of each class.
    pub fn logits(&self, state: &[f32]) -> Vec<f32> {
        self.head.apply(state)
    }

    /// The probabilities of the classes. If a text belongs to one of several classes, they add up to 1.
    pub fn probabilities(&self, state: &[f32]) -> Vec<f32> {
        let logits = self.logits(state);
        if self.is_regression {
            return logits;
        }
        if self.is_multi_label || logits.len() == 1 {
            let sigmoid = |x| HeadActivation::Sigmoid.apply(x);
            return logits.into_iter().map(sigmoid).collect();
        }
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = logits.iter().map(|x| (x - most).exp()).collect();
        let sum: f32 = weights.iter().sum();
        weights.into_iter().map(|weight| weight / sum).collect()
    }

    /// The relevance of a pair of texts, from a model with one class: a number from 0 to 1 unless the model sets
    /// another activation, as in sentence-transformers.
    pub fn score(&self, state: &[f32]) -> f32 {
        let activation = self.score_activation.unwrap_or(HeadActivation::Sigmoid);
        self.logits(state)
            .first()
            .map_or(0.0, |&x| activation.apply(x))
    }
}

/// The names of `num_classes` classes. Classes that the configuration leaves out are named by their index.
fn labels(named: Option<JsonObject<'_>>, num_classes: usize) -> Vec<String> {
    let label = |class: usize| {
        let named = named
            .as_ref()
            .and_then(|named| named.get(&class.to_string()));
        let name = named.and_then(|name| name.as_str()).map(str::to_owned);
        name.unwrap_or_else(|| format!("LABEL_{class}"))
    };
    (0..num_classes).map(label).collect()
}

/// The activation function in a field, if present.
pub fn named_activation(
    config: &JsonObject<'_>,
    field: &str,
) -> Result<Option<HeadActivation>, CheckpointError> {
    let Some(name) = config.try_text(field)? else {
        return Ok(None);
    };
    match HeadActivation::named(name) {
        Some(activation) => Ok(Some(activation)),
        None => Err(config.refuse(field, "is not a known activation function")),
    }
}

/// The activation that sentence-transformers applies to the score of a pair, from its newer field or the older one.
fn score_activation(config: &JsonObject<'_>) -> Result<Option<HeadActivation>, CheckpointError> {
    const OLDER: &str = "sbert_ce_default_activation_function";
    const FIELD: &str = "activation_fn";
    if let Some(own) = config.try_object("sentence_transformers")?
        && let Some(activation) = named_activation(&own, FIELD)?
    {
        return Ok(Some(activation));
    }
    named_activation(config, OLDER)
}
