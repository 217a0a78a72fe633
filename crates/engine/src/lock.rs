//! One daemon per network namespace.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::{Duration, Instant};

/// How long a daemon that starts waits for the guardian of one that died: that sweeps under the lock.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// Held while the daemon lives; the kernel lets go of it when the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _listener: UnixListener,
}

/// Why the lock could not be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockError {
    /// Another daemon has it.
    #[error(
        "another `braid up` is running in this network namespace: use it (`braid status`), or stop it with `braid down`; if there is none, `ss -xlp` tells who holds the name \"@braid daemon\""
    )]
    Held,
    /// The system refused.
    #[error("the lock of this network namespace cannot be taken: {0}")]
    System(#[from] std::io::Error),
}

impl Lock {
    /// Takes the lock; waits for it until `patience` is over.
    pub(crate) fn take_within(patience: Duration) -> Result<Self, LockError> {
        let end = Instant::now() + patience;
        loop {
            match Self::take() {
                Err(LockError::Held) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                other => return other,
            }
        }
    }

    /// Takes the lock: an abstract Unix socket, whose names each network namespace has for itself.
    pub(crate) fn take() -> Result<Self, LockError> {
        let name = SocketAddr::from_abstract_name("braid daemon")?;
        match UnixListener::bind_addr(&name) {
            Ok(listener) => Ok(Self { _listener: listener }),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(LockError::Held),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_is_had_once_at_a_time() {
        let first = Lock::take().unwrap();
        assert!(matches!(Lock::take(), Err(LockError::Held)));
        let later = std::thread::spawn(|| Lock::take_within(Duration::from_secs(60)).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        drop(first);
        let second = later.join().unwrap();
        assert!(matches!(Lock::take_within(Duration::ZERO), Err(LockError::Held)));
        drop(second);
    }
}
