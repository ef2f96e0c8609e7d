//! The supported families of models. Each has one file, which maps its configuration to a `DecoderSpec` and lists the
//! names of its tensors; no other code knows a family by name.

pub(crate) mod base;
mod bert;
mod cohere;
mod ernie4_5;
mod exaone4;
mod family;
pub(crate) mod field;
mod gemma;
mod gemma4;
mod glm;
mod glm4_moe;
mod gpt2;
mod gpt_oss;
mod granite;
mod layout;
mod lfm2;
mod llama;
mod minimax_m2;
mod ministral3;
mod mistral;
mod mixtral;
mod modernbert;
mod nomic_bert;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod rotary;
mod seed_oss;
mod smollm3;
pub(crate) mod tensor_part;

pub use self::base::shortest;
pub(crate) use self::family::Family;
pub use self::field::{Fields, FileFields, FolderFields};
pub use self::layout::{HeadPart, Layout, Stored};

use std::fmt;

use serde_json::Value;
use strsim::levenshtein;

use crate::{CheckpointError, DecoderSpec, LayerTensor, RowOrder};

/// All families. A GGUF file belongs to the first one that claims it.
pub(crate) const FAMILIES: [&Family; 45] = [
    &bert::BERT,
    &bert::ROBERTA,
    &bert::XLM_ROBERTA,
    &cohere::COHERE,
    &ernie4_5::ERNIE4_5,
    &ernie4_5::ERNIE4_5_FIRST,
    &ernie4_5::ERNIE4_5_MOE,
    &exaone4::EXAONE4,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &gemma::GEMMA3_MULTIMODAL,
    &gemma4::GEMMA4,
    &gemma4::GEMMA4_MULTIMODAL,
    &gemma4::GEMMA4_UNIFIED,
    &gemma4::GEMMA4_UNIFIED_MULTIMODAL,
    &glm::GLM,
    &glm::GLM4,
    &glm4_moe::GLM4_MOE,
    &gpt2::GPT2,
    &gpt_oss::GPT_OSS,
    &granite::GRANITE,
    &mixtral::MIXTRAL,
    &lfm2::LFM2,
    &lfm2::LFM2_MOE,
    &llama::LLAMA,
    &minimax_m2::MINIMAX_M2,
    &ministral3::MINISTRAL3,
    &ministral3::MISTRAL3_MULTIMODAL,
    &mistral::MISTRAL,
    &modernbert::MODERNBERT,
    &nomic_bert::NOMIC_BERT,
    // OLMo 3 comes before OLMo 2, because its files have the name of OLMo 2.
    &olmo3::OLMO3,
    &olmo2::OLMO2,
    &phi3::PHI3,
    &qwen2::QWEN2,
    &qwen2_moe::QWEN2_MOE,
    &qwen3::QWEN3,
    &qwen3_5::QWEN3_5,
    &qwen3_5::QWEN3_5_MULTIMODAL,
    &qwen3_5::QWEN3_5_MOE,
    &qwen3_5::QWEN3_5_MOE_MULTIMODAL,
    &qwen3_moe::QWEN3_MOE,
    &qwen3_next::QWEN3_NEXT,
    &seed_oss::SEED_OSS,
    &smollm3::SMOLLM3,
];

/// The family of a model.
#[derive(Clone, Copy)]
pub struct Architecture(&'static Family);

impl Architecture {
    /// The name in `config.json`.
    pub fn name(self) -> &'static str {
        self.0.architecture
    }

    /// The name in GGUF files, such as `qwen3`.
    pub fn gguf_name(self) -> &'static str {
        self.0.gguf
    }

    /// The layout of this family's tensors in folders.
    pub fn folder_layout(self) -> &'static Layout {
        &self.0.folder
    }

    /// Whether folders of this family store the rows of query and key matrices in another order than executors expect
    /// for RoPE.
    pub fn reorders_rows(self, spec: &DecoderSpec) -> bool {
        let order = |layer| tensor_part::row_order(LayerTensor::Q, layer, &self.0.folder);
        let mut layers = spec.layers.iter();
        layers.any(|layer| order(layer) != RowOrder::AsStored)
    }

    /// Reads the shape of a model of this family.
    pub(crate) fn spec(self, fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
        let spec = (self.0.spec)(fields)?;
        base::refuse_unread(fields, &spec)?;
        Ok(spec)
    }

    pub(crate) fn family(self) -> &'static Family {
        self.0
    }

    /// The family that config.json names.
    pub(crate) fn of_folder(config: &FolderFields<'_>) -> Result<Self, CheckpointError> {
        const FIELD: &str = "architectures";
        let config = config.object();
        let Some(list) = config.get(FIELD) else {
            let mut error = config.missing(FIELD);
            error.problem += &format!("; {}", supported(folder_types()));
            return Err(error);
        };
        let named = list.get(0).and_then(Value::as_str);
        let found = FAMILIES.into_iter().find(|family| {
            [family.architecture, family.decoder]
                .map(Some)
                .contains(&named)
        });
        match found {
            Some(family) => Ok(Self(family)),
            None => {
                let closest = named.and_then(|name| closest(&folder_names(), name));
                Err(config.refuse(FIELD, &unsupported(closest, folder_types())))
            }
        }
    }

    /// The family that a GGUF file names.
    pub(crate) fn of_file(file: &FileFields<'_>) -> Result<Self, CheckpointError> {
        let name = file.architecture();
        for family in FAMILIES.into_iter().filter(|family| family.gguf == name) {
            if (family.claims)(file)? {
                return Ok(Self(family));
            }
        }
        let read = |family: &&Family| !family.file.bodies.is_empty();
        let names = FAMILIES.into_iter().filter(read).map(|family| family.gguf);
        let names: Vec<_> = names.collect();
        let why = unsupported(closest(&names, name), names);
        Err(file.refuse_key("general.architecture", &why))
    }
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Architecture {}

impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn folder_names() -> [&'static str; FAMILIES.len()] {
    FAMILIES.map(|family| family.architecture)
}

/// The short names of families in folders.
pub(crate) fn folder_types() -> [&'static str; FAMILIES.len()] {
    FAMILIES.map(|family| family.model_type)
}

/// Says that a name is not supported. Lists all supported names only if none is close.
fn unsupported<'a>(closest: Option<&str>, names: impl IntoIterator<Item = &'a str>) -> String {
    match closest {
        Some(closest) => format!("it is not supported; the closest that is supported is {closest}"),
        None => format!("it is not supported; {}", supported(names)),
    }
}

fn supported<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_unstable();
    names.dedup();
    format!("supported are models of the types {}", names.join(", "))
}

/// The supported name that is closest to `unknown`; the first one if several are equally close. `None` if more than
/// half of the characters of `unknown` would have to change, because a match would then be chance.
pub(crate) fn closest<'a>(names: &[&'a str], unknown: &str) -> Option<&'a str> {
    // A file may contain a name of any length. A name with more than 100 characters is close to no supported name.
    let unknown: String = stem(unknown).chars().take(100).collect();
    let unknown = unknown.to_lowercase();
    let distance = |name: &&&str| levenshtein(&unknown, &stem(name).to_lowercase());
    let closest = names.iter().min_by_key(distance)?;
    let is_close = 2 * distance(&closest) <= unknown.len();
    is_close.then_some(*closest)
}

/// The part of a name before the suffix that many names share.
fn stem(name: &str) -> &str {
    let ends = ["For", "LMHead"]
        .into_iter()
        .filter_map(|end| name.find(end));
    &name[..ends.min().unwrap_or(name.len())]
}

#[cfg(test)]
mod tests;
