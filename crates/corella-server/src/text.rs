//! Requests as text: conversations, prompts, grammars and the fields for drawing tokens, checked on text threads.

pub mod cache_mark;
pub mod call_message;
pub mod caller_grammars;
pub mod chat_call;
pub mod chat_fields;
pub mod chat_message;
pub mod chat_role;
pub mod chat_tool;
pub mod chat_turn;
pub mod conversation_fields;
pub mod first_token;
pub mod grammar_constraint;
pub mod output_format;
pub mod pooled_prompt;
pub mod prompt;
pub mod prompt_tokens;
pub mod reply_constraint;
pub mod sampling_fields;
pub mod scored_prompt;
pub mod served_model;
pub mod suffix;
pub mod text_thread;
pub mod thinking_switch;
pub mod token_logprob;
pub mod token_rule;
pub mod tool_fields;
