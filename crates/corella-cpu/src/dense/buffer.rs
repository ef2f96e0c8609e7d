//! Activation buffers. Between two barriers each worker writes its own part of them.

use std::io;
use std::ops::Range;

use crate::kernels::PANEL_LANES;
use crate::system::Region;

/// Rows of f32. The stride is kept off powers of two, so that rows do not compete for the same cache sets.
pub struct Buffer {
    region: Region,
    stride: usize,
    num_rows: usize,
}

impl Buffer {
    /// Allocates rows of `len` elements each, rounded up to whole panels.
    pub fn new(num_rows: usize, len: usize) -> io::Result<Self> {
        let stride = len.next_multiple_of(PANEL_LANES) + 16;
        Ok(Self {
            region: Region::new(num_rows * stride * size_of::<f32>())?,
            stride,
            num_rows,
        })
    }

    /// # Safety
    /// No thread may write the row while the slice is in use.
    pub unsafe fn row(&self, row: usize) -> &[f32] {
        // SAFETY: the row lies inside the region, which holds zeroed f32s from the start.
        unsafe { std::slice::from_raw_parts(self.row_ptr(row), self.stride) }
    }

    /// # Safety
    /// No other code may use the row while the slice is in use.
    #[expect(clippy::mut_from_ref, reason = "workers write different rows")]
    pub unsafe fn row_mut(&self, row: usize) -> &mut [f32] {
        // SAFETY: the row lies inside the region, which holds zeroed f32s from the start.
        unsafe { std::slice::from_raw_parts_mut(self.row_ptr(row), self.stride) }
    }

    pub fn row_ptr(&self, row: usize) -> *mut f32 {
        assert!(row < self.num_rows);
        // SAFETY: the assertion above keeps the access in bounds.
        unsafe { self.region.as_ptr().cast::<f32>().add(row * self.stride) }
    }

    /// The distance between rows, in elements.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Points to a panel's columns in the first of the given rows.
    pub fn lanes_ptr(&self, rows: &Range<usize>, panel: usize) -> *mut f32 {
        assert!(rows.end <= self.num_rows && (panel + 1) * PANEL_LANES <= self.stride);
        // SAFETY: the assertion above keeps the access in bounds.
        unsafe { self.row_ptr(rows.start).add(panel * PANEL_LANES) }
    }
}
