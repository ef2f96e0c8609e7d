//! Rows that follow their frames on the connection's own socket: over TCP, and wherever no other path works.

mod reader;

use std::io;
use std::sync::Arc;

use corella_model::KvPages;

use crate::transport::path_name::PathName;
use crate::transport::row_path::{BoxFuture, Link, Offer, PathError, PathKind, RowPath, RowReader};
use crate::transport::socket::Socket;

pub use reader::TcpReader;

pub const NAME: PathName = PathName::new("TCP");

pub const KIND: PathKind = PathKind {
    name: NAME,
    option: "tcp",
    is_local: false,
    is_private: true,
    load: None,
    start: |_| Ok(Arc::new(Tcp)),
};

/// Every connection has a [`TcpReader`], even with another path, because pages in their canonical form go this way.
#[derive(Debug)]
pub struct Tcp;

impl RowPath for Tcp {
    fn name(&self) -> PathName {
        NAME
    }

    fn suits(&self, _link: Link) -> bool {
        true
    }

    fn is_agreed_by_greeting(&self) -> bool {
        true
    }

    fn offer(&self, _pages: &Arc<dyn KvPages>) -> Result<Option<Offer>, PathError> {
        Ok(Some(Offer::default()))
    }

    fn meet_sender<'a>(
        self: Arc<Self>,
        _socket: &'a Socket,
        _incarnation: u64,
        _offer: Offer,
    ) -> BoxFuture<'a, io::Result<Result<Box<dyn RowReader>, PathError>>> {
        let reason = PathError("rows follow their frames".to_owned());
        Box::pin(std::future::ready(Ok(Err(reason))))
    }
}
