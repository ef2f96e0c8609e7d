//! The options for reading API requests, from clients of `corella serve` or from a file.

use clap::Args;
use corella_text::{CallFormat, ReasoningFormat};

use super::format_choice::FormatChoice;

#[derive(Args)]
#[command(next_help_heading = "Requests")]
pub struct RequestArgs {
    /// Name of the model in the API, or several: requests may use each, and those without a name get an
    /// answer with the first [default: the name of the folder or file]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Vec<String>,
    /// Seed for requests that give none [default: a different one for each request]
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
