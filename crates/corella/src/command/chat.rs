//! `corella chat`: a conversation in a terminal or from piped lines.

mod answer;
mod entry;
mod input;
mod line_editor;
mod plain_line;
mod saved_conversation;
mod screen;
mod server;
mod setting;
mod wrap;

use std::io;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::Error;
use crate::arguments::config;
use answer::{Answer, AnswerEnd, AnswerStats, TokenCounts, ask};
use entry::{Command, Entry, HELP};
use input::{Input, LineSource};
use line_editor::LineEditor;
use plain_line::PlainLines;
use saved_conversation::SavedConversation;
use screen::Screen;
use server::Server;
use setting::Settings;

pub fn run(config: config::Chat) -> Result<(), Error> {
    let io_error = |what: &'static str| move |error| Error::Io(what.to_owned(), error);
    let runtime = Runtime::new().map_err(io_error("starting the conversation"))?;
    let server = Server::open(config.with, &runtime)?;
    let mut conversation = Conversation {
        is_typed: config.is_typed,
        interrupt: match config.is_typed {
            true => {
                let _context = runtime.enter();
                let interrupt = signal(SignalKind::interrupt());
                Some(interrupt.map_err(io_error("installing a signal handler"))?)
            }
            // SIGINT ends a script like any program.
            false => None,
        },
        system: config.system,
        turns: Vec::new(),
        settings: Settings::new(config.settings),
        is_verbose: config.is_verbose,
        last: None,
        runtime: &runtime,
        server: &server,
    };
    if config.is_typed {
        eprintln!("{}", server.summary());
        eprintln!("/help lists commands; Ctrl-C stops an answer; Ctrl-D leaves");
    }
    let lines: Box<dyn LineSource> = match config.is_edited {
        true => Box::new(LineEditor::new(config.history).map_err(io_error("the terminal"))?),
        false => Box::new(PlainLines::new(io::stdin().lock(), config.is_typed)),
    };
    let mut input = Input::new(lines);
    while let Some(entry) = input.next_entry().map_err(io_error("standard input"))? {
        let done = match Entry::parse(&entry) {
            Ok(Entry::Empty) => Ok(()),
            Ok(Entry::Command(Command::Exit)) => return Ok(()),
            Ok(Entry::Command(command)) => conversation.command(command),
            Ok(Entry::Message(message)) => conversation.message(message),
            Err(reason) => Err(reason),
        };
        match done {
            Ok(()) => {}
            Err(reason) if config.is_typed => eprintln!("{reason}"),
            Err(reason) => return Err(Error::Config(reason)),
        }
    }
    // The editor has ended the line already.
    if config.is_typed && !config.is_edited {
        println!();
    }
    Ok(())
}

struct Conversation<'a> {
    is_typed: bool,
    /// The signal that stops an answer.
    interrupt: Option<Signal>,
    system: Option<String>,
    /// Messages and their answers.
    turns: Vec<(String, String)>,
    settings: Settings,
    is_verbose: bool,
    last: Option<AnswerStats>,
    runtime: &'a Runtime,
    server: &'a Server,
}

impl Conversation<'_> {
    /// Carries out a command. All of its messages go to standard error, so that standard output has only answers.
    fn command(&mut self, command: Command) -> Result<(), String> {
        match command {
            Command::Help => eprintln!("{HELP}"),
            Command::ShowSystem => {
                let system = self.system.as_deref();
                eprintln!("{}", system.unwrap_or("there is no system message"));
            }
            Command::SetSystem(system) => self.system = Some(system),
            Command::RemoveSystem => self.system = None,
            Command::ShowSettings => eprintln!("{}", self.settings.display()),
            Command::Set(name, value) => self.settings.set(&name, &value)?,
            Command::Unset(name) => self.settings.unset(&name)?,
            Command::Verbose(is_verbose) => self.is_verbose = is_verbose,
            Command::Stats => self.show_stats(),
            Command::Clear => {
                self.turns.clear();
                self.last = None;
            }
            Command::Save(file) => {
                self.to_saved().save(&file)?;
                self.tell(&format!("{} are in {file}", self.size()));
            }
            Command::Load(file) => {
                let loaded = SavedConversation::load(&file)?;
                let settings = Settings::from_fields(loaded.fields);
                self.settings = settings.map_err(|reason| format!("/load {file}: {reason}"))?;
                self.system = loaded.system;
                self.turns = loaded.turns;
                self.last = None;
                self.tell(&format!("{} from {file}", self.size()));
                if !self.settings.fields().is_empty() {
                    self.tell(&self.settings.display());
                }
            }
            Command::Retry => {
                let (message, answer) = self.turns.pop().ok_or("there is no answer yet")?;
                if let Err(reason) = self.message(message.clone()) {
                    self.turns.push((message, answer));
                    return Err(reason);
                }
            }
            // The loop over entries handles this command.
            Command::Exit => {}
        }
        Ok(())
    }

    /// Confirms a typed command.
    fn tell(&self, line: &str) {
        if self.is_typed {
            eprintln!("{line}");
        }
    }

    fn size(&self) -> String {
        match self.turns.len() {
            1 => "1 message with its answer".to_owned(),
            num_messages => format!("{num_messages} messages with their answers"),
        }
    }

    /// Requests an answer and prints it. A refused message does not become part of the
    /// conversation.
    fn message(&mut self, message: String) -> Result<(), String> {
        let body = self.body(&message);
        let server = self.server;
        let mut interrupt = self.interrupt.as_mut();
        let mut screen = Screen::new(self.is_typed);
        let answered = self.runtime.block_on(async {
            if let Some(interrupt) = &mut interrupt {
                // A signal from before the message does not concern its answer.
                tokio::select! {
                    biased;
                    _ = interrupt.recv() => {}
                    () = std::future::ready(()) => {}
                }
            }
            ask(server, body, interrupt, |piece| screen.show(&piece)).await
        });
        let is_stopped = matches!(&answered, Ok(answer) if answer.end == AnswerEnd::Interrupted);
        screen.end(is_stopped);
        let Answer { text, end, stats } = answered?;
        if self.is_typed {
            match end {
                AnswerEnd::Whole => {}
                AnswerEnd::Length => {
                    eprintln!("(max_tokens or the end of the context was reached)")
                }
                AnswerEnd::Interrupted => eprintln!("(stopped)"),
            }
        }
        self.turns.push((message, text));
        self.last = Some(stats);
        if self.is_verbose {
            self.show_stats();
        }
        Ok(())
    }

    fn show_stats(&self) {
        match &self.last {
            Some(stats) => eprintln!("{}", display(stats, self.server.max_model_len())),
            None => eprintln!("there is no answer yet"),
        }
    }

    /// Returns the request for an answer to `message`.
    fn body(&self, message: &str) -> Value {
        let mut body = self.to_saved().to_json();
        if let Some(messages) = body["messages"].as_array_mut() {
            messages.push(json!({"role": "user", "content": message}));
        }
        body["stream"] = json!(true);
        body
    }

    fn to_saved(&self) -> SavedConversation {
        SavedConversation {
            system: self.system.clone(),
            turns: self.turns.clone(),
            fields: self.settings.fields().clone(),
        }
    }
}

/// Returns the figures of an answer, and the part of the context in use.
fn display(stats: &AnswerStats, max_model_len: Option<u32>) -> String {
    let seconds = |time: &Duration| format!("{:.2} s", time.as_secs_f64());
    let times = format!(
        "in {}, the first after {}",
        seconds(&stats.total),
        seconds(&stats.to_first_token)
    );
    let Some(tokens) = stats.tokens else {
        return format!("the server has not told the number of tokens; answer {times}");
    };
    let TokenCounts {
        num_prompt_tokens,
        num_cached_tokens,
        num_output_tokens,
    } = tokens;
    let decode = (stats.total - stats.to_first_token).as_secs_f64();
    let num_decoded = num_output_tokens.saturating_sub(1);
    let speed = match num_decoded > 0 && decode > 0.0 {
        true => format!(", then {:.1} tokens/s", num_decoded as f64 / decode),
        false => String::new(),
    };
    let num_context = num_prompt_tokens + num_output_tokens;
    let of = max_model_len.map_or_else(String::new, |len| format!(" of {len}"));
    format!(
        "prompt {num_prompt_tokens} tokens, {num_cached_tokens} of them cached; answer {num_output_tokens} \
         tokens {times}{speed}; context {num_context}{of}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_count_from_the_first_token() {
        let mut stats = AnswerStats {
            tokens: Some(TokenCounts {
                num_prompt_tokens: 90,
                num_cached_tokens: 64,
                num_output_tokens: 11,
            }),
            to_first_token: Duration::from_millis(500),
            total: Duration::from_millis(2500),
        };
        assert_eq!(
            display(&stats, Some(2048)),
            "prompt 90 tokens, 64 of them cached; answer 11 tokens in 2.50 s, the first after 0.50 s, \
             then 5.0 tokens/s; context 101 of 2048"
        );
        assert!(display(&stats, None).ends_with("context 101"));
        stats.tokens = None;
        assert_eq!(
            display(&stats, None),
            "the server has not told the number of tokens; answer in 2.50 s, the first after 0.50 s"
        );
    }
}
