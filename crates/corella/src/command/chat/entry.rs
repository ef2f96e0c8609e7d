//! An entry of the user: a message, or a command that begins with a slash.

use super::setting;
use crate::input::nearest_name::nearest_name;

#[derive(Debug, PartialEq)]
pub enum Entry {
    Message(String),
    Command(Command),
    /// Only spaces.
    Empty,
}

#[derive(Debug, PartialEq)]
pub enum Command {
    Help,
    /// Shows the system message.
    ShowSystem,
    SetSystem(String),
    RemoveSystem,
    /// Shows the current settings.
    ShowSettings,
    Set(String, String),
    Unset(String),
    /// Whether to show the output of `Stats` after each answer.
    Verbose(bool),
    Stats,
    Clear,
    Save(String),
    Load(String),
    /// Requests another answer to the last message.
    Retry,
    Exit,
}

const NAMES: [&str; 11] = [
    "help", "system", "set", "stats", "clear", "retry", "save", "load", "exit", "quit", "bye",
];

pub const HELP: &str = "\
/system TEXT      replace the system message; /system shows it, /system off removes it
/set NAME VALUE   set a field of the requests, such as temperature; stop takes several texts;
                  /set shows what is set, /set NAME goes back to the default
/stats            tokens and times of the last answer, and how full the context is; /set verbose
                  shows them after each answer, until /set quiet
/clear            begin a new conversation; system message and settings stay
/retry            ask for another answer to the last message
/save FILE        write the conversation with its system message and settings to a file
/load FILE        go on with a conversation from a file
/help, /?         this list
/exit, /bye       leave; so do exit and Ctrl-D on an empty line

A message of several lines stands between two lines of \"\"\", has a \\ at the end of each line but
the last, or is pasted. Up and down go through earlier messages, Ctrl-R searches them, Tab completes
commands. Ctrl-C drops what is being typed, or stops an answer; what there is of an answer stays in
the conversation.";

impl Entry {
    /// The error says what is wrong with a command. Only a word of letters after the slash is a command, so that a
    /// message may begin with a path.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::Empty);
        }
        let (name, rest) = match text.split_once(char::is_whitespace) {
            Some((name, rest)) => (name, rest.trim()),
            None => (text, ""),
        };
        // These words end a shell, too.
        if matches!(text, "exit" | "quit") {
            return Ok(Self::Command(Command::Exit));
        }
        if text.starts_with("/?") {
            return Ok(Self::Command(Command::Help));
        }
        let name = name.strip_prefix('/').unwrap_or_default();
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphabetic()) {
            return Ok(Self::Message(text.to_owned()));
        }
        let command = match (name, rest) {
            ("system", "") => Command::ShowSystem,
            ("system", "off") => Command::RemoveSystem,
            ("system", text) => Command::SetSystem(text.to_owned()),
            ("set", "") => Command::ShowSettings,
            ("set", rest) => return set(rest).map(Self::Command),
            ("show", what) => return Err(show_advice(what).to_owned()),
            ("list" | "ls", _) => {
                return Err(
                    "`corella list` lists models; a conversation keeps the one that it began with"
                        .to_owned(),
                );
            }
            ("help", _) => Command::Help,
            ("stats", "") => Command::Stats,
            ("clear", "") => Command::Clear,
            ("retry", "") => Command::Retry,
            ("exit" | "quit" | "bye", "") => Command::Exit,
            ("save" | "load", "") => return Err(format!("/{name} needs the name of a file")),
            ("save", file) => Command::Save(file.to_owned()),
            ("load", file) => Command::Load(file.to_owned()),
            ("stats" | "clear" | "retry" | "exit" | "quit" | "bye", _) => {
                return Err(format!("/{name} takes no argument"));
            }
            _ => {
                let near = nearest_name(name, NAMES);
                let near = near.map_or_else(String::new, |near| format!("did you mean /{near}? "));
                return Err(format!("there is no /{name}; {near}/help lists all"));
            }
        };
        Ok(Self::Command(command))
    }
}

/// Parses the arguments of `/set`, which include those of Ollama's chat.
fn set(rest: &str) -> Result<Command, String> {
    let (first, value) = match rest.split_once(char::is_whitespace) {
        Some((first, value)) => (first, value.trim()),
        None => (rest, ""),
    };
    match (first, value) {
        ("parameter", "") => Ok(Command::ShowSettings),
        ("parameter", rest) => set(rest),
        ("system", "") => Ok(Command::ShowSystem),
        ("system", text) => Ok(Command::SetSystem(text.trim_matches('"').to_owned())),
        ("verbose", "") => Ok(Command::Verbose(true)),
        ("quiet", "") => Ok(Command::Verbose(false)),
        ("think" | "nothink", _) => Err(
            "the chat template decides about thinking: --default-chat-template-kwargs '{\"enable_thinking\": \
             false}' when the chat is started"
                .to_owned(),
        ),
        ("format" | "noformat", _) => {
            Err("answers have a format over the API only: `response_format` of a request".to_owned())
        }
        ("history" | "nohistory", "") => {
            Err("--no-history, when the chat is started, keeps no history".to_owned())
        }
        ("wordwrap" | "nowordwrap", "") => {
            Err("lines are wrapped at spaces on a terminal only: piped answers keep the model's own lines".to_owned())
        }
        (field, "") => Ok(Command::Unset(field.to_owned())),
        (field, value) => Ok(Command::Set(field.to_owned(), value.to_owned())),
    }
}

/// Returns the command to type instead of Ollama's `/show`.
fn show_advice(what: &str) -> &'static str {
    match what {
        "system" => "/system shows the system message",
        "parameters" => "/set shows what is set",
        _ => {
            "`corella inspect MODEL` describes a model; /set shows what is set, /system the system message"
        }
    }
}

/// Returns completions of commands and of `/set`'s names for the text before the cursor: the word's start, and whole
/// words.
pub fn completions(typed: &str) -> (usize, Vec<String>) {
    if let Some(begun) = typed.strip_prefix("/set ") {
        let words = setting::names().filter(|name| name.starts_with(begun));
        let words = words.map(|name| format!("{name} ")).collect();
        return (typed.len() - begun.len(), words);
    }
    let words = NAMES.iter().map(|name| format!("/{name} "));
    let is_begun = |word: &String| !typed.is_empty() && word.starts_with(typed);
    (0, words.filter(is_begun).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(text: &str) -> Command {
        match Entry::parse(text) {
            Ok(Entry::Command(command)) => command,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn commands_and_messages_are_told_apart() {
        assert_eq!(Entry::parse(" \n"), Ok(Entry::Empty));
        for text in [
            "hello",
            "/etc/hosts is a file",
            "/ 2",
            "7/set",
            "//set",
            "exit stage left",
        ] {
            assert_eq!(Entry::parse(text), Ok(Entry::Message(text.to_owned())));
        }
        assert_eq!(command(" /clear "), Command::Clear);
        for text in ["/quit", "/exit", "/bye", "exit", " quit "] {
            assert_eq!(command(text), Command::Exit, "{text}");
        }
        for text in ["/?", "/?shortcuts", "/? shortcuts", "/help set"] {
            assert_eq!(command(text), Command::Help, "{text}");
        }
        assert_eq!(command("/retry"), Command::Retry);
        let file = "my fox.json".to_owned();
        assert_eq!(command("/save  my fox.json"), Command::Save(file.clone()));
        assert_eq!(command("/load my fox.json"), Command::Load(file));
        assert_eq!(command("/system"), Command::ShowSystem);
        assert_eq!(command("/system off"), Command::RemoveSystem);
        assert_eq!(
            command("/system Be brief.\nBe kind."),
            Command::SetSystem("Be brief.\nBe kind.".to_owned())
        );
        assert_eq!(command("/set"), Command::ShowSettings);
        assert_eq!(command("/set verbose"), Command::Verbose(true));
        assert_eq!(command("/set quiet"), Command::Verbose(false));
        assert_eq!(command("/set seed"), Command::Unset("seed".to_owned()));
        let set = |name: &str, value: &str| Command::Set(name.to_owned(), value.to_owned());
        assert_eq!(command("/set parameter top_p 0.5"), set("top_p", "0.5"));
        assert_eq!(command("/set parameter"), Command::ShowSettings);
        assert_eq!(
            command("/set system \"Be brief.\""),
            Command::SetSystem("Be brief.".to_owned())
        );
        let set = set("stop", "a  b");
        assert_eq!(command("/set stop  a  b"), set);
    }

    #[test]
    fn a_wrong_command_is_not_sent_to_the_model() {
        for (text, reason) in [
            ("/stat", "did you mean /stats?"),
            ("/frobnicate", "there is no /frobnicate; /help"),
            ("/clear all", "/clear takes no argument"),
            ("/bye bye", "/bye takes no argument"),
            ("/save", "/save needs the name of a file"),
            ("/list", "`corella list` lists models"),
            ("/set nothink", "enable_thinking"),
            ("/show info", "`corella inspect MODEL`"),
            ("/show parameters", "/set shows"),
        ] {
            let error = Entry::parse(text).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_word_is_completed_where_it_stands() {
        let words = |words: &[&str]| {
            words
                .iter()
                .map(|&word| word.to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(completions("/st"), (0, words(&["/stats "])));
        assert_eq!(
            completions("/s"),
            (0, words(&["/system ", "/set ", "/stats ", "/save "]))
        );
        assert_eq!(completions("/set te"), (5, words(&["temperature "])));
        assert_eq!(completions("/set top_"), (5, words(&["top_p ", "top_k "])));
        for typed in ["", "hello", "say /st", "/set temperature 0", "/clear "] {
            let (_, words) = completions(typed);
            assert!(
                words.is_empty() || words == ["/clear "],
                "{typed}: {words:?}"
            );
        }
    }
}
