//! The queries of a step, in the layout of attention.

use std::io;

use crate::dense::Buffer;
use crate::kernels::{Kernels, NormRotate};
use crate::kv::KvMemory;
use crate::system::Region;

/// The queries of a step's rows.
pub enum Queries {
    /// f32, `[row][head][head_dim]`, for the f32 kernels.
    Rows(Buffer),
    /// bf16, for the kernels with matrix tiles.
    Tiles(TileQueries),
}

impl Queries {
    /// Allocates queries of up to `query_len` elements in a row.
    pub fn new(
        kernels: &Kernels,
        query_len: usize,
        kv: &KvMemory,
        max_rows: usize,
    ) -> io::Result<Self> {
        Ok(match kv.tile_attention(kernels) {
            None => Self::Rows(Buffer::new(max_rows, query_len)?),
            Some(_) => Self::Tiles(TileQueries::new(query_len, max_rows)?),
        })
    }

    /// Applies norm and RoPE to one head of a row, and stores the result. `heads_of_group` heads of
    /// the layer share a KV head.
    ///
    /// # Safety
    /// See [`NormRotate`]. During the call, no other thread may use this head of the row.
    pub unsafe fn store(
        &self,
        kernels: &Kernels,
        from: NormRotate,
        row: usize,
        (head, heads_of_group): (usize, usize),
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            match self {
                Self::Rows(out) => {
                    assert!((head + 1) * from.head_dim <= out.stride());
                    (kernels.norm_rotate)(from, out.row_ptr(row).add(head * from.head_dim));
                }
                Self::Tiles(out) => {
                    let tiles = kernels.tile_attention.as_ref().expect("no tile attention");
                    (tiles.norm_rotate_rounded)(
                        from,
                        out.ptr(row, (head, from.head_dim), heads_of_group),
                    );
                }
            }
        }
    }
}

/// bf16 queries, with room for the longest rows of any layer: `[kv_head][row][query head of the group][head_dim]`, so
/// that the rows of an attention task are contiguous.
pub struct TileQueries {
    region: Region,
    max_rows: usize,
    /// The largest number of elements in a row.
    query_len: usize,
}

impl TileQueries {
    fn new(query_len: usize, max_rows: usize) -> io::Result<Self> {
        let len = max_rows * query_len;
        Ok(Self {
            region: Region::new(len * size_of::<u16>())?,
            max_rows,
            query_len,
        })
    }

    /// Points to the first element of a row's head, in a layer with heads of `head_dim` elements.
    pub fn ptr(
        &self,
        row: usize,
        (head, head_dim): (usize, usize),
        heads_of_group: usize,
    ) -> *mut u16 {
        assert!(row < self.max_rows && (head + 1) * head_dim <= self.query_len);
        let (group, in_group) = (head / heads_of_group, head % heads_of_group);
        let index = (group * self.max_rows + row) * heads_of_group + in_group;
        assert!((index + 1) * head_dim <= self.max_rows * self.query_len);
        // SAFETY: the assertions above keep the index inside the region.
        unsafe { self.region.as_ptr().cast::<u16>().add(index * head_dim) }
    }
}
