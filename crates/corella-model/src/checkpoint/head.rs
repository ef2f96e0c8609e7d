//! The output head of a folder. If the files differ from config.json, the files take precedence.

use crate::file::file_tensor::{FileTensor, TensorSource};
use crate::{CheckpointError, ModelConfig, RowOrder};

/// Sets the head of a model from its files, as Transformers 5 does. If the files have a head that differs from the
/// embedding, the head stays untied, even if config.json ties it. A model without a head, such as an embedding model
/// of the class `MistralModel`, can still be loaded.
pub fn settle<S: TensorSource>(
    config: &mut ModelConfig,
    files: &[S],
) -> Result<(), CheckpointError> {
    if config.spec.encoder.is_some() {
        config.has_head = false;
        return Ok(());
    }
    let layout = &config.architecture.family().folder;
    let embed_name = |body: &str| format!("{body}{}.weight", layout.embed);
    let find = |name: &str| {
        let found = files.iter().find_map(|file| file.tensor(name).transpose());
        found.transpose()
    };
    let names: Vec<String> = files.iter().flat_map(TensorSource::names).collect();
    let is_there = |&&(body, _): &&(&str, &str)| names.contains(&embed_name(body));
    let Some((body, head)) = layout.bodies.iter().find(is_there) else {
        return Ok(());
    };
    // Quantised heads are several tensors.
    let prefix = format!("{head}.");
    let has_own = names.iter().any(|name| name.starts_with(&prefix));
    if !config.spec.tied_embeddings {
        config.has_head = has_own;
        config.spec.tied_embeddings = !has_own;
        return Ok(());
    }
    let own = match has_own {
        true => find(&format!("{head}.weight"))?,
        false => None,
    };
    if let (Some(own), Some(embed)) = (own, find(&embed_name(body))?) {
        config.spec.tied_embeddings = is_same(own, embed);
    }
    Ok(())
}

/// Whether two matrices are equal. They are read up to the first difference.
fn is_same(one: FileTensor, other: FileTensor) -> bool {
    let [num_rows, row_len] = one.shape[..] else {
        return false;
    };
    // A matrix without rows may claim rows of any length.
    if one.shape != other.shape || num_rows == 0 {
        return false;
    }
    let [one, other] = [one, other].map(|matrix| matrix.rows(0..num_rows, RowOrder::AsStored));
    if one.dtype == other.dtype {
        return one.bytes() == other.bytes();
    }
    let (mut scratch, mut of_one) = (Vec::new(), vec![0.0; row_len]);
    let mut of_other = of_one.clone();
    (0..num_rows).all(|row| {
        one.read_row(row, &mut scratch, &mut of_one);
        other.read_row(row, &mut scratch, &mut of_other);
        of_one == of_other
    })
}
