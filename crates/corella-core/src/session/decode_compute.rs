//! Prompts whose rest the decode node computes, because the prefill node has told it to.

use crate::session::SessionKey;
use crate::session::decode_end::{DecodeAction, DecodeEnd};
use crate::session::decode_session::DecodePhase;
use crate::session::message::AbortReason;

impl DecodeEnd {
    /// Cancels the load, for which no rows will come, and computes the prompt when the load has ended.
    pub(super) fn handle_compute(&mut self, key: SessionKey) {
        let Some(session) = self.sessions.get(&key) else {
            return;
        };
        match &session.phase {
            DecodePhase::Loading {
                has_rows,
                first_token: None,
                ..
            } => match has_rows {
                true => self.compute(key),
                false => {
                    self.set_phase(key, DecodePhase::StoppingLoad);
                    self.actions.push_back(DecodeAction::CancelLoad { key });
                }
            },
            // The message was repeated, or the session has ended here.
            DecodePhase::StoppingLoad
            | DecodePhase::Decoding {
                draws_first: true, ..
            }
            | DecodePhase::Finished
            | DecodePhase::Quarantined => {}
            // `Compute` follows the reservation, and never a first token.
            DecodePhase::Greeting
            | DecodePhase::Waiting { .. }
            | DecodePhase::Reserving { .. }
            | DecodePhase::Loading { .. }
            | DecodePhase::Decoding { .. } => self.end(key, Some(AbortReason::ProtocolViolated)),
        }
    }

    pub(super) fn compute(&mut self, key: SessionKey) {
        let session = self.sessions.get(&key);
        let num_output_tokens = session.map_or(0, |session| session.num_earlier_tokens);
        self.set_phase(
            key,
            DecodePhase::Decoding {
                num_output_tokens,
                draws_first: true,
            },
        );
        self.actions.push_back(DecodeAction::Compute { key });
    }
}
