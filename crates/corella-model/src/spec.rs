//! A decoder or an encoder as data, with its tensors and weights.

pub(crate) mod decoder_spec;
pub(crate) mod decoder_weights;
pub(crate) mod encoder_spec;
pub(crate) mod head_activation;
pub(crate) mod layer_tensor;
pub(crate) mod model_part;
pub(crate) mod recurrent_spec;
pub(crate) mod rotary_spec;
pub(crate) mod stored_matrix;
