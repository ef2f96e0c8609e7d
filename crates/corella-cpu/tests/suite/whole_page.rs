//! A page with all its layers, between steps.
#![allow(dead_code, reason = "every file of tests uses a part of it")]

use corella_core::PageId;
use corella_model::{Executor, PageForm};

/// Reads a page, layer by layer. Borrows the executor mutably, so that no step begins meanwhile. No step may be in
/// flight.
pub fn read_page(executor: &mut dyn Executor, page: u32, form: PageForm) -> Vec<u8> {
    let kv = executor.kv_pages();
    let mut bytes = vec![0; kv.geometry().page_bytes()];
    let layers = bytes.chunks_mut(kv.geometry().layer_bytes());
    for (layer, out) in layers.enumerate() {
        // SAFETY: no step runs that could write to the page.
        unsafe { kv.read(layer as u32, &[PageId(page)], form, out) };
    }
    bytes
}

/// The inverse of `read_page`.
pub fn write_page(executor: &mut dyn Executor, page: u32, form: PageForm, bytes: &[u8]) {
    let kv = executor.kv_pages();
    let layers = bytes.chunks(kv.geometry().layer_bytes());
    for (layer, bytes) in layers.enumerate() {
        // SAFETY: no step runs that could use the page.
        unsafe { kv.write(layer as u32, &[PageId(page)], form, bytes) };
    }
}
