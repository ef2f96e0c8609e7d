//! Files that the sources of kernels include.

/// The files by their names.
pub const INCLUDES: &[(&str, &str)] = &[
    ("prelude.cuh", include_str!("kernels/prelude.cuh")),
    (
        "activation_function.cuh",
        include_str!("kernels/activation_function.cuh"),
    ),
    (
        "attention_item.cuh",
        include_str!("kernels/attention_item.cuh"),
    ),
    ("atomic.cuh", include_str!("kernels/atomic.cuh")),
    (
        "attention_staging.cuh",
        include_str!("kernels/attention_staging.cuh"),
    ),
    ("bulk_copy.cuh", include_str!("kernels/bulk_copy.cuh")),
    ("chunk.cuh", include_str!("kernels/chunk.cuh")),
    ("linear_args.cuh", include_str!("kernels/linear_args.cuh")),
    ("sample.cuh", include_str!("kernels/sample.cuh")),
    ("step_row.cuh", include_str!("kernels/step_row.cuh")),
    (
        "weight_fragment.cuh",
        include_str!("kernels/weight_fragment.cuh"),
    ),
    ("wgmma.cuh", include_str!("kernels/wgmma.cuh")),
];
