//! Clients of servers and collectors.

pub(crate) mod event_stream;
pub(crate) mod otlp;
pub(crate) mod patient_client;
pub(crate) mod remote_server;
pub(crate) mod tls_client;
