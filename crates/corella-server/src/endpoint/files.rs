//! `/v1/files`: the files that batches read and write.

mod multipart;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, Uri};
use axum::response::Response;
use hyper::body::Frame;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf};

use crate::call::call_context::CallContext;
use crate::clock::unix_now_s;
use crate::state::server_parts::ServerParts;
use crate::store::batch_table::Batches;
use crate::store::disk::{disk_error, on_disk};
use crate::store::file_store::{FileRecord, FileStore, Upload, life_s};
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_limit::MAX_FILE_LIFE_S;
use crate::wire::json_response::json_response;
use crate::wire::list_page::ListQuery;

use multipart::Multipart;
/// The only purpose that an upload may have.
const PURPOSE: &str = "batch";
const MAX_FILENAME_BYTES: usize = 255;
const MAX_LIMIT: usize = 10_000;

/// The form fields of an upload besides its content.
#[derive(Default)]
struct Form {
    filename: Option<String>,
    purpose: Option<String>,
    anchor: Option<String>,
    seconds: Option<String>,
}

impl Form {
    /// Returns when the file expires, in seconds since 1970.
    fn expires_at(&self, now_s: u64) -> Result<u64, ApiError> {
        const FIELD: &str = "expires_after";
        match (&self.anchor, &self.seconds) {
            (None, None) => Ok(now_s + MAX_FILE_LIFE_S),
            (Some(anchor), _) if anchor != "created_at" => Err(ApiError::invalid(
                format!("{FIELD}.anchor"),
                "must be \"created_at\"",
            )),
            (_, seconds) => {
                let seconds = seconds.as_ref().and_then(|seconds| seconds.parse().ok());
                let seconds = life_s(&format!("{FIELD}.seconds"), seconds)?;
                Ok(now_s + seconds)
            }
        }
    }
}

/// Reads the fields of an upload, and writes its content to disk.
async fn read_form(
    parts: &mut Multipart,
    files: &Arc<FileStore>,
    owner: Option<&str>,
    allow_unknown: bool,
) -> Result<(Form, Upload), ApiError> {
    let mut form = Form::default();
    let mut upload = None;
    while let Some(part) = parts.next_part().await? {
        const MAX_TEXT_BYTES: usize = 256;
        let text = match part.name.as_str() {
            "file" if upload.is_none() => {
                let mut new = files.begin(owner)?;
                let file = tokio::fs::File::create(&new.path).await;
                let mut file = file.map_err(|error| disk_error(&error))?;
                while let Some(chunk) = parts.chunk().await? {
                    new.grow(chunk.len() as u64)?;
                    let written = file.write_all(&chunk).await;
                    written.map_err(|error| disk_error(&error))?;
                }
                file.flush().await.map_err(|error| disk_error(&error))?;
                form.filename = part.filename;
                upload = Some(new);
                continue;
            }
            "purpose" => &mut form.purpose,
            "expires_after[anchor]" => &mut form.anchor,
            "expires_after[seconds]" => &mut form.seconds,
            "file" => return Err(ApiError::invalid("file", "is there twice")),
            _ if allow_unknown => continue,
            other => return Err(ApiError::unknown_field("", other, None)),
        };
        *text = Some(parts.text(&part.name, MAX_TEXT_BYTES).await?);
    }
    let upload = required("file", upload)?;
    Ok((form, upload))
}

pub async fn upload_file(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let files = server.batches()?.files.clone();
    if server.is_draining() {
        return Err(ApiError::draining());
    }
    // The other fields and all part heads are short.
    const MAX_REST_BYTES: u64 = 64 << 10;
    let max_bytes = files.config.max_file_bytes.saturating_add(MAX_REST_BYTES);
    let mut parts = Multipart::new(&headers, body, server.config.body_timeout, max_bytes)?;
    let owner = context.owner();
    let allow_unknown = server.config.allow_unknown_fields;
    let read = read_form(&mut parts, &files, owner.as_deref(), allow_unknown).await;
    if read.is_err() {
        // If the connection closed while the client still sends, the client would see a reset instead of the answer.
        parts.skip_rest().await;
    }
    let (form, upload) = read?;
    match form.purpose.as_deref() {
        Some(PURPOSE) => {}
        None => return Err(ApiError::invalid("purpose", "is required")),
        Some(_) => {
            let message = "must be \"batch\": this server has files for batches only";
            return Err(ApiError::invalid("purpose", message));
        }
    }
    let now_s = unix_now_s();
    let expires_at = form.expires_at(now_s)?;
    let mut filename = form.filename.unwrap_or_default();
    if filename.len() > MAX_FILENAME_BYTES {
        let message = format!("has a name of more than {MAX_FILENAME_BYTES} bytes");
        return Err(ApiError::invalid("file", message));
    }
    if filename.is_empty() {
        filename.clone_from(&upload.id);
    }
    let record = FileRecord {
        id: upload.id.clone(),
        owner: owner.map(|owner| owner.to_string()),
        bytes: upload.num_bytes,
        created_at: now_s,
        expires_at,
        filename,
        purpose: PURPOSE.to_owned(),
    };
    let object = record.object();
    on_disk(move || upload.complete(record)).await?;
    Ok(json_response(&object))
}

pub async fn list_files(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    uri: Uri,
) -> Result<Response, ApiError> {
    let batches = server.batches()?;
    let allow_unknown = server.config.allow_unknown_fields;
    let query = ListQuery::parse(&uri, MAX_LIMIT, &["purpose"], allow_unknown)?;
    let files = batches.files.list(context.owner().as_deref());
    let is_wanted = |file: &FileRecord| {
        let mut purposes = query.others.iter().map(|(_, purpose)| purpose);
        purposes.all(|purpose| file.purpose == *purpose)
    };
    let files = files.iter().filter(|file| is_wanted(file));
    let files = files.map(FileRecord::object).collect();
    Ok(json_response(&query.page(files)?))
}

pub async fn retrieve_file(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let files = &server.batches()?.files;
    let file = files.find(context.owner().as_deref(), &id)?;
    Ok(json_response(&file.object()))
}

pub async fn delete_file(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let batches: &Batches = server.batches()?;
    batches.files.find(context.owner().as_deref(), &id)?;
    if let Some(batch) = batches.user_of(&id) {
        return Err(ApiError::conflict(format!(
            "The file `{id}` is the input of the batch `{batch}`, which has not ended; cancel it first."
        )));
    }
    let files = batches.files.clone();
    let deleted = id.clone();
    on_disk(move || files.delete(&deleted)).await?;
    Ok(json_response(
        &json!({"id": id, "object": "file", "deleted": true}),
    ))
}

pub async fn file_content(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let files = &server.batches()?.files;
    let record = files.find(context.owner().as_deref(), &id)?;
    let file = tokio::fs::File::open(files.path_of(&id)).await;
    let file = file.map_err(|error| disk_error(&error))?;
    let mut response = Response::new(Body::new(FileBody {
        file,
        num_left: record.bytes,
    }));
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    Ok(response)
}

/// The content of a file, read at the client's pace.
struct FileBody {
    file: tokio::fs::File,
    num_left: u64,
}

impl HttpBody for FileBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        const FRAME_BYTES: usize = 64 << 10;
        let this = self.get_mut();
        if this.num_left == 0 {
            return Poll::Ready(None);
        }
        let mut bytes = vec![0; FRAME_BYTES.min(this.num_left as usize)];
        let mut buffer = ReadBuf::new(&mut bytes);
        match Pin::new(&mut this.file).poll_read(cx, &mut buffer) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Err(error)) => Poll::Ready(Some(Err(error))),
            Poll::Ready(Ok(())) => {
                let num_read = buffer.filled().len();
                if num_read == 0 {
                    let error = std::io::Error::other("the file is shorter than it was");
                    return Poll::Ready(Some(Err(error)));
                }
                this.num_left -= num_read as u64;
                bytes.truncate(num_read);
                Poll::Ready(Some(Ok(Frame::data(bytes.into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.num_left == 0
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        hyper::body::SizeHint::with_exact(self.num_left)
    }
}
