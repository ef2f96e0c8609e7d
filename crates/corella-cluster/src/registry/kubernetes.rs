//! Nodes behind a Kubernetes service, by its EndpointSlices.
//! Kubernetes itself registers pods according to their readiness. The API is reached without TLS,
//! for example through a `kubectl proxy` that runs beside the node on the loopback address and also
//! takes care of authentication.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::NodeRecord;
use super::http::HttpClient;
use super::source::{Exchange, Following, Source};

/// The folder of a pod's service account.
const ACCOUNT_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The pause before the next list. Without it, a server that ends every watch at once would be flooded with requests.
const PAUSE: Duration = Duration::from_millis(250);

pub(super) struct Kubernetes {
    pub namespace: Option<String>,
    pub service: String,
    pub port_name: Option<String>,
    /// HOST:PORT
    pub api: String,
    /// The length of a watch before everything is listed again.
    pub interval: Duration,
}

#[derive(Deserialize)]
struct SliceList {
    metadata: ListMetadata,
    #[serde(default)]
    items: Vec<Slice>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    resource_version: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Slice {
    metadata: SliceMetadata,
    #[serde(default)]
    endpoints: Option<Vec<Endpoint>>,
    #[serde(default)]
    ports: Option<Vec<Port>>,
}

#[derive(Deserialize)]
struct SliceMetadata {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    #[serde(default)]
    addresses: Vec<String>,
    #[serde(default)]
    conditions: Conditions,
    #[serde(default)]
    target_ref: Option<TargetRef>,
}

#[derive(Default, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Deserialize)]
struct TargetRef {
    name: Option<String>,
}

#[derive(Deserialize)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
}

impl Kubernetes {
    async fn follow_slices(&self, exchange: &mut Exchange) -> Result<(), String> {
        let path = self.path();
        // Without TLS the token must not leave this machine. The token is read each time because Kubernetes renews it.
        let is_local = self.api.starts_with("127.") || self.api.starts_with("[::1]");
        let token = match is_local {
            true => account_file("token"),
            false => None,
        };
        let client = HttpClient::new(&self.api).with_token(token);
        let list: SliceList = serde_json::from_value(client.get(&path).await?)
            .map_err(|error| format!("http://{}{path}: {error}", self.api))?;
        let mut slices: BTreeMap<String, Slice> = list
            .items
            .into_iter()
            .map(|slice| (slice.metadata.name.clone(), slice))
            .collect();
        exchange.give(self.nodes(&slices));

        let version = &list.metadata.resource_version;
        let seconds = self.interval.as_secs().max(1);
        let watch = format!("{path}&watch=1&timeoutSeconds={seconds}&resourceVersion={version}");
        let mut watch = client.get_lines(&watch).await?;
        let end = tokio::time::sleep(self.interval);
        tokio::pin!(end);
        loop {
            let event = tokio::select! {
                event = watch.next() => event?,
                () = &mut end => None,
            };
            let Some(event) = event else {
                return Ok(());
            };
            // Most likely the API no longer has the version of the list, and everything must be listed again.
            if event["type"] == "ERROR" {
                return Ok(());
            }
            if self.apply(event, &mut slices) {
                exchange.give(self.nodes(&slices));
            }
        }
    }

    fn path(&self) -> String {
        let namespace = self
            .namespace
            .clone()
            .or_else(|| account_file("namespace"))
            .unwrap_or_else(|| "default".to_owned());
        let service = &self.service;
        format!(
            "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices\
             ?labelSelector=kubernetes.io%2Fservice-name%3D{service}"
        )
    }

    /// Applies an event to the slices. Returns whether anything has changed.
    fn apply(&self, mut event: Value, slices: &mut BTreeMap<String, Slice>) -> bool {
        let Ok(slice) = serde_json::from_value::<Slice>(event["object"].take()) else {
            return false;
        };
        match event["type"].as_str() {
            Some("ADDED" | "MODIFIED") => {
                slices.insert(slice.metadata.name.clone(), slice);
                true
            }
            Some("DELETED") => slices.remove(&slice.metadata.name).is_some(),
            _ => false,
        }
    }

    fn nodes(&self, slices: &BTreeMap<String, Slice>) -> Vec<NodeRecord> {
        // An endpoint may be in two slices while they are rearranged.
        let mut nodes = BTreeMap::new();
        for slice in slices.values() {
            let Some(port) = self.port(slice.ports.as_deref().unwrap_or_default()) else {
                continue;
            };
            for endpoint in slice.endpoints.as_deref().unwrap_or_default() {
                if let Some(node) = endpoint.node(port) {
                    nodes.insert(node.instance_id.clone(), node);
                }
            }
        }
        nodes.into_values().collect()
    }

    fn port(&self, ports: &[Port]) -> Option<u16> {
        let port = match &self.port_name {
            Some(name) => ports.iter().find(|port| port.name.as_ref() == Some(name)),
            None => ports.first(),
        };
        port?.port
    }
}

impl Endpoint {
    /// Returns `None` while the pod starts, and when it has gone.
    fn node(&self, port: u16) -> Option<NodeRecord> {
        let address = self.addresses.first()?;
        let address = match address.contains(':') {
            true => format!("[{address}]:{port}"),
            false => format!("{address}:{port}"),
        };
        let is_draining = self.conditions.terminating == Some(true);
        // By the API's rule, an endpoint without a condition counts as ready.
        let is_there = match is_draining {
            true => self.conditions.serving == Some(true),
            false => self.conditions.ready != Some(false),
        };
        let name = self
            .target_ref
            .as_ref()
            .and_then(|target| target.name.as_deref());
        let mut node = NodeRecord::at(name.unwrap_or(&address), &address);
        node.is_draining = is_draining;
        is_there.then_some(node)
    }
}

impl Source for Kubernetes {
    fn follow<'a>(&'a mut self, exchange: &'a mut Exchange) -> Following<'a> {
        Box::pin(async move {
            loop {
                if let Err(reason) = self.follow_slices(exchange).await {
                    return reason;
                }
                tokio::time::sleep(PAUSE).await;
            }
        })
    }
}

fn account_file(name: &str) -> Option<String> {
    let text = std::fs::read_to_string(Path::new(ACCOUNT_FOLDER).join(name)).ok()?;
    Some(text.trim().to_owned())
}
