//! Members of tokenizer.json for tokenizers of other forms.

use corella_core::TokenId;
use serde_json::{Map, Value, json};

/// An added token, which is found verbatim in a text.
pub fn added_token(id: TokenId, content: &str, special: bool) -> Value {
    json!({
        "id": id,
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": special,
    })
}

/// The part that adds tokens before and after a text, if the caller asks for special tokens.
pub fn post_processor(before: Option<(&str, TokenId)>, after: Option<(&str, TokenId)>) -> Value {
    if before.is_none() && after.is_none() {
        return Value::Null;
    }
    let special =
        |(token, _): (&str, TokenId)| json!({"SpecialToken": {"id": token, "type_id": 0}});
    let around = |sequence: &str| {
        let text = json!({"Sequence": {"id": sequence, "type_id": 0}});
        let pieces = [before.map(special), Some(text), after.map(special)];
        pieces.into_iter().flatten().collect::<Vec<_>>()
    };
    let tokens = before.into_iter().chain(after);
    let special_tokens = tokens.map(|(token, id)| {
        let entry = json!({"id": token, "ids": [id], "tokens": [token]});
        (token.to_owned(), entry)
    });
    let pair = [around("A"), around("B")].concat();
    json!({
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": pair,
        "special_tokens": special_tokens.collect::<Map<_, _>>(),
    })
}
