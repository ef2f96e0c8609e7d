//! The tensors of a draft head.

use crate::arch::Stored;
use crate::{CheckpointError, DraftHeadWeights, LayerSpec};

use super::{Part, TensorSource, Tensors};

impl<S: TensorSource> Tensors<'_, S> {
    /// Takes the draft head. Its only layer has the number 0 in the names of its tensors.
    pub(super) fn take_draft_head(
        &mut self,
        layer: &LayerSpec,
    ) -> Result<DraftHeadWeights, CheckpointError> {
        let body = self.body;
        self.body = self.layout.draft_head;
        let hidden = self.config.spec.hidden_size;
        let join = format!("{}fc", self.body);
        let norm = |tensors: &mut Self, name| {
            let name = tensors.weight(name);
            let weight = tensors.take(&name, &[hidden])?;
            Ok(tensors.whole_norm(weight))
        };
        let head = DraftHeadWeights {
            embedding_norm: norm(self, "pre_fc_norm_embedding")?,
            hidden_norm: norm(self, "pre_fc_norm_hidden")?,
            join: {
                let part = Part::by_itself(hidden);
                self.take_matrix(&join, &Stored::whole("fc"), &part, [hidden, 2 * hidden])?
            },
            layer: self.take_layer(0, layer)?,
            norm: norm(self, "norm")?,
        };
        self.body = body;
        Ok(head)
    }
}
