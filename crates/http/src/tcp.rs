//! The API over TCP: without TLS on the loopback only.

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
use braid_platform::linux::sockdiag;
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
use super::connections::{Connection, Patience};
use crate::access::Origin;

/// The most connections at a time, and of one address or its network. For one more, the oldest goes that has not shown that it may change
/// something.
const MOST: usize = 128;
const OF_ONE: usize = 32;
/// How long a client may take to agree on TLS.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Where the API listens besides its Unix socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UiOptions {
    /// The address.
    pub listen: SocketAddr,
    /// Names that browsers may come by, besides addresses and `localhost`.
    pub names: Vec<String>,
    /// Certificate chain and key (PEM); `None`: one of Braid's own, where TLS is needed.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl UiOptions {
    /// Whether TLS is spoken: always but on the loopback, where a certificate must ask for it.
    pub fn tls(&self) -> bool {
        self.certificate.is_some() || !self.listen.ip().is_loopback()
    }
}

/// Why it cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum UiError {
    /// The address cannot be listened on.
    #[error("cannot listen on {listen} for the web page: {error}; name another --ui ADDRESS:PORT")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// What the system says.
        error: io::Error,
    },
    /// The certificate will not do.
    #[error("cannot use the certificate {path}: {reason}; name a PEM file of a certificate and one of its key, or leave both out")]
    Certificate {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Tokens or the own certificate cannot be kept.
    #[error("cannot keep what the web page needs in {path}: {error}; name a --state-dir that can be written")]
    State {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
}

/// A port that listens, not served yet.
#[derive(Debug)]
pub(super) struct Door {
    listener: std::net::TcpListener,
    config: Option<Arc<ServerConfig>>,
    /// Where it listens.
    pub(super) address: SocketAddr,
    /// The SHA-256 of the own certificate, which people compare with what their browser shows.
    pub(super) fingerprint: Option<String>,
}

impl Door {
    /// Listens; the own certificate is kept in `folder`.
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

    /// Begins to let clients in. Call within a tokio runtime.
    pub(super) fn enter(self) -> io::Result<Entrance> {
        let listener = TcpListener::from_std(self.listener)?;
        let acceptor = self.config.map(TlsAcceptor::from);
        let (send, incoming) = mpsc::channel(1);
        let task = tokio::spawn(accept(listener, acceptor, send));
        Ok(Entrance { incoming, task, address: self.address })
    }
}

/// The certificate that browsers do not know: made at the first start, so that people have to compare it once only.
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
    let first = certificates.first().ok_or_else(|| bad(chain, &"there is none in it"))?;
    let hash: Vec<String> = digest(&SHA256, first).as_ref().iter().map(|byte| format!("{byte:02X}")).collect();
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| bad(key, &error))?;
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, private));
    let mut config = config.map_err(|error| bad(chain, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok((Arc::new(config), hash.join(":")))
}

/// Whom a connection counts for: a user of this machine, as far as that can be told, or an address elsewhere.
fn origin(stream: &TcpStream, remote: SocketAddr) -> Origin {
    let Ok(local) = stream.local_addr() else { return Origin::Somebody };
    let [own, far] = [local, remote].map(|address| address.ip().to_canonical());
    if !far.is_loopback() && far != own {
        return Origin::Address(source(remote));
    }
    let owner = sockdiag::owner(Protocol::Tcp, remote, local).ok().flatten();
    owner.and_then(|owner| owner.user).map_or(Origin::Somebody, Origin::User)
}

async fn accept(listener: TcpListener, acceptor: Option<TlsAcceptor>, clients: mpsc::Sender<Connection<Stream>>) {
    let quota = Quota::new(MOST, OF_ONE);
    let mut listener = listener;
    loop {
        // It waits where the system has no descriptor left.
        let (stream, remote) = Listener::accept(&mut listener).await;
        let Some((permit, mut ended)) = quota.take(origin(&stream, remote)) else { continue };
        let (acceptor, clients) = (acceptor.clone(), clients.clone());
        tokio::spawn(async move {
            // An event that is small must not wait for the next.
            let _ = stream.set_nodelay(true);
            let stream = match acceptor {
                None => Stream::Plain(stream),
                Some(acceptor) => {
                    let agreed = tokio::select! {
                        agreed = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)) => agreed,
                        _ = &mut ended => return,
                    };
                    match agreed {
                        Ok(Ok(stream)) => Stream::Tls(Box::new(stream)),
                        // A scanner, or one that does not trust the certificate.
                        _ => return,
                    }
                }
            };
            let permit = Arc::new(permit);
            let connection = Connection::of(stream, ApiClient::Remote(permit.clone()), Patience::default());
            let _ = clients.send(connection.at(permit, ended)).await;
        });
    }
}

/// Clients that have come in by TCP.
pub(super) struct Entrance {
    incoming: mpsc::Receiver<Connection<Stream>>,
    task: JoinHandle<()>,
    address: SocketAddr,
}

impl Drop for Entrance {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Listener for Entrance {
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
    fn tls_is_spoken_but_on_the_loopback_and_the_own_certificate_stays() {
        let folder = tempfile::tempdir().unwrap();
        let options = |listen: &str| UiOptions { listen: listen.parse().unwrap(), names: vec!["braid.lan".into()], certificate: None };
        assert!(!options("127.0.0.1:1").tls() && !options("[::1]:1").tls() && options("0.0.0.0:1").tls() && options("10.0.0.1:1").tls());
        let plain = Door::open(&options("127.0.0.1:0"), folder.path()).unwrap();
        assert!(plain.fingerprint.is_none() && folder.path().read_dir().unwrap().next().is_none());
        let taken = Door::open(&UiOptions { listen: plain.address, ..options("127.0.0.1:0") }, folder.path()).unwrap_err().to_string();
        assert!(taken.contains("name another --ui"), "{taken}");
        let prints: Vec<_> = (0..2).map(|_| Door::open(&options("0.0.0.0:0"), folder.path()).unwrap().fingerprint.unwrap()).collect();
        assert!(prints[0] == prints[1] && prints[0].len() == 95, "{prints:?}");
    }

    #[test]
    fn a_certificate_that_will_not_do_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (chain, key) = (folder.path().join("c.pem"), folder.path().join("k.pem"));
        let open = || {
            let options =
                UiOptions { listen: "127.0.0.1:0".parse().unwrap(), names: Vec::new(), certificate: Some((chain.clone(), key.clone())) };
            Door::open(&options, folder.path()).unwrap_err().to_string()
        };
        assert!(open().contains("c.pem"));
        std::fs::write(&chain, "").unwrap();
        assert!(open().contains("there is none in it"));
        let made = rcgen::generate_simple_self_signed(vec!["a".into()]).unwrap();
        std::fs::write(&chain, made.cert.pem()).unwrap();
        std::fs::write(&key, "nonsense").unwrap();
        assert!(open().contains("k.pem"));
        let other = rcgen::generate_simple_self_signed(vec!["a".into()]).unwrap();
        std::fs::write(&key, other.signing_key.serialize_pem()).unwrap();
        assert!(open().contains("c.pem"), "the key is another's");
    }

    #[tokio::test]
    async fn a_connection_of_this_machine_is_its_users() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, from) = listener.accept().await.unwrap();
        let own = braid_platform::linux::sys::process::own_user();
        assert_eq!(origin(&accepted, from), Origin::User(own));
        drop(near);
        assert_eq!(origin(&accepted, from), Origin::Somebody);
        let elsewhere = "192.0.2.1:9".parse().unwrap();
        assert_eq!(origin(&accepted, elsewhere), Origin::Address(source(elsewhere)));
    }
}
