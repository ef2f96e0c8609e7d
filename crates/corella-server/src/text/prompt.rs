//! `prompt` of `/v1/completions`: text, token ids, or an array of either.

use std::fmt;

use corella_core::TokenId;
use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

/// The value of a field that takes prompts. An array of numbers is one prompt.
#[derive(Debug, PartialEq)]
pub struct PromptField(pub Vec<Prompt>);

impl<'de> Deserialize<'de> for PromptField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptVisitor;

        impl<'de> Visitor<'de> for PromptVisitor {
            type Value = PromptField;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, an array of token ids, or an array of such prompts")
            }

            fn visit_str<E>(self, text: &str) -> Result<PromptField, E> {
                Ok(PromptField(vec![Prompt::Text(text.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PromptField, A::Error> {
                let mut prompts = match items.next_element()? {
                    None => return Ok(PromptField(vec![Prompt::Tokens(Vec::new())])),
                    Some(Item::Token(token)) => {
                        let mut tokens = vec![token];
                        while let Some(token) = items.next_element()? {
                            tokens.push(token);
                        }
                        return Ok(PromptField(vec![Prompt::Tokens(tokens)]));
                    }
                    Some(Item::Prompt(prompt)) => vec![prompt],
                };
                while let Some(item) = items.next_element()? {
                    match item {
                        Item::Prompt(prompt) => prompts.push(prompt),
                        Item::Token(_) => {
                            return Err(A::Error::custom(
                                "a token id among prompts; put token ids in an array of their own",
                            ));
                        }
                    }
                }
                Ok(PromptField(prompts))
            }
        }

        deserializer.deserialize_any(PromptVisitor)
    }
}

/// An element of the outermost array.
enum Item {
    Token(TokenId),
    Prompt(Prompt),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;

        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = Item;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id, or an array of token ids")
            }

            fn visit_str<E>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Prompt(Prompt::Text(text.to_owned())))
            }

            fn visit_u64<E: Error>(self, token: u64) -> Result<Item, E> {
                let token = token
                    .try_into()
                    .map_err(|_| E::custom(format!("{token} is not a token id")))?;
                Ok(Item::Token(token))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Item, A::Error> {
                let tokens = Vec::deserialize(SeqAccessDeserializer::new(items))?;
                Ok(Item::Prompt(Prompt::Tokens(tokens)))
            }
        }

        deserializer.deserialize_any(ItemVisitor)
    }
}
