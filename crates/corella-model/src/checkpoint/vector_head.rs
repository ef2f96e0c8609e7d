//! The layers after the pooled hidden state of a text: a few small matrices and norms, for vectors of another length or
//! scores of classes.
//!
//! A text needs these layers only once, so they are computed apart from the model and in f32, whatever the format of
//! their weights. Sums are added in a fixed order.

use crate::checkpoint::Checkpoint;
use crate::file::file_tensor::FileTensor;
use crate::json::file_name::SINGLE;
use crate::{CheckpointError, HeadActivation, RowOrder};

/// Steps that turn one vector into another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VectorHead {
    steps: Vec<HeadStep>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum HeadStep {
    Dense {
        /// `[output][input]`.
        weight: Vec<f32>,
        /// One element for each output.
        bias: Vec<f32>,
        activation: HeadActivation,
    },
    /// Subtracts the mean, and divides by the standard deviation.
    Norm {
        weight: Vec<f32>,
        bias: Vec<f32>,
        eps: f32,
    },
    /// Scales the vector to the length 1.
    Normalise,
}

/// The file that has the tensors of a head.
pub enum HeadFile<'a> {
    /// The model's own files.
    Model,
    Other(&'a str),
}

impl VectorHead {
    pub fn new(steps: Vec<HeadStep>) -> Self {
        Self { steps }
    }

    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The length of the output for a vector of `len` elements.
    pub fn output_len(&self, len: usize) -> usize {
        self.steps.iter().fold(len, |len, step| match step {
            HeadStep::Dense { bias, .. } => bias.len(),
            HeadStep::Norm { .. } | HeadStep::Normalise => len,
        })
    }

    pub fn apply(&self, vector: &[f32]) -> Vec<f32> {
        let mut vector = vector.to_vec();
        for step in &self.steps {
            step.apply(&mut vector);
        }
        vector
    }

    pub(crate) fn steps(&self) -> &[HeadStep] {
        &self.steps
    }

    pub(crate) fn pop(&mut self) {
        self.steps.pop();
    }

    pub(crate) fn push(&mut self, step: HeadStep) {
        self.steps.push(step);
    }

    /// Reads a matrix for vectors of `len` elements, perhaps with a bias.
    pub(crate) fn push_dense(
        &mut self,
        (checkpoint, file): (&Checkpoint, &HeadFile<'_>),
        name: &str,
        len: usize,
        activation: HeadActivation,
    ) -> Result<(), CheckpointError> {
        let (weight, shape) = file.values(checkpoint, &format!("{name}.weight"))?;
        let &[num_outputs, num_inputs] = &shape[..] else {
            return Err(file.problem(checkpoint, format!("tensor {name}.weight is no matrix")));
        };
        if num_inputs != len || num_outputs == 0 {
            let problem =
                format!("tensor {name}.weight has shape {shape:?}; its input has {len} elements");
            return Err(file.problem(checkpoint, problem));
        }
        self.push(HeadStep::Dense {
            bias: file.bias(checkpoint, name, num_outputs)?,
            weight,
            activation,
        });
        Ok(())
    }

    /// Reads a norm of vectors of `len` elements, perhaps with a bias.
    pub(crate) fn push_norm(
        &mut self,
        (checkpoint, file): (&Checkpoint, &HeadFile<'_>),
        name: &str,
        len: usize,
        eps: f32,
    ) -> Result<(), CheckpointError> {
        let (weight, shape) = file.values(checkpoint, &format!("{name}.weight"))?;
        if shape != [len] {
            let problem = format!("tensor {name}.weight has shape {shape:?}, not [{len}]");
            return Err(file.problem(checkpoint, problem));
        }
        let bias = file.bias(checkpoint, name, len)?;
        self.push(HeadStep::Norm { weight, bias, eps });
        Ok(())
    }
}

impl HeadStep {
    fn apply(&self, vector: &mut Vec<f32>) {
        match self {
            Self::Dense {
                weight,
                bias,
                activation,
            } => {
                let rows = weight.chunks_exact(vector.len());
                let outputs = rows.zip(bias);
                let outputs = outputs.map(|(row, bias)| activation.apply(dot(row, vector) + bias));
                *vector = outputs.collect();
            }
            Self::Norm { weight, bias, eps } => {
                let num = vector.len() as f64;
                let mean = vector.iter().map(|&x| f64::from(x)).sum::<f64>() / num;
                let squares = vector.iter().map(|&x| (f64::from(x) - mean).powi(2));
                let scale = 1.0 / (squares.sum::<f64>() / num + f64::from(*eps)).sqrt();
                for ((x, weight), bias) in vector.iter_mut().zip(weight).zip(bias) {
                    *x = ((f64::from(*x) - mean) * scale) as f32 * weight + bias;
                }
            }
            Self::Normalise => normalise(vector),
        }
    }
}

/// Normalises a vector to the length 1. A vector of zeros stays unchanged.
fn normalise(vector: &mut [f32]) {
    let sum: f64 = vector.iter().map(|&x| f64::from(x).powi(2)).sum();
    if sum > 0.0 {
        let length = sum.sqrt();
        vector
            .iter_mut()
            .for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

/// The dot product, as sixteen parallel sums that compilers vectorise.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0; LANES];
    let (a_parts, a_rest) = a.as_chunks::<LANES>();
    let (b_parts, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_parts.iter().zip(b_parts) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

impl HeadFile<'_> {
    fn find(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
    ) -> Result<Option<FileTensor>, CheckpointError> {
        match self {
            Self::Model => checkpoint.tensor(name),
            Self::Other(file) => checkpoint.tensor_in(file, name),
        }
    }

    fn problem(&self, checkpoint: &Checkpoint, problem: String) -> CheckpointError {
        let file = match self {
            Self::Model => SINGLE,
            Self::Other(file) => file,
        };
        CheckpointError::new(checkpoint.label(file), problem)
    }

    /// The elements and the shape of a tensor.
    fn values(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
    ) -> Result<(Vec<f32>, Vec<usize>), CheckpointError> {
        let Some(tensor) = self.find(checkpoint, name)? else {
            return Err(self.problem(checkpoint, format!("tensor {name} is missing")));
        };
        let shape = tensor.shape.clone();
        let (num_rows, len) = match shape[..] {
            [num_rows, len] => (num_rows, len),
            [num_rows] => (num_rows, 1),
            _ => {
                let problem = format!("tensor {name} has shape {shape:?}");
                return Err(self.problem(checkpoint, problem));
            }
        };
        let tensor = tensor.rows(0..num_rows, RowOrder::AsStored);
        let mut values = vec![0.0; num_rows * len];
        let mut scratch = Vec::new();
        for (row, values) in values.chunks_exact_mut(len.max(1)).enumerate() {
            tensor.read_row(row, &mut scratch, values);
        }
        Ok((values, shape))
    }

    /// The bias of a matrix or a norm; zeros if absent.
    fn bias(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
        len: usize,
    ) -> Result<Vec<f32>, CheckpointError> {
        let name = format!("{name}.bias");
        if self.find(checkpoint, &name)?.is_none() {
            return Ok(vec![0.0; len]);
        }
        let (values, shape) = self.values(checkpoint, &name)?;
        match shape == [len] {
            true => Ok(values),
            false => {
                let problem = format!("tensor {name} has shape {shape:?}, not [{len}]");
                Err(self.problem(checkpoint, problem))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_each_other() {
        let head = VectorHead::new(vec![
            HeadStep::Dense {
                weight: vec![1.0, 2.0, 0.0, -1.0, 1.0, 1.0],
                bias: vec![0.5, 0.0, 4.0],
                activation: HeadActivation::Relu,
            },
            HeadStep::Normalise,
        ]);
        assert_eq!(head.output_len(2), 3);
        // Before the last step, the vector is 5.5, 0 and 7. The 0 is a -2 before Relu.
        let length = (5.5f64 * 5.5 + 49.0).sqrt();
        let expected = [5.5, 0.0, 7.0].map(|x| (x / length) as f32);
        assert_eq!(head.apply(&[1.0, 2.0]), expected);
    }

    #[test]
    fn a_norm_leaves_no_mean() {
        let head = VectorHead::new(vec![HeadStep::Norm {
            weight: vec![2.0, 1.0],
            bias: vec![0.0, 10.0],
            eps: 0.0,
        }]);
        assert_eq!(head.apply(&[1.0, 3.0]), [-2.0, 11.0]);
    }
}
