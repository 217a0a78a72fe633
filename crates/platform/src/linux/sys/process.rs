//! System calls with which `braid run` manages its processes: fork, wait, signals, descriptors, pipes.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::process;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use libc::c_int;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this status.
    Exited(i32),
    /// This signal killed it.
    Signalled(i32),
}

impl Ended {
    /// The exit status that a shell would show: 128 plus the number for a signal.
    pub fn code(self) -> i32 {
        match self {
            Self::Exited(code) => code,
            Self::Signalled(signal) => 128 + signal,
        }
    }

    fn from_raw(status: c_int) -> Self {
        if libc::WIFSIGNALED(status) { Self::Signalled(libc::WTERMSIG(status)) } else { Self::Exited(libc::WEXITSTATUS(status)) }
    }
}

/// The two processes after a [`fork`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The calling process; contains the child's process id.
    Parent(i32),
    /// The new process.
    Child,
}

/// Forks this process.
///
/// # Errors
/// `EDEADLK` if other threads are running, because locks that they hold would stay locked in the child forever. Otherwise errors of `fork`.
pub fn fork() -> io::Result<Side> {
    // A joined thread may still be counted for a moment.
    let mut attempts = 100;
    while thread_count()? != 1 {
        if attempts == 0 {
            return Err(io::Error::from_raw_os_error(libc::EDEADLK));
        }
        attempts -= 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: this is the only thread, so the child inherits no lock held by a missing thread and may continue like any program.
    match unsafe { libc::fork() } {
        0 => Ok(Side::Child),
        child => check(child).map(Side::Parent),
    }
}

/// Number of threads of this process.
///
/// # Errors
/// Fails if `/proc` is missing.
pub fn thread_count() -> io::Result<usize> {
    status_field("self", "Threads:")
}

/// Process id of the process that a thread belongs to.
///
/// # Errors
/// Fails if the thread is gone or `/proc` is missing.
pub fn thread_group(thread: i32) -> io::Result<i32> {
    status_field(&thread.to_string(), "Tgid:")
}

fn status_field<T: std::str::FromStr>(process: &str, name: &str) -> io::Result<T> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)).and_then(|value| value.trim().parse().ok());
    value.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{process}/status has no {name}")))
}

/// Sets whether this process becomes the parent of descendants whose own parent ends.
///
/// # Errors
/// Errors of `prctl`.
pub fn set_child_subreaper(adopt: bool) -> io::Result<()> {
    // SAFETY: takes integers only.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, libc::c_ulong::from(adopt), 0, 0, 0) }).map(drop)
}

/// Leaves the session and process group, so that signals of the terminal and the group no longer reach this process.
///
/// # Errors
/// `EPERM` if this process leads a process group.
pub fn leave_session() -> io::Result<()> {
    // SAFETY: takes nothing.
    check(unsafe { libc::setsid() }).map(drop)
}

/// Waits for a child to end: any child (`None`), or this one. If `block` is false, returns `Ok(None)` if it has not ended yet.
///
/// # Errors
/// `ECHILD` if there is no such child.
pub fn wait(child: Option<i32>, block: bool) -> io::Result<Option<(i32, Ended)>> {
    loop {
        let mut status = 0;
        // SAFETY: the kernel writes the status to a local variable.
        match check(unsafe { libc::waitpid(child.unwrap_or(-1), &raw mut status, if block { 0 } else { libc::WNOHANG }) }) {
            Ok(0) => return Ok(None),
            Ok(child) => return Ok(Some((child, Ended::from_raw(status)))),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Signals with which a user, a terminal or a service manager terminates or notifies a program.
pub const FORWARDED: [i32; 6] = [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// Signals that stop a program at the terminal.
pub const TERMINAL_STOPS: [i32; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// Signal that reports the end of a child.
pub const CHILD_ENDED: i32 = libc::SIGCHLD;

/// Signal that kills a process at once, even if it is stopped.
pub const KILL: i32 = libc::SIGKILL;

/// Keeps ended children until they are waited for, even if the process that started this one had set SIGCHLD to be ignored.
pub fn keep_ended_children() {
    // SAFETY: the default action runs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Sends `signal` to `process`.
///
/// # Errors
/// Errors of `kill`.
pub fn send_signal(process: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes integers only.
    check(unsafe { libc::kill(process, signal) }).map(drop)
}

/// A set of blocked signals.
#[derive(Clone, Copy)]
pub struct SignalMask(libc::sigset_t);

/// Blocks `signals` for this thread and the threads it creates. Returns the previous mask.
///
/// # Errors
/// Errors of `pthread_sigmask`.
pub fn block_signals(signals: &[i32]) -> io::Result<SignalMask> {
    set_mask(libc::SIG_BLOCK, signal_set(signals))
}

/// Restores an earlier mask for this thread and the threads it creates.
///
/// # Errors
/// Errors of `pthread_sigmask`.
pub fn restore_signals(mask: SignalMask) -> io::Result<()> {
    set_mask(libc::SIG_SETMASK, mask.0).map(drop)
}

fn set_mask(how: c_int, set: libc::sigset_t) -> io::Result<SignalMask> {
    let mut before = signal_set(&[]);
    // SAFETY: the kernel reads one set and writes another, both ours.
    match unsafe { libc::pthread_sigmask(how, &raw const set, &raw mut before) } {
        0 => Ok(SignalMask(before)),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Creates a descriptor that becomes readable when one of the blocked `signals` arrives.
///
/// # Errors
/// Errors of `signalfd`.
pub fn signal_descriptor(signals: &[i32]) -> io::Result<OwnedFd> {
    let set = signal_set(signals);
    // SAFETY: the kernel reads one set from a local variable.
    let fd = check(unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) })?;
    // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A received signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal {
    /// Number of the signal.
    pub number: i32,
    /// Whether a process sent it with `kill`, `sigqueue` or `tgkill`, and not the kernel, as for a key press.
    pub from_process: bool,
}

/// The next signal of a [`signal_descriptor`]; `None` if none is pending.
///
/// # Errors
/// Errors of `read`.
pub fn next_signal(descriptor: BorrowedFd<'_>) -> io::Result<Option<Signal>> {
    // SAFETY: all-zero is a valid value of this plain structure.
    let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::signalfd_siginfo>();
    // SAFETY: the kernel writes at most `size` bytes to a local variable.
    let read = unsafe { libc::read(descriptor.as_raw_fd(), (&raw mut info).cast(), size) };
    match read {
        read if read == size as isize => Ok(Some(Signal { number: info.ssi_signo as i32, from_process: info.ssi_code <= 0 })),
        read if read >= 0 => Ok(None),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            error => Err(error),
        },
    }
}

fn signal_set(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: all-zero is a valid value of this plain structure; the calls below write to it only.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// State of a descriptor, as reported by [`poll`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ready {
    /// Data can be read.
    pub readable: bool,
    /// The other end is closed.
    pub hung_up: bool,
}

/// Waits until one of the descriptors is ready, or until `timeout` has passed. Each descriptor is polled for data (`true`) or only for its end
/// (`false`).
///
/// # Errors
/// Errors of `ppoll`, except `EINTR`.
pub fn poll<const N: usize>(on: [(BorrowedFd<'_>, bool); N], timeout: Option<Duration>) -> io::Result<[Ready; N]> {
    let mut entries = on.map(|(fd, data)| libc::pollfd { fd: fd.as_raw_fd(), events: if data { libc::POLLIN } else { 0 }, revents: 0 });
    loop {
        match ppoll(&mut entries, timeout) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(()) => {
                let ready = |entry: libc::pollfd| Ready {
                    readable: entry.revents & libc::POLLIN != 0,
                    hung_up: entry.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0,
                };
                return Ok(entries.map(ready));
            }
        }
    }
}

/// Waits until one of `read` has data or one of `write` takes some, or until `timeout` has passed. Returns which of `read` have data.
///
/// # Errors
/// Errors of `ppoll`, except `EINTR`, which ends the wait.
pub fn wait_for_any<const N: usize>(read: [BorrowedFd<'_>; N], write: &[BorrowedFd<'_>], timeout: Duration) -> io::Result<[bool; N]> {
    let entry = |events| move |fd: &BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    let mut entries: Vec<_> = read.iter().map(entry(libc::POLLIN)).chain(write.iter().map(entry(libc::POLLOUT))).collect();
    match ppoll(&mut entries, Some(timeout)) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        // Interrupted, it has written nothing.
        _ => Ok(std::array::from_fn(|place| entries[place].revents & libc::POLLIN != 0)),
    }
}

/// `ppoll`, whose time is exact: `poll` counts whole milliseconds, and with less than one it returns at once.
fn ppoll(entries: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let span = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i32::MAX.into()),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let span = span.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `entries` is a live array of that many entries, and `span` null or a live timespec; no signal mask is given.
    check(unsafe { libc::ppoll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, span, std::ptr::null()) }).map(drop)
}

/// Redirects the standard descriptors `numbers` (0 to 2) to `/dev/null`, so that no other process waits for this one to close them.
///
/// # Errors
/// Fails if `/dev/null` cannot be opened.
pub fn silence(numbers: &[RawFd]) -> io::Result<()> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    for number in numbers.iter().filter(|number| (0..=2).contains(*number)) {
        // SAFETY: the standard descriptors belong to the whole process; replacing what is behind them leaves them open.
        check(unsafe { libc::dup2(null.as_raw_fd(), *number) })?;
    }
    Ok(())
}

/// Closes all descriptors from 3 on, except `keep`.
///
/// Call it only in a freshly forked process, or a thread with its own table, that does not use inherited objects: an owner of a closed descriptor would later close an unrelated one.
///
/// # Errors
/// Errors of `close_range`.
pub fn close_inherited(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep.into_iter().chain([u32::MAX]) {
        if fd > first {
            // SAFETY: takes integers; the caller does not use the closed descriptors.
            let closed = unsafe { libc::syscall(libc::SYS_close_range, first, fd - 1, 0) };
            check(closed as c_int)?;
        }
        first = fd.saturating_add(1);
    }
    Ok(())
}

/// Makes writes to a full pipe fail with `EAGAIN` instead of waiting. The other end of the pipe stays as it is.
///
/// # Errors
/// Errors of `fcntl`.
pub fn set_nonblocking(pipe: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes integers only.
    let flags = check(unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: takes integers only.
    check(unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) }).map(drop)
}

/// Gives the calling thread a table of descriptors of its own, with no others than `numbers` in it, and returns those. Descriptors that the thread
/// opens afterwards are its own too. Where the system does not allow that, the thread keeps sharing the table, and the descriptors returned are
/// duplicates.
///
/// `numbers` must be different and open until this returns, and the thread must not use objects that own other descriptors.
///
/// # Errors
/// `EBADF` if one of `numbers` is not open.
pub fn take_descriptors(numbers: &[RawFd]) -> io::Result<Vec<OwnedFd>> {
    let is_own = unshare_descriptors().is_ok();
    if is_own {
        // Without close_range(2) the others stay open, in this table too.
        let _ = close_inherited(numbers);
    }
    let take = |&number| {
        // SAFETY: takes integers only.
        let found =
            check(unsafe { if is_own { libc::fcntl(number, libc::F_GETFD) } else { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) } })?;
        // SAFETY: in a table of this thread's own, nothing else owns the descriptor. Otherwise it is new.
        Ok(unsafe { OwnedFd::from_raw_fd(if is_own { number } else { found }) })
    };
    numbers.iter().map(take).collect()
}

/// Gives the calling thread a table of descriptors of its own, in which only the standard streams are open. Where the system does not allow that, the
/// thread keeps sharing the table. The thread must not use objects that own other descriptors.
pub fn own_descriptors() {
    if unshare_descriptors().is_ok() {
        let _ = close_inherited(&[]);
    }
}

fn unshare_descriptors() -> io::Result<()> {
    // SAFETY: takes integers only.
    check(unsafe { libc::unshare(libc::CLONE_FILES) })?;
    // A handler would write to a descriptor that is not in this thread's table, so the signal would be lost. Other threads get it.
    let _ = block_signals(&FORWARDED);
    let _ = block_signals(&[CHILD_ENDED]);
    Ok(())
}

/// A counter in memory that this process shares with the processes forked from it.
///
/// # Errors
/// Errors of `mmap`.
pub fn shared_counter() -> io::Result<&'static AtomicU64> {
    const PROTECTION: c_int = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: requests a new mapping, which overlaps no other.
    let page =
        unsafe { libc::mmap(std::ptr::null_mut(), size_of::<AtomicU64>(), PROTECTION, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the page is aligned, zeroed (a valid value), and never unmapped.
    Ok(unsafe { &*page.cast::<AtomicU64>() })
}

/// Returns free memory from the allocator to the system, if the C library supports it.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc's allocator takes its own locks and touches only free memory.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Unmaps the resident pages of the program's and libraries' code, which lowers the resident set size. Starting touches most of them, code that runs
/// rarely touches its part, and the kernel maps additional pages around each one. A page that is used again comes back from the page cache by a minor
/// fault, without a read from disk as long as it is cached.
pub fn release_code_pages() {
    unsafe extern "C" fn object(info: *mut libc::dl_phdr_info, _: usize, _: *mut libc::c_void) -> c_int {
        // SAFETY: only queries a number.
        let Ok(page @ 1..) = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }) else { return 1 };
        // SAFETY: the loader passes the description of a loaded object, valid during the call, with `dlpi_phnum` headers and a C string as name.
        let (info, name) = unsafe { (&*info, CStr::from_ptr((*info).dlpi_name)) };
        if name.to_bytes().starts_with(b"linux-vdso") {
            return 0; // not backed by a file
        }
        // SAFETY: as above.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        // Skip writable segments, because their relocated addresses would be lost.
        for header in headers.iter().filter(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0) {
            let first = info.dlpi_addr as usize + header.p_vaddr as usize;
            let (begin, end) = (first.next_multiple_of(page), (first + header.p_memsz as usize) / page * page);
            if begin < end {
                // SAFETY: whole pages of a read-only file mapping: the next access reads the same bytes from the file.
                unsafe { libc::madvise(begin as *mut libc::c_void, end - begin, libc::MADV_DONTNEED) };
            }
        }
        0
    }
    // SAFETY: `object` accesses only its arguments and does not unwind.
    unsafe { libc::dl_iterate_phdr(Some(object), std::ptr::null_mut()) };
}

/// Lets the allocator keep a few megabytes of free memory at the end of the heap, if the C library supports it. By default glibc returns everything
/// beyond 128 KiB at once, so that a thread that repeatedly reads some hundred kilobytes faults in every page again.
pub fn raise_trim_threshold() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a parameter of glibc's allocator, which takes its own lock.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, 4 << 20);
    }
}

/// Ends this process at once, without flushing buffers or running exit handlers. A forked child must not do either a second time.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Drops every capability whose bit is not in `keep`, for this thread, the threads it creates and the programs they start. For the whole process,
/// also disables gaining privileges by starting programs, and access by other processes of its user.
///
/// # Errors
/// Errors of `capset` and `prctl`.
pub fn drop_privileges(keep: u64) -> io::Result<()> {
    let mut header = CapabilityHeader { version: CAPABILITY_VERSION, thread: 0 };
    let mut sets = [CapabilitySets::default(); 2];
    // SAFETY: the kernel reads the header and writes two structures of three integers, all local variables.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) } as c_int)?;
    // Drop the bounding set first, because that needs a capability. A process without that capability cannot gain any by starting a program.
    for bit in (0..64).filter(|bit| keep >> bit & 1 == 0) {
        // SAFETY: takes integers only. The call fails beyond the last capability of this kernel.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, bit as libc::c_ulong, 0, 0, 0) } != 0 {
            break;
        }
    }
    for (index, set) in sets.iter_mut().enumerate() {
        let keep = (keep >> (32 * index)) as u32;
        set.permitted &= keep;
        (set.effective, set.inheritable) = (set.permitted, set.inheritable & keep);
    }
    // SAFETY: the kernel reads the header and two structures, all local variables.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) } as c_int)?;
    // SAFETY: takes integers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    // SAFETY: takes integers only.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }).map(drop)
}

/// `_LINUX_CAPABILITY_VERSION_3` from `linux/capability.h`.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    thread: c_int,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct CapabilitySets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Effective user id of this process.
pub fn own_user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Makes the calling thread, and the threads it creates from now on, access files with the rights of this user and group only. All other rights of
/// the thread stay.
///
/// # Errors
/// Errors of `setgroups`; `EPERM` if the system does not let this process act as that user.
pub fn use_files_as(user: u32, group: u32) -> io::Result<()> {
    // SAFETY: takes no list. The raw system call affects only this thread.
    check(unsafe { libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) } as c_int)?;
    // SAFETY: the calls take integers only and affect only this thread. Both return the previous value, whether or not they change it.
    let now = unsafe {
        libc::setfsgid(group);
        libc::setfsuid(user);
        (libc::setfsuid(u32::MAX) as u32, libc::setfsgid(u32::MAX) as u32)
    };
    if now == (user, group) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
}

/// The process that listens on an abstract Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listener {
    /// User id of the process.
    pub user: u32,
    /// Process id in this process's namespace; 0 if it has none there.
    pub process: i32,
}

/// Finds the process that listens on an abstract Unix socket, as reported by the kernel.
///
/// # Errors
/// Errors of `connect`, which does not block here: `ECONNREFUSED` if nothing listens, `EAGAIN` if the backlog is full.
pub fn unix_listener(name: &[u8]) -> io::Result<Listener> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    let path = [&[0], name].concat();
    socket.connect(&socket2::SockAddr::unix(std::ffi::OsStr::from_bytes(&path))?)?;
    let mut user = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    let at = (&raw mut user).cast();
    // SAFETY: the kernel writes at most `length` bytes to `user`, and the length to `length`; both are local variables.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, at, &raw mut length) })?;
    Ok(Listener { user: user.uid, process: user.pid })
}

/// Raises the soft limit of open files to the hard limit, for this process and what it starts from now on. Returns the limit.
///
/// # Errors
/// Errors of `getrlimit` and `setrlimit`.
pub fn raise_open_files() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one local variable.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one local variable.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    Ok(limit.rlim_cur)
}

/// Process id of this process.
pub fn own_pid() -> i32 {
    process::id() as i32
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn exit_statuses_match_those_of_a_shell() {
        let end = |script: &str| {
            let mut child = process::Command::new("sh").args(["-c", script]).spawn().unwrap();
            let (_, ended) = wait(Some(child.id() as i32), true).unwrap().unwrap();
            assert!(child.wait().is_err(), "already waited for");
            ended
        };
        assert_eq!(end("exit 7"), Ended::Exited(7));
        assert_eq!(end("kill -TERM $$"), Ended::Signalled(libc::SIGTERM));
        assert_eq!(Ended::Signalled(9).code(), 137);
    }

    #[test]
    fn a_process_with_threads_cannot_fork() {
        // The test harness itself runs threads.
        let other = std::thread::spawn(|| fork().map(|_| ()));
        assert_eq!(other.join().unwrap().unwrap_err().raw_os_error(), Some(libc::EDEADLK));
    }

    #[test]
    fn the_listener_on_an_abstract_name_is_found() {
        use std::os::linux::net::SocketAddrExt;
        let name = format!("braid test {}", process::id());
        assert!(unix_listener(name.as_bytes()).is_err());
        let other = if own_user() == 0 { 65534 } else { own_user() };
        let bound = name.clone();
        let listener = std::thread::spawn(move || {
            // SAFETY: takes integers only; the raw system call affects only this thread.
            unsafe { libc::syscall(libc::SYS_setresuid, other, other, other) };
            std::os::unix::net::UnixListener::bind_addr(&std::os::unix::net::SocketAddr::from_abstract_name(bound).unwrap()).unwrap()
        });
        let _listener = listener.join().unwrap();
        assert_eq!(unix_listener(name.as_bytes()).unwrap(), Listener { user: other, process: own_pid() });
    }

    #[test]
    fn a_thread_and_its_children_lose_their_privileges() {
        const NET_RAW: u64 = 1 << 13;
        let set = std::thread::spawn(|| {
            drop_privileges(NET_RAW).unwrap();
            std::process::Command::new("cat").arg("/proc/self/status").output().unwrap().stdout
        });
        let status = String::from_utf8(set.join().unwrap()).unwrap();
        let bits = |name: &str| {
            let text = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(text.trim(), 16).unwrap()
        };
        assert!(bits("CapEff:") & !NET_RAW == 0 && bits("CapPrm:") & !NET_RAW == 0, "{status}");
        assert!(own_user() != 0 || bits("CapBnd:") == NET_RAW, "{status}");
        assert_eq!(bits("NoNewPrivs:"), 1);
    }

    #[test]
    fn the_process_of_a_thread_is_found() {
        assert_eq!(thread_group(own_pid()).unwrap(), own_pid());
        assert!(thread_group(i32::MAX).is_err());
    }

    #[test]
    fn the_end_of_a_pipe_is_reported() {
        let (mut reader, mut writer) = io::pipe().unwrap();
        let look = |reader: &io::PipeReader| poll([(reader.as_fd(), true)], Some(Duration::ZERO)).unwrap()[0];
        assert_eq!(look(&reader), Ready::default());
        writer.write_all(b"x").unwrap();
        assert_eq!(look(&reader), Ready { readable: true, hung_up: false });
        reader.read_exact(&mut [0]).unwrap();
        drop(writer);
        assert_eq!(look(&reader), Ready { readable: false, hung_up: true });
    }

    #[test]
    fn a_signal_reports_its_sender() {
        // Run in a separate thread, because the mask belongs to the thread.
        std::thread::spawn(|| {
            let before = block_signals(&[libc::SIGUSR2]).unwrap();
            let descriptor = signal_descriptor(&[libc::SIGUSR2]).unwrap();
            assert_eq!(next_signal(descriptor.as_fd()).unwrap(), None);
            // SAFETY: a thread signals itself with a signal that it blocks.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2) };
            assert_eq!(next_signal(descriptor.as_fd()).unwrap(), Some(Signal { number: libc::SIGUSR2, from_process: true }));
            restore_signals(before).unwrap();
        })
        .join()
        .unwrap();
    }
}
