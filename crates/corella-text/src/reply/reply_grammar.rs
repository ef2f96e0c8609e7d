//! The grammar of a whole reply: optional reasoning first, and then the calls or the text that a request asks for. The
//! parser of the same format reads every reply of the grammar back.

use std::fmt::Write;

use serde_json::Value;

use super::tag::{Sight, find_tag};
use super::{CallFormat, ReasoningFormat, ReplyContext};
use crate::grammar::grammar_source::{ComposedGrammar, GrammarSource};
use crate::{Grammar, GrammarCompiler, GrammarError, Tokenizer};

/// The required reply after the reasoning. If both members are set, the reply is either calls or a text.
#[derive(Clone, Debug, Default)]
pub struct WantedReply {
    pub calls: Option<WantedCalls>,
    /// The grammar of the reply's text.
    pub text: Option<GrammarSource>,
}

/// The required calls of a reply. Their arguments follow the schemas of their tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WantedCalls {
    /// One call or more, of any offered tools.
    Any,
    /// One call of this tool.
    One(String),
}

/// The reason for which a wanted reply has no grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyGrammarError {
    pub origin: GrammarOrigin,
    pub error: GrammarError,
}

/// The source of a part of a reply's grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrammarOrigin {
    /// The grammar of the reply's text.
    Text,
    /// The parameters of the tool of this name.
    Tool(String),
    /// All parts together.
    Whole,
}

impl GrammarCompiler {
    /// Compiles the grammar of a reply to a conversation while its result is wanted. `tokenizer` must have the
    /// vocabulary of this compiler.
    ///
    /// # Errors
    /// The wanted part that cannot be followed, and the reason. Calls need a known format.
    pub fn compile_reply(
        &self,
        tokenizer: &Tokenizer,
        context: &ReplyContext,
        wanted: WantedReply,
        is_wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<Grammar, ReplyGrammarError> {
        let text_alone = wanted.text.as_ref().filter(|_| wanted.calls.is_none());
        if let Some(text) = text_alone
            && !context.has_markup_before_text()
        {
            let origin = GrammarOrigin::Text;
            return self
                .compile_while(text, is_wanted)
                .map_err(|error| ReplyGrammarError { origin, error });
        }
        let mut writer = GrammarWriter::new(tokenizer, context);
        let start = writer.reply(context, wanted)?;
        let source = GrammarSource::Composed(ComposedGrammar {
            start: format!("start: {start}\n{}", writer.rules),
            parts: writer.parts,
        });
        self.compile_while(&source, is_wanted).map_err(|mut error| {
            let part = error.part.and_then(|part| writer.origins.get(part));
            let (origin, place) = match part {
                Some((origin, place)) => (origin.clone(), place.as_str()),
                None => (GrammarOrigin::Whole, ""),
            };
            error.place = joined_place(place, &error.place);
            ReplyGrammarError { origin, error }
        })
    }
}

impl ReplyContext {
    /// Whether the text of a reply may follow markup other than calls.
    fn has_markup_before_text(&self) -> bool {
        !self.past_reasoning && (self.format.reasoning.is_some() || self.is_harmony())
    }

    fn is_harmony(&self) -> bool {
        let has_calls = self.tools.is_some();
        self.format.reasoning == Some(ReasoningFormat::Harmony)
            || has_calls && self.format.calls == Some(CallFormat::Harmony)
    }
}

/// Writes the grammar of a reply in Lark's notation, as expressions, rules and parts.
#[derive(Default)]
pub(crate) struct GrammarWriter {
    /// The markers of the format that are special tokens, which text never matches.
    special: Vec<(&'static str, u32)>,
    /// Whether Mistral's newer markers are in the vocabulary.
    pub(crate) has_args_token: bool,
    pub(crate) has_call_id: bool,
    rules: String,
    /// The rules that several calls share.
    shared_rules: Vec<&'static str>,
    parts: Vec<GrammarSource>,
    /// The source of each part, and the place in it.
    origins: Vec<(GrammarOrigin, String)>,
}

/// White space that models write after their reasoning.
const GAP: &str = r"/[ \n]{1,4}/?";

impl GrammarWriter {
    fn new(tokenizer: &Tokenizer, context: &ReplyContext) -> Self {
        let special_id = |marker: &str| {
            let id = tokenizer.token_to_id(marker);
            id.filter(|&id| tokenizer.is_special(id))
        };
        let markers = context.format.markers();
        let special = markers
            .into_iter()
            .filter_map(|marker| Some((marker, special_id(marker)?)))
            .collect();
        Self {
            special,
            has_call_id: tokenizer.token_to_id("[CALL_ID]").is_some(),
            has_args_token: tokenizer.token_to_id("[ARGS]").is_some(),
            ..Self::default()
        }
    }

    fn reply(
        &mut self,
        context: &ReplyContext,
        wanted: WantedReply,
    ) -> Result<String, ReplyGrammarError> {
        let reasoning = self.reasoning(context);
        let mut answers = Vec::new();
        if let Some(text) = wanted.text {
            let header = match context.is_harmony() && !context.past_reasoning {
                true => self.text("<|channel|>final<|message|>"),
                false => String::new(),
            };
            let text = self.part(text, GrammarOrigin::Text, String::new());
            answers.push(format!("{header} {text}"));
        }
        if let Some(calls) = wanted.calls {
            answers.push(self.calls(context, &calls)?);
        }
        Ok(format!("{reasoning} ({})", answers.join(" | ")))
    }

    /// The model's reasoning before its answer. The reasoning is optional, but it must end if the prompt has begun it.
    fn reasoning(&mut self, context: &ReplyContext) -> String {
        if context.past_reasoning {
            return String::new();
        }
        if context.format.reasoning == Some(ReasoningFormat::Harmony) {
            let begin = self.text("<|channel|>analysis<|message|>");
            let thought = self.until("thought", "<|end|>");
            let end = self.text("<|start|>assistant");
            return format!("({begin} {thought} {end})?");
        }
        let Some(tags) = context.format.reasoning.and_then(ReasoningFormat::tags) else {
            return String::new();
        };
        let thought = self.until("thought", tags.close);
        match context.within_reasoning {
            true => format!("{thought} {GAP}"),
            false => format!("({} {thought} {GAP})?", self.text(tags.open)),
        }
    }

    /// Adds a rule for any text up to and including a marker.
    fn until(&mut self, rule: &str, marker: &'static str) -> String {
        match self.is_special(marker) {
            true => {
                let marker = self.text(marker);
                self.rule(rule, &format!("/(?s:.+)/? {marker}"));
            }
            false => {
                let head = format!("{rule}[suffix={}]", Value::from(marker));
                self.rule(&head, "/(?s:.*)/");
            }
        }
        rule.to_owned()
    }

    /// Whether a marker of the format is a token that text never matches.
    pub(crate) fn is_special(&self, marker: &str) -> bool {
        self.special.iter().any(|(special, _)| *special == marker)
    }

    /// Whether a shared rule has still to be written.
    pub(crate) fn writes_once(&mut self, name: &'static str) -> bool {
        let is_new = !self.shared_rules.contains(&name);
        if is_new {
            self.shared_rules.push(name);
        }
        is_new
    }

    pub(crate) fn rule(&mut self, name: &str, body: &str) {
        writeln!(self.rules, "{name}: {body}").expect("a string takes everything");
    }

    /// Adds a grammar of its own, and returns the reference to it.
    pub(crate) fn part(
        &mut self,
        source: GrammarSource,
        origin: GrammarOrigin,
        place: String,
    ) -> String {
        let name = ComposedGrammar::part_name(self.parts.len());
        self.parts.push(source);
        self.origins.push((origin, place));
        format!("@{name}")
    }

    /// Exactly this text, with special markers as tokens.
    pub(crate) fn text(&self, text: &str) -> String {
        let markers: Vec<_> = self.special.iter().map(|(marker, _)| *marker).collect();
        let mut terms = Vec::new();
        let mut rest = text;
        while let Sight::Tag { start, tag } = find_tag(rest, &markers) {
            terms.extend(literal(&rest[..start]));
            let (marker, id) = self.special[tag];
            terms.push(format!("<[{id}]>"));
            rest = &rest[start + marker.len()..];
        }
        terms.extend(literal(rest));
        terms.join(" ")
    }
}

/// A text in Lark's notation, which is JSON's; `None` if it is empty.
pub(crate) fn literal(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| Value::from(text).to_string())
}

fn joined_place(outer: &str, inner: &str) -> String {
    match (outer, inner) {
        ("", place) | (place, "") => place.to_owned(),
        (outer, inner) => format!("{outer}.{inner}"),
    }
}

#[cfg(test)]
mod tests;
