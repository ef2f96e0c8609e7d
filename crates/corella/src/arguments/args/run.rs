//! The options of `corella run`, which works like `ollama run`.

use clap::Args;
use clap::builder::FalseyValueParser;

use super::{ChatArgs, Command, ConfigFileArgs, GenerateArgs, ModelArgs, OwnModelArgs};

#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub config_file: ConfigFileArgs,

    /// Prompt to answer; several words need no quotes, and what is piped in comes before them [default: what
    /// is piped in, or else a conversation]
    #[arg(value_name = "PROMPT")]
    pub prompt: Vec<String>,
    /// System message before the prompt, or at the beginning of the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Generate at most this many tokens for each answer [default: as many as the context allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// Show the speed of each answer
    #[arg(long)]
    pub verbose: bool,
    /// In a conversation, neither read nor write the input history
    #[arg(long, env = "CORELLA_NO_HISTORY", value_parser = FalseyValueParser::new())]
    pub no_history: bool,

    #[command(flatten)]
    pub own: OwnModelArgs,
}

impl RunArgs {
    /// Returns the command with the same effect: a conversation if a user types no prompt, and otherwise one answer.
    pub fn into_command(self, is_typed: bool) -> Command {
        if self.prompt.is_empty() && is_typed {
            return Command::Chat(Box::new(ChatArgs {
                model: self.model,
                config_file: self.config_file,
                url: None,
                api_key: None,
                system: self.system,
                max_tokens: self.max_tokens,
                verbose: self.verbose,
                no_history: self.no_history,
                own: self.own,
            }));
        }
        Command::Generate(Box::new(GenerateArgs {
            model: self.model,
            config_file: self.config_file,
            with_input: !self.prompt.is_empty(),
            prompt: (!self.prompt.is_empty()).then(|| self.prompt.join(" ")),
            system: self.system,
            raw: false,
            prompt_tokens: None,
            max_tokens: self.max_tokens,
            ignore_eos: false,
            no_limits: true,
            no_speed: !self.verbose,
            profile: false,
            own: self.own,
        }))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::args::Cli;

    fn command(line: &str, is_typed: bool) -> Command {
        match Cli::try_parse_from(line.split(' ')).map(|cli| cli.command) {
            Ok(Command::Run(args)) => args.into_command(is_typed),
            Ok(_) => panic!("{line} is another command"),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_prompt_is_answered_once_and_without_one_there_is_a_conversation() {
        for line in [
            "corella run some/model Tell me more --seed 3 --system Hm",
            "corella run some/model --seed 3 --system Hm Tell me more",
            "corella run --seed 3 --system=Hm some/model -- Tell me more",
        ] {
            let Command::Generate(args) = command(line, true) else {
                panic!("{line} converses");
            };
            assert_eq!(args.model.model, Some("some/model".into()), "{line}");
            assert_eq!(args.prompt.as_deref(), Some("Tell me more"), "{line}");
            assert_eq!(args.system.as_deref(), Some("Hm"), "{line}");
            assert_eq!(args.own.sampling.seed, Some(3), "{line}");
            assert!(args.with_input && args.no_limits && args.no_speed, "{line}");
        }
        let line = "corella run some/model --max-tokens 5 --system Hm --verbose";
        let Command::Chat(args) = command(line, true) else {
            panic!("{line} does not converse");
        };
        assert!(args.verbose && args.max_tokens == Some(5));
        assert_eq!(args.system.as_deref(), Some("Hm"));
        // What is piped in is a prompt.
        assert!(matches!(
            command(line, false),
            Command::Generate(args) if args.prompt.is_none() && !args.with_input
        ));
    }
}
