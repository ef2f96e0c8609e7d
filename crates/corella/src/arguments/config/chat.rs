//! Configuration of `corella chat`.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::LlmConfig;
use crate::Error;
use crate::arguments::args::{ChatArgs, RequestArgs, own_folder};
use crate::client::remote_server::RemoteOptions;
use crate::terminal::progress_line::is_controllable;

pub struct Chat {
    pub with: ChatWith,
    pub system: Option<String>,
    /// Fields of each request, with the changes of `/set`.
    pub settings: Vec<(&'static str, Value)>,
    /// Whether each answer is followed by its tokens and times.
    pub is_verbose: bool,
    /// Whether a user types the input, instead of a file or another program.
    pub is_typed: bool,
    /// Whether typed lines are edited, which needs a terminal with a movable cursor.
    pub is_edited: bool,
    /// The file of the input history, if kept.
    pub history: Option<PathBuf>,
}

/// The source of answers.
pub enum ChatWith {
    Model(Box<LlmConfig>),
    Server(RemoteOptions),
}

pub fn chat(args: ChatArgs) -> Result<Chat, Error> {
    let sampling = &args.own.sampling;
    sampling.check()?;
    let settings = [
        ("temperature", sampling.temperature.map(decimal)),
        ("top_k", sampling.top_k.map(|k| json!(k))),
        ("top_p", sampling.top_p.map(decimal)),
        ("min_p", sampling.min_p.map(decimal)),
        ("seed", sampling.seed.map(|seed| json!(seed))),
        ("max_tokens", args.max_tokens.map(|most| json!(most))),
    ];
    let is_typed = io::stdin().is_terminal();
    let history = || Some(own_folder("XDG_STATE_HOME", ".local/state")?.join("chat_history"));
    Ok(Chat {
        system: args.system.clone(),
        settings: { settings.into_iter() }
            .filter_map(|(name, value)| Some((name, value?)))
            .collect(),
        is_verbose: args.verbose,
        is_typed,
        is_edited: is_typed && is_controllable(&io::stdout()),
        history: (!args.no_history).then(history).flatten(),
        with: chat_with(args)?,
    })
}

fn chat_with(args: ChatArgs) -> Result<ChatWith, Error> {
    if let Some(url) = args.url {
        let named = args.model.model.or(args.model.model_option);
        return Ok(ChatWith::Server(RemoteOptions {
            url,
            api_key: args.api_key.filter(|key| !key.is_empty()),
            model: named.map(|name| name.to_string_lossy().into_owned()),
        }));
    }
    Ok(ChatWith::Model(Box::new(LlmConfig {
        options: args.own.options(&args.model)?,
        source: args.model.source(),
        request: RequestArgs::default(),
    })))
}

/// Returns the number as typed: 0.7 is not 0.699999988.
fn decimal(number: f32) -> Value {
    json!(number.to_string().parse::<f64>().unwrap_or(number.into()))
}
