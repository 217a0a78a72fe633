//! Users who opt in and out: whoever connects asks for the address from which the connection comes. One line of JSON each way.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_bond::host::source;
use braid_peer::quota::Quota;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::controller::ACCEPT_AGAIN;

/// Most users at once, and most of them from one source.
const MAX_USERS: usize = 64;
const MAX_USERS_OF_SOURCE: usize = 4;
/// Time for a question and its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest line.
const MAX_LINE: u64 = 512;

/// What a user asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum UserRequest {
    /// To be in this slice.
    Join(String),
    /// To be in none.
    Leave,
    /// Which slices take users.
    List,
}

/// What a user is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UserAnswer {
    /// It is done.
    Done(String),
    /// It is not, for this reason.
    Refused(String),
    /// The slices that take users.
    Slices(Vec<String>),
}

/// A user's question.
pub(super) struct Asked {
    pub(super) user: IpAddr,
    pub(super) request: UserRequest,
    pub(super) reply: oneshot::Sender<UserAnswer>,
}

/// Accepts users for ever.
pub(super) async fn accept(listener: TcpListener, asking: mpsc::Sender<Asked>) {
    let places = Quota::new(MAX_USERS, MAX_USERS_OF_SOURCE);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let Some(place) = places.try_take(source(peer)) else { continue };
                let asking = asking.clone();
                tokio::spawn(async move {
                    let _ = timeout(PATIENCE, serve(stream, peer, asking)).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a user; trying again");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, peer: SocketAddr, asking: mpsc::Sender<Asked>) -> std::io::Result<()> {
    let (reading, mut writing) = stream.into_split();
    let mut line = String::new();
    BufReader::new(reading.take(MAX_LINE)).read_line(&mut line).await?;
    let answer = match serde_json::from_str::<UserRequest>(&line) {
        Ok(request) => {
            let (reply, answer) = oneshot::channel();
            let _ = asking.send(Asked { user: peer.ip().to_canonical(), request, reply }).await;
            answer.await.unwrap_or_else(|_| UserAnswer::Refused("the slicer is ending".to_owned()))
        }
        Err(error) => UserAnswer::Refused(format!("not understood: {error}; send {{\"join\":\"SLICE\"}}, \"leave\" or \"list\"")),
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    writing.write_all(&text).await?;
    writing.shutdown().await
}

/// Asks a slicer.
///
/// # Errors
/// There is none, or it does not answer.
pub fn ask(slicer: SocketAddr, request: &UserRequest) -> anyhow::Result<UserAnswer> {
    use std::io::{BufRead, BufReader, Read, Write};
    let mut stream = std::net::TcpStream::connect_timeout(&slicer, PATIENCE)
        .map_err(|error| anyhow::anyhow!("no slicer takes users at {slicer}: {error}; ask its operator for the address (users_listen)"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream.take(1 << 16)).read_line(&mut answer)?;
    serde_json::from_str(&answer).map_err(|error| anyhow::anyhow!("{slicer} does not answer as a slicer does: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_user_is_known_by_the_address_of_the_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (asking, mut asked) = mpsc::channel(1);
        tokio::spawn(accept(listener, asking));
        let client = tokio::task::spawn_blocking(move || ask(address, &UserRequest::Join("guests".to_owned())));
        let question = asked.recv().await.unwrap();
        assert_eq!((question.user, question.request), (address.ip(), UserRequest::Join("guests".to_owned())));
        question.reply.send(UserAnswer::Done("welcome".to_owned())).unwrap();
        assert_eq!(client.await.unwrap().unwrap(), UserAnswer::Done("welcome".to_owned()));
        // Noise is answered, and asks nothing.
        let mut noise = TcpStream::connect(address).await.unwrap();
        noise.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
        let mut text = String::new();
        noise.read_to_string(&mut text).await.unwrap();
        assert!(text.contains("not understood"), "{text}");
    }
}
