//! The rules of the core: scenarios, placement, sessions.

mod burst;
mod kv_event;
mod line_diff;
mod load_table;
mod page_hash;
mod page_list;
mod peer_table;
mod placement;
mod pooling_name;
mod reservation;
mod route;
mod scenario;
mod session;
mod span_token;
