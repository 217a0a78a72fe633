//! State and helpers shared by all connections of the proxy.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use braid_fetch::splice::Splicer;
use braid_transport::copy_both;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::access::Access;
use crate::outbound::Outbound;

/// Time limit for a client's greeting and request.
pub(crate) const GREETING_TIMEOUT: Duration = Duration::from_secs(20);
/// State shared by all connections.
pub(crate) struct Shared {
    pub(crate) access: Access,
    pub(crate) outbound: Arc<dyn Outbound>,
    pub(crate) splicer: Splicer,
    pub(crate) clients: Mutex<BTreeMap<IpAddr, usize>>,
}

/// Forwards bytes both ways until both ends have finished, or nothing has moved for a day. If one end breaks, resets the client.
pub(crate) async fn join(mut client: TcpStream, mut onward: impl AsyncRead + AsyncWrite + Unpin) {
    if copy_both(&mut client, &mut onward).await.is_err() {
        let _ = SockRef::from(&client).set_linger(Some(Duration::ZERO));
    }
}

/// Like [`join`], for an HTTP client connection; sends the bytes that were read ahead to `onward` first.
pub(crate) async fn join_upgraded(client: Upgraded, mut onward: impl AsyncRead + AsyncWrite + Unpin) {
    // Every client connection is served with this type.
    let Ok(parts) = client.downcast::<TokioIo<TcpStream>>() else { return };
    let client = parts.io.into_inner();
    match onward.write_all(&parts.read_buf).await {
        Ok(()) => join(client, onward).await,
        Err(_) => drop(SockRef::from(&client).set_linger(Some(Duration::ZERO))),
    }
}
