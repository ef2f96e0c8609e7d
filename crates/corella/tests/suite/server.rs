//! The built program as a server in its own process.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

use crate::held_isa::held_isa;

/// Adds `--isa` if the tests are held to an instruction set and the subcommand computes.
pub fn corella(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_corella"));
    command.stdin(Stdio::null()).env_remove("RUST_LOG");
    command.args(arguments);
    let computes_nothing = matches!(
        arguments,
        ["list" | "rm", ..] | ["bench", "admission" | "serve", ..]
    );
    if let Some(isa) = held_isa().filter(|_| !computes_nothing) {
        command.args(["--isa", &isa.to_string()]);
    }
    command
}

/// A server that is killed when its test fails.
pub struct Server {
    pub process: Child,
    /// Kept open until the process has ended.
    pub log: Lines<BufReader<ChildStderr>>,
    pub summary: String,
    pub limits: String,
    pub address: String,
}

impl Server {
    pub fn start(arguments: &[&str]) -> Self {
        let mut command = corella(&[&["serve", "--port", "0", "--verbose"], arguments].concat());
        let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
        let log = BufReader::new(process.stderr.take().unwrap()).lines();
        let mut server = Self {
            process,
            log,
            summary: String::new(),
            limits: String::new(),
            address: String::new(),
        };
        server.summary = server.line_with("KV pages");
        server.limits = server.line_with("limits: ");
        let ready = server.line_with("ready: page http://");
        let (_, rest) = ready.split_once("http://").unwrap();
        server.address = rest.split_once('/').unwrap().0.to_owned();
        server
    }

    pub fn line_with(&mut self, word: &str) -> String {
        let mut lines = self.log.by_ref().map(|line| line.unwrap());
        let line = lines.find(|line| line.contains(word));
        line.unwrap_or_else(|| panic!("no line with {word}"))
    }

    /// Gets a path with a request id, and returns the response.
    pub fn get(&self, path: &str, id: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: {id}\r\n\r\n",
        )
        .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    /// Asks the server to end after its requests.
    pub fn terminate(&self) {
        let pid = self.process.id().to_string();
        let killed = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(killed.unwrap().success());
    }

    /// Posts a request that must succeed, and returns the body of the answer.
    pub fn complete(&self, body: &str) -> serde_json::Value {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
        let (_, body) = response.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
