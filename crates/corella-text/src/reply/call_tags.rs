//! The formats whose calls are tags, such as `<tool_call><function=name><parameter=key>value</parameter></function>
//! </tool_call>`. Values are not JSON, so the schema of the tool gives their types.

/// A format whose calls are tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagFormat {
    Qwen3Coder,
    Glm45,
    /// GLM 4.7 writes no line breaks between tags.
    Glm47,
    MiniMaxM2,
    SeedOss,
}

/// The tags of a format, and the white space that its models write between them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CallTags {
    /// The tags around a call, or around all calls of a reply if `holds_several`.
    pub(crate) outer: [&'static str; 2],
    pub(crate) holds_several: bool,
    /// The tags before and after the name of a function, and at the function's end. Formats without these tags have the
    /// name and the parameters directly in the outer tags.
    pub(crate) function: Option<[&'static str; 3]>,
    /// The tags before and after a key.
    pub(crate) key: [&'static str; 2],
    /// The tags before and after a value. The tag before it may be empty.
    pub(crate) value: [&'static str; 2],
    /// The white space around a value.
    pub(crate) padding: &'static str,
    /// The white space between other tags.
    pub(crate) gap: &'static str,
}

const QWEN3_CODER: CallTags = CallTags {
    outer: ["<tool_call>", "</tool_call>"],
    holds_several: false,
    function: Some(["<function=", ">", "</function>"]),
    key: ["<parameter=", ">"],
    value: ["", "</parameter>"],
    padding: "\n",
    gap: "\n",
};
const SEED_OSS: CallTags = CallTags {
    outer: ["<seed:tool_call>", "</seed:tool_call>"],
    padding: "",
    ..QWEN3_CODER
};
const MINIMAX_M2: CallTags = CallTags {
    outer: ["<minimax:tool_call>", "</minimax:tool_call>"],
    holds_several: true,
    function: Some(["<invoke name=\"", "\">", "</invoke>"]),
    key: ["<parameter name=\"", "\">"],
    padding: "",
    ..QWEN3_CODER
};
const GLM45: CallTags = CallTags {
    function: None,
    key: ["<arg_key>", "</arg_key>"],
    value: ["<arg_value>", "</arg_value>"],
    padding: "",
    ..QWEN3_CODER
};
const GLM47: CallTags = CallTags { gap: "", ..GLM45 };

impl TagFormat {
    pub(crate) fn tags(self) -> &'static CallTags {
        match self {
            Self::Qwen3Coder => &QWEN3_CODER,
            Self::Glm45 => &GLM45,
            Self::Glm47 => &GLM47,
            Self::MiniMaxM2 => &MINIMAX_M2,
            Self::SeedOss => &SEED_OSS,
        }
    }

    /// vLLM's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Qwen3Coder => "qwen3_coder",
            Self::Glm45 => "glm45",
            Self::Glm47 => "glm47",
            Self::MiniMaxM2 => "minimax_m2",
            Self::SeedOss => "seed_oss",
        }
    }

    /// The texts of tokens that mark calls.
    pub(crate) fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Qwen3Coder => &QWEN3_CODER.outer,
            Self::MiniMaxM2 => &MINIMAX_M2.outer,
            Self::SeedOss => &SEED_OSS.outer,
            Self::Glm45 | Self::Glm47 => &[
                "<tool_call>",
                "</tool_call>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
            ],
        }
    }
}

impl CallTags {
    /// The tags outside of functions. Models sometimes omit the outermost one before a function.
    pub(crate) fn outside(&self) -> Vec<&'static str> {
        let function = self.function.map(|[open, _, end]| [open, end]);
        self.outer
            .into_iter()
            .chain(function.into_iter().flatten())
            .collect()
    }

    /// The tags that begin a call.
    pub(crate) fn begins(&self) -> Vec<&'static str> {
        let open = self.function.map(|[open, ..]| open);
        [self.outer[0]].into_iter().chain(open).collect()
    }

    /// The tags between two parameters.
    pub(crate) fn inside(&self) -> Vec<&'static str> {
        let mut tags = self.outside();
        tags.push(self.key[0]);
        tags
    }

    /// The texts before all calls of a reply, between two, and after all.
    pub(crate) fn around_calls(&self) -> [String; 3] {
        let [open, close] = self.outer;
        match self.holds_several {
            true => [
                format!("{open}{}", self.gap),
                String::new(),
                close.to_owned(),
            ],
            false => [String::new(), self.gap.to_owned(), String::new()],
        }
    }

    /// A call up to its parameters, as the model writes it.
    pub(crate) fn begin(&self, name: &str) -> String {
        let Self { outer, gap, .. } = self;
        match self.function {
            None => format!("{}{name}{gap}", outer[0]),
            Some([open, close, _]) if self.holds_several => format!("{open}{name}{close}{gap}"),
            Some([open, close, _]) => format!("{}{gap}{open}{name}{close}{gap}", outer[0]),
        }
    }

    /// A call after its parameters.
    pub(crate) fn end(&self) -> String {
        match self.function {
            None => self.outer[1].to_owned(),
            Some([.., end]) if self.holds_several => format!("{end}{}", self.gap),
            Some([.., end]) => format!("{end}{}{}", self.gap, self.outer[1]),
        }
    }

    /// A parameter up to its value.
    pub(crate) fn begin_value(&self, key: &str) -> String {
        let gap = if self.value[0].is_empty() {
            ""
        } else {
            self.gap
        };
        let [before, behind] = self.key;
        format!(
            "{before}{key}{behind}{gap}{}{}",
            self.value[0], self.padding
        )
    }

    /// The end of a value.
    pub(crate) fn end_value(&self) -> String {
        format!("{}{}", self.padding, self.value[1])
    }
}
