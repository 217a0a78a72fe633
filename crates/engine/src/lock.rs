//! One daemon per network namespace.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::{Duration, Instant};

use braid_platform::linux::sys::process as sys;

/// How long a daemon that starts waits for the guardian of one that died: that sweeps under the lock.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

const NAME: &[u8] = b"braid daemon";
/// The user of the package's service, which is no stranger.
pub(crate) const SERVICE: &str = "braid";

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
        "Braid runs already in this network namespace{0}: use it (`braid status`), or stop it with {stop}; if there is none, `ss -xlp` tells who holds the name \"@braid daemon\"",
        stop = .0.stop()
    )]
    Held(Holder),
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

/// The daemon that has the lock, as far as that can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Nothing is known of it.
    Unknown,
    /// The package's service, which runs as [a user of its own](SERVICE), or one started by hand; with its process.
    Known {
        /// Its process; 0 where it has no number here.
        process: i32,
        /// Whether it is the service.
        service: bool,
    },
}

impl Holder {
    fn stop(self) -> &'static str {
        match self {
            Self::Known { service: true, .. } => "`sudo systemctl stop braid`",
            Self::Known { .. } | Self::Unknown => "`braid down`",
        }
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown | Self::Known { process: 0, service: false } => Ok(()),
            Self::Known { process: 0, service: true } => f.write_str(" (the service \"braid\")"),
            Self::Known { process, service: false } => write!(f, " (process {process})"),
            Self::Known { process, service: true } => write!(f, " (process {process}, the service \"braid\")"),
        }
    }
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
                Err(LockError::Held(_)) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                other => return other,
            }
        }
    }

    /// An abstract Unix socket, whose names each network namespace has for itself.
    fn try_name(name: &[u8]) -> Result<Self, LockError> {
        match UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?) {
            Ok(listener) => Ok(Self { _listener: listener }),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
                Err(judge(sys::unix_listener(name), sys::own_user(), user_number(&users, SERVICE)))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// What to say of whoever holds the lock: any user may take the name. `holder` is the kernel's word, `service` the user of the package's
/// service, if there is one.
fn judge(holder: std::io::Result<sys::Listener>, own: u32, service: Option<u32>) -> LockError {
    match holder {
        Ok(sys::Listener { user, process }) if service == Some(user) => LockError::Held(Holder::Known { process, service: true }),
        Ok(sys::Listener { user, process }) if user == 0 || user == own => LockError::Held(Holder::Known { process, service: false }),
        Ok(sys::Listener { user, .. }) => LockError::Stranger { user },
        Err(_) => LockError::Held(Holder::Unknown),
    }
}

/// The number of a user by the text of passwd(5).
pub(crate) fn user_number(users: &str, name: &str) -> Option<u32> {
    let fields = users.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    fields.split(':').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_a_strangers_lock_is_told_from_a_daemons() {
        let judged = |user, own, service| judge(Ok(sys::Listener { user, process: 7 }), own, service);
        let daemon = |service| LockError::Held(Holder::Known { process: 7, service }).to_string();
        assert!(matches!(judged(65534, 0, Some(997)), LockError::Stranger { user: 65534 }));
        assert_eq!([judged(0, 0, None), judged(1000, 1000, Some(997))].map(|error| error.to_string()), [daemon(false), daemon(false)]);
        let unknown = judge(Err(std::io::ErrorKind::WouldBlock.into()), 0, Some(997));
        assert!(matches!(unknown, LockError::Held(Holder::Unknown)), "who cannot be told may be a daemon");
    }

    #[test]
    fn regression_the_services_own_user_is_no_stranger() {
        let users =
            "root:x:0:0:root:/root:/bin/sh\nbraid-relay:x:996:996::/:/sbin/nologin\nbraid:x:997:997:Braid:/var/lib/braid:/sbin/nologin\n";
        let service = user_number(users, SERVICE);
        assert_eq!((service, user_number("", SERVICE)), (Some(997), None));
        let held = judge(Ok(sys::Listener { user: 997, process: 412 }), 0, service).to_string();
        assert!(held.contains("process 412, the service \"braid\"") && held.contains("systemctl stop braid"), "{held}");
    }

    #[test]
    fn the_lock_is_had_once_at_a_time() {
        // A name of this process's own: a daemon may run on this machine, and this test a second time.
        let name = format!("braid test {}", std::process::id()).into_bytes();
        let take = |patience| Lock::take_name(&name, patience);
        let first = take(Duration::ZERO).unwrap();
        assert!(matches!(take(Duration::ZERO), Err(LockError::Held(_))));
        let theirs = name.clone();
        let later = std::thread::spawn(move || Lock::take_name(&theirs, Duration::from_secs(60)).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        drop(first);
        let second = later.join().unwrap();
        assert!(matches!(take(Duration::ZERO), Err(LockError::Held(_))));
        drop(second);
    }
}
