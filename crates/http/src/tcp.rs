//! The API over TCP, with TLS except on loopback.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use braid_bond::host::source;
use braid_model::Protocol;
use braid_peer::quota::Quota;
use braid_peer::state::StateDirError;
use braid_platform::linux::sockdiag;
use braid_platform::linux::worker::Worker;
use ring::digest::{SHA256, digest};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::access::ApiClient;
use super::connections::{Connection, Timeouts};
use crate::access::Origin;

/// Maximum number of connections, and of those from one address or its network. At a limit, a new connection replaces the oldest one that has
/// not authenticated for full access.
const MAX_CONNECTIONS: usize = 128;
const MAX_PER_ORIGIN: usize = 32;
/// Time limit for the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a new connection waits for the kernel to name its user.
const OWNER_WAIT: Duration = Duration::from_millis(250);

/// Options of the API over TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UiOptions {
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Host names that browsers may use, besides addresses and `localhost`.
    pub names: Vec<String>,
    /// Certificate chain and key (PEM); `None`: Braid's own certificate, if TLS is needed.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl UiOptions {
    /// Whether TLS is used: always, except on loopback without a configured certificate.
    pub fn tls(&self) -> bool {
        self.certificate.is_some() || !self.listen.ip().is_loopback()
    }
}

/// Reason why the API cannot be served over TCP.
#[derive(Debug, thiserror::Error)]
pub enum UiError {
    /// The address cannot be bound.
    #[error("cannot listen on {listen} for the web page: {error}; specify another --ui ADDRESS:PORT")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// Error from the system.
        error: io::Error,
    },
    /// The certificate is not usable.
    #[error("cannot use the certificate {path}: {reason}; specify PEM files for a certificate and its key, or omit both")]
    Certificate {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Their directory cannot be created, or other users may write to it.
    #[error("cannot keep the web page's tokens: {0}")]
    Folder(#[from] StateDirError),
    /// Tokens or Braid's own certificate cannot be stored.
    #[error("cannot store the web page's tokens and certificate in {path}: {error}; specify a writable --state-dir")]
    State {
        /// Path of the directory.
        path: PathBuf,
        /// Error from the system.
        error: io::Error,
    },
}

/// A bound TCP port, not served yet.
#[derive(Debug)]
pub(super) struct BoundPort {
    listener: std::net::TcpListener,
    config: Option<Arc<ServerConfig>>,
    /// Address it listens on.
    pub(super) address: SocketAddr,
    /// SHA-256 of Braid's own certificate, which users compare with the one that their browser shows.
    pub(super) fingerprint: Option<String>,
}

impl BoundPort {
    /// Binds the address; stores Braid's own certificate in `folder`.
    pub(super) fn open(options: &UiOptions, folder: &Path) -> Result<Self, UiError> {
        let failed = |error| UiError::Listen { listen: options.listen, error };
        let listener = std::net::TcpListener::bind(options.listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (mut config, mut fingerprint) = (None, None);
        if options.tls() {
            let (chain, key) = match &options.certificate {
                Some((chain, key)) => (chain.clone(), key.clone()),
                None => own_certificate(options, folder).map_err(|error| UiError::State { path: folder.to_owned(), error })?,
            };
            let (made, first) = tls(&chain, &key)?;
            config = Some(made);
            fingerprint = options.certificate.is_none().then_some(first);
        }
        Ok(Self { listener, config, address, fingerprint })
    }

    /// Starts to accept clients. Call within a tokio runtime.
    pub(super) fn accept_clients(self) -> io::Result<TcpConnections> {
        let listener = TcpListener::from_std(self.listener)?;
        let acceptor = self.config.map(TlsAcceptor::from);
        let (send, incoming) = mpsc::channel(1);
        let task = tokio::spawn(accept(listener, acceptor, send));
        Ok(TcpConnections { incoming, task, address: self.address })
    }
}

/// Braid's self-signed certificate, created at the first start and kept, so that users have to verify it only once.
fn own_certificate(options: &UiOptions, folder: &Path) -> io::Result<(PathBuf, PathBuf)> {
    let (chain, key) = (folder.join("ui-cert.pem"), folder.join("ui-key.pem"));
    if chain.exists() && key.exists() {
        return Ok((chain, key));
    }
    let mut names: Vec<String> = options.names.clone();
    names.extend(["localhost".to_owned(), options.listen.ip().to_string()]);
    names.dedup();
    let made = rcgen::generate_simple_self_signed(names).map_err(io::Error::other)?;
    write_private(&key, &made.signing_key.serialize_pem())?;
    write_private(&chain, &made.cert.pem())?;
    Ok((chain, key))
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let _ = std::fs::remove_file(path);
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())?;
    file.sync_all()
}

fn tls(chain: &Path, key: &Path) -> Result<(Arc<ServerConfig>, String), UiError> {
    let bad = |path: &Path, reason: &dyn std::fmt::Display| UiError::Certificate { path: path.to_owned(), reason: reason.to_string() };
    let certificates: Vec<CertificateDer<'static>> =
        CertificateDer::pem_file_iter(chain).and_then(Iterator::collect).map_err(|error| bad(chain, &error))?;
    let first = certificates.first().ok_or_else(|| bad(chain, &"it holds no certificate"))?;
    let hash: Vec<String> = digest(&SHA256, first).as_ref().iter().map(|byte| format!("{byte:02X}")).collect();
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| bad(key, &error))?;
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, private));
    let mut config = config.map_err(|error| bad(chain, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok((Arc::new(config), hash.join(":")))
}

/// The origin that a connection counts for: a user of this machine, if known, or a remote address.
async fn origin(stream: &TcpStream, remote: SocketAddr, owners: &Worker) -> Origin {
    let Ok(local) = stream.local_addr() else { return Origin::Somebody };
    let [own, far] = [local, remote].map(|address| address.ip().to_canonical());
    if !far.is_loopback() && far != own {
        return Origin::Address(source(remote));
    }
    let asked = owners.ask_async(OWNER_WAIT, move || sockdiag::owner(Protocol::Tcp, remote, local)).await;
    let owner = asked.ok().and_then(|answer| answer.ok()?);
    owner.and_then(|owner| owner.user).map_or(Origin::Somebody, Origin::User)
}

async fn accept(listener: TcpListener, acceptor: Option<TlsAcceptor>, clients: mpsc::Sender<Connection<Stream>>) {
    let quota = Quota::new(MAX_CONNECTIONS, MAX_PER_ORIGIN);
    let owners = Worker::new("braid-owners", 1);
    let mut listener = listener;
    loop {
        // Waits if the system has no descriptor left.
        let (stream, remote) = Listener::accept(&mut listener).await;
        let Some((permit, mut ended)) = quota.take(origin(&stream, remote, &owners).await) else { continue };
        let (acceptor, clients) = (acceptor.clone(), clients.clone());
        tokio::spawn(async move {
            // A small event must not wait for the next one.
            let _ = stream.set_nodelay(true);
            let stream = match acceptor {
                None => Stream::Plain(stream),
                Some(acceptor) => {
                    let agreed = tokio::select! {
                        agreed = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)) => agreed,
                        _ = &mut ended => return,
                    };
                    match agreed {
                        Ok(Ok(stream)) => Stream::Tls(Box::new(stream)),
                        // A scanner, or a client that does not trust the certificate.
                        _ => return,
                    }
                }
            };
            let permit = Arc::new(permit);
            let connection = Connection::of(stream, ApiClient::Remote(permit.clone()), Timeouts::default());
            let _ = clients.send(connection.at(permit, ended)).await;
        });
    }
}

/// Accepted TCP clients.
pub(super) struct TcpConnections {
    incoming: mpsc::Receiver<Connection<Stream>>,
    task: JoinHandle<()>,
    address: SocketAddr,
}

impl Drop for TcpConnections {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Listener for TcpConnections {
    type Io = Connection<Stream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection<Stream>, SocketAddr) {
        match self.incoming.recv().await {
            Some(connection) => (connection, self.address),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// A TCP connection, with TLS or without.
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_is_used_except_on_loopback_and_the_own_certificate_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let options = |listen: &str| UiOptions { listen: listen.parse().unwrap(), names: vec!["braid.lan".into()], certificate: None };
        assert!(!options("127.0.0.1:1").tls() && !options("[::1]:1").tls() && options("0.0.0.0:1").tls() && options("10.0.0.1:1").tls());
        let plain = BoundPort::open(&options("127.0.0.1:0"), folder.path()).unwrap();
        assert!(plain.fingerprint.is_none() && folder.path().read_dir().unwrap().next().is_none());
        let taken = BoundPort::open(&UiOptions { listen: plain.address, ..options("127.0.0.1:0") }, folder.path()).unwrap_err().to_string();
        assert!(taken.contains("specify another --ui"), "{taken}");
        let prints: Vec<_> = (0..2).map(|_| BoundPort::open(&options("0.0.0.0:0"), folder.path()).unwrap().fingerprint.unwrap()).collect();
        assert!(prints[0] == prints[1] && prints[0].len() == 95, "{prints:?}");
    }

    #[test]
    fn an_unusable_certificate_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let (chain, key) = (folder.path().join("c.pem"), folder.path().join("k.pem"));
        let open = || {
            let options =
                UiOptions { listen: "127.0.0.1:0".parse().unwrap(), names: Vec::new(), certificate: Some((chain.clone(), key.clone())) };
            BoundPort::open(&options, folder.path()).unwrap_err().to_string()
        };
        assert!(open().contains("c.pem"));
        std::fs::write(&chain, "").unwrap();
        assert!(open().contains("it holds no certificate"));
        let made = rcgen::generate_simple_self_signed(vec!["a".into()]).unwrap();
        std::fs::write(&chain, made.cert.pem()).unwrap();
        std::fs::write(&key, "nonsense").unwrap();
        assert!(open().contains("k.pem"));
        let other = rcgen::generate_simple_self_signed(vec!["a".into()]).unwrap();
        std::fs::write(&key, other.signing_key.serialize_pem()).unwrap();
        assert!(open().contains("c.pem"), "the key belongs to another certificate");
    }

    #[tokio::test]
    async fn a_local_connection_counts_for_its_user() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, from) = listener.accept().await.unwrap();
        let own = braid_platform::linux::sys::process::own_user();
        let owners = Worker::new("test", 1);
        assert_eq!(origin(&accepted, from, &owners).await, Origin::User(own));
        drop(near);
        assert_eq!(origin(&accepted, from, &owners).await, Origin::Somebody);
        let elsewhere = "192.0.2.1:9".parse().unwrap();
        assert_eq!(origin(&accepted, elsewhere, &owners).await, Origin::Address(source(elsewhere)));
    }
}
