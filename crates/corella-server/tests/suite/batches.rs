//! `/v1/batches` and its folder, for faults that a client cannot cause.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use corella_core::StepId;
use corella_model::Fault;
use corella_server::batch::FilesConfig;
use corella_test::{wait_until_asked, wait_until_async};
use serde_json::{Value, json};

use crate::client::{get, head, post, send};
use crate::fixture::Setup;

/// A folder that is removed with its content.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("corella-batches-{}-{name}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn config(&self, batch_concurrency: usize) -> FilesConfig {
        FilesConfig {
            dir: self.0.clone(),
            max_file_bytes: 1 << 20,
            max_files_bytes: 1 << 20,
            batch_concurrency,
        }
    }

    /// Returns the answered lines of a batch, and the failed ones.
    fn lines(&self, batch: &str) -> (Vec<Value>, Vec<Value>) {
        let read = |path: PathBuf| {
            let text = fs::read_to_string(path).unwrap_or_default();
            // The last line may be half written.
            let lines = text.lines().map(serde_json::from_str);
            lines.filter_map(Result::ok).collect()
        };
        let folder = self.0.join("batches");
        (
            read(folder.join(format!("{batch}.output.jsonl"))),
            read(folder.join(format!("{batch}.errors.jsonl"))),
        )
    }
}

impl Folder {
    /// Waits until the tasks of a stopped server have released the folder, as a process does when it ends.
    async fn is_free(&self) {
        wait_until_async("the folder is free", || {
            let lock = fs::File::open(self.0.join("lock")).expect("it is there");
            lock.try_lock().is_ok()
        })
        .await;
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Uploads lines that each write some tokens, and makes a batch of them. Returns the id of the batch.
async fn create(address: SocketAddr, num_lines: usize, num_tokens: usize) -> String {
    let lines = (0..num_lines).map(|number| {
        let body = json!({"prompt": format!("line {number}"), "max_tokens": num_tokens});
        let url = "/v1/completions";
        json!({"custom_id": number.to_string(), "method": "POST", "url": url, "body": body})
    });
    let lines: String = lines.map(|line| format!("{line}\n")).collect();
    let form = format!(
        "--x\r\ncontent-disposition: form-data; name=purpose\r\n\r\nbatch\r\n--x\r\ncontent-disposition: \
         form-data; name=file; filename=a\r\n\r\n{lines}\r\n--x--\r\n"
    );
    let form_type = ("content-type", "multipart/form-data; boundary=x");
    let head = head("POST", "/v1/files", &[form_type], Some(form.len()));
    let file = send(address, &head, form.as_bytes()).await.json();
    let batch = json!({
        "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h",
    });
    let batch = post(address, "/v1/batches", &batch).await.json();
    batch["id"].as_str().expect("it has an id").to_owned()
}

/// Makes a batch of 40 lines, and stops the server while it answers the line after the first `num_lines`. Returns the
/// id of the batch.
async fn answer_some(folder: &Folder, num_lines: usize) -> String {
    const NUM_TOKENS: usize = 20;
    // Lines run one by one, and each token takes a step.
    let mut setup = Setup::new().holding_behind((num_lines * NUM_TOKENS) as u64);
    setup.files = Some(folder.config(1));
    let server = setup.start().await;
    let batch = create(server.address, 40, NUM_TOKENS).await;
    wait_until_async("the lines are answered and another begins", || {
        let is_running = server.engine.stats().scheduler.num_running == 1;
        is_running && folder.lines(&batch).0.len() == num_lines
    })
    .await;
    server.ask_to_stop();
    server.is_draining().await;
    server.gate().open();
    server.stopped().await;
    folder.is_free().await;
    assert_eq!(folder.lines(&batch).0.len(), num_lines + 1);
    batch
}

/// Waits until a batch has ended, and returns it.
async fn ended(address: SocketAddr, batch: &str) -> Value {
    let path = format!("/v1/batches/{batch}");
    let mut last = Value::Null;
    wait_until_asked("the batch ends", async || {
        last = get(address, &path).await.json();
        let status = last["status"].as_str().expect("it has a status");
        ["completed", "failed", "expired", "cancelled"].contains(&status)
    })
    .await;
    last
}

fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    let found = fs::metadata(path).expect("it is there");
    found.permissions().mode() & 0o777
}

/// A request dropped by a lost engine has not failed by itself: the next start answers it.
#[tokio::test]
async fn lines_that_a_lost_engine_drops_are_left_for_the_next_start() {
    let folder = Folder::new("lost");
    let mut setup = Setup::new();
    setup.files = Some(folder.config(2));
    setup.mock.faults = vec![(StepId(90), Fault::Lost)];
    let server = setup.start().await;
    let batch = create(server.address, 12, 20).await;
    let lost = server.ended().await;
    lost.expect_err("the engine is lost");
    folder.is_free().await;
    let (answers, failures) = folder.lines(&batch);
    assert!((2..12).contains(&answers.len()), "{answers:?}");
    assert!(failures.is_empty(), "{failures:?}");
    let mut setup = Setup::new();
    setup.files = Some(folder.config(2));
    let server = setup.start().await;
    let ended = ended(server.address, &batch).await;
    assert_eq!(ended["status"], "completed");
    assert_eq!(
        ended["request_counts"],
        json!({"total": 12, "completed": 12, "failed": 0})
    );
    server.ask_to_stop();
    server.stopped().await;
}

#[tokio::test]
async fn only_the_owner_can_read_the_folder() {
    let folder = Folder::new("private");
    let mut setup = Setup::new();
    setup.files = Some(folder.config(2));
    let server = setup.start().await;
    for part in ["", "files", "batches"] {
        assert_eq!(mode(&folder.0.join(part)), 0o700, "{part:?}");
    }
    server.ask_to_stop();
    server.stopped().await;
}

/// A batch reads its input at any later time, even after a restart.
#[tokio::test]
async fn an_input_whose_time_is_over_is_kept_for_its_batch() {
    let folder = Folder::new("expired");
    let batch = answer_some(&folder, 1).await;
    for entry in fs::read_dir(folder.0.join("files")).expect("it is there") {
        let path = entry.expect("an entry").path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            let mut record: Value =
                serde_json::from_slice(&fs::read(&path).expect("it is there")).expect("it is JSON");
            record["expires_at"] = json!(1);
            fs::write(&path, record.to_string()).expect("it can be written");
        }
    }
    let mut setup = Setup::new();
    setup.files = Some(folder.config(1));
    let server = setup.start().await;
    let ended = ended(server.address, &batch).await;
    assert_eq!(ended["status"], "completed", "{ended}");
    server.ask_to_stop();
    server.stopped().await;
}

/// Answers of a continued batch count against the bytes of all files, and no file of a forgotten batch stays.
#[tokio::test]
async fn what_is_in_the_folder_counts_from_the_start() {
    let folder = Folder::new("counted");
    let batch = answer_some(&folder, 5).await;
    let batches = folder.0.join("batches");
    let orphan = batches.join("batch_0.errors.jsonl");
    fs::write(&orphan, "{}").expect("it can be written");
    fs::write(batches.join("batch_0.json.new"), "{").expect("it can be written");
    let size = |path: PathBuf| fs::metadata(path).map_or(0, |file| file.len());
    let num_answer_bytes = size(batches.join(format!("{batch}.output.jsonl")));
    let input = fs::read_dir(folder.0.join("files"))
        .expect("it is there")
        .map(|entry| entry.expect("an entry").path())
        .find(|path| path.extension().is_none());
    let num_input_bytes = size(input.expect("it is there"));
    // The limit has room for the existing lines and for less than one more.
    let mut setup = Setup::new();
    setup.files = Some(FilesConfig {
        max_files_bytes: num_input_bytes + num_answer_bytes + 10,
        ..folder.config(1)
    });
    let server = setup.start().await;
    let ended = ended(server.address, &batch).await;
    assert_eq!(
        ended["errors"]["data"][0]["code"], "storage_full",
        "{ended}"
    );
    assert!(!orphan.exists() && !batches.join("batch_0.json.new").exists());
    let output = ended["output_file_id"].as_str().expect("answers are kept");
    let file = get(server.address, &format!("/v1/files/{output}"))
        .await
        .json();
    assert_eq!(file["bytes"], num_answer_bytes);
    server.ask_to_stop();
    server.stopped().await;
}
