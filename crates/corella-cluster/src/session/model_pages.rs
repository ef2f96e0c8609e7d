//! An executor's KV memory and a session's key, as transports have them.

use std::ptr::NonNull;
use std::sync::Arc;

use corella_core::PageId;
use corella_core::session::SessionKey;

use crate::transport::{self, ElementOrder, KvGeometry, KvPages, PageForm};

pub struct ModelPages {
    pages: Arc<dyn corella_model::KvPages>,
    geometry: KvGeometry,
}

impl ModelPages {
    pub fn new(pages: Arc<dyn corella_model::KvPages>) -> Self {
        let own = pages.geometry();
        let geometry = KvGeometry {
            num_layers: own.num_layers,
            num_kv_heads: own.num_kv_heads,
            head_dim: own.head_dim,
            page_size: own.page_size,
            num_pages: own.num_pages,
            format: own.format,
            order: match own.order {
                corella_model::ElementOrder::Plain => ElementOrder::Plain,
                corella_model::ElementOrder::Tiles => ElementOrder::Tiles,
            },
        };
        Self { pages, geometry }
    }
}

impl KvPages for ModelPages {
    fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2] {
        self.pages.native_parts(layer, page)
    }

    fn note_written(&self, page: PageId) {
        self.pages.note_written(page);
    }

    unsafe fn read(&self, layer: u32, pages: &[PageId], form: PageForm, out: &mut [u8]) {
        // SAFETY: the caller's promise.
        unsafe { self.pages.read(layer, pages, model_form(form), out) };
    }

    unsafe fn write(&self, layer: u32, pages: &[PageId], form: PageForm, bytes: &[u8]) {
        // SAFETY: the caller's promise.
        unsafe { self.pages.write(layer, pages, model_form(form), bytes) };
    }
}

fn model_form(form: PageForm) -> corella_model::PageForm {
    match form {
        PageForm::Native => corella_model::PageForm::Native,
        PageForm::Canonical => corella_model::PageForm::Canonical,
    }
}

pub fn transport_key(key: SessionKey) -> transport::SessionKey {
    transport::SessionKey {
        uuid: key.session.0,
        attempt: key.attempt,
        prefill_incarnation: key.prefill_incarnation.0,
        decode_incarnation: key.decode_incarnation.0,
    }
}
