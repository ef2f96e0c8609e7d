//! Compares operations on pages with the same copies on the host.

use corella_model::{DType, ElementOrder, KvFormat, KvGeometry, KvLayers};

use super::{PageKernels, PageMove, RowCopy, TableChange};
use crate::device::Stream;
use crate::kernels::test_memory::{Random, device, download, upload};

fn geometry(format: KvFormat, head_dim: u32, page_size: u32) -> KvGeometry {
    KvGeometry {
        num_layers: 3,
        layers: KvLayers::one(3),
        num_kv_heads: 2,
        head_dim,
        page_size,
        num_pages: 6,
        format,
        order: ElementOrder::Plain,
    }
}

fn geometries() -> [KvGeometry; 4] {
    [
        geometry(KvFormat::Float(DType::Bf16), 64, 16),
        geometry(KvFormat::Float(DType::F32), 12, 5),
        geometry(KvFormat::Int8, 10, 7),
        geometry(KvFormat::Int8, 128, 17),
    ]
}

fn random_region(geometry: &KvGeometry) -> Vec<u8> {
    let mut random = Random::new(3);
    let len = geometry.num_pages as usize * geometry.page_bytes();
    (0..len).map(|_| random.bits() as u8).collect()
}

#[test]
fn only_the_first_rows_of_a_page_are_copied() {
    let device = device();
    for geometry in geometries() {
        let kernels = PageKernels::load(&device, &geometry).unwrap();
        let mut region = random_region(&geometry);
        let kv = upload(&device, &region);
        let all = geometry.page_size;
        let copies = [(5, 0, 1), (2, 4, 3), (1, 3, all)].map(|(from, to, num_rows)| RowCopy {
            from,
            to,
            num_rows,
        });
        let list = upload(&device, &copies);
        // SAFETY: both are the device's memory.
        unsafe { kernels.copy_rows(&device, kv.pointer(), list.pointer(), copies.len()) }.unwrap();

        let page_size = geometry.page_size as usize;
        let row_bytes = geometry.head_dim as usize * geometry.format.size();
        for copy in copies {
            // The places of each row's keys, values and scales: an offset within a head's bytes, and a number of bytes.
            let rows = (0..copy.num_rows as usize).flat_map(|row| {
                let elements = [row, page_size + row].map(|i| (i * row_bytes, row_bytes));
                let scales = [row, page_size + row].map(|i| (geometry.element_bytes() + 4 * i, 4));
                let num_scales = if geometry.format == KvFormat::Int8 {
                    2
                } else {
                    0
                };
                elements
                    .into_iter()
                    .chain(scales.into_iter().take(num_scales))
            });
            for (at, len) in rows {
                for head in 0..(geometry.num_layers * geometry.num_kv_heads) as usize {
                    let first = |page: u32| {
                        page as usize * geometry.page_bytes() + head * geometry.head_bytes() + at
                    };
                    let from = first(copy.from);
                    region.copy_within(from..from + len, first(copy.to));
                }
            }
        }
        let copied: Vec<u8> = download(&device, &kv, region.len());
        assert!(copied == region, "{geometry:?}");
    }
}

#[test]
fn pages_of_a_layer_go_out_and_come_back() {
    let device = device();
    for geometry in geometries() {
        let kernels = PageKernels::load(&device, &geometry).unwrap();
        let region = random_region(&geometry);
        let (layer, pages) = (2, [4_u32, 0, 5]);
        let layer_bytes = geometry.layer_bytes();
        let ids = upload(&device, &pages);
        let staging = upload(&device, &vec![0_u8; pages.len() * layer_bytes]);
        let of_page = |page: u32| {
            let first = page as usize * geometry.page_bytes() + layer * layer_bytes;
            first..first + layer_bytes
        };
        let move_pages = |way, kv: &crate::device::DeviceBuffer| {
            let kv = kv.pointer().add(layer * layer_bytes);
            let ids = (ids.pointer(), pages.len());
            // SAFETY: all of this is the device's memory.
            unsafe {
                kernels.move_pages(&device, Stream::Compute, way, kv, ids, staging.pointer())
            }
            .unwrap();
        };
        move_pages(PageMove::Gather, &upload(&device, &region));
        let gathered: Vec<u8> = download(&device, &staging, pages.len() * layer_bytes);
        let wanted: Vec<u8> = pages
            .iter()
            .flat_map(|page| &region[of_page(*page)])
            .copied()
            .collect();
        assert!(gathered == wanted, "{geometry:?}");

        let empty = vec![0_u8; region.len()];
        let target = upload(&device, &empty);
        move_pages(PageMove::Spread, &target);
        let mut wanted = empty;
        for page in pages {
            wanted[of_page(page)].copy_from_slice(&region[of_page(page)]);
        }
        let spread: Vec<u8> = download(&device, &target, region.len());
        assert!(spread == wanted, "{geometry:?}");
    }
}

#[test]
fn entries_of_tables_change_alone() {
    let device = device();
    let kernels = PageKernels::load(&device, &geometries()[0]).unwrap();
    let mut tables: Vec<u32> = (1000..2000).collect();
    let changes: Vec<TableChange> = (0..300)
        .map(|i| TableChange {
            index: i * 3 + 1,
            page: i,
        })
        .collect();
    let buffer = upload(&device, &tables);
    let list = upload(&device, &changes);
    // SAFETY: both are the device's memory.
    unsafe { kernels.change_tables(&device, buffer.pointer(), list.pointer(), changes.len()) }
        .unwrap();
    for change in changes {
        tables[change.index as usize] = change.page;
    }
    assert_eq!(download::<u32>(&device, &buffer, 1000), tables);
}
