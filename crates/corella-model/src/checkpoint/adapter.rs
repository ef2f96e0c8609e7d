//! Adapters as PEFT stores them: low-rank updates of a model's matrices (LoRA, Hu et al. 2021).
//!
//! An adapter belongs to the rows of a slot: its product is computed beside each dense layer, and requests with and
//! without adapters share steps.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde_json::{Map, Value};
use xxhash_rust::xxh3::Xxh3;

use crate::arch::tensor_part::Part;
use crate::checkpoint::Source;
use crate::file::file_tensor::TensorSource;
use crate::file::safetensors_file::SafetensorsFile;
use crate::json::json_object::{self, JsonObject};
use crate::{CheckpointError, FileWatch, LayerTensor, ModelConfig, RowOrder, Tensor};

/// The updates of a model's matrices.
pub struct Adapter {
    /// The updated matrices of each of the model's layers.
    pub layers: Vec<AdapterLayer>,
    /// The names of tensors that update other parts of the model, such as a vision tower.
    pub left_out: Vec<String>,
}

pub type AdapterLayer = BTreeMap<LayerTensor, LowRankUpdate>;

/// The update `scale * up * down` of a matrix `[out, in]`.
pub struct LowRankUpdate {
    /// PEFT's `lora_A`, `[rank, in]`.
    pub down: Tensor,
    /// PEFT's `lora_B`, `[out, rank]`.
    pub up: Tensor,
    pub scale: f32,
}

/// Adapters of an executor, by the names in `SlotStart::adapter`. Any thread may call these methods while steps run.
pub trait Adapters: Send + Sync {
    /// The largest rank of an adapter.
    fn max_rank(&self) -> usize;

    /// Adds an adapter of at most `max_rank`, or replaces the adapter with this name.
    fn add(&self, name: &str, adapter: &Adapter);

    /// Removes an adapter. From then on no slot can start with its name. Slots that have started with the adapter keep
    /// it.
    fn remove(&self, name: &str);
}

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// PEFT's prefix of a model's module names.
const PREFIX: &str = "base_model.model.";
/// A text model may be the decoder of a multimodal model for which the adapter was made. These are the decoder's
/// prefixes in that model.
const DECODERS: [&str; 3] = [
    "model.language_model.",
    "language_model.model.",
    "language_model.",
];
/// The prefixes of the multimodal model's other parts, perhaps after `model.`.
const OTHER_PARTS: [&str; 7] = [
    "vision_tower.",
    "vision_model.",
    "visual.",
    "audio_tower.",
    "multi_modal_projector.",
    "embed_vision.",
    "embed_audio.",
];

impl Adapter {
    /// A digest of the updates, independent of the adapter's name. It does not resist deliberate collisions.
    pub fn fingerprint(&self) -> u128 {
        let mut hasher = Xxh3::new();
        for (index, layer) in self.layers.iter().enumerate() {
            for (name, LowRankUpdate { down, up, scale }) in layer {
                hasher.update(format!("{index} {name:?} {scale:?}").as_bytes());
                for tensor in [down, up] {
                    hasher.update(format!("{:?} {:?}", tensor.dtype, tensor.shape).as_bytes());
                    hasher.update(tensor.bytes());
                }
            }
        }
        hasher.digest128()
    }

    /// Reads a folder as PEFT's `save_pretrained` writes it, for a model. Unsupported parts are refused, because
    /// leaving them out would change the adapter's output. Updates of parts that read no text are left out, because
    /// they change no output.
    pub fn open(folder: &Path, model: &ModelConfig) -> Result<Self, CheckpointError> {
        Self::open_by(Source::Folder(folder.to_path_buf(), None), model)
    }

    /// Opens an adapter whose file may become shorter meanwhile. The caller asks `watch` before it uses the adapter,
    /// and again after it has read the updates.
    pub fn open_watched(
        folder: &Path,
        model: &ModelConfig,
        watch: &FileWatch,
    ) -> Result<Self, CheckpointError> {
        let source = Source::Folder(folder.to_path_buf(), Some(watch.clone()));
        Self::open_by(source, model)
    }

    fn open_by(source: Source, model: &ModelConfig) -> Result<Self, CheckpointError> {
        let label = source.label(CONFIG);
        let Some(config) = source.read(CONFIG)? else {
            let problem = "no such file; an adapter is a folder that PEFT's save_pretrained wrote";
            return Err(CheckpointError::new(label, problem));
        };
        let config = json_object::parse(&label, &config)?;
        let scaling = Scaling::read(&label, &config)?;
        let label = source.label(WEIGHTS);
        let Some(storage) = source.map(WEIGHTS)? else {
            let problem = "no such file; only adapters in safetensors format are read";
            return Err(CheckpointError::new(label, problem));
        };
        let file = SafetensorsFile::open(label, storage)?;
        let mut tensors = AdapterTensors {
            file: &file,
            model,
            scaling: &scaling,
            taken: HashSet::new(),
        };
        let layers = (0..model.spec.layers.len()).map(|layer| tensors.take_layer(layer));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let left_out = tensors.left_out()?;
        if layers.iter().all(BTreeMap::is_empty) {
            let problem = match left_out.first() {
                None => String::from("updates no matrix"),
                Some(first) => format!(
                    "updates only parts of the model that read no text, such as {first}, and text is all \
                     that is served"
                ),
            };
            return Err(CheckpointError::new(file.file(), problem));
        }
        Ok(Self { layers, left_out })
    }

    /// The largest rank among the adapter's updates.
    pub fn max_rank(&self) -> usize {
        let updates = self.layers.iter().flat_map(BTreeMap::values);
        updates
            .map(|update| update.down.shape[0])
            .max()
            .unwrap_or(0)
    }
}

/// PEFT's scale of updates: `lora_alpha / r`, or `lora_alpha / √r` with `use_rslora`.
struct Scaling {
    alpha: f64,
    by_root: bool,
    /// Values of `lora_alpha` for modules with these name endings.
    patterns: Vec<(String, f64)>,
}

impl Scaling {
    fn read(file: &str, config: &Map<String, Value>) -> Result<Self, CheckpointError> {
        let fields = JsonObject::new(file, config);
        let refuse = |field: &str, problem: &str| {
            let value = fields.get(field).unwrap_or(&Value::Null);
            Err(CheckpointError::new(
                file,
                format!("{field} is {value}; {problem}"),
            ))
        };
        if fields.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return refuse("peft_type", "only LORA is supported");
        }
        let unsupported = [
            ("use_dora", "DoRA is not supported"),
            ("use_qalora", "QALoRA is not supported"),
            ("lora_bias", "biases of adapters are not supported"),
            ("modules_to_save", "only low-rank updates are supported"),
            (
                "trainable_token_indices",
                "only low-rank updates are supported",
            ),
            ("layer_replication", "replicated layers are not supported"),
            ("target_parameters", "only updates of modules are supported"),
            ("use_bdlora", "BD-LoRA is not supported"),
            ("alora_invocation_tokens", "activated LoRA is not supported"),
        ];
        for (field, problem) in unsupported {
            let is_off = |value: &Value| match value {
                Value::Bool(is_on) => !is_on,
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            };
            if !fields.get(field).is_none_or(is_off) {
                return refuse(field, problem);
            }
        }
        if !matches!(
            fields.get("bias").map(Value::as_str),
            None | Some(Some("none"))
        ) {
            return refuse("bias", "only \"none\" is supported");
        }
        let mut patterns = Vec::new();
        if let Some(list) = fields.get("alpha_pattern").and_then(Value::as_object) {
            for (name, alpha) in list {
                let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
                match alpha.as_f64().filter(|_| name.chars().all(is_plain)) {
                    Some(alpha) => patterns.push((name.clone(), alpha)),
                    None => {
                        return refuse("alpha_pattern", "only names with numbers are supported");
                    }
                }
            }
        }
        Ok(Self {
            alpha: fields.number("lora_alpha")?,
            by_root: fields.get("use_rslora") == Some(&Value::Bool(true)),
            patterns,
        })
    }

    /// The scale of a module's update.
    fn of(&self, module: &str, rank: usize) -> f32 {
        let is_it = |name: &str| {
            let before = module.strip_suffix(name);
            before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        let pattern = self.patterns.iter().find(|(name, _)| is_it(name));
        let alpha = pattern.map_or(self.alpha, |(_, alpha)| *alpha);
        let rank = rank as f64;
        (alpha / if self.by_root { rank.sqrt() } else { rank }) as f32
    }
}

struct AdapterTensors<'a> {
    file: &'a SafetensorsFile,
    model: &'a ModelConfig,
    scaling: &'a Scaling,
    taken: HashSet<String>,
}

impl AdapterTensors<'_> {
    fn take_layer(&mut self, index: usize) -> Result<AdapterLayer, CheckpointError> {
        let layout = self.model.architecture.folder_layout();
        let spec = &self.model.spec.layers[index];
        let specs = spec.tensors(self.model.spec.hidden_size);
        let mut layer = AdapterLayer::new();
        for matrix in &specs {
            use LayerTensor as T;
            let adapted = [T::Q, T::K, T::V, T::O, T::GATE, T::UP, T::DOWN];
            if !adapted.contains(&matrix.tensor) {
                continue;
            }
            let stored = (layout.of_layer)(matrix.tensor);
            let part = Part::new(matrix.tensor, spec, layout, &stored, &specs);
            let bodies = layout.bodies.iter().map(|(body, _)| *body);
            for body in bodies.chain(DECODERS) {
                let module = layout.name(body, index, matrix.tensor);
                if let Some(update) = self.take(&module, &part, &matrix.shape)? {
                    layer.insert(matrix.tensor, update);
                }
            }
        }
        Ok(layer)
    }

    /// Takes a module's update for one matrix `[out, in]`. The matrix may be only a part of the module's matrix.
    fn take(
        &mut self,
        module: &str,
        part: &Part,
        shape: &[usize],
    ) -> Result<Option<LowRankUpdate>, CheckpointError> {
        let name = |matrix: &str| format!("{PREFIX}{module}.{matrix}.weight");
        let (down_name, up_name) = (name("lora_A"), name("lora_B"));
        let Some(down) = self.file.tensor(&down_name)? else {
            return Ok(None);
        };
        let refuse = |name: &str, found: &[usize], wanted: &str| {
            let problem = format!("tensor {name} has shape {found:?}; the model makes it {wanted}");
            Err(CheckpointError::new(self.file.file(), problem))
        };
        let rank = match down.shape[..] {
            [rank, input] if rank > 0 && input == shape[1] => rank,
            _ => return refuse(&down_name, &down.shape, &format!("[rank, {}]", shape[1])),
        };
        let Some(up) = self.file.tensor(&up_name)? else {
            let problem = format!("tensor {up_name} is missing, but there is {down_name}");
            return Err(CheckpointError::new(self.file.file(), problem));
        };
        let up_shape = part.whole(&[shape[0], rank]);
        if up.shape != up_shape {
            return refuse(&up_name, &up.shape, &format!("{up_shape:?}"));
        }
        self.taken.extend([down_name, up_name]);
        Ok(Some(LowRankUpdate {
            down: down.rows(0..rank, RowOrder::AsStored),
            up: up.rows(part.rows(), part.order),
            scale: self.scaling.of(module, rank),
        }))
    }

    /// The names of tensors of other parts of the model. Refuses other unused tensors, because to leave them out would
    /// change the adapter's output.
    fn left_out(&self) -> Result<Vec<String>, CheckpointError> {
        let of_family = self.model.architecture.folder_layout().other_parts;
        let is_other = |name: &&String| {
            let module = name.strip_prefix(PREFIX).unwrap_or(name);
            let short = module.strip_prefix("model.").unwrap_or(module);
            of_family.iter().any(|part| module.starts_with(part))
                || OTHER_PARTS.iter().any(|part| short.starts_with(part))
        };
        let mut names = self.file.names();
        names.retain(|name| !self.taken.contains(name));
        names.sort();
        let Some(name) = names.iter().find(|name| !is_other(name)) else {
            return Ok(names);
        };
        Err(CheckpointError::new(
            self.file.file(),
            format!(
                "tensor {name} cannot be used: adapters may update the attention and MLP matrices of the \
                 {}'s layers, and not those of experts",
                self.model.architecture
            ),
        ))
    }
}

#[cfg(test)]
mod tests;
