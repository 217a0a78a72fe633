//! The profile service over HTTP (OPERETTA III.C's online service): `GET /v1/profiles[?technology=T][&model=M][&product=P][&id=V:D][&nonce=N]`.
//!
//! `model` is a name from a database of hardware, `product` the name that a USB device reports, and `id` the device's numbers. The answer's
//! signature (`braid-signature`) covers the query, so a random `nonce` proves that the answer is fresh.
//!
//! It is read-only, so clients cannot change anything. Connections are limited in number and in time, and hyper limits the size of
//! requests.

pub mod database;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::Uri;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use braid_api::Problem;
use braid_decide::energy::{Profile, Profiles, Technology};
use braid_model::DeviceModel;
use braid_peer::keys::KeyPair;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};

use crate::Refusal;
use crate::profile_client::{self, SIGNATURE};
use database::Database;

/// Maximum number of concurrent connections; further ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 128;
/// Maximum lifetime of a connection.
const LIFETIME: Duration = Duration::from_secs(20);

/// The database, and the key that signs answers.
struct Service {
    database: Mutex<Database>,
    keys: KeyPair,
}

type Shared = State<Arc<Service>>;

/// Serves the profiles of `database` on `listener`, signed with `keys`, until `end` resolves.
pub async fn serve(
    listener: TcpListener,
    database: Database,
    keys: KeyPair,
    end: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let router = Router::new()
        .route("/v1/profiles", get(profiles))
        .fallback(async || refuse(404, "Not found", "the only path is /v1/profiles?technology=T&model=M".to_owned()))
        .method_not_allowed_fallback(async || refuse(405, "Wrong method", "use GET to read profiles".to_owned()))
        .with_state(Arc::new(Service { database: Mutex::new(database), keys }));
    let bounded = Bounded { listener, slots: Arc::new(Semaphore::new(MAX_CONNECTIONS)), lifetime: LIFETIME };
    axum::serve(bounded, router).with_graceful_shutdown(end).await
}

fn refuse(status: u16, title: &str, detail: String) -> Refusal {
    Refusal(Problem::new(status, title, detail))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    technology: Option<String>,
    model: Option<String>,
    product: Option<String>,
    id: Option<String>,
    /// Only signed.
    #[serde(rename = "nonce")]
    _nonce: Option<String>,
}

async fn profiles(State(service): Shared, uri: Uri, wanted: Result<Query<Wanted>, QueryRejection>) -> Result<Response, Refusal> {
    let Query(wanted) = wanted.map_err(|error| refuse(400, "Not understood", error.body_text()))?;
    let technology = wanted.technology.as_deref().map(str::parse::<Technology>).transpose();
    let technology = technology.map_err(|error| refuse(400, "Not understood", error.to_string()))?;
    let found = service.database.lock().unwrap_or_else(PoisonError::into_inner).profiles(technology);
    let found = found.map_err(|error| {
        tracing::warn!("{error}");
        refuse(500, "Not read", "cannot read the profiles now: see the service's log".to_owned())
    })?;
    let rows = select(found, &DeviceModel { id: wanted.id, name: wanted.model, product: wanted.product });
    let body = serde_json::json!({ "schema_version": braid_api::SCHEMA_VERSION, "profiles": rows }).to_string();
    let request = uri.path_and_query().map_or("", |path| path.as_str());
    let signature = profile_client::sign(&service.keys, request, body.as_bytes());
    Ok(([(CONTENT_TYPE.as_str(), "application/json".to_owned()), (SIGNATURE, signature)], body).into_response())
}

/// The requested rows. With a model: for each technology, the profile nearest to it.
fn select(found: Vec<Profile>, model: &DeviceModel) -> Vec<braid_decide::energy::Row> {
    if model.label().is_none() {
        return found.iter().map(|profile| profile.row().clone()).collect();
    }
    let mut all = Profiles::default();
    all.extend(found);
    let nearest = |technology| all.nearest(model, technology).map(|nearest| nearest.profile.row().clone());
    Technology::ALL.iter().filter_map(|(_, technology)| nearest(*technology)).collect()
}

/// A listener that limits the number and the lifetime of connections.
struct Bounded {
    listener: TcpListener,
    slots: Arc<Semaphore>,
    lifetime: Duration,
}

impl Listener for Bounded {
    type Io = TimedConnection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TimedConnection, SocketAddr) {
        let permit = match Arc::clone(&self.slots).acquire_owned().await {
            Ok(permit) => permit,
            // The semaphore is never closed.
            Err(_) => std::future::pending().await,
        };
        let (stream, from) = Listener::accept(&mut self.listener).await;
        (TimedConnection { stream, end: Box::pin(sleep(self.lifetime)), _permit: permit }, from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection with a maximum lifetime.
struct TimedConnection {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl TimedConnection {
    /// The stream, or a timeout error at the end of its lifetime.
    fn live_stream(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(Pin::new(&mut self.stream)),
        }
    }
}

impl AsyncRead for TimedConnection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.live_stream(context)?.poll_read(context, buffer)
    }
}

impl AsyncWrite for TimedConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.live_stream(context)?.poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.live_stream(context)?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.live_stream(context)?.poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile_client::{FetchError, PATH, ask as ask_service, fetch};
    use braid_control::config::EnergyService;
    use braid_control::core::ProfileQuestion;
    use braid_model::LinkIndex;
    use braid_model::address::Address;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::oneshot;

    /// Runs a service until the sender is dropped.
    async fn start() -> (EnergyService, SocketAddr, oneshot::Sender<()>, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("energy.sqlite")).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (end, ended) = oneshot::channel::<()>();
        let keys = KeyPair::generate().unwrap();
        let service = EnergyService { address: Address::from(address), key: keys.public() };
        tokio::spawn(serve(listener, database, keys, async move { drop(ended.await) }));
        (service, address, end, folder)
    }

    async fn exchange(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request).await.unwrap();
        let mut text = Vec::new();
        // A service that rejects a request early may reset the connection; its answer is received nevertheless.
        let _ = stream.read_to_end(&mut text).await;
        String::from_utf8_lossy(&text).into_owned()
    }

    async fn ask(address: SocketAddr, path: &str) -> String {
        exchange(address, format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await
    }

    #[tokio::test]
    async fn profiles_are_selected_by_technology_and_model() {
        let (_, address, _end, _folder) = start().await;
        let body = |text: String| text.split_once("\r\n\r\n").unwrap().1.to_owned();
        let all = braid_control::profiles::from_json("service", body(ask(address, "/v1/profiles").await).as_bytes()).unwrap();
        assert_eq!(all.len(), braid_control::profiles::shipped().iter().count());
        let path = "/v1/profiles?technology=wifi&model=netgear%20MA701";
        let one = braid_control::profiles::from_json("service", body(ask(address, path).await).as_bytes()).unwrap();
        assert_eq!(one.iter().map(|profile| profile.row().transmit_mw).collect::<Vec<_>>(), [990.0]);
    }

    #[tokio::test]
    async fn a_device_gets_its_signed_profile_and_nothing_else_is_accepted() {
        let (service, address, _end, _folder) = start().await;
        let model = DeviceModel {
            id: Some("8086:1229".to_owned()),
            name: Some("Intel Corporation 82557/8/9/0/1 Ethernet Pro 100".to_owned()),
            product: Some("a & b=c%ü#?".to_owned()),
        };
        let question = |service: &EnergyService| ProfileQuestion {
            link: LinkIndex(3),
            technology: Technology::Ethernet,
            model: model.clone(),
            service: service.clone(),
        };
        let rows = ask_service(&question(&service)).await.unwrap();
        assert_eq!(rows.iter().map(|profile| profile.row().model.as_str()).collect::<Vec<_>>(), ["Intel 82559"]);
        let stranger = EnergyService { key: KeyPair::generate().unwrap().public(), ..service.clone() };
        assert!(matches!(ask_service(&question(&stranger)).await, Err(FetchError::Unsigned(_))));
        let url: Uri = format!("http://{address}{PATH}?technology=lte").parse().unwrap();
        assert!(fetch(&url, Some(&service.key)).await.unwrap().len() > 1);
        assert!(fetch(&url, None).await.is_ok() && fetch(&url, Some(&stranger.key)).await.is_err());
    }

    /// Answers each connection with `answer`.
    async fn impostor(answer: Vec<u8>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4096]).await;
                let _ = stream.write_all(&answer).await;
            }
        });
        address
    }

    #[tokio::test]
    async fn a_replayed_or_oversized_answer_is_refused() {
        let (service, address, _end, _folder) = start().await;
        // A genuine answer to another request of the same service.
        let genuine = ask(address, "/v1/profiles?technology=ethernet&nonce=0").await;
        assert!(genuine.contains(SIGNATURE));
        let question = |service: &EnergyService| ProfileQuestion {
            link: LinkIndex(3),
            technology: Technology::Ethernet,
            model: DeviceModel { id: Some("1:2".to_owned()), ..DeviceModel::default() },
            service: service.clone(),
        };
        let replayed = EnergyService { address: Address::from(impostor(genuine.into_bytes()).await), ..service.clone() };
        assert!(matches!(ask_service(&question(&replayed)).await, Err(FetchError::Unsigned(_))));
        let huge = [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n".to_vec(), vec![b' '; 100_000]].concat();
        let wordy = format!(r#"{{"title": "full", "status": 500, "detail": "{}"}}"#, r"\n".repeat(20_000));
        let wordy = [b"HTTP/1.1 500 X\r\nconnection: close\r\n\r\n".to_vec(), wordy.into_bytes()].concat();
        let wordy = EnergyService { address: Address::from(impostor(wordy).await), ..service.clone() };
        let Err(FetchError::Refused { detail, .. }) = ask_service(&question(&wordy)).await else { panic!("it is refused") };
        assert!(detail.chars().count() <= 200 && !detail.contains('\n'), "{detail:?}");
        let huge = EnergyService { address: Address::from(impostor(huge).await), ..service };
        assert!(matches!(ask_service(&question(&huge)).await, Err(FetchError::Incomplete { .. })));
    }

    #[tokio::test]
    async fn hostile_requests_are_rejected_and_the_service_continues() {
        let (_, address, _end, _folder) = start().await;
        for (path, code) in [
            ("/v1/profiles?technology=6g", "400"),
            ("/v1/profiles?technology=wifi'%20OR%201=1--", "400"),
            ("/v1/profiles?tecnology=wifi", "400"),
            ("/v1/profiles?model=%ff%00", "200"),
            ("/../../etc/passwd", "404"),
        ] {
            let answer = ask(address, path).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {code}")), "{path}: {answer}");
        }
        assert!(exchange(address, b"DELETE /v1/profiles HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.contains(" 405 "));
        let endless = format!("GET /v1/profiles?model={} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(1 << 20));
        assert!(exchange(address, endless.as_bytes()).await.lines().next().is_none_or(|line| line.contains(" 4")));
        exchange(address, b"\x16\x03\x01\x00\xff\x00\x01 this is TLS\r\n\r\n").await;
        assert!(ask(address, "/v1/profiles").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn an_idle_connection_times_out_and_frees_its_slot() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut bounded = Bounded { listener, slots: Arc::new(Semaphore::new(1)), lifetime: Duration::from_millis(50) };
        let (_idle, _next) = (TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap());
        let (mut first, _) = bounded.accept().await;
        assert!(tokio::time::timeout(Duration::from_millis(20), bounded.accept()).await.is_err(), "one at a time");
        assert_eq!(first.read(&mut [0; 1]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(first);
        assert!(tokio::time::timeout(Duration::from_secs(60), bounded.accept()).await.is_ok());
    }
}
