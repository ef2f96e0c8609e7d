//! Copies of rows between pages, changes of page tables, and pages gathered in host memory.

use corella_core::PageCopy;
use corella_model::{DeviceError, KvGeometry};

use crate::device::{DevicePointer, Grid, Kernel, ModuleSource, SharedDevice, Stream};

use super::args_bytes;

#[cfg(all(test, feature = "emulated-device"))]
mod tests;

const NUM_THREADS: u32 = 256;

/// The approximate bytes that a block moves: each of its threads 16 bytes, 16 times.
const BYTES_PER_BLOCK: usize = 16 * 16 * NUM_THREADS as usize;

/// The kernels for the pages of one KV region.
#[derive(Debug)]
pub struct PageKernels {
    geometry: KvGeometry,
    copy_rows: Kernel,
    change_tables: Kernel,
    gather_pages: Kernel,
    spread_pages: Kernel,
}

/// Rows to copy, in the layout of `copy_rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RowCopy {
    pub from: u32,
    pub to: u32,
    pub num_rows: u32,
}

/// An entry of the page tables: its index among all entries of all tables, and its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct TableChange {
    pub index: u32,
    pub page: u32,
}

/// The direction of a move of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageMove {
    /// From the KV region to other memory.
    Gather,
    /// From other memory to the KV region.
    Spread,
}

#[repr(C)]
struct CopyRowsArgs {
    kv: DevicePointer,
    copies: DevicePointer,
    page_bytes: u64,
    layer_bytes: u64,
    num_kv_heads: u32,
    head_bytes: u32,
    page_size: u32,
    row_bytes: u32,
    scale_bytes: u32,
    padding: u32,
}

#[repr(C)]
struct ChangeTablesArgs {
    tables: DevicePointer,
    changes: DevicePointer,
    num_changes: u32,
    padding: u32,
}

#[repr(C)]
struct MovePagesArgs {
    kv: DevicePointer,
    pages: DevicePointer,
    staging: DevicePointer,
    page_bytes: u64,
    layer_bytes: u64,
}

impl From<&PageCopy> for RowCopy {
    fn from(copy: &PageCopy) -> Self {
        Self {
            from: copy.from.0,
            to: copy.to.0,
            num_rows: copy.num_rows,
        }
    }
}

impl PageKernels {
    pub fn load(device: &SharedDevice, geometry: &KvGeometry) -> Result<Self, DeviceError> {
        let source = ModuleSource {
            name: "page.cu",
            text: include_str!("page.cu"),
            defines: Vec::new(),
        };
        let names = ["copy_rows", "change_tables", "gather_pages", "spread_pages"];
        let kernels = device.load(&source, &names)?;
        Ok(Self {
            geometry: geometry.clone(),
            copy_rows: kernels[0],
            change_tables: kernels[1],
            gather_pages: kernels[2],
            spread_pages: kernels[3],
        })
    }

    /// Copies the first rows of pages, in all layers of a page. `copies` has `num_copies` of `RowCopy`. No copy reads
    /// the target of another.
    ///
    /// # Safety
    /// `kv` is the KV region; see also `Device::launch`.
    pub unsafe fn copy_rows(
        &self,
        device: &SharedDevice,
        kv: DevicePointer,
        copies: DevicePointer,
        num_copies: usize,
    ) -> Result<(), DeviceError> {
        if num_copies == 0 {
            return Ok(());
        }
        let geometry = &self.geometry;
        let args = CopyRowsArgs {
            kv,
            copies,
            page_bytes: geometry.page_bytes() as u64,
            layer_bytes: geometry.layer_bytes() as u64,
            num_kv_heads: geometry.num_kv_heads,
            head_bytes: geometry.head_bytes() as u32,
            page_size: geometry.page_size,
            row_bytes: geometry.head_dim * geometry.format.size() as u32,
            scale_bytes: geometry.format.row_bytes(0) as u32,
            padding: 0,
        };
        let layers = geometry.num_layers as usize;
        let grid = Grid::new([num_copies, layers, 1], NUM_THREADS, 0);
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(Stream::Compute, self.copy_rows, grid, args_bytes(&args)) }
    }

    /// Writes entries of page tables: `num_changes` of `TableChange`, each of a different entry.
    ///
    /// # Safety
    /// See `Device::launch`.
    pub unsafe fn change_tables(
        &self,
        device: &SharedDevice,
        tables: DevicePointer,
        changes: DevicePointer,
        num_changes: usize,
    ) -> Result<(), DeviceError> {
        if num_changes == 0 {
            return Ok(());
        }
        let args = ChangeTablesArgs {
            tables,
            changes,
            num_changes: num_changes as u32,
            padding: 0,
        };
        let blocks = num_changes.div_ceil(NUM_THREADS as usize);
        let grid = Grid::new([blocks, 1, 1], NUM_THREADS, 0);
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(Stream::Compute, self.change_tables, grid, args_bytes(&args)) }
    }

    /// Moves whole pages of a layer between the KV region and memory in which they are contiguous. `pages` are
    /// `num_pages` ids, and `kv` is the layer within page 0.
    ///
    /// # Safety
    /// See `Device::launch`.
    pub unsafe fn move_pages(
        &self,
        device: &SharedDevice,
        stream: Stream,
        way: PageMove,
        kv: DevicePointer,
        (pages, num_pages): (DevicePointer, usize),
        staging: DevicePointer,
    ) -> Result<(), DeviceError> {
        if num_pages == 0 {
            return Ok(());
        }
        let layer_bytes = self.geometry.layer_bytes();
        let args = MovePagesArgs {
            kv,
            pages,
            staging,
            page_bytes: self.geometry.page_bytes() as u64,
            layer_bytes: layer_bytes as u64,
        };
        let blocks = layer_bytes.div_ceil(BYTES_PER_BLOCK);
        let grid = Grid::new([num_pages, blocks, 1], NUM_THREADS, 0);
        let kernel = match way {
            PageMove::Gather => self.gather_pages,
            PageMove::Spread => self.spread_pages,
        };
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(stream, kernel, grid, args_bytes(&args)) }
    }
}
