//! The options of `corella chat`.

use clap::builder::FalseyValueParser;
use clap::{Args, Command, Id};

use super::{CacheArgs, ConfigFileArgs, DeviceArgs, ModelArgs, OwnModelArgs, SpeculationArgs};

/// Returns the options for loading a model, except the model's name, which may also mean a model of a server.
fn of_a_loaded_model() -> Vec<Id> {
    let augmented = ModelArgs::augment_args(Command::new("chat"));
    let augmented = SpeculationArgs::augment_args(augmented);
    let augmented = DeviceArgs::augment_args(CacheArgs::augment_args(augmented));
    let ids = augmented.get_arguments().map(|arg| arg.get_id().clone());
    ids.filter(|id| id != "model" && id != "model_option")
        .collect()
}

#[derive(Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub config_file: ConfigFileArgs,

    /// Talk to a running server of OpenAI's API, of Corella or another, such as http://127.0.0.1:8000.
    /// MODEL is a name of that server then [default: the first that it lists]. Options of the model,
    /// the KV cache and the device belong to the server, and are refused
    #[arg(long, value_name = "URL", conflicts_with_all = of_a_loaded_model())]
    pub url: Option<String>,
    /// With --url: API key to send as a bearer token
    #[arg(
        long,
        value_name = "KEY",
        env = "CORELLA_API_KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,

    /// System message that the conversation begins with
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Generate at most this many tokens for each answer [default: as many as the context allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// Show tokens and times after each answer, as /stats does
    #[arg(long)]
    pub verbose: bool,
    /// Neither read nor write the input history. Otherwise the last 1000 messages are kept in
    /// ~/.local/state/corella/chat_history
    #[arg(long, env = "CORELLA_NO_HISTORY", value_parser = FalseyValueParser::new())]
    pub no_history: bool,

    #[command(flatten)]
    pub own: OwnModelArgs,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use crate::arguments::args::Cli;

    #[test]
    fn options_of_a_loaded_model_do_not_go_with_a_server() {
        let program = Cli::command();
        let chat = program.find_subcommand("chat").unwrap();
        let url = chat
            .get_arguments()
            .find(|arg| arg.get_id() == "url")
            .unwrap();
        let refused = chat.get_arg_conflicts_with(url);
        let mut allowed: Vec<_> = chat
            .get_arguments()
            .filter(|arg| !refused.iter().any(|other| other.get_id() == arg.get_id()))
            .map(|arg| arg.get_id().as_str())
            .collect();
        allowed.sort();
        let expected = [
            "api_key",
            "config",
            "max_tokens",
            "min_p",
            "model",
            "model_option",
            "no_history",
            "seed",
            "system",
            "temperature",
            "top_k",
            "top_p",
            "url",
            "verbose",
        ];
        assert_eq!(allowed, expected);
        let typed = ["corella", "chat", "--url", "x", "--threads", "2"];
        let error = Cli::command().try_get_matches_from(typed).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("'--url <URL>' cannot be used with") && message.contains("--threads"),
            "{message}"
        );
        let typed = ["corella", "chat", "--url", "x", "name", "--seed", "3"];
        assert!(Cli::command().try_get_matches_from(typed).is_ok());
    }
}
