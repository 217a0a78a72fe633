//! One daemon per network namespace.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::{Duration, Instant};

use braid_platform::linux::sys::process as sys;

/// How long a daemon that starts waits for the guardian of one that died: that sweeps under the lock.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

const NAME: &[u8] = b"braid daemon";

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
    /// The name belongs to somebody who may not run a daemon.
    #[error(
        "user {user} holds the name \"@braid daemon\", by which one `braid up` knows of another; it is no Braid: `ss -xlp` tells its process; end it"
    )]
    Stranger {
        /// Who.
        user: u32,
    },
    /// The system refused.
    #[error("the lock of this network namespace cannot be taken: {0}")]
    System(#[from] std::io::Error),
}

impl Lock {
    /// Takes the lock; waits for it until `patience` is over.
    pub(crate) fn take_within(patience: Duration) -> Result<Self, LockError> {
        Self::take_name(NAME, patience)
    }

    fn take_name(name: &[u8], patience: Duration) -> Result<Self, LockError> {
        let end = Instant::now() + patience;
        loop {
            match Self::try_name(name) {
                Err(LockError::Held) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                other => return other,
            }
        }
    }

    /// An abstract Unix socket, whose names each network namespace has for itself.
    fn try_name(name: &[u8]) -> Result<Self, LockError> {
        match UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?) {
            Ok(listener) => Ok(Self { _listener: listener }),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(judge(sys::unix_listener_user(name), sys::own_user())),
            Err(error) => Err(error.into()),
        }
    }
}

/// What to say of whoever holds the lock: any user may take the name. `holder` is the kernel's word.
fn judge(holder: std::io::Result<u32>, own: u32) -> LockError {
    match holder {
        Ok(user) if user != 0 && user != own => LockError::Stranger { user },
        _ => LockError::Held,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_a_strangers_lock_is_told_from_a_daemons() {
        assert!(matches!(judge(Ok(65534), 0), LockError::Stranger { user: 65534 }));
        assert!(matches!(judge(Ok(0), 1000), LockError::Held) && matches!(judge(Ok(1000), 1000), LockError::Held));
        assert!(matches!(judge(Err(std::io::ErrorKind::WouldBlock.into()), 0), LockError::Held), "who cannot be told may be a daemon");
    }

    #[test]
    fn the_lock_is_had_once_at_a_time() {
        // A name of this process's own: a daemon may run on this machine, and this test a second time.
        let name = format!("braid test {}", std::process::id()).into_bytes();
        let take = |patience| Lock::take_name(&name, patience);
        let first = take(Duration::ZERO).unwrap();
        assert!(matches!(take(Duration::ZERO), Err(LockError::Held)));
        let theirs = name.clone();
        let later = std::thread::spawn(move || Lock::take_name(&theirs, Duration::from_secs(60)).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        drop(first);
        let second = later.join().unwrap();
        assert!(matches!(take(Duration::ZERO), Err(LockError::Held)));
        drop(second);
    }
}
