//! Reads a growing reply: reasoning, text and calls of tools, without the markup between them.
//!
//! A parser takes pieces of text from the detokenizer, and returns the parts that are certain. It holds back only text
//! that may still prove to be markup, or the beginning of a call whose name is not complete. The joined parts do not
//! depend on how the text was divided into pieces.
//!
//! The chat template decides the format (`reply_format`). Each format has a parser, and a grammar for the replies that
//! a request demands (`reply_grammar`).

mod call_grammar;
mod call_list;
mod call_object;
mod call_reader;
mod call_tags;
mod deepseek;
mod gemma4;
mod gemma4_arguments;
mod gemma4_grammar;
mod glm4_reader;
mod harmony;
mod hermes;
mod json_extent;
mod json_writer;
mod list_reader;
mod llama;
mod member_grammar;
mod mistral;
mod part_list;
mod python_arguments;
mod python_call;
mod python_reader;
mod python_string;
mod reasoning_count;
mod reply_format;
mod reply_grammar;
pub(crate) mod reply_part;
mod tag;
mod tagged_grammar;
mod tagged_reader;
mod think;
mod tool_set;

use std::sync::Arc;

use call_reader::{CallReader, PlainReader};
use deepseek::DeepSeekReader;
use gemma4::Gemma4Reader;
use glm4_reader::Glm4Reader;
use harmony::HarmonyReader;
use hermes::HermesReader;
use list_reader::ListReader;
use llama::LlamaReader;
use mistral::MistralReader;
use part_list::PartList;
use python_reader::PythonReader;
use reasoning_count::{ReasoningCount, ReplyPhase};
use tagged_reader::TaggedReader;
use think::ThinkReader;

pub use call_tags::TagFormat;
pub use reply_format::{CallFormat, ReasoningFormat, ReplyFormat, UnknownFormat};
pub use reply_grammar::{GrammarOrigin, ReplyGrammarError, WantedCalls, WantedReply};
pub use tool_set::ToolSet;

use crate::reply::reply_part::ReplyPart;

/// The context of a reply before it begins.
#[derive(Clone, Debug, Default)]
pub struct ReplyContext {
    pub format: ReplyFormat,
    /// The offered tools. Without any, calls are not detected.
    pub tools: Option<Arc<ToolSet>>,
    /// Whether the prompt ends within the reasoning.
    pub within_reasoning: bool,
    /// Whether the prompt has ended the reasoning, or begun the answer after it.
    pub past_reasoning: bool,
    /// Calls after the first are left out.
    pub one_call: bool,
}

/// Reads one reply.
pub struct ReplyParser {
    think: Option<ThinkReader>,
    calls: Box<dyn CallReader>,
    /// Whether a call begins like text.
    has_plain_calls: bool,
    /// The end of the pushed text, until it is known whether it is reasoning.
    unsorted: String,
    /// Unread text that is not reasoning.
    unread: String,
    out: PartList,
    reasoning_count: ReasoningCount,
}

impl ReplyParser {
    pub fn new(context: &ReplyContext) -> Self {
        let ReplyContext { format, tools, .. } = context;
        let calls = format.calls.filter(|_| tools.is_some());
        let reads_harmony_reasoning = format.reasoning == Some(ReasoningFormat::Harmony);
        let offered = tools.clone().filter(|_| calls.is_some());
        let reader: Box<dyn CallReader> = match calls {
            _ if reads_harmony_reasoning => Box::new(HarmonyReader::new(offered.clone(), true)),
            Some(CallFormat::Harmony) => Box::new(HarmonyReader::new(offered.clone(), false)),
            Some(CallFormat::Hermes) => Box::new(HermesReader::new()),
            Some(CallFormat::Tagged(format)) => {
                Box::new(TaggedReader::new(format.tags(), offered.clone()))
            }
            Some(CallFormat::Llama3) => Box::new(LlamaReader::new(tools.clone())),
            Some(CallFormat::Mistral) => Box::new(MistralReader::new()),
            Some(CallFormat::DeepSeekV3) => Box::new(DeepSeekReader::new(true)),
            Some(CallFormat::DeepSeekV31) => Box::new(DeepSeekReader::new(false)),
            Some(CallFormat::Granite) => Box::new(ListReader::new(list_reader::GRANITE)),
            Some(CallFormat::CommandR) => Box::new(ListReader::new(list_reader::COMMAND_R)),
            Some(CallFormat::Glm4) => Box::new(Glm4Reader::new(tools.clone())),
            Some(CallFormat::Gemma4) => Box::new(Gemma4Reader::new()),
            Some(CallFormat::Lfm2) => {
                Box::new(PythonReader::new(python_reader::LFM2, tools.clone()))
            }
            Some(CallFormat::Olmo3) => {
                Box::new(PythonReader::new(python_reader::OLMO3, tools.clone()))
            }
            None => Box::new(PlainReader),
        };
        let tags = format.reasoning.and_then(ReasoningFormat::tags);
        Self {
            think: tags.map(|tags| ThinkReader::new(tags, context.within_reasoning)),
            calls: reader,
            has_plain_calls: calls.is_some_and(CallFormat::is_plain),
            unsorted: String::new(),
            unread: String::new(),
            out: PartList::new(offered, if context.one_call { 1 } else { usize::MAX }),
            reasoning_count: ReasoningCount::default(),
        }
    }

    /// Adds text and returns the parts that are now certain.
    pub fn push(&mut self, text: &str) -> Vec<ReplyPart> {
        self.read(text, false);
        self.out.take()
    }

    /// Adds the text of one more token, which may be empty, and returns the parts that are now certain.
    pub fn push_token(&mut self, text: &str) -> Vec<ReplyPart> {
        let before = self.phase();
        let parts = self.push(text);
        self.reasoning_count.push(before, self.phase());
        parts
    }

    /// The number of reasoning tokens so far, including the markup around them.
    pub fn num_reasoning_tokens(&self) -> u32 {
        self.reasoning_count.num_tokens()
    }

    fn phase(&self) -> ReplyPhase {
        match &self.think {
            Some(think) => think.phase(),
            None => self.calls.phase(),
        }
    }

    /// Returns the held-back text. Call it once, after the last text. If a limit cut the reply off within a tag, the
    /// beginning of the tag is dropped.
    pub fn finish(&mut self, is_cut_off: bool) -> Vec<ReplyPart> {
        self.read("", !is_cut_off || self.has_plain_calls);
        self.out.finish();
        self.out.take()
    }

    fn read(&mut self, text: &str, at_end: bool) {
        match &mut self.think {
            None => self.unread.push_str(text),
            Some(think) => {
                self.unsorted.push_str(text);
                let mut at = 0;
                while let Some(len) = think.step(
                    &self.unsorted[at..],
                    at_end,
                    &mut self.out,
                    &mut self.unread,
                ) {
                    at += len;
                }
                self.unsorted.drain(..at);
            }
        }
        let mut at = 0;
        while let Some(len) = self.calls.step(&self.unread[at..], at_end, &mut self.out) {
            at += len;
        }
        self.unread.drain(..at);
    }
}
