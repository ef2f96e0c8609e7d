//! The part of the Kubernetes API that lists and watches EndpointSlices, over HTTP/1.1.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

pub struct KubernetesApi {
    address: String,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    slices: Vec<Value>,
    version: u32,
    watchers: Vec<mpsc::UnboundedSender<String>>,
    /// The requested paths, lists and watches alike.
    paths: Vec<String>,
    is_refusing: bool,
}

impl KubernetesApi {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let state = Arc::new(Mutex::new(State::default()));
        let served = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&served)));
            }
        });
        Self { address, state }
    }

    pub fn url(&self) -> String {
        format!("kubernetes:serving/decode:session@{}", self.address)
    }

    /// Sets the content of a list without sending an event.
    pub fn set_slices(&self, slices: Vec<Value>) {
        let mut state = self.state.lock().unwrap();
        state.slices = slices;
        state.version += 1;
    }

    /// Sends an event to the watches.
    pub fn tell(&self, event: &str, object: Value) {
        let mut state = self.state.lock().unwrap();
        let line = json!({ "type": event, "object": object }).to_string();
        state
            .watchers
            .retain(|watcher| watcher.send(line.clone()).is_ok());
    }

    pub fn num_watchers(&self) -> usize {
        let mut state = self.state.lock().unwrap();
        state.watchers.retain(|watcher| !watcher.is_closed());
        state.watchers.len()
    }

    /// Ends all watches. From now on every request is answered with 403, or normally again.
    pub fn refuse(&self, is_refusing: bool) {
        let mut state = self.state.lock().unwrap();
        state.is_refusing = is_refusing;
        state.watchers.clear();
    }

    pub fn paths(&self) -> Vec<String> {
        self.state.lock().unwrap().paths.clone()
    }
}

async fn answer(stream: TcpStream, state: Arc<Mutex<State>>) {
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    let Ok(Some(first)) = lines.next_line().await else {
        return;
    };
    while lines
        .next_line()
        .await
        .is_ok_and(|line| line.is_some_and(|line| !line.is_empty()))
    {}
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();

    let (head, mut events) = {
        let mut state = state.lock().unwrap();
        state.paths.push(path.clone());
        if state.is_refusing {
            (
                whole("403 Forbidden", &json!({ "message": "no access" })),
                None,
            )
        } else if path.contains("watch=1") {
            let (sender, receiver) = mpsc::unbounded_channel();
            state.watchers.push(sender);
            let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
            (head, Some(receiver))
        } else {
            let list = json!({
                "kind": "EndpointSliceList",
                "metadata": { "resourceVersion": state.version.to_string() },
                "items": state.slices,
            });
            (whole("200 OK", &list), None)
        }
    };
    if writer.write_all(head.as_bytes()).await.is_err() {
        return;
    }
    let Some(events) = &mut events else {
        return;
    };
    loop {
        tokio::select! {
            event = events.recv() => {
                let chunk = match event {
                    Some(line) => format!("{:x}\r\n{line}\n\r\n", line.len() + 1),
                    None => "0\r\n\r\n".to_owned(),
                };
                if writer.write_all(chunk.as_bytes()).await.is_err() || chunk.starts_with('0') {
                    return;
                }
            }
            // The client has hung up.
            _ = lines.next_line() => return,
        }
    }
}

fn whole(status: &str, body: &Value) -> String {
    let body = body.to_string();
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}")
}
