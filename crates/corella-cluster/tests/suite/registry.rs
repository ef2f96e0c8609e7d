//! Registries of every kind, with their faults caused for real.

mod addresses;
mod etcd;
mod etcd_lease;
mod etcd_server;
mod fleet;
mod folder;
mod kubernetes;
mod kubernetes_api;
