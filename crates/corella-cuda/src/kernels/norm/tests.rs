//! Compares sums and norms with their definitions in f64.

use super::*;
use crate::device::DeviceBuffer;
use crate::kernels::test_memory::{
    Random, device, download, download_as, is_near, rounded, upload, upload_as,
};

const NUM_ROWS: usize = 3;

struct Case {
    hidden: usize,
    branch: Element,
    out: Element,
    after: Option<NormSpec>,
    before: Option<NormSpec>,
    has_branch: bool,
}

/// The weights and biases of a norm, on both sides.
struct Norm {
    spec: NormSpec,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    buffers: [DeviceBuffer; 2],
}

impl Norm {
    fn new(device: &SharedDevice, spec: NormSpec, hidden: usize, random: &mut Random) -> Self {
        let weight = random.numbers(hidden);
        let bias = (spec.kind == NormKind::Layer { bias: true }).then(|| random.numbers(hidden));
        let bias_buffer = upload(device, bias.as_deref().unwrap_or(&[]));
        Self {
            spec,
            buffers: [upload(device, &weight), bias_buffer],
            weight,
            bias,
        }
    }

    fn on_device(&self) -> DeviceNorm {
        DeviceNorm {
            spec: self.spec,
            weight: self.buffers[0].pointer(),
            bias: self.buffers[1].pointer(),
        }
    }

    fn apply(&self, x: &mut [f64]) {
        let n = x.len() as f64;
        let mean = match self.spec.kind {
            NormKind::Rms => 0.0,
            NormKind::Layer { .. } => x.iter().sum::<f64>() / n,
        };
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        let scale = 1.0 / (variance + f64::from(self.spec.eps)).sqrt();
        for (i, x) in x.iter_mut().enumerate() {
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[i]);
            *x = (*x - mean) * scale * f64::from(self.weight[i]) + f64::from(bias);
        }
    }
}

fn check(case: Case) {
    const RESIDUAL_SCALE: f32 = 0.25;
    let device = device();
    let hidden = case.hidden;
    let mut random = Random::new(hidden as u64);
    let after = case
        .after
        .map(|spec| Norm::new(&device, spec, hidden, &mut random));
    let before = case
        .before
        .map(|spec| Norm::new(&device, spec, hidden, &mut random));
    // The mean of layer norms is far from 0.
    let residual: Vec<f32> = random
        .numbers(NUM_ROWS * hidden)
        .iter()
        .map(|x| x + 3.0)
        .collect();
    let branch = rounded(case.branch, random.numbers(NUM_ROWS * hidden));
    let kernel = NormKernel::load(&device, hidden, case.branch, case.out).unwrap();
    let run = |rows: &[usize]| {
        let of = |values: &[f32]| -> Vec<f32> {
            let rows = rows.iter();
            rows.flat_map(|row| values[row * hidden..][..hidden].to_vec())
                .collect()
        };
        let stream = upload(&device, &of(&residual));
        let values = upload_as(&device, case.branch, &of(&branch));
        let out = upload_as(&device, case.out, &vec![0.0; rows.len() * hidden]);
        let step = NormStep {
            residual: stream.pointer(),
            rows: NormRows::First(rows.len()),
            branch: case.has_branch.then_some(Branch {
                values: values.pointer(),
                after: after.as_ref().map(Norm::on_device),
                residual_scale: RESIDUAL_SCALE,
            }),
            before: before.as_ref().map(Norm::on_device),
            out: out.pointer(),
        };
        // SAFETY: the buffers have the shapes of the step.
        unsafe { kernel.launch(&device, &step) }.unwrap();
        let sums: Vec<f32> = download(&device, &stream, rows.len() * hidden);
        (
            sums,
            download_as(&device, case.out, &out, rows.len() * hidden),
        )
    };
    let (sums, outs) = run(&[0, 1, 2]);
    for row in 0..NUM_ROWS {
        let range = row * hidden..(row + 1) * hidden;
        let mut added: Vec<f64> = branch[range.clone()]
            .iter()
            .copied()
            .map(f64::from)
            .collect();
        if let Some(after) = &after {
            after.apply(&mut added);
        }
        let mut exact: Vec<f64> = residual[range.clone()]
            .iter()
            .copied()
            .map(f64::from)
            .collect();
        for (x, added) in exact.iter_mut().zip(added).filter(|_| case.has_branch) {
            *x += added * f64::from(RESIDUAL_SCALE);
        }
        for (actual, exact) in sums[range.clone()].iter().zip(&exact) {
            assert!(is_near(Element::F32, *actual, *exact), "{actual} {exact}");
        }
        if let Some(before) = &before {
            before.apply(&mut exact);
        }
        for (actual, exact) in outs[range].iter().zip(&exact) {
            assert!(is_near(case.out, *actual, *exact), "{actual} {exact}");
        }
    }
    // A row alone has the same bits.
    let (sum, out) = run(&[1]);
    assert_eq!(
        (sum, out),
        (
            sums[hidden..2 * hidden].to_vec(),
            outs[hidden..2 * hidden].to_vec(),
        )
    );
}

const RMS: NormSpec = NormSpec {
    kind: NormKind::Rms,
    eps: 1e-5,
};
const LAYER: NormSpec = NormSpec {
    kind: NormKind::Layer { bias: true },
    eps: 1e-3,
};
const LAYER_WITHOUT_BIAS: NormSpec = NormSpec {
    kind: NormKind::Layer { bias: false },
    eps: 1e-3,
};

#[test]
fn sums_and_norms() {
    use Element::{Bf16, F32};
    let cases = [
        (64, F32, Bf16, None, Some(RMS), true),
        (60, F32, Bf16, None, Some(RMS), false),
        (21, Bf16, F32, Some(RMS), Some(RMS), true),
        (300, Bf16, Bf16, Some(LAYER), Some(LAYER_WITHOUT_BIAS), true),
        (77, F32, F32, None, Some(LAYER), true),
        // OLMo 2 has no norm before.
        (2048, Bf16, Bf16, Some(RMS), None, true),
        // Two chunks for some of the threads.
        (8 * 1024 + 40, F32, Bf16, Some(LAYER), Some(RMS), true),
    ];
    for (hidden, branch, out, after, before, has_branch) in cases {
        check(Case {
            hidden,
            branch,
            out,
            after,
            before,
            has_branch,
        });
    }
}

#[test]
fn selected_rows_come_in_their_order() {
    const HIDDEN: usize = 24;
    let device = device();
    let mut random = Random::new(1);
    let norm = Norm::new(&device, RMS, HIDDEN, &mut random);
    let values = random.numbers(4 * HIDDEN);
    let residual = upload(&device, &values);
    let index = upload(&device, &[3u32, 0]);
    let out = upload(&device, &[0.0f32; 2 * HIDDEN]);
    let kernel = NormKernel::load(&device, HIDDEN, Element::F32, Element::F32).unwrap();
    let step = NormStep {
        residual: residual.pointer(),
        rows: NormRows::Selected {
            index: index.pointer(),
            len: 2,
        },
        branch: None,
        before: Some(norm.on_device()),
        out: out.pointer(),
    };
    // SAFETY: the buffers have the shapes of the step.
    unsafe { kernel.launch(&device, &step) }.unwrap();
    let outs: Vec<f32> = download(&device, &out, 2 * HIDDEN);
    for (actual, row) in outs.chunks(HIDDEN).zip([3, 0]) {
        let row = &values[row * HIDDEN..][..HIDDEN];
        let mut exact: Vec<f64> = row.iter().copied().map(f64::from).collect();
        norm.apply(&mut exact);
        for (actual, exact) in actual.iter().zip(exact) {
            assert!(is_near(Element::F32, *actual, exact));
        }
    }
    let after: Vec<f32> = download(&device, &residual, values.len());
    assert_eq!(after, values);
}
