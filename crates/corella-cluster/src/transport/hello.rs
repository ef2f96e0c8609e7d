//! The greetings by which two nodes find out that they can exchange rows.

use corella_core::Arithmetic;
use corella_model::{DType, ElementOrder, KvFormat, KvGeometry, KvLayers, PageForm};

use super::frame::{FieldReader, FieldWriter, FrameError};
use super::path::{PathSet, own_paths};

/// The bytes after the byte `C` that marks the frame as a greeting.
const MAGIC: [u8; 3] = *b"KVT";
/// The version of the protocol. Peers of another version are refused.
const PROTOCOL_VERSION: u32 = 4;

const FORMATS: [KvFormat; 4] = [
    KvFormat::Float(DType::F32),
    KvFormat::Float(DType::F16),
    KvFormat::Float(DType::Bf16),
    KvFormat::Int8,
];
const ORDERS: [ElementOrder; 3] = [ElementOrder::Plain, ElementOrder::Tiles, ElementOrder::Rows];

/// The limit of elements of a page within a layer: more than any model has, and so few that no product of a peer's
/// numbers overflows.
const MAX_PAGE_ELEMENTS: u64 = 1 << 24;

#[derive(Clone, Debug, PartialEq)]
pub struct Hello {
    pub protocol_version: u32,
    pub incarnation: u64,
    pub model_fingerprint: u128,
    /// May differ between the nodes: each load says which arithmetic its rows must have.
    pub arithmetic: Arithmetic,
    /// The geometry, as if a page had all layers of the model. The number of pages is always 0, because peers do not
    /// need it.
    pub geometry: KvGeometry,
    /// `KvLayers::window_digest`.
    pub window_digest: u64,
    /// The paths by which the node can move rows.
    pub paths: PathSet,
}

impl Hello {
    pub fn new(
        incarnation: u64,
        model_fingerprint: u128,
        arithmetic: Arithmetic,
        geometry: &KvGeometry,
    ) -> Self {
        Self {
            protocol_version: PROTOCOL_VERSION,
            incarnation,
            model_fingerprint,
            arithmetic,
            window_digest: geometry.layers.window_digest(),
            geometry: KvGeometry {
                num_layers: geometry.layers.num_layers(),
                layers: KvLayers::one(geometry.layers.num_layers()),
                num_pages: 0,
                ..geometry.clone()
            },
            paths: PathSet::of(&own_paths(incarnation)),
        }
    }

    /// Returns the form in which pages travel between two nodes. Both nodes compute the same form. The receiver
    /// converts page size (except with windows, where its first page would lack rows), KV format and element order.
    /// Pages in `ElementOrder::Rows` are in the memory of a GPU, which sockets cannot read, so they always travel in
    /// canonical form.
    pub fn page_form(&self, other: &Self) -> Result<PageForm, Incompatibility> {
        let (own, theirs) = (&self.geometry, &other.geometry);
        let shape = |of: &KvGeometry| (of.num_layers, of.num_kv_heads, of.head_dim);
        let windows = (self.window_digest, other.window_digest);
        if self.protocol_version != other.protocol_version {
            Err(Incompatibility::Protocol(other.protocol_version))
        } else if self.model_fingerprint != other.model_fingerprint {
            Err(Incompatibility::Model)
        } else if shape(own) != shape(theirs) || windows.0 != windows.1 {
            Err(Incompatibility::Shape)
        } else if self.window_digest != 0 && own.page_size != theirs.page_size {
            Err(Incompatibility::PageSize)
        } else if own.is_native_to(theirs) && own.order != ElementOrder::Rows {
            Ok(PageForm::Native)
        } else {
            Ok(PageForm::Canonical)
        }
    }

    pub(super) fn encode(&self, out: &mut FieldWriter<'_>) {
        out.put(&MAGIC);
        out.u32(self.protocol_version);
        out.u64(self.incarnation);
        out.put(&self.model_fingerprint.to_le_bytes());
        out.u64(self.arithmetic.0);
        let geometry = &self.geometry;
        out.u16(geometry.num_layers);
        out.u16(geometry.num_kv_heads);
        out.u32(geometry.head_dim);
        out.u32(geometry.page_size);
        out.index(&FORMATS, &geometry.format);
        out.index(&ORDERS, &geometry.order);
        out.put(&[self.paths.0]);
        out.u64(self.window_digest);
    }

    pub(super) fn decode(fields: &mut FieldReader<'_>) -> Result<Self, FrameError> {
        if fields.take() != MAGIC {
            return Err(FrameError::Field("magic"));
        }
        let (protocol_version, incarnation) = (fields.u32(), fields.u64());
        let model_fingerprint = u128::from_le_bytes(fields.take());
        let arithmetic = Arithmetic(fields.u64());
        let num_layers = fields.u16();
        let hello = Self {
            protocol_version,
            incarnation,
            model_fingerprint,
            arithmetic,
            geometry: KvGeometry {
                num_layers,
                layers: KvLayers::one(num_layers),
                num_kv_heads: fields.u16(),
                head_dim: fields.u32(),
                page_size: fields.u32(),
                num_pages: 0,
                format: fields.index(&FORMATS, "KV format")?,
                order: fields.index(&ORDERS, "element order")?,
            },
            paths: PathSet(u8::from_le_bytes(fields.take())),
            window_digest: fields.u64(),
        };
        let geometry = &hello.geometry;
        let sizes = [geometry.num_kv_heads, geometry.head_dim, geometry.page_size];
        let num_elements = sizes.iter().try_fold(1u64, |product, &size| {
            let product = product.checked_mul(u64::from(size))?;
            (1..=MAX_PAGE_ELEMENTS)
                .contains(&product)
                .then_some(product)
        });
        match num_elements {
            Some(_) if geometry.num_layers > 0 => Ok(hello),
            _ => Err(FrameError::Field("geometry")),
        }
    }
}

/// The reason why two healthy nodes cannot exchange KV rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Incompatibility {
    /// The other node's version.
    #[error(
        "it speaks version {0} of the KV protocol, and this node {PROTOCOL_VERSION}; run the same Corella on both"
    )]
    Protocol(u32),
    #[error("it serves another model")]
    Model,
    #[error("its model has other layers, windows or heads")]
    Shape,
    #[error("the model has sliding windows, and its pages have another --block-size")]
    PageSize,
    #[error(
        "it computes other rows of the same model: --dtype, --kv-cache-dtype, the instruction set or the version of \
         Corella differs"
    )]
    Arithmetic,
}
