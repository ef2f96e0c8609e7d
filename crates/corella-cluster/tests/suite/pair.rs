//! A prefill node and a decode node in one process, over loopback, mostly with the mock executor,
//! which notices every wrong row of a page.

mod account;
mod adapter;
mod blocks;
mod computed_there;
mod constraint;
mod fetch;
mod fetch_fault;
mod fetch_hostile;
mod fetch_node;
mod fetch_part;
pub mod fixture;
mod formats;
mod frame_proxy;
mod hybrid;
mod kv_connector;
mod loss;
mod mixed;
mod oracle;
mod recorded_route;
mod window;
