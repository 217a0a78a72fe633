//! Connections to controllers.

use std::sync::Arc;
use std::time::Duration;

use braid_network::ConnectionId;
use braid_slice::LinkId;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;

use crate::controller::connections::Arrival;

/// Time to find a controller and to connect.
const CONNECT: Duration = Duration::from_secs(5);
/// Size of a piece that is read at most.
const PIECE: usize = 16 << 10;

/// A controller is reached, or is not.
pub(super) struct Outside {
    pub(super) link: LinkId,
    pub(super) stream: Result<TcpStream, String>,
}

/// Dials a controller, and reports what came of it.
pub(super) async fn dial(link: LinkId, outside: mpsc::Sender<Outside>) {
    let stream = match timeout(CONNECT, TcpStream::connect(&link.address)).await {
        Ok(Ok(stream)) => {
            // Messages are small, and wait for nothing.
            let _ = stream.set_nodelay(true);
            Ok(stream)
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", CONNECT.as_secs())),
    };
    let _ = outside.send(Outside { link, stream }).await;
}

/// Reads until the connection ends: for each permit one piece.
pub(super) async fn read(mut stream: OwnedReadHalf, id: ConnectionId, may_read: Arc<Semaphore>, arrivals: mpsc::Sender<Arrival>) {
    let mut piece = vec![0; PIECE];
    while let Ok(permit) = may_read.acquire().await {
        permit.forget();
        let arrival = match stream.read(&mut piece).await {
            Ok(size @ 1..) => Arrival::Bytes(id, piece.get(..size).unwrap_or_default().to_vec()),
            _ => break,
        };
        if arrivals.send(arrival).await.is_err() {
            return;
        }
    }
    let _ = arrivals.send(Arrival::Ended(id)).await;
}

#[cfg(test)]
mod tests {
    use braid_openflow::ids::DatapathId;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    fn link(address: String) -> LinkId {
        LinkId { slice: "a".to_owned(), switch: DatapathId(1), address }
    }

    #[tokio::test]
    async fn a_controller_is_read_as_far_as_it_may_be() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (outside, mut dialled) = mpsc::channel(1);
        tokio::spawn(dial(link(listener.local_addr().unwrap().to_string()), outside));
        let (mut controller, _) = listener.accept().await.unwrap();
        let (reading, _writing) = dialled.recv().await.unwrap().stream.unwrap().into_split();
        let (arrivals, mut arrived) = mpsc::channel(4);
        let may_read = Arc::new(Semaphore::new(1));
        tokio::spawn(read(reading, ConnectionId(1), may_read.clone(), arrivals));
        controller.write_all(&[1; 8]).await.unwrap();
        assert!(matches!(arrived.recv().await, Some(Arrival::Bytes(_, bytes)) if bytes == [1; 8]));
        controller.write_all(&[2; 8]).await.unwrap();
        assert!(timeout(Duration::from_millis(50), arrived.recv()).await.is_err());
        may_read.add_permits(2);
        assert!(matches!(arrived.recv().await, Some(Arrival::Bytes(_, bytes)) if bytes == [2; 8]));
        drop(controller);
        assert!(matches!(arrived.recv().await, Some(Arrival::Ended(_))));
    }

    #[tokio::test]
    async fn a_controller_that_is_not_there_is_reported_with_the_reason() {
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let (outside, mut dialled) = mpsc::channel(1);
        dial(link(free.to_string()), outside).await;
        let reason = dialled.recv().await.unwrap().stream.unwrap_err();
        assert!(reason.contains("refused"), "{reason}");
    }
}
