//! The files of a repository that Corella needs: a Hugging Face folder's, or one GGUF model's.

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::HubError;

pub const CONFIG: &str = "config.json";
pub const INDEX: &str = "model.safetensors.index.json";
pub const SINGLE: &str = "model.safetensors";

/// A folder's files beside its weights. Only `config.json` is required.
const BESIDE_WEIGHTS: [&str; 13] = [
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    // sentence-transformers' settings for vectors of texts.
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
];

/// Whether a path is a file of one of sentence-transformers' modules, which have folders such as `1_Pooling`.
fn is_of_module(path: &str) -> bool {
    let Some((folder, file)) = path.split_once('/') else {
        return false;
    };
    let number = folder.split_once('_').map_or("", |(number, _)| number);
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    is_number && (file == CONFIG || file == SINGLE)
}

/// The quantisation that is chosen among several by default, as in other programs.
pub const DEFAULT_QUANTISATION: &str = "Q4_K_M";

/// In a name, the mark before a quantisation whose formats differ from layer to layer.
const MARK: &str = "UD-";

/// The files of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// A Hugging Face folder: the files beside the weights, and the weights known before the index is read.
    Folder {
        small: Vec<String>,
        weights: FolderWeights,
    },
    /// The parts of one GGUF model, in order.
    Gguf(Vec<String>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderWeights {
    Single,
    /// The files in `model.safetensors.index.json`.
    Indexed,
}

impl Selection {
    /// Chooses from the paths of a repository. `wanted` is a quantisation or the name of a GGUF
    /// file; without it, safetensors are preferred.
    pub fn new(repository: &str, paths: &[&str], wanted: Option<&str>) -> Result<Self, HubError> {
        let has = |name: &str| paths.contains(&name);
        let weights = match (has(SINGLE), has(INDEX)) {
            (true, _) => Some(FolderWeights::Single),
            (false, true) => Some(FolderWeights::Indexed),
            (false, false) => None,
        };
        if let (None, Some(weights), true) = (wanted, weights, has(CONFIG)) {
            let small = BESIDE_WEIGHTS.into_iter().filter(|name| has(name));
            let modules = paths.iter().copied().filter(|path| is_of_module(path));
            let small = small.chain(modules).map(str::to_owned).collect();
            return Ok(Self::Folder { small, weights });
        }
        let models = gguf_models(paths);
        if models.is_empty() {
            return Err(HubError::Name(match wanted {
                Some(_) => {
                    format!("{repository} has no GGUF files: leave out the text after the colon")
                }
                None => format!(
                    "{repository} has neither {CONFIG} with safetensors nor GGUF files, and Corella \
                     reads no others"
                ),
            }));
        }
        let chosen = match wanted {
            Some(wanted) => choose(&models, wanted),
            None if models.len() == 1 => models.iter().collect(),
            None => choose(&models, DEFAULT_QUANTISATION),
        };
        match (&chosen[..], wanted) {
            ([one], _) => one.parts(repository, paths).map(Self::Gguf),
            ([], Some(wanted)) => Err(HubError::Name(format!(
                "{repository} has no GGUF file for `{wanted}`; it has {}",
                names(&models.iter().collect::<Vec<_>>())
            ))),
            ([], None) => Err(HubError::Name(format!(
                "{repository} has several GGUF files: say which, as in {repository}:{}; it has {}",
                models[0].short_name(),
                names(&models.iter().collect::<Vec<_>>())
            ))),
            _ => Err(HubError::Name(format!(
                "{repository} has several GGUF files for `{}`: name one of {}",
                wanted.unwrap_or(DEFAULT_QUANTISATION),
                files(&chosen)
            ))),
        }
    }
}

/// A GGUF model of a repository, in one file or in parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufModel {
    /// The path of the file, or of the first part.
    pub path: String,
    /// The path without `.gguf` and the number of a part.
    stem: String,
    /// The number of parts; `None` for one file without a number.
    num_parts: Option<u32>,
}

/// The GGUF models among the paths of a repository, in order. Vision encoders and importance matrices, which are GGUF
/// files too, are excluded.
pub fn gguf_models(paths: &[&str]) -> Vec<GgufModel> {
    let mut models: Vec<_> = paths
        .iter()
        .filter_map(|path| GgufModel::first_part(path))
        .collect();
    models.sort_by(|one, other| one.path.cmp(&other.path));
    models
}

impl GgufModel {
    fn first_part(path: &str) -> Option<Self> {
        let stem = path.strip_suffix(".gguf")?;
        let name = stem.rsplit('/').next().unwrap_or(stem).to_ascii_lowercase();
        if name.contains("mmproj") || name.contains("imatrix") {
            return None;
        }
        let (stem, num_parts) = match split_part(stem) {
            Some((_, part, _)) if part != 1 => return None,
            Some((model, _, num_parts)) => (model, Some(num_parts)),
            None => (stem, None),
        };
        Some(Self {
            path: path.to_owned(),
            stem: stem.to_owned(),
            num_parts,
        })
    }

    /// The quantisation in the name, such as `Q4_K_M` or `UD-Q4_K_XL`, in its original spelling.
    pub fn quantisation(&self) -> Option<&str> {
        let name = self.stem.rsplit('/').next().unwrap_or(&self.stem);
        let is_start = |at: usize| at == 0 || b"-._".contains(&name.as_bytes()[at - 1]);
        let starts = name.char_indices().map(|(at, _)| at);
        let start = starts
            .filter(|&at| is_start(at))
            .find(|&at| is_quantisation(&name[at..]))?;
        let before = &name[..start];
        let start = match before.to_ascii_uppercase().ends_with(MARK) {
            true => start - MARK.len(),
            false => start,
        };
        Some(&name[start..])
    }

    /// The text after the colon in a name.
    pub fn short_name(&self) -> &str {
        self.quantisation().unwrap_or(&self.path)
    }

    /// The paths of all parts.
    pub fn parts(&self, repository: &str, paths: &[&str]) -> Result<Vec<String>, HubError> {
        let Some(num_parts) = self.num_parts else {
            return Ok(vec![self.path.clone()]);
        };
        let stem = &self.stem;
        let part = |number| format!("{stem}-{number:05}-of-{num_parts:05}.gguf");
        let parts: Vec<_> = (1..=num_parts).map(part).collect();
        match parts.iter().find(|part| !paths.contains(&part.as_str())) {
            Some(missing) => Err(HubError::Name(format!(
                "{repository} has no {missing}, a part of {}",
                self.path
            ))),
            None => Ok(parts),
        }
    }
}

/// Splits the name of a part into the model's name, the part's number and the number of parts.
fn split_part(stem: &str) -> Option<(&str, u32, u32)> {
    const MAX_PARTS: u32 = 4096;
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (model, part) = rest.rsplit_once('-')?;
    let number = |text: &str| match text.len() == 5 {
        true => text.parse::<u32>().ok(),
        false => None,
    };
    let (part, total) = (number(part)?, number(total)?);
    (1..=total.min(MAX_PARTS))
        .contains(&part)
        .then_some((model, part, total))
}

/// Whether a text consists only of the name of a quantisation or a number format.
pub fn is_quantisation(text: &str) -> bool {
    let text = text.to_ascii_uppercase();
    let is_word = |text: &str| {
        text.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    let digit_behind = |prefix: &str| {
        let rest = text.strip_prefix(prefix);
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()) && is_word(rest))
    };
    matches!(text.as_str(), "BF16" | "F16" | "F32" | "FP16" | "FP32")
        || ["Q", "IQ", "TQ", "MXFP", "NVFP"]
            .into_iter()
            .any(digit_behind)
}

/// The models that `wanted` names: by path or file name, by quantisation, or by a quantisation after the mark `UD-`.
fn choose<'a>(models: &'a [GgufModel], wanted: &str) -> Vec<&'a GgufModel> {
    let chosen = |is_meant: &dyn Fn(&GgufModel) -> bool| -> Vec<&'a GgufModel> {
        models.iter().filter(|model| is_meant(model)).collect()
    };
    let by_file = chosen(&|model| {
        let name = model.path.rsplit('/').next().unwrap_or(&model.path);
        model.path == wanted || name == wanted
    });
    if !by_file.is_empty() {
        return by_file;
    }
    let by_quantisation = |wanted: &str| {
        let is = |known: &str| same_format(known, wanted);
        without_copies(chosen(&|model| model.quantisation().is_some_and(is)))
    };
    match by_quantisation(wanted) {
        none if none.is_empty() => by_quantisation(&format!("{MARK}{wanted}")),
        chosen => chosen,
    }
}

/// Compares the names of two formats. F16 has two names.
fn same_format(one: &str, other: &str) -> bool {
    let plain = |name: &str| name.to_ascii_uppercase().replace("FP", "F");
    plain(one) == plain(other)
}

/// Some repositories have a model both as one file and in parts. The one file is enough.
fn without_copies(chosen: Vec<&GgufModel>) -> Vec<&GgufModel> {
    let is_copy = |model: &GgufModel| {
        let mut others = chosen.iter();
        model.num_parts.is_some()
            && others.any(|other| other.num_parts.is_none() && other.stem == model.stem)
    };
    chosen
        .iter()
        .copied()
        .filter(|model| !is_copy(model))
        .collect()
}

fn names(models: &[&GgufModel]) -> String {
    let names: BTreeSet<_> = models.iter().map(|model| model.short_name()).collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}

fn files(models: &[&GgufModel]) -> String {
    let paths: Vec<_> = models.iter().map(|model| model.path.as_str()).collect();
    paths.join(", ")
}

/// The files over which an index distributes the tensors, in order.
pub fn shards(index: &[u8]) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index).map_err(|error| error.to_string())?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    match shards.iter().find(|name| name.contains(['/', '\\'])) {
        Some(outside) => Err(format!("{outside} is not beside it")),
        None => Ok(shards.into_iter().collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn gguf(paths: &[&str], wanted: Option<&str>) -> Vec<String> {
        match Selection::new("a/b", paths, wanted).unwrap() {
            Selection::Gguf(parts) => parts,
            folder => panic!("{folder:?}"),
        }
    }

    #[track_caller]
    fn refusal(paths: &[&str], wanted: Option<&str>) -> String {
        Selection::new("a/b", paths, wanted)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_folder_is_its_configuration_its_tokenizer_and_its_safetensors() {
        let paths = [
            "README.md",
            "config.json",
            "tokenizer.json",
            "additional_chat_templates/tool_use.jinja",
            "modules.json",
            "1_Pooling/config.json",
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin",
            "v2_old/config.json",
            "model.safetensors",
            "pytorch_model.bin",
            "original/consolidated.00.pth",
            "onnx/model.onnx",
            "b-Q4_0.gguf",
        ];
        let expected = Selection::Folder {
            small: [
                "config.json",
                "tokenizer.json",
                "additional_chat_templates/tool_use.jinja",
                "modules.json",
                "1_Pooling/config.json",
                "2_Dense/config.json",
                "2_Dense/model.safetensors",
            ]
            .map(str::to_owned)
            .to_vec(),
            weights: FolderWeights::Single,
        };
        assert_eq!(Selection::new("a/b", &paths, None).unwrap(), expected);
        assert_eq!(gguf(&paths, Some("q4_0")), ["b-Q4_0.gguf"]);
        let indexed = [
            "config.json",
            "model.safetensors.index.json",
            "model-00001-of-00001.safetensors",
        ];
        let selection = Selection::new("a/b", &indexed, None).unwrap();
        assert!(matches!(
            selection,
            Selection::Folder {
                weights: FolderWeights::Indexed,
                ..
            }
        ));
    }

    #[test]
    fn a_quantisation_names_one_file() {
        let paths = [
            "b-Q4_0.gguf",
            "b-IQ4_XS.gguf",
            "b-Q4_K_M.gguf",
            "b-Q4_K_S.gguf",
            "b-UD-Q4_K_XL.gguf",
            "b.Q8_0.gguf",
            "b_bf16.gguf",
            "mmproj-b-f16.gguf",
            "imatrix_b.gguf",
            "Q6_K/b-Q6_K-00001-of-00002.gguf",
            "Q6_K/b-Q6_K-00002-of-00002.gguf",
        ];
        assert_eq!(gguf(&paths, None), ["b-Q4_K_M.gguf"]);
        assert_eq!(gguf(&paths, Some("Q4_0")), ["b-Q4_0.gguf"]);
        assert_eq!(gguf(&paths, Some("iq4_xs")), ["b-IQ4_XS.gguf"]);
        assert_eq!(gguf(&paths, Some("Q4_K_XL")), ["b-UD-Q4_K_XL.gguf"]);
        assert_eq!(gguf(&paths, Some("UD-Q4_K_XL")), ["b-UD-Q4_K_XL.gguf"]);
        assert_eq!(gguf(&paths, Some("Q8_0")), ["b.Q8_0.gguf"]);
        assert_eq!(gguf(&paths, Some("BF16")), ["b_bf16.gguf"]);
        assert_eq!(gguf(&paths, Some("b-Q4_0.gguf")), ["b-Q4_0.gguf"]);
        let parts = [
            "Q6_K/b-Q6_K-00001-of-00002.gguf",
            "Q6_K/b-Q6_K-00002-of-00002.gguf",
        ];
        assert_eq!(gguf(&paths, Some("Q6_K")), parts);
        let reason = refusal(&paths, Some("Q5_0"));
        assert!(
            reason.ends_with("BF16, IQ4_XS") || reason.contains("IQ4_XS, Q4_0, Q4_K_M"),
            "{reason}"
        );
        assert_eq!(gguf(&["only-F16.gguf"], None), ["only-F16.gguf"]);
        assert_eq!(
            gguf(&["a-F16.gguf", "b.gguf"], Some("fp16")),
            ["a-F16.gguf"]
        );
    }

    #[test]
    fn one_file_is_enough_of_a_model_that_is_there_in_parts_too() {
        let paths = [
            "b-q4_k_m-00001-of-00002.gguf",
            "b-q4_k_m-00002-of-00002.gguf",
            "b-q4_k_m.gguf",
        ];
        assert_eq!(gguf(&paths, None), ["b-q4_k_m.gguf"]);
        assert_eq!(gguf(&paths[..2], None), paths[..2]);
    }

    #[test]
    fn what_cannot_be_chosen_is_refused_with_the_choices() {
        let reason = refusal(&["b-Q5_0.gguf", "b-Q8_0.gguf"], None);
        assert!(
            reason.contains("as in a/b:Q5_0; it has Q5_0, Q8_0"),
            "{reason}"
        );
        let reason = refusal(&["x-Q4_0.gguf", "y-Q4_0.gguf"], Some("Q4_0"));
        assert!(
            reason.contains("name one of x-Q4_0.gguf, y-Q4_0.gguf"),
            "{reason}"
        );
        let reason = refusal(&["b-Q4_0-00001-of-00002.gguf"], Some("Q4_0"));
        assert!(
            reason.contains("has no b-Q4_0-00002-of-00002.gguf"),
            "{reason}"
        );
        assert!(refusal(&["pytorch_model.bin", "config.json"], None).contains("neither"));
        assert!(refusal(&["config.json", "model.safetensors"], Some("Q4_0")).contains("no GGUF"));
    }

    #[test]
    fn a_model_name_that_contains_a_quantisation_is_not_taken_for_one() {
        let model = GgufModel::first_part("Q8-chat-7b.Q4_K_M.gguf").unwrap();
        assert_eq!(model.quantisation(), Some("Q4_K_M"));
        assert_eq!(
            GgufModel::first_part("gpt2.gguf").unwrap().quantisation(),
            None
        );
    }

    #[test]
    fn an_index_names_files_beside_it() {
        let index = br#"{"weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-1.safetensors"}}"#;
        assert_eq!(
            shards(index).unwrap(),
            ["m-1.safetensors", "m-2.safetensors"]
        );
        assert!(shards(br#"{"weight_map": {"a": "../m.safetensors"}}"#).is_err());
        assert!(shards(b"{}").is_err());
    }
}
