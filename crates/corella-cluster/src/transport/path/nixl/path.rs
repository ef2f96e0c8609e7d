//! NIXL as a row path.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use corella_model::{ElementOrder, KvPages, PageForm};

use super::agent::NixlAgent;
use super::library::{NixlError, NixlLibrary};
use super::reader::NixlReader;
use crate::transport::memory_region::Canary;
use crate::transport::path_name::PathName;
use crate::transport::row_path::{BoxFuture, Link, Offer, PathError, PathKind, RowPath, RowReader};
use crate::transport::socket::Socket;

pub const KIND: PathKind = PathKind {
    name: PathName::new("NIXL"),
    option: "nixl",
    is_local: false,
    is_private: false,
    load: Some(|| Ok(NixlLibrary::find().map(drop)?)),
    start: |incarnation| Ok(NixlAgent::start(&NixlLibrary::find()?, incarnation)?),
};

/// The limit of the first read, for which the networks connect.
const TEST_TIMEOUT: Duration = Duration::from_secs(2);

impl RowPath for NixlAgent {
    fn name(&self) -> PathName {
        KIND.name
    }

    /// True for native pages. Pages in canonical form go over the socket, because their reads would have to be
    /// converted.
    fn suits(&self, link: Link) -> bool {
        !link.is_local && link.form == PageForm::Native
    }

    /// Returns `None` for pages in a GPU's memory. They cannot be registered as the host's, and travel by sockets.
    fn offer(&self, pages: &Arc<dyn KvPages>) -> Result<Option<Offer>, PathError> {
        if pages.geometry().order == ElementOrder::Rows {
            return Ok(None);
        }
        self.register_pages(pages)?;
        Ok(Some(Offer {
            data: self.canary().encode(),
            bytes: self.metadata()?,
        }))
    }

    fn meet_sender<'a>(
        self: Arc<Self>,
        socket: &'a Socket,
        incarnation: u64,
        offer: Offer,
    ) -> BoxFuture<'a, io::Result<Result<Box<dyn RowReader>, PathError>>> {
        Box::pin(async move {
            let reader = match self.meet(incarnation, &offer.bytes) {
                Ok(peer) => test(NixlReader::new(peer), socket, &offer).await,
                Err(error) => Err(error),
            };
            let reader = reader.map(|reader| Box::new(reader) as Box<dyn RowReader>);
            Ok(reader.map_err(PathError::from))
        })
    }
}

/// Reads the canary that the sender has named.
async fn test(
    mut reader: NixlReader,
    socket: &Socket,
    offer: &Offer,
) -> Result<NixlReader, NixlError> {
    let (region, content) = Canary::decode(&offer.data);
    reader.set_regions(&mut [region].into_iter(), content.len());
    match *reader.bytes(socket, TEST_TIMEOUT).await? == content {
        true => Ok(reader),
        false => Err(NixlError::Peer(
            "NIXL reads other memory than the sender named",
        )),
    }
}

impl From<NixlError> for PathError {
    fn from(error: NixlError) -> Self {
        Self(error.to_string())
    }
}
