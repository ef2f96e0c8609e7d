//! Admission rules as data: each rule's configuration of the scheduler, and the output limits of its requests.

use corella_core::{HeadRoom, SchedulerConfig};

/// One of the compared admission rules.
#[derive(Debug)]
pub struct Rule {
    pub name: &'static str,
    pub limit: GivenLimit,
    /// Whether the rule knows every output's length. Other rules are measured against it.
    pub is_oracle: bool,
    pub configure: fn(&mut SchedulerConfig),
}

/// The limit that a request gives for its output. Every output ends at its true length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GivenLimit {
    /// `max_tokens` is the true length, and there is no end token.
    Exact,
    /// `max_tokens` is this number, or less where the context or the pool leaves less room, or more where the true
    /// length is greater. An end token comes at the true length.
    AtMost(u32),
    /// No `max_tokens`; an end token comes at the true length.
    None,
}

pub static RULES: [Rule; 5] = [
    Rule {
        name: "oracle-reserve",
        limit: GivenLimit::Exact,
        is_oracle: true,
        configure: |config| config.head_room = HeadRoom::Limit,
    },
    Rule {
        name: "oracle",
        limit: GivenLimit::Exact,
        is_oracle: true,
        configure: |_| {},
    },
    // SGLang's estimate counts at most 4,096 tokens of a limit (`CLIP_MAX_NEW_TOKENS`).
    Rule {
        name: "sglang",
        limit: GivenLimit::AtMost(4096),
        is_oracle: false,
        configure: |config| {
            config.head_room = HeadRoom::Share {
                share: HeadRoom::ONE / 10 * 7,
                min_share: HeadRoom::ONE / 10,
                num_decay_steps: 600,
            };
            config.max_preemptions = u32::MAX;
        },
    },
    Rule {
        name: "vllm",
        limit: GivenLimit::None,
        is_oracle: false,
        configure: |config| {
            config.head_room = HeadRoom::fixed_share(0);
            config.max_preemptions = u32::MAX;
        },
    },
    Rule {
        name: "default",
        limit: GivenLimit::None,
        is_oracle: false,
        configure: |_| {},
    },
];

impl Rule {
    pub fn named(name: &str) -> Option<&'static Self> {
        RULES.iter().find(|rule| rule.name == name)
    }
}
