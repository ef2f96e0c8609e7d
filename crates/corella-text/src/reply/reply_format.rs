//! The formats of replies: their names, and their detection in a chat template.

use std::str::FromStr;

use serde_json::{Value, json};

use super::call_tags::TagFormat;
use super::list_reader::COMMAND_R;
use super::python_reader::{LFM2, OLMO3};
use super::think::ThinkTags;
use crate::chat_template::{ChatInput, ChatTemplate};

/// The model's markup of tool calls and reasoning in its replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplyFormat {
    pub calls: Option<CallFormat>,
    pub reasoning: Option<ReasoningFormat>,
}

/// The format of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    Hermes,
    Tagged(TagFormat),
    Llama3,
    Mistral,
    Harmony,
    DeepSeekV3,
    DeepSeekV31,
    Granite,
    Gemma4,
    Lfm2,
    Olmo3,
    CommandR,
    Glm4,
}

/// The format of reasoning before the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>…</think>`
    Think,
    /// `[THINK]…[/THINK]`, of Mistral's Magistral.
    MistralThink,
    /// The channel `analysis` of gpt-oss.
    Harmony,
    /// `<|channel>thought…<channel|>`
    Gemma4,
    /// `<seed:think>…</seed:think>`
    SeedOss,
    /// `<think>…</think><response>…</response>`
    Granite,
}

impl ChatTemplate {
    /// The model's format of tool calls and reasoning, as far as the template shows it.
    pub fn reply_format(&self) -> ReplyFormat {
        ReplyFormat::of_template(self, &self.sources())
    }
}

impl ReplyFormat {
    /// The format in which a chat template prints a call. If a template does not print a call, its source may show the
    /// format.
    pub(crate) fn of_template(template: &ChatTemplate, source: &str) -> Self {
        Self {
            calls: match printed_call(template) {
                Some(printed) => CallFormat::of_printed(&printed).or_else(|| {
                    let is_another = |marker: &&str| printed.contains(marker);
                    CallFormat::of_source(source).filter(|calls| {
                        let calls = Some(*calls);
                        let reasoning = None;
                        !Self { calls, reasoning }.markers().iter().any(is_another)
                    })
                }),
                None => CallFormat::of_source(source),
            },
            reasoning: ReasoningFormat::of_source(source),
        }
    }

    /// The texts of tokens that mark the format, which are kept in a reply even if they are special.
    pub fn markers(&self) -> Vec<&'static str> {
        let calls: &[_] = match self.calls {
            Some(CallFormat::Hermes) => &["<tool_call>", "</tool_call>"],
            Some(CallFormat::Tagged(format)) => format.markers(),
            Some(CallFormat::Llama3) => &["<|python_tag|>"],
            Some(CallFormat::Mistral) => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Some(CallFormat::DeepSeekV3 | CallFormat::DeepSeekV31) => &super::deepseek::TAGS,
            Some(CallFormat::Harmony) => &super::harmony::TAGS,
            Some(CallFormat::Granite) => &["<|tool_call|>"],
            Some(CallFormat::Gemma4) => &super::gemma4::TAGS,
            Some(CallFormat::Lfm2) => super::python_reader::LFM2.tags,
            Some(CallFormat::Olmo3) => super::python_reader::OLMO3.tags,
            Some(CallFormat::Glm4) => &[super::glm4_reader::TURN],
            // Plain text.
            Some(CallFormat::CommandR) => &[],
            None => &[],
        };
        let reasoning: &[_] = match self.reasoning {
            Some(ReasoningFormat::Think | ReasoningFormat::Granite) => &["<think>", "</think>"],
            Some(ReasoningFormat::SeedOss) => &["<seed:think>", "</seed:think>"],
            Some(ReasoningFormat::MistralThink) => &["[THINK]", "[/THINK]"],
            Some(ReasoningFormat::Harmony) => &super::harmony::TAGS,
            Some(ReasoningFormat::Gemma4) => &["<|channel>", "<channel|>"],
            None => &[],
        };
        let mut markers = [calls, reasoning].concat();
        markers.sort_unstable();
        markers.dedup();
        markers
    }
}

impl CallFormat {
    pub const ALL: [Self; 17] = [
        Self::Hermes,
        Self::Tagged(TagFormat::Qwen3Coder),
        Self::Tagged(TagFormat::Glm45),
        Self::Tagged(TagFormat::Glm47),
        Self::Tagged(TagFormat::MiniMaxM2),
        Self::Tagged(TagFormat::SeedOss),
        Self::Llama3,
        Self::Mistral,
        Self::Harmony,
        Self::DeepSeekV3,
        Self::DeepSeekV31,
        Self::Granite,
        Self::Gemma4,
        Self::Lfm2,
        Self::Olmo3,
        Self::CommandR,
        Self::Glm4,
    ];

    /// The format around a printed call.
    fn of_printed(printed: &str) -> Option<Self> {
        let at = printed.rfind(CALLED)?;
        let (before, behind) = (&printed[..at], &printed[at + CALLED.len()..]);
        let tagged = |format| Some(Self::Tagged(format));
        if let Some(before) = before.strip_suffix("<function=") {
            let parameters = behind.strip_prefix('>')?.trim_start();
            return match before.trim_end().ends_with("<seed:tool_call>") {
                _ if !parameters.starts_with("<parameter=") => None,
                true => tagged(TagFormat::SeedOss),
                false => tagged(TagFormat::Qwen3Coder),
            };
        }
        if let Some(before) = before.strip_suffix("<invoke name=\"") {
            let is_minimax = before.trim_end().ends_with("<minimax:tool_call>");
            return is_minimax.then_some(Self::Tagged(TagFormat::MiniMaxM2));
        }
        if before.ends_with("<tool_call>") {
            return match behind.trim_start().starts_with("<arg_key>") {
                true if behind.starts_with("<arg_key>") => tagged(TagFormat::Glm47),
                true => tagged(TagFormat::Glm45),
                false => None,
            };
        }
        if before.ends_with("to=functions.") {
            return Some(Self::Harmony);
        }
        if before.contains("<｜tool▁call▁begin｜>") {
            return match behind.trim_start().starts_with("```json") {
                true => Some(Self::DeepSeekV3),
                false => Some(Self::DeepSeekV31),
            };
        }
        if before.ends_with("<|tool_call>call:") {
            return Some(Self::Gemma4);
        }
        let [lfm2, olmo3] = [LFM2, OLMO3].map(|block| block.tags[0]);
        if before.strip_suffix('[').unwrap_or(before).ends_with(lfm2) {
            return Some(Self::Lfm2);
        }
        if before.ends_with(olmo3) {
            return Some(Self::Olmo3);
        }
        if before.ends_with("[TOOL_CALLS]") {
            return Some(Self::Mistral);
        }
        // An object in JSON.
        let object = before.rfind('{')?;
        let list = before[..object].trim_end();
        let (tag, is_list) = match list.strip_suffix('[') {
            Some(tag) => (tag.trim_end(), true),
            None => (list, false),
        };
        if tag.ends_with("<|tool_call|>") || is_list && tag.ends_with("<tool_call>") {
            Some(Self::Granite)
        } else if tag.ends_with("<tool_call>") {
            Some(Self::Hermes)
        } else if tag.ends_with("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if tag.ends_with(lfm2) {
            Some(Self::Lfm2)
        } else if is_list && COMMAND_R.begin.iter().any(|begin| tag.ends_with(begin)) {
            Some(Self::CommandR)
        } else if !is_list && behind.starts_with("\", \"parameters\": ") {
            Some(Self::Llama3)
        } else {
            None
        }
    }

    fn of_source(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if has("<|channel|>") && has("<|message|>") {
            Some(Self::Harmony)
        } else if has("<｜tool▁call▁begin｜>") {
            match has("```json") {
                true => Some(Self::DeepSeekV3),
                false => Some(Self::DeepSeekV31),
            }
        } else if has("<function=") && has("<parameter=") {
            Some(Self::Tagged(TagFormat::Qwen3Coder))
        } else if has("<|tool_call|>") {
            Some(Self::Granite)
        } else if OLMO3.tags.iter().all(|tag| has(tag)) {
            Some(Self::Olmo3)
        } else if has(super::gemma4::CALL) {
            Some(Self::Gemma4)
        } else if has(LFM2.tags[0]) || has("<|tool_list_start|>") {
            Some(Self::Lfm2)
        } else if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has("<tool_call>") {
            Some(Self::Hermes)
        } else if has("<|python_tag|>") || (has("<|start_header_id|>") && has("\"parameters\": ")) {
            Some(Self::Llama3)
        } else if has("List of tools: ") && has("<|im_start|>") {
            // Most templates of LFM2 write earlier calls only where they are part of the text.
            Some(Self::Lfm2)
        } else if has(super::glm4_reader::TURN) && has("metadata") && has("observation") {
            Some(Self::Glm4)
        } else {
            None
        }
    }

    /// Whether a call begins like text, and not with a tag.
    pub(crate) fn is_plain(self) -> bool {
        matches!(self, Self::Llama3 | Self::CommandR | Self::Glm4)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Tagged(format) => format.name(),
            Self::Llama3 => "llama3_json",
            Self::Mistral => "mistral",
            Self::Harmony => "openai",
            Self::DeepSeekV3 => "deepseek_v3",
            Self::DeepSeekV31 => "deepseek_v31",
            Self::Granite => "granite",
            Self::Gemma4 => "gemma4",
            Self::Lfm2 => "lfm2",
            Self::Olmo3 => "olmo3",
            Self::CommandR => "command_r",
            Self::Glm4 => "glm4",
        }
    }
}

impl ReasoningFormat {
    pub const ALL: [Self; 6] = [
        Self::Think,
        Self::MistralThink,
        Self::Harmony,
        Self::Gemma4,
        Self::SeedOss,
        Self::Granite,
    ];

    fn of_source(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if has("<|channel|>") && has("<|message|>") {
            Some(Self::Harmony)
        } else if has("<|channel>") && has("<channel|>") {
            Some(Self::Gemma4)
        } else if has("[THINK]") {
            Some(Self::MistralThink)
        } else if has("<seed:think>") {
            Some(Self::SeedOss)
        } else if has("<response></response>") {
            Some(Self::Granite)
        } else if has("<think>") || has("</think>") {
            Some(Self::Think)
        } else {
            None
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Think => "think",
            Self::MistralThink => "mistral",
            Self::Harmony => "openai_gptoss",
            Self::Gemma4 => "gemma4",
            Self::SeedOss => "seed_oss",
            Self::Granite => "granite",
        }
    }

    /// The tags around the reasoning, if the format has any.
    pub(crate) fn tags(self) -> Option<ThinkTags> {
        match self {
            Self::Think => Some(ThinkTags::new("<think>", "</think>")),
            Self::MistralThink => Some(ThinkTags::new("[THINK]", "[/THINK]")),
            Self::Gemma4 => Some(ThinkTags {
                label: "thought\n",
                end: Some(super::gemma4::CALL),
                ..ThinkTags::new("<|channel>", "<channel|>")
            }),
            Self::SeedOss => Some(ThinkTags::new("<seed:think>", "</seed:think>")),
            Self::Granite => Some(ThinkTags {
                answer: Some(["<response>", "</response>"]),
                ..ThinkTags::new("<think>", "</think>")
            }),
            Self::Harmony => None,
        }
    }

    /// Whether this text ends within the reasoning.
    pub fn is_open_at_end(self, text: &str) -> bool {
        self.tags().is_some_and(|tags| match text.rfind(tags.open) {
            Some(open) => !text[open..].contains(tags.close),
            None => false,
        })
    }

    /// Whether a prompt for a new reply has ended the reasoning, so that the reply has none.
    pub fn is_closed_by(self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        self.tags().is_some_and(|tags| prompt.ends_with(tags.close))
    }

    /// Whether a prompt for a new reply has opened its reasoning.
    pub fn is_opened_by(self, prompt: &str) -> bool {
        self.tags().is_some_and(|tags| {
            let prompt = prompt.trim_end();
            let before_label = prompt.strip_suffix(tags.label.trim_end());
            before_label.unwrap_or(prompt).ends_with(tags.open)
        })
    }
}

/// The name and the argument of the call that templates print as a test.
const CALLED: &str = "probe_called";
const ARGUMENT: &str = "probe_argument";
/// The text of the user before the call.
const ASKED: &str = "probe_asked";

/// The turn in which the assistant makes a call, as the template prints it. `None` if the call is not in it.
fn printed_call(template: &ChatTemplate) -> Option<String> {
    let arguments = json!({ARGUMENT: "probe value"});
    let arguments = match template.needs_text_arguments() {
        true => arguments.to_string().into(),
        false => arguments,
    };
    let call = json!({
        // Some templates accept only ids of nine letters and digits.
        "id": "probe0000", "type": "function", "function": {"name": CALLED, "arguments": arguments},
    });
    let messages = [
        json!({"role": "user", "content": ASKED}),
        json!({"role": "assistant", "content": "", "tool_calls": [call]}),
    ];
    let parameters = json!({"type": "object", "properties": {"probe": {"type": "string", "description": "A probe."}}});
    let tools = json!([{
        "type": "function",
        "function": {"name": "probe_offered", "description": "A probe.", "parameters": parameters},
    }]);
    // Some templates print the turn only if the call's result follows, and others read tools only from a variable of
    // their own.
    let printed = |tools: Option<&Value>| {
        let prompt = template.render(ChatInput {
            messages: &messages,
            tools,
            ..ChatInput::default()
        });
        let prompt = prompt.ok()?;
        // Instructions before the user's text may contain examples of calls.
        let (_, turn) = prompt.rsplit_once(ASKED)?;
        (turn.contains(CALLED) && turn.contains(ARGUMENT)).then(|| turn.to_owned())
    };
    printed(Some(&tools)).or_else(|| printed(None))
}

/// An unknown name of a format.
#[derive(Debug, thiserror::Error)]
#[error("{name:?} is not a known format; known are {known}")]
pub struct UnknownFormat {
    name: String,
    known: String,
}

fn unknown<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> UnknownFormat {
    UnknownFormat {
        name: name.to_owned(),
        known: known.collect::<Vec<_>>().join(", "),
    }
}

impl FromStr for CallFormat {
    type Err = UnknownFormat;

    /// Also accepts vLLM's names of the same formats.
    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        match name {
            "hermes" | "qwen" | "qwen25" | "qwen3" | "granite4" | "ernie45" => Ok(Self::Hermes),
            "qwen3_coder" | "qwen3_xml" => Ok(Self::Tagged(TagFormat::Qwen3Coder)),
            "glm45" => Ok(Self::Tagged(TagFormat::Glm45)),
            "glm47" => Ok(Self::Tagged(TagFormat::Glm47)),
            "minimax_m2" => Ok(Self::Tagged(TagFormat::MiniMaxM2)),
            "seed_oss" => Ok(Self::Tagged(TagFormat::SeedOss)),
            "llama3_json" | "llama4_json" | "llama3" => Ok(Self::Llama3),
            "mistral" => Ok(Self::Mistral),
            "openai" | "harmony" => Ok(Self::Harmony),
            "deepseek_v3" => Ok(Self::DeepSeekV3),
            "deepseek_v31" => Ok(Self::DeepSeekV31),
            "granite" => Ok(Self::Granite),
            "gemma4" => Ok(Self::Gemma4),
            "lfm2" => Ok(Self::Lfm2),
            "olmo3" => Ok(Self::Olmo3),
            "command_r" => Ok(Self::CommandR),
            "glm4" => Ok(Self::Glm4),
            _ => Err(unknown(name, Self::ALL.into_iter().map(Self::name))),
        }
    }
}

impl FromStr for ReasoningFormat {
    type Err = UnknownFormat;

    /// Also accepts vLLM's names of the same formats.
    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        match name {
            "think" | "deepseek_r1" | "deepseek_v3" | "qwen3" | "glm45" | "glm47"
            | "minimax_m2" => Ok(Self::Think),
            "seed_oss" => Ok(Self::SeedOss),
            "granite" | "ernie45" => Ok(Self::Granite),
            "mistral" => Ok(Self::MistralThink),
            "openai_gptoss" | "harmony" => Ok(Self::Harmony),
            "gemma4" => Ok(Self::Gemma4),
            _ => Err(unknown(name, Self::ALL.into_iter().map(Self::name))),
        }
    }
}
