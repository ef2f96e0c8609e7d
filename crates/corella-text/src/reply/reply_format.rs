//! The formats of replies: their names, and their detection in a chat template.

use std::fmt;
use std::str::FromStr;

use super::think::ThinkTags;

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
    Qwen3Coder,
    Llama3,
    Mistral,
    Harmony,
    DeepSeekV3,
    DeepSeekV31,
    Granite,
    Gemma4,
    Lfm2,
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
}

impl ReplyFormat {
    /// The format in the source of a chat template, which writes earlier replies as the model does.
    pub(crate) fn of_template(source: &str) -> Self {
        Self {
            calls: CallFormat::of_template(source),
            reasoning: ReasoningFormat::of_template(source),
        }
    }

    /// The texts of tokens that mark the format, which are kept in a reply even if they are special.
    pub fn markers(&self) -> Vec<&'static str> {
        let calls: &[_] = match self.calls {
            Some(CallFormat::Hermes | CallFormat::Qwen3Coder) => &["<tool_call>", "</tool_call>"],
            Some(CallFormat::Llama3) => &["<|python_tag|>"],
            Some(CallFormat::Mistral) => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Some(CallFormat::DeepSeekV3 | CallFormat::DeepSeekV31) => &super::deepseek::TAGS,
            Some(CallFormat::Harmony) => &super::harmony::TAGS,
            Some(CallFormat::Granite) => &["<|tool_call|>"],
            Some(CallFormat::Gemma4) => &super::gemma4::TAGS,
            Some(CallFormat::Lfm2) => &super::lfm2::TAGS,
            None => &[],
        };
        let reasoning: &[_] = match self.reasoning {
            Some(ReasoningFormat::Think) => &["<think>", "</think>"],
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
    pub const ALL: [Self; 10] = [
        Self::Hermes,
        Self::Qwen3Coder,
        Self::Llama3,
        Self::Mistral,
        Self::Harmony,
        Self::DeepSeekV3,
        Self::DeepSeekV31,
        Self::Granite,
        Self::Gemma4,
        Self::Lfm2,
    ];

    fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if has("<|channel|>") && has("<|message|>") {
            Some(Self::Harmony)
        } else if has("<｜tool▁call▁begin｜>") {
            match has("```json") {
                true => Some(Self::DeepSeekV3),
                false => Some(Self::DeepSeekV31),
            }
        } else if has("<function=") && has("<parameter=") {
            Some(Self::Qwen3Coder)
        } else if has("<|tool_call|>") {
            Some(Self::Granite)
        } else if has(super::gemma4::CALL) {
            Some(Self::Gemma4)
        } else if has(super::lfm2::BLOCK) || has("<|tool_list_start|>") {
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
        } else {
            None
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Llama3 => "llama3_json",
            Self::Mistral => "mistral",
            Self::Harmony => "openai",
            Self::DeepSeekV3 => "deepseek_v3",
            Self::DeepSeekV31 => "deepseek_v31",
            Self::Granite => "granite",
            Self::Gemma4 => "gemma4",
            Self::Lfm2 => "lfm2",
        }
    }
}

impl ReasoningFormat {
    pub const ALL: [Self; 4] = [Self::Think, Self::MistralThink, Self::Harmony, Self::Gemma4];

    fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if has("<|channel|>") && has("<|message|>") {
            Some(Self::Harmony)
        } else if has("<|channel>") && has("<channel|>") {
            Some(Self::Gemma4)
        } else if has("[THINK]") {
            Some(Self::MistralThink)
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

    /// Whether a prompt for a new reply has already ended the reasoning, which was left out.
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

/// An unknown name of a format.
#[derive(Debug)]
pub struct UnknownFormat {
    name: String,
    known: String,
}

impl fmt::Display for UnknownFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a known format; known are {}",
            self.name, self.known
        )
    }
}

impl std::error::Error for UnknownFormat {}

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
            "hermes" | "qwen" | "qwen25" | "qwen3" => Ok(Self::Hermes),
            "qwen3_coder" | "qwen3_xml" => Ok(Self::Qwen3Coder),
            "llama3_json" | "llama4_json" | "llama3" => Ok(Self::Llama3),
            "mistral" => Ok(Self::Mistral),
            "openai" | "harmony" => Ok(Self::Harmony),
            "deepseek_v3" => Ok(Self::DeepSeekV3),
            "deepseek_v31" => Ok(Self::DeepSeekV31),
            "granite" => Ok(Self::Granite),
            "gemma4" => Ok(Self::Gemma4),
            "lfm2" => Ok(Self::Lfm2),
            _ => Err(unknown(name, Self::ALL.into_iter().map(Self::name))),
        }
    }
}

impl FromStr for ReasoningFormat {
    type Err = UnknownFormat;

    /// Also accepts vLLM's names of the same formats.
    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        match name {
            "think" | "deepseek_r1" | "deepseek_v3" | "qwen3" | "glm45" => Ok(Self::Think),
            "mistral" => Ok(Self::MistralThink),
            "openai_gptoss" | "harmony" => Ok(Self::Harmony),
            "gemma4" => Ok(Self::Gemma4),
            _ => Err(unknown(name, Self::ALL.into_iter().map(Self::name))),
        }
    }
}
