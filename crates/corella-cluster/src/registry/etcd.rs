//! Nodes in etcd: a key for each, which vanishes with the node's lease.
//!
//! Requests are the JSON that every etcd from 3.4 on accepts on the port of gRPC. A gRPC client would need `protoc` at
//! build time.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::NodeRecord;
use super::http::{HttpClient, JsonLines};
use super::node_record::MAX_NODES;
use super::source::{Exchange, Following, Source};

pub(super) struct Etcd {
    endpoints: Vec<String>,
    /// The index of the current member.
    member: usize,
    /// The part of a node's key before the instance id.
    key_prefix: String,
    lease_ttl: Duration,
    /// The lease of this node's key.
    lease: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Renewal {
    SameLease,
    NewLease,
}

impl Etcd {
    pub fn new(endpoints: Vec<String>, prefix: &str, lease_ttl: Duration) -> Self {
        Self {
            endpoints,
            member: 0,
            key_prefix: format!("/{prefix}/nodes/"),
            lease_ttl,
            lease: None,
        }
    }

    fn client(&self) -> HttpClient {
        HttpClient::new(&self.endpoints[self.member])
    }

    async fn follow_member(&mut self, exchange: &mut Exchange) -> Result<(), String> {
        // A lease from before an outage may be about to expire, and the key would vanish with the lease.
        self.publish(exchange, Renewal::NewLease).await?;
        let mut watch = self.watch().await?;
        let period = self.lease_ttl / 3;
        let mut tick = tokio::time::interval_at(Instant::now() + period, period);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                answer = watch.next() => match answer? {
                    Some(answer) => check_watch(&answer)?,
                    None => return Err("etcd has ended the watch".into()),
                },
                _ = tick.tick() => {
                    if !self.keep_alive().await? {
                        tracing::warn!("the lease of this node in etcd has expired; registering anew");
                        self.publish(exchange, Renewal::NewLease).await?;
                    }
                }
                () = exchange.own_changed() => self.publish(exchange, Renewal::SameLease).await?,
            }
            // The list is small, so it is read whole after every change. The first answer to a watch only says that the
            // watch has begun. The list is read after that, so no change is missed.
            let list = self.list().await?;
            exchange.give(list);
        }
    }

    /// Writes this node's record in `exchange` to etcd, or removes it if there is none.
    async fn publish(&mut self, exchange: &mut Exchange, renewal: Renewal) -> Result<(), String> {
        let Some(own) = exchange.own() else {
            self.revoke().await?;
            exchange.set_published(false);
            return Ok(());
        };
        let lease_id = match self.lease.take() {
            Some(lease_id) if renewal == Renewal::SameLease => lease_id,
            _ => self.grant().await?,
        };
        let put = json!({
            "key": BASE64.encode(self.key(&own)),
            "value": BASE64.encode(own.to_json()),
            "lease": lease_id,
        });
        self.lease = Some(lease_id);
        self.client().post("/v3/kv/put", &put).await?;
        exchange.set_published(true);
        Ok(())
    }

    async fn revoke(&mut self) -> Result<(), String> {
        let Some(lease_id) = &self.lease else {
            return Ok(());
        };
        let lease = json!({ "ID": lease_id });
        let revoked = self.client().post("/v3/lease/revoke", &lease).await;
        // A lease that has expired cannot be revoked, and need not be.
        if revoked.is_err() && self.keep_alive().await? {
            revoked?;
        }
        self.lease = None;
        Ok(())
    }

    async fn grant(&self) -> Result<String, String> {
        let ttl_s = self.lease_ttl.as_secs().max(1);
        let lease = json!({ "TTL": ttl_s });
        let granted = self.client().post("/v3/lease/grant", &lease).await?;
        // 64-bit numbers are strings in etcd's JSON.
        match granted["ID"].as_str() {
            Some(id) => Ok(id.to_owned()),
            None => Err(format!("etcd granted a lease without a name: {granted}")),
        }
    }

    /// Renews the lease, if the node has one. Returns false if it has expired.
    async fn keep_alive(&self) -> Result<bool, String> {
        let Some(lease_id) = &self.lease else {
            return Ok(true);
        };
        let lease = json!({ "ID": lease_id });
        let answer = self.client().post("/v3/lease/keepalive", &lease).await?;
        // Numbers that are 0 may be missing, and an expired lease has 0 seconds to live.
        let ttl_s = answer["result"]["TTL"].as_str().unwrap_or("0");
        Ok(ttl_s != "0")
    }

    async fn list(&self) -> Result<Vec<NodeRecord>, String> {
        let mut range = self.range();
        range["limit"] = MAX_NODES.into();
        let answer = self.client().post("/v3/kv/range", &range).await?;
        let empty = Vec::new();
        let pairs = answer["kvs"].as_array().unwrap_or(&empty);
        Ok(pairs.iter().filter_map(|pair| self.node(pair)).collect())
    }

    fn node(&self, pair: &Value) -> Option<NodeRecord> {
        let field = |name: &str| BASE64.decode(pair[name].as_str().unwrap_or_default()).ok();
        let key = String::from_utf8(field("key")?).ok()?;
        match NodeRecord::from_json(&field("value")?) {
            Ok(node) if self.key(&node) == key => Some(node),
            Ok(node) => {
                tracing::debug!(
                    "etcd: key {key} has the record of node {}",
                    node.instance_id
                );
                None
            }
            Err(reason) => {
                tracing::debug!("etcd: key {key} has no record of a node: {reason}");
                None
            }
        }
    }

    async fn watch(&self) -> Result<JsonLines, String> {
        let create = json!({ "create_request": self.range() });
        self.client().post_lines("/v3/watch", &create).await
    }

    fn key(&self, node: &NodeRecord) -> String {
        format!("{}{}", self.key_prefix, node.instance_id)
    }

    /// Selects all keys with the prefix: from the prefix up to the prefix with its last character raised by one.
    fn range(&self) -> Value {
        let first = self.key_prefix.as_bytes();
        let mut end = first.to_vec();
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        json!({ "key": BASE64.encode(first), "range_end": BASE64.encode(&end) })
    }
}

fn check_watch(answer: &Value) -> Result<(), String> {
    let is_over = answer["result"]["canceled"] == true || !answer["error"].is_null();
    match is_over {
        true => Err(format!("etcd has ended the watch: {answer}")),
        false => Ok(()),
    }
}

impl Source for Etcd {
    fn follow<'a>(&'a mut self, exchange: &'a mut Exchange) -> Following<'a> {
        Box::pin(async move {
            let outcome = self.follow_member(exchange).await;
            self.member = (self.member + 1) % self.endpoints.len();
            outcome.err().unwrap_or_default()
        })
    }
}
