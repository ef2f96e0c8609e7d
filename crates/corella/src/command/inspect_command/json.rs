//! An inspection as JSON. Sizes are in bytes.

use corella_model::{ByPart, FeedForward, LayerSpec, ModelPart};
use serde_json::{Map, Value, json};

use super::shape;
use crate::{Inspection, ModelReport, TokenizerReport};

pub fn render(inspection: &Inspection) -> Value {
    let sizes = &inspection.sizes;
    let totals = inspection.totals;
    json!({
        "name": inspection.name,
        "form": inspection.form,
        "architecture": inspection.architecture,
        "family": inspection.model.as_ref().map(|model| model.config.architecture.name()),
        "closest": inspection.closest,
        "stated": {
            "num_layers": sizes.num_layers,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_heads": sizes.num_heads,
            "num_kv_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "window": sizes.window,
            "num_experts": sizes.num_experts,
            "num_experts_per_token": sizes.num_experts_per_token,
            "vocab_size": sizes.vocab_size,
            "max_position": sizes.max_position,
        },
        "num_tensors": totals.map(|totals| totals.num_tensors),
        "tensor_bytes": totals.map(|totals| totals.num_bytes),
        "model": inspection.model.as_ref().map(model),
        "tokenizer": inspection.tokenizer.as_ref().map(tokenizer),
        "chat_template": inspection.chat_template.as_ref().map(|template| json!({
            "reads_tools": template.reads_tools,
            "thinking_switch": template.thinking_switch,
        })),
        "refused": inspection.refusals,
    })
}

fn model(model: &ModelReport) -> Value {
    let spec = &model.config.spec;
    json!({
        "num_layers": spec.layers.len(),
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_known_tokens": model.num_known_tokens,
        "max_position": spec.max_position,
        "learned_positions": spec.learned_positions,
        "has_head": model.config.has_head,
        "tied_embeddings": spec.tied_embeddings,
        "embedding_scale": spec.embedding_scale,
        "logit_scale": spec.logit_scale,
        "logit_soft_cap": spec.logit_soft_cap,
        "layers": spec.layers.iter().map(layer).collect::<Vec<_>>(),
        "num_parameters": by_part(&model.num_parameters),
        "num_active_parameters": by_part(&model.num_active_parameters),
        "weights": model.weights.as_ref().map(|weights| json!({
            "stored_bytes": by_part(&weights.stored_bytes),
            "unused_bytes": weights.unused_bytes,
            "unused_tensors": weights.left_out,
            "format": weights.format.name(),
            "memory_bytes": by_part(&weights.packed_bytes),
        })),
        "kv_cache": model.weights.as_ref().and_then(|weights| weights.kv.as_ref()).map(|kv| {
            let fits = kv.fits.iter();
            let fits = fits.map(|&(requests, context)| {
                json!({"num_requests": requests, "context": context})
            });
            json!({
                "format": kv.format.name(),
                "token_bytes": kv.token_bytes,
                "window_token_bytes": kv.window_token_bytes,
                "bytes": kv.cache_bytes,
                "num_tokens": kv.num_tokens,
                "max_model_len": kv.max_model_len,
                "fits": fits.collect::<Vec<_>>(),
            })
        }),
    })
}

fn layer(layer: &LayerSpec) -> Value {
    let attention = &layer.attention;
    let experts = match &layer.feed_forward {
        FeedForward::Mlp(_) => None,
        FeedForward::Experts(experts) => Some(json!({
            "num_experts": experts.num_experts,
            "num_experts_per_token": experts.num_experts_per_token,
            "has_shared_expert": experts.shared.is_some(),
        })),
    };
    json!({
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "is_recurrent": layer.recurrent.is_some(),
        "window": attention.window,
        "rope": shape::rotary(layer),
        "soft_cap": attention.soft_cap,
        "intermediate_size": layer.feed_forward.mlp().intermediate_size,
        "experts": experts,
        "norms": shape::norms(layer),
    })
}

fn by_part(numbers: &ByPart) -> Value {
    let names = [
        (ModelPart::Embedding, "embedding"),
        (ModelPart::Attention, "attention"),
        (ModelPart::Mlp, "mlp"),
        (ModelPart::Experts, "experts"),
        (ModelPart::Norm, "norms"),
        (ModelPart::Head, "head"),
    ];
    let parts = names.map(|(part, name)| (name.to_owned(), numbers.of(part).into()));
    let mut object: Map<String, Value> = parts.into_iter().collect();
    object.insert("all".to_owned(), numbers.total().into());
    object.into()
}

fn tokenizer(tokenizer: &TokenizerReport) -> Value {
    let named = |(id, token): &(u32, String)| json!({"id": id, "token": token});
    let ends = tokenizer
        .ends
        .iter()
        .map(|(end, token)| json!({"id": end.id, "token": token, "named_by": end.named_by}));
    json!({
        "kind": tokenizer.kind,
        "num_tokens": tokenizer.num_tokens,
        "num_special_tokens": tokenizer.num_special,
        "bos": tokenizer.bos.as_ref().map(named),
        "ends": ends.collect::<Vec<_>>(),
    })
}
