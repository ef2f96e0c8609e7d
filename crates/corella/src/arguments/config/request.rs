//! How API requests are read, for every command that answers them.

use corella_hub::short_names;
use corella_server::{GenerationDefaults, ModelFacts, ServeConfig};
use corella_text::{CallFormat, ChatTemplate, ReasoningFormat, ReplyFormat};

use crate::Llm;
use crate::arguments::args::{FormatChoice, RequestArgs};

/// The options for requests. The default equals an empty command line.
#[derive(Clone, Debug, Default)]
pub struct RequestOptions {
    pub served_model_names: Vec<String>,
    pub seed: Option<u64>,
    pub allow_unknown_fields: bool,
    pub call_format: FormatChoice<CallFormat>,
    pub reasoning_format: FormatChoice<ReasoningFormat>,
}

pub fn request(args: RequestArgs) -> RequestOptions {
    RequestOptions {
        served_model_names: args.served_model_name,
        seed: args.seed,
        allow_unknown_fields: args.allow_unknown_fields,
        call_format: args.tool_call_parser,
        reasoning_format: args.reasoning_parser,
    }
}

impl RequestOptions {
    /// Returns the format of replies: the chat template's, unless an option gives another.
    pub fn reply_format(&self, template: Option<&ChatTemplate>) -> ReplyFormat {
        let shown = template.map_or_else(ReplyFormat::default, ChatTemplate::reply_format);
        ReplyFormat {
            calls: self.call_format.of(shown.calls),
            reasoning: self.reasoning_format.of(shown.reasoning),
        }
    }

    /// Returns the configuration of a server of this model. Without a name in the options, the model is served under
    /// the name of its folder or file.
    pub fn serve_config(self, llm: &Llm) -> ServeConfig {
        let generation = &llm.config.generation;
        let mut names = self.served_model_names;
        if names.is_empty() {
            names.push(llm.name.clone());
        }
        let spec = &llm.config.spec;
        let weight_bytes = llm.hardware.executor.weight_bytes as u64;
        ServeConfig {
            served_model_names: names,
            other_names: short_names(&llm.name),
            model_facts: ModelFacts {
                family: llm.config.architecture.gguf_name().to_owned(),
                num_parameters: spec.num_parameters().total(),
                file_bytes: llm.file_bytes,
                weight_bytes,
                gpu_weight_bytes: match llm.hardware.executor.device.starts_with("cuda") {
                    true => weight_bytes,
                    false => 0,
                },
                weight_format: llm.hardware.weight_format.name().to_owned(),
                kv_format: llm.hardware.kv_format.name().to_owned(),
            },
            seed: self.seed,
            has_head: llm.config.has_head,
            is_encoder: llm.config.spec.encoder.is_some(),
            sentence: llm.sentence.clone(),
            allow_unknown_fields: self.allow_unknown_fields,
            end_token_ids: llm.config.end_tokens.ids(),
            generation_defaults: GenerationDefaults {
                temperature: generation.temperature,
                top_p: generation.top_p,
                top_k: generation.top_k,
                min_p: generation.min_p,
                repetition_penalty: generation.repetition_penalty,
            },
            ..ServeConfig::new(
                "",
                llm.max_model_len,
                llm.config.spec.vocab_size,
                llm.config.spec.hidden_size,
            )
        }
    }
}
