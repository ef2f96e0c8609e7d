//! Tokenizer, chat template, incremental detokenizer, stop strings.
