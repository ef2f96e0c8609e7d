//! Compiles the grammars of a request while its client waits for them.

use corella_text::{
    Grammar, GrammarCompiler, GrammarError, GrammarSource, ReplyContext, ReplyGrammarError,
    Tokenizer, WantedReply,
};

use crate::text::text_thread::Caller;

pub struct CallerGrammars<'a> {
    pub compiler: &'a GrammarCompiler,
    pub caller: &'a Caller,
}

impl CallerGrammars<'_> {
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
        self.compiler
            .compile_while(source, &|| !self.caller.has_left())
    }

    pub fn compile_reply(
        &self,
        tokenizer: &Tokenizer,
        context: &ReplyContext,
        wanted: WantedReply,
    ) -> Result<Grammar, ReplyGrammarError> {
        let is_wanted = || !self.caller.has_left();
        self.compiler
            .compile_reply(tokenizer, context, wanted, &is_wanted)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nothing_is_compiled_for_a_client_that_has_left() {
        let tokenizer = include_bytes!("../../../../models/nano/tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(tokenizer).expect("a tokenizer");
        let compiler =
            GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).expect("a vocabulary");
        // The two grammars differ, because the compiler caches compiled grammars.
        for (number, has_left) in [(1, true), (2, false)] {
            let grammars = CallerGrammars {
                compiler: &compiler,
                caller: &Caller::who_has_left(has_left),
            };
            let source = |kind| GrammarSource::JsonSchema(json!({"const": [number, kind]}));
            let text = grammars.compile(&source("text"));
            let wanted = WantedReply {
                calls: None,
                text: Some(source("reply")),
            };
            let reply = grammars.compile_reply(&tokenizer, &ReplyContext::default(), wanted);
            assert_eq!((text.is_err(), reply.is_err()), (has_left, has_left));
        }
    }
}
