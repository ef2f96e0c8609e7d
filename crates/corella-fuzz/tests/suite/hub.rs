//! A hub's answers, or an impostor's, to a client that asks for a model.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fs, thread};

use corella_fuzz::{Random, Target, Verdict};
use corella_hub::{Hub, HubConfig, ModelName};
use serde_json::json;

use crate::corpus::Scratch;
use crate::model::mutate_json_bytes;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// The content of every file, with git's checksum and its SHA-256.
const CONTENT: &str = "{}";
const GIT_SHA1: &str = "9e26dfeeb6e641a33dae4961196235bdb965b21b";
const SHA256: &str = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";

/// The answers to the two requests about a repository.
#[derive(Clone, PartialEq)]
struct Answers {
    revision: Vec<u8>,
    tree: Vec<u8>,
}

impl AsRef<[u8]> for Answers {
    fn as_ref(&self) -> &[u8] {
        &self.tree
    }
}

fn valid() -> Answers {
    let revision =
        json!({"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]});
    let small =
        |path: &str| json!({"type": "file", "oid": GIT_SHA1, "size": CONTENT.len(), "path": path});
    let tree = json!([
        {"type": "directory", "oid": GIT_SHA1, "size": 0, "path": "onnx"},
        small("config.json"), small("tokenizer.json"), small("onnx/config.json"),
        {"type": "file", "oid": GIT_SHA1, "size": CONTENT.len(), "path": "model.safetensors",
         "lfs": {"oid": SHA256, "size": CONTENT.len(), "pointerSize": 130}},
    ]);
    Answers {
        revision: revision.to_string().into_bytes(),
        tree: tree.to_string().into_bytes(),
    }
}

/// Answers one request, and closes the connection.
fn answer(stream: TcpStream, answers: &Answers) -> std::io::Result<()> {
    let mut lines = BufReader::new(&stream).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    // The lines after the first are read, so that closing does not reset the connection.
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let (status, body): (&str, &[u8]) = if first.contains("/revision/") {
        ("200 OK", &answers.revision)
    } else if first.contains("/tree/") {
        ("200 OK", &answers.tree)
    } else if *answers == valid() {
        ("200 OK", CONTENT.as_bytes())
    } else {
        ("404 Not Found", b"")
    };
    let mut stream = &stream;
    write!(
        stream,
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    )?;
    stream.write_all(body)
}

#[test]
fn hub_listing() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let answers = Arc::new(Mutex::new(valid()));
    let served = answers.clone();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answers = served.lock().expect("nobody panics with it").clone();
            // A client may leave early.
            let _ = answer(stream, &answers);
        }
    });
    let name = ModelName::parse("org/model").expect("a name");
    let fetch = |input: &Answers| {
        *answers.lock().expect("nobody panics with it") = input.clone();
        let scratch = Scratch::new();
        let hub = Hub::new(HubConfig {
            endpoint: format!("http://{address}"),
            token: None,
            cache: scratch.path().join("deep/cache"),
            ca_file: None,
            is_offline: false,
            num_parallel: 2,
            read_timeout: Duration::from_secs(5),
        });
        let fetched = hub.fetch(&name, &|_| {});
        // No file is written outside of the cache.
        let beside =
            |folder: &str| fs::read_dir(scratch.path().join(folder)).map_or(0, Iterator::count);
        assert!(beside("") <= 1 && beside("deep") <= 1);
        Verdict::from(&fetched)
    };
    let words = [
        "type",
        "file",
        "directory",
        "path",
        "..",
        "../../../a",
        "/etc/a",
        "a\\b",
        ".",
        "size",
        "lfs",
        "oid",
        SHA256,
        "model.safetensors.index.json",
        "model-Q4_K_M.gguf",
        "model-00001-of-00002.gguf",
        "tokenizer.model",
    ];
    let mutate = |random: &mut Random, answers: &mut Answers| match random.below(4) {
        0 => mutate_json_bytes(random, &mut answers.revision, &words),
        _ => mutate_json_bytes(random, &mut answers.tree, &words),
    };
    let target = Target::new("hub_listing", 32 << 20, 1000).watching_threads();
    target.run(&[valid()], mutate, fetch);
}
