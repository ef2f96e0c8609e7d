//! The options for reading API requests, from clients of `corella serve` or from a file.

use clap::Args;
use corella_hub::short_names;
use corella_model::{ModelConfig, SentenceConfig};
use corella_server::{ModelFacts, ServeConfig};
use corella_text::{CallFormat, ChatTemplate, ReasoningFormat, ReplyFormat};

use super::format_choice::FormatChoice;
use crate::Llm;
use crate::model::llm::Described;

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

    /// Adds the names of the model and the facts about it to a configuration.
    pub fn serve_config(self, llm: &Llm, limits: ServeConfig) -> ServeConfig {
        let config = self.described(&llm.name, &llm.config, &llm.sentence, limits);
        let weight_bytes = llm.hardware.executor.weight_bytes as u64;
        ServeConfig {
            model_facts: ModelFacts {
                file_bytes: llm.file_bytes,
                weight_bytes,
                gpu_weight_bytes: match llm.hardware.executor.device.starts_with("cuda") {
                    true => weight_bytes,
                    false => 0,
                },
                weight_format: llm.hardware.weight_format.name().to_owned(),
                kv_format: llm.hardware.kv_format.name().to_owned(),
                ..config.model_facts
            },
            max_model_len: llm.max_model_len,
            ..config
        }
    }

    /// The configuration of a model that is not loaded.
    pub(crate) fn card_config(self, described: &Described, limits: ServeConfig) -> ServeConfig {
        let (name, plan) = (&described.name, &described.plan);
        let config = self.described(name, &described.config, &described.sentence, limits);
        ServeConfig {
            model_facts: ModelFacts {
                file_bytes: described.file_bytes,
                weight_bytes: plan.memory.weight_bytes,
                weight_format: plan.weight_format.name().to_owned(),
                kv_format: plan.kv_format.name().to_owned(),
                ..config.model_facts
            },
            max_model_len: plan.max_model_len,
            ..config
        }
    }

    /// Adds the facts in the model's files. Without a name in the options, the model is served under the name of its
    /// folder or file.
    fn described(
        self,
        name: &str,
        config: &ModelConfig,
        sentence: &SentenceConfig,
        limits: ServeConfig,
    ) -> ServeConfig {
        let mut names = self.served_model_name;
        if names.is_empty() {
            names.push(name.to_owned());
        }
        let spec = &config.spec;
        ServeConfig {
            served_model_names: names,
            other_names: short_names(name),
            model_facts: ModelFacts {
                family: config.architecture.gguf_name().to_owned(),
                num_parameters: spec.num_parameters().total(),
                ..ModelFacts::default()
            },
            seed: self.seed,
            has_head: config.has_head,
            is_encoder: spec.encoder.is_some(),
            sentence: sentence.clone(),
            end_token_ids: config.end_tokens.ids(),
            generation_defaults: config.generation.clone(),
            vocab_size: spec.vocab_size,
            hidden_size: spec.hidden_size,
            ..limits
        }
    }
}
