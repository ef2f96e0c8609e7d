//! Reads the tokenizer while weights are packed, which takes about the same time for a small model.

use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::panic::resume_unwind;
use std::thread::JoinHandle;

use corella_model::Checkpoint;
use corella_text::{TextError, Tokenizer};

use crate::Error;
use crate::model::vocabulary::drop_padding;

pub(crate) struct TokenizerLoader {
    /// `None` after the start.
    json: Cell<Option<Cow<'static, [u8]>>>,
    thread: Cell<Option<JoinHandle<Result<Tokenizer, TextError>>>>,
    tokenizer: OnceCell<Tokenizer>,
}

impl TokenizerLoader {
    /// Finds the tokenizer. Removes the rows of the model's vocabulary for which the tokenizer has no token.
    pub fn open(checkpoint: &mut Checkpoint) -> Result<Self, Error> {
        let json = checkpoint.required_file("tokenizer.json")?;
        drop_padding(checkpoint, &json)?;
        Ok(Self {
            json: Cell::new(Some(json)),
            thread: Cell::new(None),
            tokenizer: OnceCell::new(),
        })
    }

    /// Starts to read the tokenizer, unless it was started.
    pub fn start(&self) -> Result<(), Error> {
        let Some(json) = self.json.take() else {
            return Ok(());
        };
        let thread = std::thread::Builder::new().name(String::from("corella-tokenizer"));
        let thread = thread
            .spawn(move || Tokenizer::from_bytes(&json))
            .map_err(|error| Error::Io("starting a thread".to_owned(), error))?;
        self.thread.set(Some(thread));
        Ok(())
    }

    /// Waits for the tokenizer. Must not be called again after an error.
    pub fn get(&self) -> Result<&Tokenizer, Error> {
        self.start()?;
        if let Some(thread) = self.thread.take() {
            let tokenizer = thread.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            return Ok(self.tokenizer.get_or_init(|| tokenizer));
        }
        Ok(self.tokenizer.get().expect("asked again after an error"))
    }
}
