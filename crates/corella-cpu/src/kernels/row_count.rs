//! The number of rows as a constant, so that kernels keep their sums in registers.

/// Matches on a run-time number of rows, which is a constant in each arm.
macro_rules! with_rows {
    ($num_rows:expr, $M:ident in [$($m:literal)*], $call:expr) => {
        match $num_rows {
            $($m => { const $M: usize = $m; $call })*
            _ => unreachable!("there is no kernel for a tile of {} rows", $num_rows),
        }
    };
}
pub(super) use with_rows;
