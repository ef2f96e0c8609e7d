//! Ministral 3: Mistral with YaRN, and queries that grow with their positions. Published models are multimodal, and
//! only their decoder is used. Mistral Small 3.1 has the same kind of configuration, and its decoder is a Mistral.

use super::base::{self, Base};
use super::field::{Field, Fields, FileFields, Source};
use super::{Family, Layout, mistral, rotary};
use crate::json::json_object::JsonObject;
use crate::{CheckpointError, DecoderSpec, QueryGrowth};

/// The decoder alone.
pub const MINISTRAL3: Family = Family {
    architecture: "Ministral3ForCausalLM",
    decoder: "Ministral3Model",
    model_type: "ministral3",
    gguf: "mistral3",
    file: Layout::FILE_OF_NEIGHBOURS,
    ..Family::new(ministral3)
};

pub const MISTRAL3_MULTIMODAL: Family = Family {
    architecture: "Mistral3ForConditionalGeneration",
    decoder: "Mistral3Model",
    model_type: "mistral3",
    claims: |_| Ok(false),
    spec: multimodal,
    folder: Layout::FOLDER.of_seeing(),
    ..MINISTRAL3
};

fn ministral3(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        max_position: 262_144,
        eps: 1e-5,
        head_dim: Some(128),
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    base::set_windows(&mut spec, base::try_window(fields)?, |_| true);
    let growth = match fields.source() {
        Source::Folder(config) => Some(query_growth(config)?),
        Source::File(file) => query_growth_of_file(file)?,
    };
    for layer in &mut spec.layers {
        layer.attention.query_growth = growth;
    }
    Ok(spec)
}

/// GGUF files of Mistral Small 3.1 also have the name of this family, but its queries do not grow.
fn query_growth_of_file(file: &FileFields<'_>) -> Result<Option<QueryGrowth>, CheckpointError> {
    const BETA: Field = Field::of_file("attention.temperature_scale");
    let Some(beta) = file.try_number(BETA)?.filter(|&beta| beta != 0.0) else {
        return Ok(None);
    };
    Ok(Some(QueryGrowth {
        beta: base::shortest(beta as f32),
        original_max_position: file.size(rotary::ORIGINAL)?,
    }))
}

/// Transformers reads both parameters of the growth with any type of RoPE.
fn query_growth(config: &JsonObject<'_>) -> Result<QueryGrowth, CheckpointError> {
    let Some(parameters) = rotary::parameters(config)? else {
        return Err(config.missing("rope_parameters"));
    };
    Ok(QueryGrowth {
        beta: parameters.number("llama_4_scaling_beta")?,
        original_max_position: parameters.size("original_max_position_embeddings")?,
    })
}

/// Reads the decoder of a multimodal model.
fn multimodal(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let kind = |text: &JsonObject<'_>| match text.try_text("model_type")? {
        Some("ministral3") => Ok(MINISTRAL3.spec),
        None | Some("mistral") => Ok(mistral::MISTRAL.spec),
        Some(_) => Err(text.refuse("model_type", "supported are ministral3, mistral")),
    };
    base::of_text(fields, true, kind)
}
