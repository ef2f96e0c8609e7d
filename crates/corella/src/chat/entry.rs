//! What somebody entered: a message, or a command that begins with a slash.

use crate::nearest_name::nearest_name;

#[derive(Debug, PartialEq)]
pub enum Entry {
    Message(String),
    Command(Command),
    /// Nothing but spaces.
    Empty,
}

#[derive(Debug, PartialEq)]
pub enum Command {
    Help,
    /// Shows the system message.
    ShowSystem,
    SetSystem(String),
    RemoveSystem,
    /// Shows what is set.
    ShowSettings,
    Set(String, String),
    Unset(String),
    Stats,
    Clear,
    Exit,
}

const NAMES: [&str; 7] = ["help", "system", "set", "stats", "clear", "exit", "quit"];

pub const HELP: &str = "\
/system TEXT      replace the system message; /system shows it, /system off removes it
/set NAME VALUE   set a field of the requests, such as temperature; /set shows what is set,
                  /set NAME goes back to the default
/stats            tokens and times of the last answer, and how full the context is
/clear            begin a new conversation; system message and settings stay
/help             this list
/exit             leave; so does Ctrl-D

A message of several lines stands between two lines of \"\"\", or has a \\ at the end of each line
but the last. Ctrl-C stops an answer; what there is of it stays in the conversation.";

impl Entry {
    /// `Err` says what is wrong with a command. Only a word of letters behind the slash is a command,
    /// so that a message may begin with a path.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::Empty);
        }
        let (name, rest) = match text.split_once(char::is_whitespace) {
            Some((name, rest)) => (name, rest.trim()),
            None => (text, ""),
        };
        let name = name.strip_prefix('/').unwrap_or_default();
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphabetic()) {
            return Ok(Self::Message(text.to_owned()));
        }
        let command = match (name, rest) {
            ("system", "") => Command::ShowSystem,
            ("system", "off") => Command::RemoveSystem,
            ("system", text) => Command::SetSystem(text.to_owned()),
            ("set", "") => Command::ShowSettings,
            ("set", rest) => match rest.split_once(char::is_whitespace) {
                Some((field, value)) => Command::Set(field.to_owned(), value.trim().to_owned()),
                None => Command::Unset(rest.to_owned()),
            },
            ("help", "") => Command::Help,
            ("stats", "") => Command::Stats,
            ("clear", "") => Command::Clear,
            ("exit" | "quit", "") => Command::Exit,
            ("help" | "stats" | "clear" | "exit" | "quit", _) => {
                return Err(format!("/{name} stands alone"));
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
        for text in ["hello", "/etc/hosts is a file", "/ 2", "7/set", "//set"] {
            assert_eq!(Entry::parse(text), Ok(Entry::Message(text.to_owned())));
        }
        assert_eq!(command(" /clear "), Command::Clear);
        assert_eq!(command("/quit"), Command::Exit);
        assert_eq!(command("/system"), Command::ShowSystem);
        assert_eq!(command("/system off"), Command::RemoveSystem);
        assert_eq!(
            command("/system Be brief.\nBe kind."),
            Command::SetSystem("Be brief.\nBe kind.".to_owned())
        );
        assert_eq!(command("/set"), Command::ShowSettings);
        assert_eq!(command("/set seed"), Command::Unset("seed".to_owned()));
        let set = Command::Set("stop".to_owned(), "a  b".to_owned());
        assert_eq!(command("/set stop  a  b"), set);
    }

    #[test]
    fn a_wrong_command_is_not_sent_to_the_model() {
        for (text, reason) in [
            ("/stat", "did you mean /stats?"),
            ("/frobnicate", "there is no /frobnicate; /help"),
            ("/clear all", "/clear stands alone"),
        ] {
            let error = Entry::parse(text).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
