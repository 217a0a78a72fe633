//! Client of a profile service ([`profile_service`](crate::profile_service)).
//!
//! The service signs its answer together with the request's path and query. The query of the daemon holds a random number, so that an old
//! answer, or one to another question, is refused.

use std::time::Duration;

use axum::http::{Request, Uri, header};
use braid_control::core::ProfileQuestion;
use braid_control::profiles::{ProfileError, SIZE_LIMIT, from_json};
use braid_decide::energy::Profile;
use braid_model::key::PublicKey;
use braid_peer::keys::{SIGNATURE_LENGTH, is_signed};
use bytes::Bytes;
use data_encoding::{BASE64, HEXLOWER};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use ring::rand::{SecureRandom, SystemRandom};
use tokio::net::TcpStream;

/// Path of the profiles.
pub const PATH: &str = "/v1/profiles";
/// Header of an answer that holds its signature, in base64.
pub const SIGNATURE: &str = "braid-signature";
/// Context of the signature.
const CONTEXT: &str = "braid energy profiles 1";

/// Time limit for a profile service to answer.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum number of characters of a service's explanation that an error message repeats: nobody has signed it.
const DETAIL_LIMIT: usize = 200;
/// Maximum size of an answer about one device.
const ANSWER_LIMIT: usize = 64 << 10;

/// Why a profile service gave no profiles.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The URL is not one of a profile service.
    #[error("{0} is not a URL of a profile service: write http://HOST:PORT (for an encrypted service, use a proxy or tunnel)")]
    Url(Uri),
    /// There is no connection, or the answer is not HTTP.
    #[error("no profile service answers on {url}: check that `braid energy serve` runs there ({reason})")]
    Unreachable {
        /// The URL.
        url: Uri,
        /// Error of the system or of the HTTP client.
        reason: String,
    },
    /// The answer takes too long.
    #[error("{url} does not answer within {} s", TIMEOUT.as_secs())]
    Timeout {
        /// The URL.
        url: Uri,
    },
    /// The answer ended early or is too large.
    #[error("{url} did not send a complete answer of at most {limit} bytes: {reason}")]
    Incomplete {
        /// The URL.
        url: Uri,
        /// The limit.
        limit: usize,
        /// Error of the HTTP client.
        reason: String,
    },
    /// The service refused.
    #[error("{url} refused with status {status}{detail}")]
    Refused {
        /// The URL.
        url: Uri,
        /// HTTP status.
        status: u16,
        /// The service's explanation.
        detail: String,
    },
    /// The signature is missing or wrong.
    #[error("{0} did not sign its answer with the expected key: check the key that `braid energy serve` prints there, and the address")]
    Unsigned(Uri),
    /// The answer is malformed.
    #[error(transparent)]
    Malformed(#[from] ProfileError),
    /// The system gives no random numbers.
    #[error("the system provides no random numbers")]
    Random,
}

/// Fetches the profiles at `url`. With a key, the answer must be signed with it.
///
/// Must run inside a tokio runtime with I/O and time enabled.
pub async fn fetch(url: &Uri, key: Option<&PublicKey>) -> Result<Vec<Profile>, FetchError> {
    within_time(url, key, SIZE_LIMIT).await
}

/// Asks a service for the profile of one device. Only the device's technology, names and numbers are sent.
///
/// Must run inside a tokio runtime with I/O and time enabled.
pub async fn ask(question: &ProfileQuestion) -> Result<Vec<Profile>, FetchError> {
    let mut nonce = [0; 16];
    SystemRandom::new().fill(&mut nonce).map_err(|_| FetchError::Random)?;
    let mut query = format!("technology={}&nonce={}", question.technology, HEXLOWER.encode(&nonce));
    let (service, model) = (&question.service, &question.model);
    for (key, value) in [("model", &model.name), ("product", &model.product), ("id", &model.id)] {
        if let Some(value) = value {
            query += &format!("&{key}={}", escaped(value));
        }
    }
    let url = format!("http://{}{PATH}?{query}", service.address);
    let url: Uri = url.parse().map_err(|_| FetchError::Url(Uri::default()))?;
    within_time(&url, Some(&service.key), ANSWER_LIMIT).await
}

/// The bytes that an answer's signature covers: path and query of the request, a line feed, and the body.
pub(crate) fn signed_part(request: &str, body: &[u8]) -> Vec<u8> {
    [request.as_bytes(), b"\n", body].concat()
}

/// The value of [`SIGNATURE`] for an answer.
pub(crate) fn sign(keys: &braid_peer::keys::KeyPair, request: &str, body: &[u8]) -> String {
    BASE64.encode(&keys.sign(CONTEXT, &signed_part(request, body)))
}

/// Percent-encodes a value of a query (RFC 3986, section 2.3).
fn escaped(value: &str) -> String {
    let byte = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    value.bytes().map(byte).collect()
}

async fn within_time(url: &Uri, key: Option<&PublicKey>, limit: usize) -> Result<Vec<Profile>, FetchError> {
    let answer = tokio::time::timeout(TIMEOUT, download(url, key, limit)).await;
    let body = answer.map_err(|_| FetchError::Timeout { url: url.clone() })??;
    Ok(from_json(&url.to_string(), &body)?)
}

async fn download(url: &Uri, key: Option<&PublicKey>, limit: usize) -> Result<Bytes, FetchError> {
    let host = url.host().filter(|_| url.scheme_str() == Some("http")).ok_or_else(|| FetchError::Url(url.clone()))?;
    let path = match url.path_and_query() {
        Some(path) if path.as_str() != "/" => path.as_str(),
        _ => PATH,
    };
    let name = host.trim_start_matches('[').trim_end_matches(']');
    let unreachable = |error: &dyn std::fmt::Display| FetchError::Unreachable { url: url.clone(), reason: error.to_string() };
    let stream = TcpStream::connect((name, url.port_u16().unwrap_or(80))).await.map_err(|error| unreachable(&error))?;
    let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = shaken.map_err(|error| unreachable(&error))?;
    tokio::spawn(connection);
    let authority = url.authority().map_or(host, |authority| authority.as_str().rsplit('@').next().unwrap_or(host));
    let request = Request::get(path).header(header::HOST, authority).body(Empty::<Bytes>::new());
    let request = request.map_err(|_| FetchError::Url(url.clone()))?;
    let answer = sender.send_request(request).await.map_err(|error| unreachable(&error))?;
    let status = answer.status();
    let signature = answer.headers().get(SIGNATURE).and_then(|value| BASE64.decode(value.as_bytes()).ok());
    let body = Limited::new(answer.into_body(), limit).collect().await;
    let incomplete = |error: &dyn std::fmt::Display| FetchError::Incomplete { url: url.clone(), limit, reason: error.to_string() };
    let body = body.map_err(|error| incomplete(&error))?.to_bytes();
    if !status.is_success() {
        let problem = serde_json::from_slice::<braid_api::Problem>(&body).map(|problem| format!(": {problem}")).unwrap_or_default();
        let detail = problem.chars().take(DETAIL_LIMIT).map(|char| if char.is_control() { ' ' } else { char }).collect();
        return Err(FetchError::Refused { url: url.clone(), status: status.as_u16(), detail });
    }
    let signature = signature.filter(|signature| signature.len() == SIGNATURE_LENGTH).unwrap_or_default();
    match key {
        Some(key) if !is_signed(key, CONTEXT, &signed_part(path, &body), &signature) => Err(FetchError::Unsigned(url.clone())),
        _ => Ok(body),
    }
}
