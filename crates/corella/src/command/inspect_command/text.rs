//! An inspection as text: a line for each property, and a table of sizes.

use corella_model::{DecoderSpec, ModelConfig, ModelPart, OutlineSizes};

use super::shape;
use crate::{
    Inspection, ModelReport, TemplateReport, TokenizerReport, WeightReport, display_bytes,
};

/// The width of the first column, which has the names of the lines.
const NAME_LEN: usize = 14;

pub fn render(inspection: &Inspection) -> String {
    let mut page = Page(String::new());
    page.line(
        "model",
        &format!("{} ({})", inspection.name, inspection.form),
    );
    page.line("architecture", &architecture(inspection));
    match &inspection.model {
        Some(model) => page.shape(model),
        None => page.outline(&inspection.sizes),
    }
    if let Some(tokenizer) = &inspection.tokenizer {
        page.line("tokenizer", &tokenizer_text(tokenizer));
        let model = inspection.model.as_ref();
        if model.is_some_and(|model| model.config.has_head) {
            page.line("answers end", &ends_text(tokenizer));
        }
        if model.is_none_or(|model| model.config.has_head) {
            page.line("chat template", &template_text(&inspection.chat_template));
        }
    }
    if let Some(model) = &inspection.model {
        page.sizes(model);
    } else if let Some(totals) = &inspection.totals {
        let stored = display_bytes(totals.num_bytes);
        page.line("tensors", &format!("{}, {stored}", totals.num_tensors));
    }
    page.0.push('\n');
    match &inspection.refusals[..] {
        [] => page.line("problems", "none"),
        refusals => refusals.iter().for_each(|why| page.line("problem", why)),
    }
    page.0
}

struct Page(String);

impl Page {
    fn line(&mut self, name: &str, text: &str) {
        self.0 += &format!("{name:<NAME_LEN$}{text}\n");
    }

    fn shape(&mut self, model: &ModelReport) {
        let spec = &model.config.spec;
        let layers = &spec.layers;
        self.line(
            "layers",
            &format!("{}, hidden size {}", layers.len(), spec.hidden_size),
        );
        self.line("attention", &shape::kinds(layers, shape::attention));
        if layers.iter().any(|layer| layer.attention.window.is_some()) {
            self.line("window", &shape::kinds(layers, shape::window));
        }
        self.line("RoPE", &rotary(spec));
        self.line("feed-forward", &shape::kinds(layers, shape::feed_forward));
        self.line("norms", &shape::kinds(layers, shape::norms));
        self.line("context", &spec.max_position.to_string());
        self.line("vocabulary", &vocabulary(model));
    }

    /// Writes the known properties of a model of an unknown family.
    fn outline(&mut self, sizes: &OutlineSizes) {
        for (name, size) in [
            ("layers", sizes.num_layers),
            ("hidden size", sizes.hidden_size),
            ("heads", sizes.num_heads),
            ("KV heads", sizes.num_kv_heads),
            ("head size", sizes.head_dim),
            ("window", sizes.window),
            ("feed-forward", sizes.intermediate_size),
            ("experts", sizes.num_experts),
            ("per token", sizes.num_experts_per_token),
            ("context", sizes.max_position),
            ("vocabulary", sizes.vocab_size),
        ] {
            if let Some(size) = size {
                self.line(name, &size.to_string());
            }
        }
    }

    fn sizes(&mut self, model: &ModelReport) {
        let parameters = &model.num_parameters;
        let weights = model.weights.as_ref();
        self.0.push('\n');
        let head = weights.map(|weights| {
            let held = format!("as {}", weights.format.name());
            ["stored".to_owned(), held]
        });
        self.row("", "parameters", head);
        for &part in ModelPart::ALL {
            let number = parameters.of(part);
            if number > 0 {
                let bytes = weights
                    .map(|weights| [weights.stored_bytes.of(part), weights.packed_bytes.of(part)]);
                let name = part_name(part, &model.config);
                self.row(
                    name,
                    &count(number),
                    bytes.map(|bytes| bytes.map(display_bytes)),
                );
            }
        }
        let bytes =
            weights.map(|weights| [weights.stored_bytes.total(), weights.packed_bytes.total()]);
        let bytes = bytes.map(|bytes| bytes.map(display_bytes));
        self.row("all", &count(parameters.total()), bytes);
        let active = model.num_active_parameters.total();
        if active < parameters.total() {
            self.row("per token", &count(active), None);
        }
        if let Some(weights) = weights {
            self.rest(weights);
        }
    }

    fn row(&mut self, name: &str, number: &str, bytes: Option<[String; 2]>) {
        let cells = match bytes {
            Some([stored, packed]) => format!("{stored:>12}{packed:>17}"),
            None => String::new(),
        };
        self.0 += &format!("{name:<NAME_LEN$}{number:>12}{cells}\n");
    }

    fn rest(&mut self, weights: &WeightReport) {
        self.0.push('\n');
        if weights.unused_bytes > 0 {
            let parts = match &weights.left_out[..] {
                [] => String::new(),
                [first, ..] => format!(
                    ": {} tensors of other parts of the model, {first} and others",
                    weights.left_out.len()
                ),
            };
            self.line(
                "not used",
                &format!("{}{parts}", display_bytes(weights.unused_bytes)),
            );
        }
        let Some(kv) = &weights.kv else {
            return;
        };
        let windowed = match kv.window_token_bytes {
            0 => String::new(),
            bytes => format!(", {} of them in layers with a window", display_bytes(bytes)),
        };
        self.line(
            "KV cache",
            &format!(
                "{} for each token ({}){windowed}",
                display_bytes(kv.token_bytes),
                kv.format.name()
            ),
        );
        // If several numbers of requests have the same context, only the largest is shown.
        let fits = kv.fits.chunk_by(|a, b| a.1 == b.1).filter_map(|same| {
            let (number, context) = same.last()?;
            Some(format!("{number} × {context}"))
        });
        self.line(
            "fits",
            &format!(
                "{} tokens in {}: requests × context {}{}",
                kv.num_tokens,
                display_bytes(kv.cache_bytes),
                fits.collect::<Vec<_>>().join(", "),
                match kv.is_context_cut {
                    true => "; the KV cache does not hold the model's longest context",
                    false => "",
                }
            ),
        );
    }
}

fn architecture(inspection: &Inspection) -> String {
    let name = inspection.architecture.as_deref().unwrap_or("not named");
    match (&inspection.model, inspection.closest) {
        // A GGUF file names its architecture differently than the family.
        (Some(model), _) if model.config.architecture.name() != name => {
            format!("{name} ({})", model.config.architecture)
        }
        (None, Some(closest)) => format!("{name}, which is not supported; closest is {closest}"),
        _ => name.to_owned(),
    }
}

fn rotary(spec: &DecoderSpec) -> String {
    match spec.learned_positions {
        true => "none; positions are learned".to_owned(),
        false => shape::kinds(&spec.layers, shape::rotary),
    }
}

fn vocabulary(model: &ModelReport) -> String {
    let spec = &model.config.spec;
    let mut text = model.num_known_tokens.to_string();
    let num_padding = spec.vocab_size - model.num_known_tokens;
    if num_padding > 0 {
        text += &format!(" and {num_padding} rows without a token");
    }
    if spec.encoder.is_some() {
        text += ", no head: an encoder";
    } else if !model.config.has_head {
        text += ", no head: embeddings only";
    } else if spec.tied_embeddings {
        text += ", head tied to the embedding";
    }
    if spec.embedding_scale != 1.0 {
        text += &format!(", embeddings × {}", spec.embedding_scale);
    }
    if spec.logit_scale != 1.0 {
        text += &format!(", logits × {}", spec.logit_scale);
    }
    if let Some(cap) = spec.logit_soft_cap {
        text += &format!(", soft cap of logits {cap}");
    }
    text
}

fn tokenizer_text(tokenizer: &TokenizerReport) -> String {
    let mut text = format!(
        "{}, {} tokens, {} of them special",
        tokenizer.kind, tokenizer.num_tokens, tokenizer.num_special
    );
    if let Some((id, token)) = &tokenizer.bos {
        text += &format!("; begins {token} {id}");
    }
    text
}

fn ends_text(tokenizer: &TokenizerReport) -> String {
    let ends = tokenizer.ends.iter();
    let shown = ends.map(|(end, token)| format!("{token} {} ({})", end.id, end.named_by));
    match tokenizer.ends.is_empty() {
        true => {
            "no token: no file names one, so answers end with max_tokens or a stop text".to_owned()
        }
        false => shown.collect::<Vec<_>>().join(", "),
    }
}

fn template_text(template: &Option<TemplateReport>) -> String {
    let Some(template) = template else {
        return "none: only /v1/completions and /api/generate answer".to_owned();
    };
    let tools = match template.reads_tools {
        true => "tools",
        false => "no tools",
    };
    match template.thinking_switch {
        Some(switch) => format!("{tools}; thinking by {switch}"),
        None => tools.to_owned(),
    }
}

fn part_name(part: ModelPart, config: &ModelConfig) -> &'static str {
    match part {
        ModelPart::Embedding if config.has_head && config.spec.tied_embeddings => "embed + head",
        ModelPart::Embedding => "embedding",
        ModelPart::Attention => "attention",
        ModelPart::Mlp => "MLP",
        ModelPart::Experts => "experts",
        ModelPart::Norm => "norms",
        ModelPart::Head => "head",
    }
}

/// Formats a number of parameters with three or four digits.
fn count(number: u64) -> String {
    let (unit, suffix) = match number {
        0..10_000 => return number.to_string(),
        10_000..1_000_000 => (1e3, "K"),
        1_000_000..1_000_000_000 => (1e6, "M"),
        _ => (1e9, "B"),
    };
    let value = number as f64 / unit;
    match value < 10.0 {
        true => format!("{value:.2} {suffix}"),
        false => format!("{value:.1} {suffix}"),
    }
}
