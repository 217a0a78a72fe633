//! What all connections of the proxy share.

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

/// How long a client may take until it is known what it wants.
pub(crate) const GREETING: Duration = Duration::from_secs(20);
/// What all its connections share.
pub(crate) struct Shared {
    pub(crate) access: Access,
    pub(crate) outbound: Arc<dyn Outbound>,
    pub(crate) splicer: Splicer,
    pub(crate) clients: Mutex<BTreeMap<IpAddr, usize>>,
}

/// Moves bytes both ways until both have ended, or nothing has moved for a day. What breaks at one end is reset at the other.
pub(crate) async fn join(mut client: TcpStream, mut onward: impl AsyncRead + AsyncWrite + Unpin) {
    if copy_both(&mut client, &mut onward).await.is_err() {
        let _ = SockRef::from(&client).set_linger(Some(Duration::ZERO));
    }
}

/// The same for a client's connection that has spoken HTTP: `onward` is given first what was read ahead.
pub(crate) async fn join_upgraded(client: Upgraded, mut onward: impl AsyncRead + AsyncWrite + Unpin) {
    // Every client's connection is served as this type.
    let Ok(parts) = client.downcast::<TokioIo<TcpStream>>() else { return };
    let client = parts.io.into_inner();
    match onward.write_all(&parts.read_buf).await {
        Ok(()) => join(client, onward).await,
        Err(_) => drop(SockRef::from(&client).set_linger(Some(Duration::ZERO))),
    }
}
