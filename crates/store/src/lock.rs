//! The daemon's lock: one daemon per network namespace.
//!
//! The lock has two parts: an abstract Unix socket name, which is separate in each network namespace, and a locked file that only root and
//! the service's user can open. Any user may bind the name, so a name bound by an untrusted user is ignored and the file decides.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use braid_platform::linux::sys::process as sys;

/// Time that a starting daemon waits for the watchdog of a dead one, which sweeps under the lock.
pub const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

const NAME: &[u8] = b"braid daemon";
/// Directory of the lock files.
const FOLDER: &str = "/run/braid";
/// User of the package's service, which is trusted.
pub const SERVICE: &str = "braid";

/// Held while the daemon lives. The kernel releases it when the process ends, however it ends.
#[derive(Debug)]
pub struct Lock {
    /// `None` if another user's process holds the name.
    _name: Option<UnixListener>,
    /// `None` if the file cannot be used: the name alone then decides.
    _file: Option<LockedFile>,
}

/// Why the lock cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon holds it.
    #[error(
        "Braid already runs in this network namespace{0}: use it (`braid status`), or stop it with {stop}. If no daemon runs, `ss -xlp` shows which process holds the name \"@braid daemon\"",
        stop = .0.stop()
    )]
    Held(Holder),
    /// An untrusted user holds the name, and the lock file cannot be used.
    #[error(
        "user {user} holds the name \"@braid daemon\", and the lock file {} cannot be used instead: {error}; make its directory writable, or end the process that `ss -xlp` shows",
        file.display()
    )]
    Stranger {
        /// User that holds the name.
        user: u32,
        /// Path of the lock file.
        file: PathBuf,
        /// Error of the lock file.
        error: io::Error,
    },
    /// The system returned an error.
    #[error("cannot take the lock of this network namespace: {0}")]
    System(#[from] io::Error),
}

/// The daemon that holds the lock, as far as known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// No information.
    Unknown,
    /// The package's service, which runs as [its own user](SERVICE), or a daemon started by hand.
    Known {
        /// Process id; 0 if the process is not visible in this PID namespace.
        process: i32,
        /// Whether it is the service.
        service: bool,
    },
}

impl Holder {
    /// Whether this may be the process with this id and user.
    pub fn is(self, number: i32, user: u32) -> bool {
        match self {
            Self::Known { process, .. } if process != 0 => process == number,
            Self::Known { .. } | Self::Unknown => Users::of_this_system().trust(user),
        }
    }

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
    /// Takes the lock, waiting up to `timeout`.
    pub fn take_within(timeout: Duration) -> Result<Self, LockError> {
        Self::take_at(NAME, &file_of_this_namespace("lock")?, timeout)
    }

    /// The current holder of the lock, if any.
    ///
    /// # Errors
    /// If the lock cannot be examined.
    pub fn holder() -> Result<Option<Holder>, LockError> {
        match Self::try_at(NAME, &file_of_this_namespace("lock")?) {
            Ok(_) => Ok(None),
            Err(LockError::Held(holder)) => Ok(Some(holder)),
            Err(error) => Err(error),
        }
    }

    fn take_at(name: &[u8], file: &Path, timeout: Duration) -> Result<Self, LockError> {
        let end = Instant::now() + timeout;
        loop {
            match Self::try_at(name, file) {
                Err(LockError::Held(_)) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                other => return other,
            }
        }
    }

    fn try_at(name: &[u8], path: &Path) -> Result<Self, LockError> {
        let users = Users::of_this_system();
        let name = match UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?) {
            Ok(listener) => Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(users.judge(sys::unix_listener(name))),
            Err(error) => return Err(error.into()),
        };
        if let Err(NameHolder::Daemon(holder)) = name {
            return Err(LockError::Held(holder));
        }
        match (name, LockedFile::take(path, users)) {
            (_, Ok(None)) => Err(LockError::Held(Holder::Unknown)),
            (Ok(listener), Ok(file)) => Ok(Self { _name: Some(listener), _file: file }),
            (Ok(listener), Err(error)) => {
                tracing::debug!(
                    "{} cannot be locked: {error}; only the name \"@braid daemon\" keeps other daemons from starting",
                    path.display()
                );
                Ok(Self { _name: Some(listener), _file: None })
            }
            (Err(_), Ok(file)) => {
                tracing::warn!(
                    "the name \"@braid daemon\" is held by another user's process (`ss -xlp` shows it); only the lock file {} keeps other daemons from starting",
                    path.display()
                );
                Ok(Self { _name: None, _file: file })
            }
            (Err(NameHolder::Stranger(user)), Err(error)) => Err(LockError::Stranger { user, file: path.to_owned(), error }),
            (Err(_), Err(_)) => Err(LockError::Held(Holder::Unknown)),
        }
    }
}

/// Keeps other processes of Braid in this network namespace from something until it is dropped, by a name alone. `None`: an untrusted user's process has the name, or
/// there are no such names here.
///
/// # Errors
/// The process that has it.
pub fn reserve(name: &str) -> Result<Option<impl Send + use<>>, Holder> {
    let Ok(address) = SocketAddr::from_abstract_name(name) else { return Ok(None) };
    match UnixListener::bind_addr(&address) {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            match Users::of_this_system().judge(sys::unix_listener(name.as_bytes())) {
                NameHolder::Daemon(holder) => Err(holder),
                NameHolder::Stranger(_) | NameHolder::Unknown => Ok(None),
            }
        }
        Err(_) => Ok(None),
    }
}

/// The holder of the name.
#[derive(Debug)]
enum NameHolder {
    /// A trusted user's process: a daemon.
    Daemon(Holder),
    /// A process of this untrusted user.
    Stranger(u32),
    /// The kernel does not show it: it does not listen, or its backlog is full.
    Unknown,
}

/// Trusted users: root, this process's user, and the user of the package's service.
#[derive(Debug, Clone, Copy)]
struct Users {
    own: u32,
    service: Option<u32>,
}

impl Users {
    fn of_this_system() -> Self {
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        Self { own: sys::own_user(), service: user_number(&users, SERVICE) }
    }

    fn trust(self, user: u32) -> bool {
        user == 0 || user == self.own || self.service == Some(user)
    }

    /// Classifies the holder of the name, as reported by the kernel.
    fn judge(self, holder: io::Result<sys::Listener>) -> NameHolder {
        match holder {
            Ok(sys::Listener { user, process }) if self.trust(user) => {
                NameHolder::Daemon(Holder::Known { process, service: self.service == Some(user) })
            }
            Ok(sys::Listener { user, .. }) => NameHolder::Stranger(user),
            Err(_) => NameHolder::Unknown,
        }
    }
}

/// Path of the file of this `kind` for the calling thread's network namespace. The path contains the namespace, since namespaces share
/// directories.
pub fn file_of_this_namespace(kind: &str) -> io::Result<PathBuf> {
    let namespace = std::fs::metadata("/proc/thread-self/ns/net")?;
    Ok(Path::new(FOLDER).join(format!("network-{}.{kind}", namespace.ino())))
}

/// A locked file. Dropping it removes the file.
#[derive(Debug)]
struct LockedFile {
    path: PathBuf,
    _file: File,
}

impl LockedFile {
    /// Locks the file, creating it if necessary; `None` if another process holds the lock.
    fn take(path: &Path, users: Users) -> io::Result<Option<Self>> {
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
        }
        loop {
            let file = open_or_make(path)?;
            let found = file.metadata()?;
            if !found.is_file() || !users.trust(found.uid()) || found.mode() & 0o077 != 0 {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, "users other than root and Braid can lock it; remove it"));
            }
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
                Ok(()) => {}
            }
            // The previous holder may have removed the file between the open and the lock.
            if std::fs::symlink_metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (found.dev(), found.ino())) {
                return Ok(Some(Self { path: path.to_owned(), _file: file }));
            }
        }
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Opens the file for locking only, without following a symbolic link.
fn open_or_make(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    match options.clone().read(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match options.write(true).create_new(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => options.create_new(false).write(false).read(true).open(path),
            made => made,
        },
        found => found,
    }
}

/// User id of `name` in the text of passwd(5).
pub fn user_number(users: &str, name: &str) -> Option<u32> {
    let fields = users.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    fields.split(':').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Lines};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, ChildStdout, Command, Stdio};

    use super::*;

    const USERS: Users = Users { own: 0, service: Some(997) };

    #[test]
    fn regression_an_untrusted_users_name_is_distinguished_from_a_daemons() {
        let judged = |user, users: Users| users.judge(Ok(sys::Listener { user, process: 7 }));
        let by_hand = |held| matches!(held, NameHolder::Daemon(Holder::Known { process: 7, service: false }));
        assert!(matches!(judged(65534, USERS), NameHolder::Stranger(65534)));
        assert!(by_hand(judged(0, Users { own: 0, service: None })) && by_hand(judged(1000, Users { own: 1000, ..USERS })));
        assert!(matches!(USERS.judge(Err(io::ErrorKind::WouldBlock.into())), NameHolder::Unknown));
    }

    #[test]
    fn what_is_reserved_is_free_again_once_it_is_dropped() {
        let name = format!("braid test reservation {}", std::process::id());
        let reservation = reserve(&name).unwrap();
        assert!(reservation.is_some());
        assert!(matches!(reserve(&name), Err(Holder::Known { .. })));
        drop(reservation);
        assert!(reserve(&name).unwrap().is_some());
    }

    #[test]
    fn regression_the_services_user_is_trusted() {
        let users =
            "root:x:0:0:root:/root:/bin/sh\nbraid-relay:x:996:996::/:/sbin/nologin\nbraid:x:997:997:Braid:/var/lib/braid:/sbin/nologin\n";
        let service = user_number(users, SERVICE);
        assert_eq!((service, user_number("", SERVICE)), (Some(997), None));
        let NameHolder::Daemon(holder) = (Users { own: 0, service }).judge(Ok(sys::Listener { user: 997, process: 412 })) else {
            panic!("the service is a daemon")
        };
        let held = LockError::Held(holder).to_string();
        assert!(held.contains("process 412, the service \"braid\"") && held.contains("systemctl stop braid"), "{held}");
    }

    /// A name and a file of the calling test: a daemon, or a second run of this test, may use the same machine.
    struct TestLock {
        name: Vec<u8>,
        folder: tempfile::TempDir,
    }

    impl TestLock {
        fn new(test: &str) -> Self {
            Self { name: format!("braid test {test} {}", std::process::id()).into_bytes(), folder: tempfile::tempdir().unwrap() }
        }

        fn file(&self) -> PathBuf {
            self.folder.path().join("run/braid/network.lock")
        }

        fn take(&self, timeout: Duration) -> Result<Lock, LockError> {
            Lock::take_at(&self.name, &self.file(), timeout)
        }

        /// Starts a process that takes the name. Under root it runs as another user. The kernel shows its owner only if it is `listening`.
        fn lose_name(&self, listening: bool) -> Stranger {
            let mut command = Command::new("/proc/self/exe");
            command.args(["--exact", "lock::tests::the_strangers_process", "--nocapture"]).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.env(STRANGER, if listening { "listens" } else { "mute" }).env(STRANGERS_NAME, std::ffi::OsStr::from_bytes(&self.name));
            if sys::own_user() == 0 {
                command.uid(65534);
            }
            let mut process = command.spawn().unwrap();
            let mut said = BufReader::new(process.stdout.take().unwrap()).lines();
            assert!(said.any(|line| line.unwrap().ends_with("holds the name")));
            Stranger { process, _said: said }
        }
    }

    const STRANGER: &str = "BRAID_TEST_STRANGER";
    const STRANGERS_NAME: &str = "BRAID_TEST_STRANGERS_NAME";

    struct Stranger {
        process: Child,
        _said: Lines<BufReader<ChildStdout>>,
    }

    impl Drop for Stranger {
        fn drop(&mut self) {
            drop(self.process.stdin.take());
            self.process.wait().unwrap();
        }
    }

    /// The process that [`TestLock::lose_name`] starts. Does nothing in a normal test run.
    #[test]
    fn the_strangers_process() {
        let (Some(manner), Some(name)) = (std::env::var_os(STRANGER), std::env::var_os(STRANGERS_NAME)) else { return };
        let kind = if manner == "listens" { socket2::Type::STREAM } else { socket2::Type::DGRAM };
        let socket = socket2::Socket::new(socket2::Domain::UNIX, kind, None).unwrap();
        let address = [&[0], name.as_bytes()].concat();
        socket.bind(&socket2::SockAddr::unix(std::ffi::OsStr::from_bytes(&address)).unwrap()).unwrap();
        if manner == "listens" {
            socket.listen(1).unwrap();
        }
        println!("holds the name");
        io::copy(&mut io::stdin(), &mut io::sink()).unwrap();
    }

    #[test]
    fn only_one_lock_is_held_at_a_time() {
        let lock = TestLock::new("once");
        let first = lock.take(Duration::ZERO).unwrap();
        assert!(matches!(lock.take(Duration::ZERO), Err(LockError::Held(_))));
        let second = std::thread::scope(|scope| {
            let later = scope.spawn(|| lock.take(Duration::from_secs(60)).unwrap());
            std::thread::sleep(Duration::from_millis(20));
            drop(first);
            later.join().unwrap()
        });
        assert!(matches!(lock.take(Duration::ZERO), Err(LockError::Held(_))));
        drop(second);
        assert!(!lock.file().exists(), "the file is removed");
    }

    #[test]
    fn regression_an_untrusted_holder_of_the_name_does_not_block_the_lock() {
        for listens in [true, false] {
            if listens && sys::own_user() != 0 {
                continue; // only root can be another user
            }
            let lock = TestLock::new(if listens { "stranger" } else { "mute" });
            let theirs = lock.lose_name(listens);
            let first = lock.take(Duration::ZERO).unwrap();
            assert!(matches!(lock.take(Duration::ZERO), Err(LockError::Held(_))), "the file keeps a second daemon out");
            drop(theirs);
            assert!(matches!(lock.take(Duration::ZERO), Err(LockError::Held(_))), "also when the name is free again");
            drop(first);
            lock.take(Duration::ZERO).unwrap();
        }
    }

    #[test]
    fn a_file_that_others_can_lock_is_ignored() {
        let lock = TestLock::new("exposed");
        std::fs::create_dir_all(lock.file().parent().unwrap()).unwrap();
        std::fs::write(lock.file(), "").unwrap();
        std::fs::set_permissions(lock.file(), std::fs::Permissions::from_mode(0o644)).unwrap();
        let held = File::open(lock.file()).unwrap();
        held.lock().unwrap();
        lock.take(Duration::ZERO).unwrap();
        std::fs::remove_file(lock.file()).unwrap();
        std::os::unix::fs::symlink("elsewhere", lock.file()).unwrap();
        lock.take(Duration::ZERO).unwrap();
        assert!(!lock.file().with_file_name("elsewhere").exists());
    }

    #[test]
    fn without_name_and_file_the_error_contains_the_remedy() {
        if sys::own_user() != 0 {
            return; // only root can be another user
        }
        let lock = TestLock::new("neither");
        let _theirs = lock.lose_name(true);
        std::fs::write(lock.folder.path().join("run"), "in the way").unwrap();
        let error = lock.take(Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("user 65534") && error.contains("network.lock") && error.contains("ss -xlp"), "{error}");
    }
}
