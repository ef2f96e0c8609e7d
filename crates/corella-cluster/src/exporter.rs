//! Carries out the tasks of export books with this node's sender and engine.

use std::sync::Arc;

use corella_core::session::{ExportTask, SessionKey};
use corella_engine::{KvExchange, rare_line};
use tokio::sync::watch;

use crate::clock::Clock;
use crate::transport::{KvSender, SendStatus};

/// Carries out the tasks of an [`ExportBook`](corella_core::session::ExportBook).
pub struct Exporter {
    pub sender: Arc<KvSender>,
    pub exchange: KvExchange,
    pub clock: Clock,
}

/// The outcome of a task, for the owner of the export book.
pub enum Exported {
    Nothing,
    /// An export is open. The receiver of the status follows the export.
    Opened(SessionKey, watch::Receiver<SendStatus>),
    /// The sender refused an export.
    Refused(SessionKey),
    /// The rows of an export are no longer read.
    Deleted(SessionKey),
}

impl Exporter {
    pub fn carry_out(&self, task: ExportTask) -> Exported {
        match task {
            ExportTask::Open { key, num_rows, .. } => {
                // SAFETY: exported rows stay unchanged until the engine is told to release the hold. The books order
                // that after `Delete`.
                return match unsafe { self.sender.export(key, num_rows) } {
                    Ok(status) => Exported::Opened(key, status),
                    Err(error) => {
                        rare_line!(warn, %key, %error, "KV rows are not exported");
                        Exported::Refused(key)
                    }
                };
            }
            ExportTask::AddPages { key, tables } => self.sender.add_pages(&key, &tables),
            ExportTask::RowsReadable {
                key,
                layers,
                num_rows,
            } => self.sender.handle_rows_readable(&key, layers, num_rows),
            ExportTask::Finish { key, state } => {
                if let Some(snapshot) = state {
                    self.sender.set_state(&key, snapshot);
                }
                self.sender.finish(&key);
            }
            ExportTask::Delete { key } => {
                self.sender.delete(&key);
                return Exported::Deleted(key);
            }
            ExportTask::RenewHold { request, until_us } => {
                self.exchange
                    .renew_hold(request, self.clock.until(until_us));
            }
            ExportTask::ReleaseHold { request } => self.exchange.release_hold(request),
        }
        Exported::Nothing
    }
}
