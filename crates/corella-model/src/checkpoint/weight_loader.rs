//! The mapping from a checkpoint's tensors to a decoder's weights, and their required shapes.

mod draft_head;

use std::collections::{HashMap, HashSet};

use crate::arch::tensor_part::Part;
use crate::arch::{Layout, Stored};
use crate::checkpoint::packed_matrix::{self, Parts};
use crate::file::file_tensor::{FileTensor, TensorSource};
use crate::tensor::packed_tensor::{RowView, StoredTensor};
use crate::{
    CheckpointError, DecoderWeights, EncoderSpec, EncoderWeights, LayerSpec, LayerTensor,
    LayerWeights, ModelConfig, NormSpec, PerLayerWeights, Quantization, RowOrder, Tensor,
    TensorRole, TensorSpec,
};

/// Finds and checks all weights. `missing_from` is the file named in errors about missing tensors.
pub fn load<S: TensorSource>(
    config: &ModelConfig,
    files: &[S],
    layout: &Layout,
    missing_from: &str,
) -> Result<DecoderWeights, CheckpointError> {
    let spec = &config.spec;
    let mut tensors = Tensors::new(config, files, layout, missing_from);
    let vocab_by_hidden = [spec.vocab_size, spec.hidden_size];
    let stored_by_hidden = [config.num_vocab_rows, spec.hidden_size];
    let mut embed = tensors.weight(layout.embed);
    let head = format!("{}.weight", tensors.head);
    let is_there = |name: &String| tensors.by_name.contains_key(name);
    // Some exporters store a tied matrix only under the name of the head.
    if spec.tied_embeddings && !is_there(&embed) && is_there(&head) {
        embed = head;
    }
    let embed = tensors.find(&embed, &stored_by_hidden)?;
    let embed = embed.rows(0..spec.vocab_size, RowOrder::AsStored);
    let positions = match spec.learned_positions {
        true => {
            let first = spec.encoder.as_ref().map_or(0, |it| it.first_position);
            let shape = [first + spec.max_position, spec.hidden_size];
            Some(tensors.take(&tensors.weight(layout.positions), &shape)?)
        }
        false => None,
    };
    let encoder = match &spec.encoder {
        Some(encoder) => tensors.take_encoder(encoder)?,
        None => EncoderWeights::default(),
    };
    let mut layers = Vec::new();
    for (index, layer) in spec.layers.iter().enumerate() {
        layers.push(tensors.take_layer(index, layer)?);
    }
    let per_layer = match spec.per_layer() {
        Some(of_layer) => Some(tensors.take_per_layer(of_layer.len)?),
        None => None,
    };
    let draft_head = match &spec.draft_head {
        Some(layer) => Some(tensors.take_draft_head(layer)?),
        None => None,
    };
    let norm_name = layout.norm_name(spec.layers.len());
    let (norm, norm_bias) = tensors.take_norm(&norm_name, spec.norm)?;
    let lm_head = match spec.tied_embeddings {
        true => None,
        false => {
            let name = tensors.head;
            let part = Part::by_itself(config.num_vocab_rows);
            Some(tensors.take_matrix(name, &Stored::whole(name), &part, vocab_by_hidden)?)
        }
    };
    let left_out = tensors.left_out()?;
    Ok(DecoderWeights {
        embed,
        positions,
        layers,
        norm: tensors.whole_norm(norm),
        norm_bias,
        lm_head,
        encoder,
        per_layer,
        draft_head,
        left_out,
        files: None,
    })
}

struct Tensors<'a, S> {
    config: &'a ModelConfig,
    layout: &'a Layout,
    /// The prefix of all tensor names except the head's.
    body: &'static str,
    head: &'static str,
    by_name: HashMap<String, &'a S>,
    taken: HashSet<String>,
    missing_from: &'a str,
}

impl<'a, S: TensorSource> Tensors<'a, S> {
    fn new(
        config: &'a ModelConfig,
        files: &'a [S],
        layout: &'a Layout,
        missing_from: &'a str,
    ) -> Self {
        let names_of = |file: &'a S| file.names().into_iter().map(move |name| (name, file));
        let by_name: HashMap<_, _> = files.iter().flat_map(names_of).collect();
        let is_there = |(body, _): &&(&str, &str)| {
            by_name.contains_key(&format!("{body}{}.weight", layout.embed))
        };
        let (body, head) = *layout
            .bodies
            .iter()
            .find(is_there)
            .unwrap_or(&layout.bodies[0]);
        Self {
            config,
            layout,
            body,
            head,
            by_name,
            taken: HashSet::new(),
            missing_from,
        }
    }

    fn weight(&self, name: &str) -> String {
        format!("{}{name}.weight", self.body)
    }

    /// Takes a tensor unchanged.
    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, CheckpointError> {
        let tensor = self.find(name, shape)?;
        let num_rows = tensor.shape[0];
        Ok(tensor.rows(0..num_rows, RowOrder::AsStored))
    }

    /// Finds a tensor, whose shape in the file must be `shape`, except for a size of 1.
    fn find(&mut self, name: &str, shape: &[usize]) -> Result<FileTensor, CheckpointError> {
        let Some(file) = self.by_name.get(name) else {
            let problem = format!("tensor {name} is missing; it should have shape {shape:?}");
            return Err(CheckpointError::new(self.missing_from, problem));
        };
        let mut tensor = file
            .tensor(name)?
            .expect("the file lists the tensor but does not have it");
        // Some exporters store some vectors as matrices of one row.
        if let (&[len], &[1, row_len]) = (shape, &tensor.shape[..])
            && len == row_len
        {
            tensor.shape = vec![len];
        }
        // Convolutions of single channels have a size of 1 between their channels and their lengths.
        if let (&[num_channels, len], &[stored_channels, 1, stored_len]) =
            (shape, &tensor.shape[..])
            && (num_channels, len) == (stored_channels, stored_len)
        {
            tensor.shape = vec![num_channels, len];
        }
        if tensor.shape != shape {
            let problem = format!(
                "tensor {name} has shape {:?}; {} makes it {shape:?}",
                tensor.shape, self.layout.described_by
            );
            return Err(CheckpointError::new(file.file(), problem));
        }
        self.taken.insert(name.to_string());
        Ok(tensor)
    }

    /// Takes the weights of a norm outside of the layers, and its bias, if any.
    fn take_norm(
        &mut self,
        name: &str,
        spec: NormSpec,
    ) -> Result<(Tensor, Option<Tensor>), CheckpointError> {
        let hidden = [self.config.spec.hidden_size];
        let weight = self.take(&self.weight(name), &hidden)?;
        let bias = match spec.has_bias() {
            true => Some(self.take(&format!("{}{name}.bias", self.body), &hidden)?),
            false => None,
        };
        Ok((weight, bias))
    }

    fn take_encoder(&mut self, spec: &EncoderSpec) -> Result<EncoderWeights, CheckpointError> {
        let mut weights = EncoderWeights::default();
        if spec.num_segments > 0 {
            let shape = [spec.num_segments, self.config.spec.hidden_size];
            let name = self.weight(self.layout.segments);
            weights.segments = Some(self.take(&name, &shape)?);
        }
        if let Some(norm) = spec.embedding_norm {
            let (weight, bias) = self.take_norm(self.layout.embedding_norm, norm)?;
            (weights.embedding_norm, weights.embedding_norm_bias) = (Some(weight), bias);
        }
        Ok(weights)
    }

    /// Takes the tensors of the layers' own inputs, with `len` elements in each layer.
    fn take_per_layer(&mut self, len: usize) -> Result<PerLayerWeights, CheckpointError> {
        let spec = &self.config.spec;
        let num_elements = spec.layers.len() * len;
        let [table, projection, norm] = self.layout.per_layer.map(|name| self.weight(name));
        let table = self.take(&table, &[self.config.num_vocab_rows, num_elements])?;
        let projection = self.take(&projection, &[num_elements, spec.hidden_size])?;
        let norm = self.take(&norm, &[len])?;
        Ok(PerLayerWeights {
            table,
            projection,
            norm: self.whole_norm(norm),
        })
    }

    fn take_layer(
        &mut self,
        index: usize,
        layer: &LayerSpec,
    ) -> Result<LayerWeights, CheckpointError> {
        let specs = layer.tensors(self.config.spec.hidden_size);
        let prefix = self.layout.prefix(self.body, index);
        let mut weights = LayerWeights::default();
        for TensorSpec { tensor, shape } in &specs {
            let tensor = *tensor;
            let stored = self.stored(&prefix, tensor.owner().unwrap_or(tensor));
            let part = Part::new(tensor, layer, self.layout, &stored, &specs);
            let values = match (tensor.role(), &shape[..]) {
                (TensorRole::Matrix(_), &[out, input]) => {
                    let name = format!("{prefix}{}", stored.name);
                    self.take_matrix(&name, &stored, &part, [out, input])?
                }
                (_, shape) => {
                    let name = prefix.clone() + &stored.full_name(tensor.owner().is_some());
                    let mut whole = self.find(&name, &part.whole(shape))?;
                    if part.num_experts.is_some() {
                        whole = whole.flat();
                    }
                    let values = whole.rows(part.rows(), part.order);
                    match tensor {
                        _ if tensor.is_norm() => self.whole_norm(values),
                        LayerTensor::DeltaRate if self.layout.has_plain_rates => {
                            values.converted(|rate| f64::from(-rate).ln() as f32)
                        }
                        _ => values,
                    }
                }
            };
            weights.insert(tensor, values);
        }
        Ok(weights)
    }

    /// The place of a layer's tensor in these files. `prefix` begins the names of the layer's tensors.
    fn stored(&self, prefix: &str, tensor: LayerTensor) -> Stored {
        let elsewhere = (self.layout.elsewhere)(tensor);
        let is_there = |stored: &Stored| {
            let name = prefix.to_owned() + &stored.full_name(false);
            self.by_name.contains_key(&name)
        };
        let found = elsewhere.filter(is_there);
        found.unwrap_or_else(|| (self.layout.of_layer)(tensor))
    }

    /// Takes a matrix, which may be stored as integers if the configuration describes a quantisation.
    fn take_matrix(
        &mut self,
        name: &str,
        stored: &Stored,
        part: &Part,
        [out, input]: [usize; 2],
    ) -> Result<Tensor, CheckpointError> {
        if let Some(tensor) = self.take_integers(name, stored, part, [out, input])? {
            return Ok(tensor);
        }
        let name = match stored.is_complete {
            true => name.to_owned(),
            false => format!("{name}.weight"),
        };
        if stored.is_transposed {
            let mut shape: Vec<usize> = part.num_experts.into_iter().collect();
            shape.extend([input, part.num_rows]);
            let tensor = self.find(&name, &shape)?;
            return columns_of(tensor, part, stored.expert).ok_or_else(|| {
                let problem = format!("tensor {name} is stored as [in, out] and in blocks");
                CheckpointError::new(self.missing_from, problem)
            });
        }
        let tensor = self.find(&name, &part.whole(&[out, input]))?;
        Ok(tensor.rows_with_columns(part.rows(), [part.order, part.columns]))
    }

    /// Takes a matrix that is stored as integers; `None` if it is stored otherwise.
    fn take_integers(
        &mut self,
        name: &str,
        stored: &Stored,
        part: &Part,
        [out, input]: [usize; 2],
    ) -> Result<Option<Tensor>, CheckpointError> {
        let Some(quantization) = &self.config.quantization else {
            return Ok(None);
        };
        // Transposed matrices and the matrices of experts are stored as integers in MXFP4 only, and no other matrix
        // is in MXFP4.
        let is_mxfp4 = *quantization == Quantization::Mxfp4;
        if (stored.is_transposed || stored.expert.is_some()) != is_mxfp4 {
            return Ok(None);
        }
        let view = RowView {
            first: part.first,
            num_rows: out,
            order: part.order,
        };
        let mut parts = MatrixParts {
            prefix: match stored.is_complete {
                true => format!("{name}_"),
                false => format!("{name}."),
            },
            by_name: &self.by_name,
            taken: &mut self.taken,
            file: None,
        };
        let num_experts = part.num_experts.unwrap_or(1);
        let whole = [part.num_rows, input];
        packed_matrix::find(quantization, num_experts, whole, view, &mut parts).map_err(|problem| {
            CheckpointError::new(
                parts.file.unwrap_or(self.missing_from),
                format!("matrix {name}: {problem}"),
            )
        })
    }

    /// The factors of a norm.
    fn whole_norm(&self, stored: Tensor) -> Tensor {
        match self.layout.norms_lack_one {
            true => stored.converted(|weight| 1.0 + weight),
            false => stored,
        }
    }

    /// The names of tensors of other parts of the model. Refuses unused tensors: they show that the description does
    /// not match the model, and the model's output would be wrong without a notice.
    fn left_out(&self) -> Result<Vec<String>, CheckpointError> {
        let layers = format!("{}{}.", self.body, self.layout.layers);
        let is_behind = |name: &str| {
            let number = name
                .strip_prefix(&*layers)
                .and_then(|rest| rest.split('.').next());
            let number: Option<usize> = number.and_then(|number| number.parse().ok());
            number.is_some_and(|number| number >= self.config.spec.layers.len())
        };
        // If the draft head is loaded, an unused tensor of the draft head is an error.
        let of_loaded_head = self.config.spec.draft_head.as_ref();
        let of_loaded_head = of_loaded_head.map(|_| self.layout.draft_head);
        let is_other = |name: &str| {
            let others = self.layout.other_parts.iter();
            let mut others = others.filter(|part| Some(**part) != of_loaded_head);
            others.any(|part| name.starts_with(part))
                || self.layout.has_more_layers && is_behind(name)
        };
        // Files may contain key and value projections of layers that read the keys and values of other layers.
        let layers = self.config.spec.layers.iter().enumerate();
        let unread: Vec<_> = layers
            .filter(|(_, layer)| layer.attention.kv_source.is_some())
            .flat_map(|(index, _)| {
                let name = move |tensor| self.layout.full_name(self.body, index, tensor);
                [LayerTensor::K, LayerTensor::V, LayerTensor::KNorm].map(name)
            })
            .collect();
        let is_harmless = |name: &str, file: &S| {
            // A copy of the tied matrix is harmless. So are the zero biases that GPTQ exporters add to layers without
            // biases.
            name.strip_suffix(".weight") == Some(self.head)
                || self.layout.buffers.iter().any(|end| name.ends_with(end))
                || self.is_unused_bias(name, file)
                || unread.iter().any(|unread| unread == name)
        };
        let leftover = self
            .by_name
            .iter()
            .filter(|(name, file)| {
                !self.taken.contains(*name) && !is_other(name) && !is_harmless(name, file)
            })
            .min_by_key(|(name, _)| *name);
        if let Some((name, file)) = leftover {
            return Err(CheckpointError::new(
                file.file(),
                format!(
                    "tensor {name} has no place in the {} that {} describes",
                    self.config.architecture, self.layout.described_by
                ),
            ));
        }
        if self.config.spec.encoder.is_some() {
            // The tensors after an encoder belong to its head, which is read elsewhere or not served.
            return Ok(Vec::new());
        }
        let mut names: Vec<_> = self
            .by_name
            .keys()
            .filter(|name| is_other(name))
            .cloned()
            .collect();
        names.sort();
        Ok(names)
    }

    fn is_unused_bias(&self, name: &str, file: &S) -> bool {
        let is_gptq = matches!(self.config.quantization, Some(Quantization::Gptq { .. }));
        let bias = file.stored(name);
        is_gptq
            && name.ends_with(".bias")
            && bias.is_some_and(|bias| bias.bytes().iter().all(|&byte| byte == 0))
    }
}

struct MatrixParts<'a, 's, S> {
    /// The prefix of a part's name.
    prefix: String,
    by_name: &'a HashMap<String, &'s S>,
    taken: &'a mut HashSet<String>,
    /// The file of the first found part.
    file: Option<&'s str>,
}

impl<S: TensorSource> Parts for MatrixParts<'_, '_, S> {
    fn take(&mut self, suffix: &str) -> Option<StoredTensor> {
        let name = format!("{}{suffix}", self.prefix);
        let file: &_ = *self.by_name.get(&name)?;
        let tensor = file.stored(&name)?;
        self.file.get_or_insert(file.file());
        self.taken.insert(name);
        Some(tensor)
    }
}

/// Some outputs of a matrix that is stored as `[in, out]`. The tensor may hold the matrices of several experts.
fn columns_of(stored: FileTensor, part: &Part, expert: Option<usize>) -> Option<Tensor> {
    let dtype = stored.format.float_type()?;
    let [.., num_inputs, num_outputs] = stored.shape[..] else {
        return None;
    };
    let num_bytes = num_inputs * num_outputs * dtype.size();
    let start = stored.range.start + expert.unwrap_or(0) * num_bytes;
    // The outputs of each expert are counted from 0, although the expert's matrix lies after the matrices of other
    // experts.
    let first = expert.map_or(part.first, |expert| part.first - expert * num_outputs);
    Some(Tensor::of_columns(
        stored.storage,
        start..start + num_bytes,
        dtype,
        [num_inputs, num_outputs],
        first..first + part.num_taken,
        part.order,
    ))
}
