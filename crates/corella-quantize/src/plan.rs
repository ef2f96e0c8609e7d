//! The plan of a quantisation: the form of each tensor in the new folder, decided before any tensor is read, and the
//! `quantization_config` that describes these forms.

use corella_model::{
    DecoderWeights, LayerTensor, ModelConfig, PlannedPart, Scheme, Tensor, TensorRole,
};
use serde_json::{Value, json};

use crate::matrix::{part_shapes, stored_dtype};

/// The format in which matrices are to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizeFormat {
    /// 8-bit integers with one scale per `group_len` weights of an output, or per output. With
    /// per-channel scales, readers quantise activations to 8 bits as well.
    Int8 { group_len: Option<usize> },
    /// 4-bit integers with one scale, and possibly a zero point, per `group_len` weights of an output, or per output.
    Int4 {
        group_len: Option<usize>,
        symmetric: bool,
    },
}

impl QuantizeFormat {
    fn scheme(self) -> Scheme {
        match self {
            Self::Int8 { group_len } => Scheme {
                num_bits: 8,
                group_len,
                symmetric: true,
                is_packed: group_len.is_some(),
            },
            Self::Int4 {
                group_len,
                symmetric,
            } => Scheme {
                num_bits: 4,
                group_len,
                symmetric,
                is_packed: true,
            },
        }
    }
}

/// The plan of a quantised folder: its tensors, and their formats.
pub struct QuantizePlan<'a> {
    /// All tensors in the order in which they are to be written, layer by layer.
    pub tensors: Vec<PlannedTensor<'a>>,
    format: QuantizeFormat,
}

/// A tensor of the checkpoint, and its form in the quantised folder.
pub struct PlannedTensor<'a> {
    /// The name in Hugging Face's spelling; without `.weight` if the tensor is a matrix that is quantised.
    pub name: String,
    pub tensor: &'a Tensor,
    /// The tensor's shape in the new folder if the tensor is not quantised. A quantised matrix has the shapes of its
    /// [`parts`](Self::parts).
    pub shape: Vec<usize>,
    /// The scheme of a quantised matrix; `None` if the tensor stays unchanged.
    pub scheme: Option<Scheme>,
    pub scope: TensorScope,
}

/// The part of the model that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorScope {
    /// The embedding, the final norm or the head.
    Outside,
    /// A norm or bias of a layer.
    Layer(usize),
    /// One of a layer's matrices.
    Matrix { layer: usize, tensor: LayerTensor },
}

impl<'a> QuantizePlan<'a> {
    /// Plans a quantisation. `keep` names matrices that stay as they are, by whole components of their names, for
    /// example `lm_head`, `down_proj` or `layers.0`. `Err` reports a name that fits no matrix.
    pub fn new(
        config: &ModelConfig,
        weights: &'a DecoderWeights,
        format: QuantizeFormat,
        keep: &[String],
    ) -> Result<Self, String> {
        check_stored_as_is(config, weights)?;
        let layout = config.architecture.folder_layout();
        let (body, head) = layout.bodies[0];
        let plain = |name: String, tensor: &'a Tensor, scope| PlannedTensor {
            name,
            tensor,
            shape: tensor.shape.clone(),
            scheme: None,
            scope,
        };
        let mut tensors = vec![plain(
            format!("{body}{}.weight", layout.embed),
            &weights.embed,
            TensorScope::Outside,
        )];
        let mut matrices = Vec::new();
        let mut matrix = |name: String, tensor: &'a Tensor, scope| {
            let scheme = match keep.iter().any(|kept| names_part(kept, &name)) {
                true => None,
                false => scheme_for(format.scheme(), tensor.shape[1]),
            };
            matrices.push(name.clone());
            PlannedTensor {
                name: match scheme {
                    Some(_) => name,
                    None => format!("{name}.weight"),
                },
                tensor,
                shape: tensor.shape.clone(),
                scheme,
                scope,
            }
        };
        for (layer, weights) in weights.layers.iter().enumerate() {
            for (tensor, values) in weights.iter() {
                tensors.push(match tensor.role() {
                    TensorRole::Matrix(_) => matrix(
                        layout.name(body, layer, tensor),
                        values,
                        TensorScope::Matrix { layer, tensor },
                    ),
                    TensorRole::Router | TensorRole::Vector => {
                        let name = layout.full_name(body, layer, tensor);
                        let mut planned = plain(name, values, TensorScope::Layer(layer));
                        if let Some(at) = (layout.of_layer)(tensor).one_at {
                            planned.shape.insert(at, 1);
                        }
                        planned
                    }
                });
            }
        }
        tensors.push(plain(
            format!("{body}{}.weight", layout.norm),
            &weights.norm,
            TensorScope::Outside,
        ));
        match &weights.lm_head {
            Some(values) => tensors.push(matrix(head.into(), values, TensorScope::Outside)),
            // `lm_head` is accepted for tied models too, so that one list of names serves any model.
            None => matrices.push(head.into()),
        }
        let names_none = |kept: &&String| !matrices.iter().any(|name| names_part(kept, name));
        match keep.iter().find(names_none) {
            Some(kept) => Err(format!(
                "--keep: {kept} is not part of any matrix's name; there are {}",
                matrices.join(", ")
            )),
            None => Ok(Self { tensors, format }),
        }
    }

    /// The matrices that are quantised.
    pub fn matrices(&self) -> impl Iterator<Item = &PlannedTensor<'a>> {
        self.tensors
            .iter()
            .filter(|planned| planned.scheme.is_some())
    }

    /// The names of matrices that stay as they are.
    pub fn kept(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().filter_map(|planned| {
            let is_matrix = matches!(planned.scope, TensorScope::Matrix { .. });
            let is_head = planned.name == "lm_head.weight";
            let is_kept = planned.scheme.is_none() && (is_matrix || is_head);
            is_kept.then(|| planned.name.trim_end_matches(".weight"))
        })
    }

    /// The mean number of bits per quantised weight, with scales and zero points.
    pub fn bits_per_weight(&self) -> f64 {
        let parts = self.matrices().flat_map(PlannedTensor::parts);
        let bits = parts.map(|(_, dtype, shape)| shape.iter().product::<usize>() * dtype.bitsize());
        let weights = self
            .matrices()
            .map(|planned| planned.tensor.shape.iter().product::<usize>());
        bits.sum::<usize>() as f64 / weights.sum::<usize>() as f64
    }

    /// All tensors that are to be written.
    pub fn parts(&self) -> Vec<PlannedPart> {
        let parts = self.tensors.iter().flat_map(PlannedTensor::parts);
        parts.collect()
    }

    /// The `quantization_config` of the compressed-tensors format, which vLLM and Transformers read.
    pub fn quantization_config(&self, is_tied: bool) -> Value {
        let requested = self.format.scheme();
        let mut schemes = Vec::new();
        for planned in self.matrices() {
            schemes.extend(planned.scheme.filter(|scheme| !schemes.contains(scheme)));
        }
        // The scheme for `Linear`, which fits every matrix, comes last: some readers take the first one that fits.
        schemes.sort_by_key(|scheme| *scheme == requested);
        let groups = schemes.iter().enumerate().map(|(index, scheme)| {
            let targets = match index + 1 == schemes.len() {
                true => vec!["Linear".to_owned()],
                false => self.targets(*scheme),
            };
            let group = json!({
                "targets": targets,
                "weights": weights_config(*scheme),
                "input_activations": match requested.is_packed {
                    true => Value::Null,
                    false => activations_config(),
                },
                "output_activations": null,
            });
            (format!("group_{index}"), group)
        });
        // A tied head is still a layer to the readers.
        let ignore: Vec<_> = self.kept().chain(is_tied.then_some("lm_head")).collect();
        json!({
            "quant_method": "compressed-tensors",
            "format": match requested.is_packed {
                true => "pack-quantized",
                false => "int-quantized",
            },
            "quantization_status": "compressed",
            "config_groups": groups.collect::<serde_json::Map<_, _>>(),
            "ignore": ignore,
            "kv_cache_scheme": null,
            "global_compression_ratio": null,
        })
    }

    /// The patterns for the matrices of a scheme, which are the same in all layers.
    fn targets(&self, scheme: Scheme) -> Vec<String> {
        let mut patterns = Vec::new();
        for planned in self.matrices() {
            if planned.scheme != Some(scheme) {
                continue;
            }
            let pattern = match planned.scope {
                TensorScope::Matrix { layer, .. } => {
                    let number = format!(".{layer}.");
                    let name = planned.name.split_once(&number);
                    let name = name.map_or(&*planned.name, |(_, name)| name);
                    format!("re:.*{}$", pattern_of(name))
                }
                _ => planned.name.clone(),
            };
            if !patterns.contains(&pattern) {
                patterns.push(pattern);
            }
        }
        patterns
    }
}

/// A pattern for the name of a matrix. The pattern for an expert's matrix fits the same matrix of all experts.
fn pattern_of(name: &str) -> String {
    let parts = name.split('.').map(|part| match part.parse::<usize>() {
        Ok(_) => "\\d+",
        Err(_) => part,
    });
    parts.collect::<Vec<_>>().join("\\.")
}

impl PlannedTensor<'_> {
    /// The layer that the tensor belongs to, if any.
    pub fn layer(&self) -> Option<usize> {
        match self.scope {
            TensorScope::Outside => None,
            TensorScope::Layer(layer) | TensorScope::Matrix { layer, .. } => Some(layer),
        }
    }

    /// The tensors that are written for this tensor.
    pub fn parts(&self) -> Vec<PlannedPart> {
        let shape = &self.tensor.shape;
        let Some(scheme) = self.scheme else {
            return vec![(
                self.name.clone(),
                stored_dtype(self.tensor.dtype),
                self.shape.clone(),
            )];
        };
        let parts = part_shapes(scheme, [shape[0], shape[1]], self.tensor.dtype);
        let parts = parts
            .into_iter()
            .map(|(suffix, dtype, shape)| (format!("{}.{suffix}", self.name), dtype, shape));
        parts.collect()
    }
}

/// The group lengths that other engines have kernels for.
const GROUP_LENS: [usize; 3] = [128, 64, 32];

/// The scheme with the longest groups, up to the requested length, that divide the rows; `None` if no length divides
/// the rows.
fn scheme_for(scheme: Scheme, num_columns: usize) -> Option<Scheme> {
    let Some(group_len) = scheme.group_len else {
        return Some(scheme);
    };
    let lens = [group_len].into_iter().chain(GROUP_LENS);
    let group_len = lens
        .filter(|&len| len <= group_len)
        .find(|&len| num_columns.is_multiple_of(len))?;
    Some(Scheme {
        group_len: Some(group_len),
        ..scheme
    })
}

/// Refuses models whose folders store matrices in another form than the executors compute with.
fn check_stored_as_is(config: &ModelConfig, weights: &DecoderWeights) -> Result<(), String> {
    let architecture = config.architecture;
    let layout = architecture.folder_layout();
    let is_plain = |tensor: LayerTensor| {
        let owner = tensor.owner().unwrap_or(tensor);
        (layout.of_layer)(owner).is_plain()
    };
    let mut tensors = weights.layers.iter().flat_map(|layer| layer.iter());
    let is_stored_as_is = tensors.all(|(tensor, _)| is_plain(tensor))
        && !layout.norms_lack_one
        && !architecture.reorders_rows(&config.spec)
        && !config.spec.layers.iter().any(|layer| layer.has_scale)
        && weights.positions.is_none();
    match is_stored_as_is {
        true => Ok(()),
        false => Err(format!(
            "folders of {architecture} store other matrices than those that are computed; \
             quantise while loading, with --dtype"
        )),
    }
}

/// Whether `part` is one or more whole components of `name`.
fn names_part(part: &str, name: &str) -> bool {
    !part.is_empty() && format!(".{name}.").contains(&format!(".{part}."))
}

fn weights_config(scheme: Scheme) -> Value {
    json!({
        "num_bits": scheme.num_bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": match scheme.group_len {
            Some(_) => "group",
            None => "channel",
        },
        "group_size": scheme.group_len,
        "dynamic": false,
    })
}

fn activations_config() -> Value {
    json!({
        "num_bits": 8,
        "type": "int",
        "symmetric": true,
        "strategy": "token",
        "group_size": null,
        "dynamic": true,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::{Path, PathBuf};

    use corella_model::Checkpoint;
    use safetensors::SafeTensors;

    use super::*;

    fn golden(name: &str) -> PathBuf {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        tests.join(name)
    }

    fn parts(folder: &Path) -> Result<BTreeMap<String, Vec<usize>>, String> {
        const INT8: QuantizeFormat = QuantizeFormat::Int8 { group_len: None };
        let checkpoint = Checkpoint::open(folder).unwrap();
        let weights = checkpoint.weights().unwrap();
        let keep = ["layers", "lm_head"].map(str::to_owned);
        let plan = QuantizePlan::new(checkpoint.config(), &weights, INT8, &keep)?;
        let parts = plan.parts().into_iter();
        Ok(parts.map(|(name, _, shape)| (name, shape)).collect())
    }

    #[test]
    fn what_is_kept_has_the_names_and_shapes_of_the_folder() {
        for name in [
            "exaone4",
            "lfm2",
            "lfm2-moe",
            "olmo3",
            "qwen2-gqa-untied",
            "qwen2-moe",
            "qwen3-moe",
            "seed-oss",
        ] {
            let bytes = fs::read(golden(name).join("model.safetensors")).unwrap();
            let stored = SafeTensors::deserialize(&bytes).unwrap();
            let stored = stored.tensors().into_iter();
            let expected: BTreeMap<_, _> = stored
                .map(|(name, tensor)| (name, tensor.shape().to_vec()))
                .collect();
            assert_eq!(parts(&golden(name)).unwrap(), expected, "{name}");
        }
    }

    /// Readers of these models' folders reorder the rows of matrices, and the written rows are already in the new
    /// order.
    #[test]
    fn folders_whose_rows_are_turned_are_refused() {
        for name in [
            "cohere",
            "ernie4-5",
            "ernie4-5-moe",
            "glm4-moe",
            "minimax-m2",
        ] {
            let error = parts(&golden(name)).unwrap_err();
            assert!(error.contains("store other matrices than those"), "{error}");
        }
    }
}
