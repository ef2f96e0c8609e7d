//! A decode node computes the rest of a prompt itself, because its prefill node has said so.

use crate::session::SessionKey;
use crate::session::decode_end::{DecodeAction, DecodeEnd};
use crate::session::decode_session::DecodePhase;
use crate::session::message::AbortReason;

impl DecodeEnd {
    /// Stops the load, which waits for rows that do not come, and computes when it is at rest.
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
            // The message came twice, or the session is over here.
            DecodePhase::StoppingLoad
            | DecodePhase::Decoding {
                draws_first: true, ..
            }
            | DecodePhase::Finished
            | DecodePhase::Quarantined => {}
            // It answers the reservation, and excludes a first token.
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
