//! A `tokenizer.model`: the message `ModelProto` of SentencePiece.

use super::protobuf::{Message, Value};
use super::{AddedSpace, Division, Piece, SentencePiece, TokenType};

/// The content of a `tokenizer.model`.
pub struct ModelFile<'a> {
    pub vocabulary: SentencePiece<'a>,
    pub bos_id: Option<usize>,
    pub eos_id: Option<usize>,
}

impl<'a> ModelFile<'a> {
    /// Reads a file. `Err` describes its defect.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let mut file = Self {
            vocabulary: SentencePiece {
                pieces: Vec::new(),
                division: Division::BestSum,
                byte_fallback: false,
                charsmap: &[],
                removes_spaces: true,
                added_space: AddedSpace::Text,
            },
            bos_id: Some(1),
            eos_id: Some(2),
        };
        let not_one = |problem: &str| format!("is not a SentencePiece model: {problem}");
        for field in Message::new(bytes) {
            match field.map_err(not_one)? {
                (1, Value::Bytes(bytes)) => file.add_piece(bytes)?,
                (2, Value::Bytes(bytes)) => file.read_trainer(bytes)?,
                (3, Value::Bytes(bytes)) => file.read_normalizer(bytes)?,
                (4 | 5, _) => {}
                (number, _) => return Err(not_one(&format!("it has a field {number}"))),
            }
        }
        match file.vocabulary.pieces.is_empty() {
            true => Err(not_one("it has no pieces")),
            false => Ok(file),
        }
    }

    fn add_piece(&mut self, bytes: &'a [u8]) -> Result<(), String> {
        let number = self.vocabulary.pieces.len();
        let mut piece = Piece {
            text: "",
            score: 0.0,
            kind: TokenType::Normal,
        };
        for field in Message::new(bytes) {
            match field.map_err(|problem| format!("piece {number}: {problem}"))? {
                (1, Value::Bytes(text)) => {
                    let text = std::str::from_utf8(text);
                    piece.text = text.map_err(|_| format!("piece {number} is not UTF-8"))?;
                }
                (2, Value::Fixed32(bits)) => piece.score = f32::from_bits(bits).into(),
                (3, Value::Number(kind)) => piece.kind = TokenType::from_number(kind.into()),
                _ => {}
            }
        }
        if !piece.score.is_finite() {
            return Err(format!("the score of piece {number} is {}", piece.score));
        }
        self.vocabulary.pieces.push(piece);
        Ok(())
    }

    fn read_trainer(&mut self, bytes: &[u8]) -> Result<(), String> {
        // An id of -1 means that the token does not exist.
        let id = |number: u64| usize::try_from(number as i64).ok();
        for field in Message::new(bytes) {
            match field.map_err(|problem| format!("trainer_spec: {problem}"))? {
                (3, Value::Number(model_type)) => {
                    self.vocabulary.division = match model_type {
                        1 => Division::BestSum,
                        2 => Division::Merges,
                        _ => {
                            return Err(format!(
                                "trainer_spec.model_type is {model_type}; supported are unigram (1) and \
                                 BPE (2)"
                            ));
                        }
                    };
                }
                (35, Value::Number(flag)) => self.vocabulary.byte_fallback = flag != 0,
                (41, Value::Number(number)) => self.bos_id = id(number),
                (42, Value::Number(number)) => self.eos_id = id(number),
                (24, Value::Number(1)) => {
                    return Err(
                        "trainer_spec.treat_whitespace_as_suffix is set, which is not supported"
                            .to_owned(),
                    );
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn read_normalizer(&mut self, bytes: &'a [u8]) -> Result<(), String> {
        for field in Message::new(bytes) {
            match field.map_err(|problem| format!("normalizer_spec: {problem}"))? {
                (2, Value::Bytes(charsmap)) => self.vocabulary.charsmap = charsmap,
                (3, Value::Number(0)) => self.vocabulary.added_space = AddedSpace::None,
                (4, Value::Number(flag)) => self.vocabulary.removes_spaces = flag != 0,
                (5, Value::Number(0)) => {
                    return Err(
                        "normalizer_spec.escape_whitespaces is not set, which is not supported"
                            .to_owned(),
                    );
                }
                _ => {}
            }
        }
        Ok(())
    }
}
