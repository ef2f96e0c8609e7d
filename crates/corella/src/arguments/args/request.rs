//! The options for reading API requests, from clients of `corella serve` or from a file.

use clap::Args;
use corella_hub::short_names;
use corella_server::{ModelFacts, ServeConfig};
use corella_text::{CallFormat, ChatTemplate, ReasoningFormat, ReplyFormat};

use super::format_choice::FormatChoice;
use crate::Llm;

/// The default has the values of an empty command line.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Requests")]
pub struct RequestArgs {
    /// Name of the model in the API, or several: requests may use each, and those without a name get an
    /// answer with the first [default: the name of the folder or file]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Makes a run repeatable: the n-th request to arrive, or the n-th line of a batch, draws the same in every run,
    /// if it has no seed [default: draws differ from run to run]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    /// Ignore request fields with unknown names instead of answering 400
    #[arg(long)]
    pub allow_unknown_fields: bool,
    /// How the model writes calls of tools: auto (what the chat template shows), none, hermes,
    /// qwen3_coder, glm45, glm47, minimax_m2, seed_oss, llama3_json, mistral, openai, deepseek_v3, deepseek_v31, granite,
    /// gemma4, lfm2, olmo3, command_r or glm4
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub tool_call_parser: FormatChoice<CallFormat>,
    /// How the model marks its reasoning: auto (what the chat template shows), none, think, mistral,
    /// openai_gptoss, gemma4, seed_oss or granite
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub reasoning_parser: FormatChoice<ReasoningFormat>,
}

impl RequestArgs {
    /// Returns the format of replies: the chat template's, unless an option gives another.
    pub fn reply_format(&self, template: Option<&ChatTemplate>) -> ReplyFormat {
        let shown = template.map_or_else(ReplyFormat::default, ChatTemplate::reply_format);
        ReplyFormat {
            calls: self.tool_call_parser.of(shown.calls),
            reasoning: self.reasoning_parser.of(shown.reasoning),
        }
    }

    /// Adds the names of the model and the facts about it to a configuration. Without a name in the options, the model
    /// is served under the name of its folder or file.
    pub fn serve_config(self, llm: &Llm, limits: ServeConfig) -> ServeConfig {
        let mut names = self.served_model_name;
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
            is_encoder: spec.encoder.is_some(),
            sentence: llm.sentence.clone(),
            end_token_ids: llm.config.end_tokens.ids(),
            generation_defaults: llm.config.generation.clone(),
            max_model_len: llm.max_model_len,
            vocab_size: spec.vocab_size,
            hidden_size: spec.hidden_size,
            ..limits
        }
    }
}
