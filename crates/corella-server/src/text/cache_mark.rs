//! Marks of a conversation: the prefix cache retains the prompt up to each of them for a time.
//!
//! A chat template decides where a marked block ends in the prompt. So the texts of all blocks up to the last mark are
//! looked for in the rendered prompt, one after another. A wrong guess costs no answer: each place is the end of some
//! beginning of the prompt, and the cache retains a beginning that is a little longer or shorter. Templates write tools
//! beside the system prompt, so both end together.

use corella_core::{Retention, TokenId};
use corella_text::{ChatInput, ChatTemplate, RenderLimit, Tokenizer};
use serde_json::{Value, json};

/// Limits the bytes that are searched for blocks in vain. Some templates drop texts, and each search for a text that is
/// not there reads the rest of the prompt.
const MAX_MISSED_BYTES: usize = 64 << 20;

/// The marks of a conversation.
#[derive(Default)]
pub struct CacheMarks {
    /// The blocks of the system prompt.
    pub system: Vec<MarkedText>,
    /// The lifetime of a mark after the tools or after the whole system prompt.
    pub head_ttl_us: Option<u64>,
    /// The blocks of the messages, up to the last mark.
    pub messages: Vec<MarkedText>,
}

/// The text of a block, and the lifetime of a mark after it.
pub struct MarkedText {
    pub text: String,
    pub ttl_us: Option<u64>,
}

/// The text of a prompt, and its tokens.
pub struct MarkedPrompt<'a> {
    pub text: &'a str,
    pub tokens: &'a [TokenId],
    /// The length of the text that does not depend on the messages.
    pub num_head_bytes: usize,
}

impl CacheMarks {
    /// The beginnings of a prompt that the cache is to retain, the shortest first. Each is retained at least as long as
    /// the longer ones, which contain it.
    pub fn retentions(&self, prompt: &MarkedPrompt, tokenizer: &Tokenizer) -> Vec<Retention> {
        let places = self.places(prompt.text, prompt.num_head_bytes);
        let ends: Vec<usize> = places.iter().map(|&(end, _)| end).collect();
        let counts = token_counts(prompt, &ends, tokenizer);
        let mut longest_us = 0;
        let mut retentions: Vec<_> = { counts.into_iter().zip(places).rev() }
            .map(|(num_tokens, (_, ttl_us))| {
                longest_us = ttl_us.max(longest_us);
                Retention {
                    num_tokens,
                    ttl_us: longest_us,
                }
            })
            .collect();
        retentions.reverse();
        retentions
    }

    /// The end of each mark in the prompt's text, in order, with its lifetime. A mark after a block that is not found
    /// ends with the block before it.
    fn places(&self, text: &str, num_head_bytes: usize) -> Vec<(usize, u64)> {
        let mut places = Vec::new();
        let mut end = 0;
        let mut num_left = MAX_MISSED_BYTES;
        for block in &self.system {
            end = end_of(text, end, &block.text, &mut num_left);
            places.extend(block.ttl_us.map(|ttl_us| (end, ttl_us)));
        }
        end = end.max(num_head_bytes);
        places.extend(self.head_ttl_us.map(|ttl_us| (end, ttl_us)));
        for block in &self.messages {
            end = end_of(text, end, &block.text, &mut num_left);
            places.extend(block.ttl_us.map(|ttl_us| (end, ttl_us)));
        }
        places
    }
}

/// The end of a block's text in the prompt's text behind `start`, or `start` if it is not there. Many templates trim
/// texts. `num_left` is the number of bytes that may still be searched in vain.
fn end_of(text: &str, start: usize, block: &str, num_left: &mut usize) -> usize {
    let block = block.trim();
    let rest = &text[start..];
    if block.len() > rest.len() || *num_left == 0 {
        return start;
    }
    match rest.find(block) {
        Some(at) => start + at + block.len(),
        None => {
            *num_left = num_left.saturating_sub(rest.len());
            start
        }
    }
}

/// The number of whole tokens before each of `ends`, which are in order.
fn token_counts(prompt: &MarkedPrompt, ends: &[usize], tokenizer: &Tokenizer) -> Vec<u32> {
    let num_bytes = |token: &TokenId| tokenizer.token_bytes(*token).map_or(0, <[u8]>::len);
    let total: usize = prompt.tokens.iter().map(num_bytes).sum();
    // Some tokenizers put a space before a text.
    let Some(num_more) = total
        .checked_sub(prompt.text.len())
        .filter(|&more| more < 2)
    else {
        let count = |&end: &usize| common_token_count(prompt, end, tokenizer);
        return ends.iter().map(count).collect();
    };
    let mut counts = Vec::with_capacity(ends.len());
    let (mut num_tokens, mut at) = (0, 0);
    for end in ends {
        while let Some(token) = prompt.tokens.get(num_tokens)
            && at + num_bytes(token) <= end + num_more
        {
            at += num_bytes(token);
            num_tokens += 1;
        }
        counts.push(num_tokens as u32);
    }
    counts
}

/// Counts the tokens before `end` for a tokenizer that changes texts, so that bytes of tokens are not bytes of the
/// text.
fn common_token_count(prompt: &MarkedPrompt, end: usize, tokenizer: &Tokenizer) -> u32 {
    let beginning = tokenizer.encode(&prompt.text[..end], false);
    let beginning = beginning.unwrap_or_default();
    let pairs = beginning.iter().zip(prompt.tokens);
    pairs.take_while(|(ours, theirs)| ours == theirs).count() as u32
}

/// The length of the prompt's beginning that does not depend on the messages after the system prompt. It is what the
/// prompt has in common with one that has another first message.
pub fn num_head_bytes(
    template: &ChatTemplate,
    input: ChatInput,
    text: &str,
    limit: RenderLimit,
) -> usize {
    let is_head =
        |message: &&Value| matches!(message["role"].as_str(), Some("system" | "developer"));
    let head = input.messages.iter().take_while(is_head).cloned();
    let other = json!({"role": "user", "content": "?"});
    let messages: Vec<_> = head.chain([other]).collect();
    let input = ChatInput {
        messages: &messages,
        add_generation_prompt: false,
        continue_final_message: false,
        ..input
    };
    let Ok(other) = template.render_within(input, limit) else {
        return 0;
    };
    let pairs = text.bytes().zip(other.bytes());
    let num_common = pairs.take_while(|(ours, theirs)| ours == theirs).count();
    text.floor_char_boundary(num_common)
}

#[cfg(test)]
mod tests {
    use corella_text::SpecialTokens;

    use super::*;

    const MINUTE_US: u64 = 60_000_000;
    /// Like Qwen's: the tools stand after the system prompt, within its turn.
    const TEMPLATE: &str = "<s>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}\
                            {% if tools %}[tools {{ tools }}]{% endif %}</s>\
                            {% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content|trim }}</>\
                            {% endfor %}";

    fn block(text: &str, ttl_us: Option<u64>) -> MarkedText {
        MarkedText {
            text: text.to_owned(),
            ttl_us,
        }
    }

    /// The beginnings of the prompt up to each mark.
    fn marked(marks: &CacheMarks, messages: &[Value], tools: Option<&Value>) -> Vec<(String, u64)> {
        let template = ChatTemplate::new(TEMPLATE, SpecialTokens::default()).unwrap();
        let input = ChatInput {
            messages,
            tools,
            ..ChatInput::default()
        };
        let text = template.render(input).unwrap();
        let num_head_bytes = num_head_bytes(&template, input, &text, RenderLimit::NONE);
        let places = marks.places(&text, num_head_bytes).into_iter();
        let beginning = |(end, ttl_us)| (text[..end].to_owned(), ttl_us);
        places.map(beginning).collect()
    }

    fn turn(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    #[test]
    fn marks_end_with_their_blocks_and_tools_with_the_system_prompt() {
        let messages = [
            turn("system", "be kind\nand brief"),
            turn("user", " what is a fox? \n"),
            turn("assistant", "a fox"),
            turn("user", "a\nwhat"),
        ];
        let tools = json!(["what"]);
        let marks = CacheMarks {
            system: vec![block("be kind", Some(1)), block("and brief", None)],
            head_ttl_us: Some(2),
            messages: vec![
                block(" what is a fox? \n", Some(3)),
                block("a fox", None),
                block("a", Some(4)),
                block("what", Some(5)),
            ],
        };
        let head = "<s>be kind\nand brief[tools ['what']]</s><user>";
        let expected = [
            ("<s>be kind".to_owned(), 1),
            (head.to_owned(), 2),
            (format!("{head}what is a fox?"), 3),
            (
                format!("{head}what is a fox?</><assistant>a fox</><user>a"),
                4,
            ),
            (
                format!("{head}what is a fox?</><assistant>a fox</><user>a\nwhat"),
                5,
            ),
        ];
        assert_eq!(marked(&marks, &messages, Some(&tools)), expected);
    }

    /// The template drops the second text.
    #[test]
    fn a_mark_after_a_text_that_is_not_found_ends_before_it() {
        let messages = [turn("user", "a fox"), turn("user", "an owl")];
        let marks = CacheMarks {
            messages: vec![
                block("a fox", None),
                block("a bear", Some(1)),
                block("an owl", Some(2)),
            ],
            ..CacheMarks::default()
        };
        let expected = [
            ("<s></s><user>a fox".to_owned(), 1),
            ("<s></s><user>a fox</><user>an owl".to_owned(), 2),
        ];
        assert_eq!(marked(&marks, &messages, None), expected);
    }

    #[test]
    fn no_more_blocks_are_searched_once_too_many_bytes_were_searched_in_vain() {
        let mut num_left = 8;
        assert_eq!(end_of("abcdef", 0, "x", &mut num_left), 0);
        assert_eq!(end_of("abcdef", 0, " ab ", &mut num_left), 2);
        assert_eq!(end_of("abcdef", 2, "x", &mut num_left), 2);
        assert_eq!(end_of("abcdef", 2, "cd", &mut num_left), 2);
    }

    /// The second tokenizer changes the text, so the beginning is tokenised anew.
    #[test]
    fn whole_tokens_are_counted_and_a_longer_mark_prolongs_shorter_ones() {
        let replace = json!({"type": "Replace", "pattern": {"String": "_"}, "content": ""});
        let cases = [
            (Value::Null, ["a fox", " a", " ow", "l"]),
            (replace, ["a f_ox", " a", " ow_", "l"]),
        ];
        for (normalizer, parts) in cases {
            let tokenizer = json!({
                "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
                "normalizer": normalizer, "pre_tokenizer": {
                    "type": "Split", "pattern": {"Regex": " "}, "behavior": "Isolated", "invert": false
                },
                "post_processor": null, "decoder": null, "model": {
                    "type": "WordLevel", "vocab": {"a": 0, "fox": 1, "owl": 2, " ": 3}, "unk_token": "a"
                },
            });
            let tokenizer = Tokenizer::from_bytes(tokenizer.to_string().as_bytes()).unwrap();
            let text = parts.concat();
            let tokens = [0, 3, 1, 3, 0, 3, 2];
            assert_eq!(tokenizer.encode(&text, false).unwrap(), tokens);
            let [first, second, third, _] = parts;
            let marks = CacheMarks {
                messages: vec![
                    block(first, Some(5 * MINUTE_US)),
                    block(second, Some(60 * MINUTE_US)),
                    block(third, Some(5 * MINUTE_US)),
                ],
                ..CacheMarks::default()
            };
            let prompt = MarkedPrompt {
                text: &text,
                tokens: &tokens,
                num_head_bytes: 0,
            };
            let retentions = marks.retentions(&prompt, &tokenizer);
            let found: Vec<_> = { retentions.iter() }
                .map(|it| (it.num_tokens, it.ttl_us / MINUTE_US))
                .collect();
            assert_eq!(found, [(3, 60), (5, 60), (6, 5)]);
        }
    }
}
