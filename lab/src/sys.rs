//! System calls without a safe wrapper in the standard library. All `unsafe` code of the lab is here.

use std::ffi::CString;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use braid_model::Time;

/// Converts -1 into the last OS error.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn text(value: &str) -> io::Result<CString> {
    CString::new(value).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("{value:?} holds a zero byte")))
}

/// `CLOCK_MONOTONIC`.
pub(crate) fn now() -> Time {
    // SAFETY: all zero bytes are a valid timespec, and the pointer is to a live one.
    let at = unsafe {
        let mut at: libc::timespec = zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut at);
        at
    };
    Time::from_nanos(at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64)
}

/// Gives the calling thread new namespaces (`CLONE_NEW*`), or its own copy of shared state (`CLONE_FS`).
pub(crate) fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: takes no pointer; a refusal is an error.
    check(unsafe { libc::unshare(flags) }).map(drop)
}

/// Puts the calling thread into the namespace.
pub(crate) fn setns(namespace: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is borrowed and so open; a wrong one is an error.
    check(unsafe { libc::setns(namespace.as_raw_fd(), kind) }).map(drop)
}

/// State of a TCP socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TcpState {
    /// Segments that were sent again.
    pub(crate) retransmitted: u32,
    /// Those that arrived twice, as the other end says (RFC 2883).
    pub(crate) needless: u32,
    /// State of congestion control: 3: recovery, 4: after a timeout (`enum tcp_ca_state`).
    congestion: u8,
}

impl TcpState {
    /// Whether it recovers from a loss.
    pub(crate) fn is_recovering(self) -> bool {
        self.congestion >= 3
    }
}

/// Reads the state of a TCP socket.
pub(crate) fn tcp_state(socket: BorrowedFd<'_>) -> io::Result<TcpState> {
    // The structure of Linux 5.5 (include/uapi/linux/tcp.h), to which later kernels append.
    let mut info = [0u32; 57];
    let mut length = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `info`, and the length to `length`; both live.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut length) })?;
    Ok(TcpState { retransmitted: info[25], needless: info[54], congestion: info[0].to_ne_bytes()[1] })
}

/// The effective user.
pub fn effective_user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// The effective group.
pub fn effective_group() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::getegid() }
}

/// Gives the calling process, which must have one thread only, a user namespace in which it is root.
pub fn become_root_of_a_user_namespace() -> io::Result<()> {
    let (user, group) = (effective_user(), effective_group());
    unshare(libc::CLONE_NEWUSER)?;
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("0 {user} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("0 {group} 1"))
}

/// Mounts as `mount(2)` does; `None` is a null pointer.
pub(crate) fn mount(source: &str, target: &str, kind: Option<&str>, flags: libc::c_ulong) -> io::Result<()> {
    let (source, target) = (text(source)?, text(target)?);
    let kind = kind.map(text).transpose()?;
    let kind = kind.as_ref().map_or(std::ptr::null(), |kind| kind.as_ptr());
    // SAFETY: the strings end in zero and live until the call returns; null type and data are allowed.
    check(unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind, flags, std::ptr::null()) }).map(drop)
}

/// Makes the command run in these namespaces, in `directory`, and as `user` (with a group of the same number and no others) if given.
pub(crate) fn enter(command: &mut Command, namespaces: [(OwnedFd, libc::c_int); 2], directory: &Path, user: Option<u32>) {
    let directory = CString::new(directory.as_os_str().as_encoded_bytes()).ok();
    // SAFETY: the closure runs between fork and exec and makes only system calls, which are async-signal-safe; it allocates nothing.
    unsafe {
        command.pre_exec(move || {
            for (namespace, kind) in &namespaces {
                check(libc::setns(namespace.as_raw_fd(), *kind))?;
            }
            if let Some(directory) = &directory {
                // If the directory no longer exists, the program stays in the root directory.
                libc::chdir(directory.as_ptr());
            }
            if let Some(user) = user {
                check(libc::setgroups(0, std::ptr::null()))?;
                check(libc::setresgid(user, user, user))?;
                check(libc::setresuid(user, user, user))?;
            }
            Ok(())
        });
    }
}

/// Makes the calling thread, and no other, an unprivileged user, with the group of the same number and no others.
pub(crate) fn become_user(user: u32) -> io::Result<()> {
    let done = |result: libc::c_long| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: numbers, and no groups. The bare system calls, since libc's functions change every thread of the process.
    unsafe {
        done(libc::syscall(libc::SYS_setgroups, 0usize, std::ptr::null::<libc::gid_t>()))?;
        done(libc::syscall(libc::SYS_setresgid, user, user, user))?;
        done(libc::syscall(libc::SYS_setresuid, user, user, user))
    }
}

/// Runs the command in a new session, which the terminal's signals do not reach, and keeps these descriptors open in it.
pub(crate) fn detach_keeping(command: &mut Command, kept: Vec<RawFd>) {
    // SAFETY: as in `enter`: system calls only.
    unsafe {
        command.pre_exec(move || {
            libc::setsid();
            for fd in &kept {
                check(libc::fcntl(*fd, libc::F_SETFD, 0))?;
            }
            Ok(())
        });
    }
}

/// Makes timers of the calling thread accurate to the microsecond; by default they are some 50 µs late.
pub(crate) fn precise_timers() {
    // SAFETY: takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000u64, 0u64, 0u64, 0u64) };
}

/// Waits until one of the descriptors is readable or the timeout expires, and returns which are. `None` waits for ever.
pub(crate) fn wait_readable(fds: &[RawFd], ready: &mut Vec<bool>, timeout: Option<Duration>) -> io::Result<()> {
    let mut polled: Vec<libc::pollfd> = fds.iter().map(|fd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 }).collect();
    let span = timeout.map(|t| libc::timespec { tv_sec: t.as_secs() as _, tv_nsec: t.subsec_nanos().into() });
    let span = span.as_ref().map_or(std::ptr::null(), |span| span as *const libc::timespec);
    // SAFETY: `polled` is as long as said; the timespec outlives the call; a null mask leaves signals alone.
    let result = check(unsafe { libc::ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, span, std::ptr::null()) });
    ready.clear();
    match result {
        Ok(_) => ready.extend(polled.iter().map(|p| p.revents != 0)),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => ready.resize(fds.len(), false),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Creates an eventfd, which wakes a poller.
pub(crate) fn event() -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only; the descriptor is new and ours.
    unsafe { Ok(OwnedFd::from_raw_fd(check(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?)) }
}

/// Raises an [`event`].
pub(crate) fn raise(event: BorrowedFd<'_>) {
    let one = 1u64;
    // SAFETY: eight bytes that live until the call returns. It fails only when the counter is full, which wakes as well.
    unsafe { libc::write(event.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
}

/// Clears an [`event`].
pub(crate) fn drain(event: BorrowedFd<'_>) {
    let mut count = 0u64;
    // SAFETY: room for eight bytes that lives until the call returns. It fails only when the counter is zero.
    unsafe { libc::read(event.as_raw_fd(), (&raw mut count).cast(), size_of::<u64>()) };
}

/// The number of the device `name` in the calling thread's network namespace.
fn device(name: &str) -> io::Result<libc::c_int> {
    let name = text(name)?;
    // SAFETY: the string ends in zero and lives until the call returns.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 { Err(io::Error::last_os_error()) } else { Ok(index as libc::c_int) }
}

fn set_option<T>(fd: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int, value: T) -> io::Result<()> {
    let size = size_of::<T>() as libc::socklen_t;
    // SAFETY: the value lives until the call returns and is as long as said.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, (&raw const value).cast(), size) }).map(drop)
}

/// A non-blocking packet socket that receives every incoming frame of the device, and no outgoing one.
pub(crate) fn frames_of(name: &str) -> io::Result<OwnedFd> {
    use std::os::fd::AsFd;
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    let index = device(name)?;
    // SAFETY: takes numbers only; the descriptor is new and ours. Protocol 0: nothing arrives before the socket is bound to its device.
    let fd = unsafe {
        OwnedFd::from_raw_fd(check(libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0))?)
    };
    set_option(fd.as_fd(), libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1i32)?;
    set_option(fd.as_fd(), libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1i32)?;
    for option in [libc::SO_RCVBUFFORCE, libc::SO_SNDBUFFORCE] {
        // Refused in user namespaces, which keep the default size.
        let _ = set_option(fd.as_fd(), libc::SOL_SOCKET, option, 8 << 20);
    }
    // SAFETY: all zero bytes are a valid address, which is then filled in and is as long as said.
    unsafe {
        let mut address: libc::sockaddr_ll = zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = index;
        check(libc::bind(fd.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as libc::socklen_t))?;
    }
    Ok(fd)
}

/// Frames that the kernel dropped because the socket's buffer was full, since the last call.
pub(crate) fn frames_missed(fd: BorrowedFd<'_>) -> u64 {
    let mut value = [0u32; 2];
    let mut size = size_of::<[u32; 2]>() as libc::socklen_t;
    // SAFETY: `value` is a tpacket_stats (packets, drops) and as long as said.
    let result =
        unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_PACKET, libc::PACKET_STATISTICS, value.as_mut_ptr().cast(), &mut size) };
    if result == 0 { value[1].into() } else { 0 }
}

/// Buffers for a batch of frames.
pub(crate) struct Batch {
    buffers: Vec<[u8; Batch::FRAME]>,
    lengths: Vec<usize>,
}

impl Batch {
    /// Frames per batch.
    pub(crate) const COUNT: usize = 16;
    /// The longest frame: a jumbo packet and its header.
    const FRAME: usize = 9216;

    pub(crate) fn new() -> Self {
        Self { buffers: vec![[0; Self::FRAME]; Self::COUNT], lengths: Vec::with_capacity(Self::COUNT) }
    }

    /// Reads the waiting frames. A device that is down has none.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>) -> usize {
        let mut parts: Vec<libc::iovec> =
            self.buffers.iter_mut().map(|b| libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: Self::FRAME }).collect();
        let mut messages = headers(&mut parts);
        // SAFETY: every header points to one iovec, which points to a buffer as long as said; all outlive the call.
        let count = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                messages.as_mut_ptr(),
                Self::COUNT as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        self.lengths.clear();
        self.lengths.extend(messages.iter().take(count.max(0) as usize).map(|m| (m.msg_len as usize).min(Self::FRAME)));
        self.lengths.len()
    }

    /// The frames of the last [`receive`](Self::receive).
    pub(crate) fn frames(&self) -> impl Iterator<Item = &[u8]> {
        self.buffers.iter().zip(&self.lengths).map(|(buffer, length)| &buffer[..*length])
    }
}

/// Sends the frames through the socket's device and returns the number sent. The device did not accept the rest (down, or no room).
pub(crate) fn send_frames(fd: BorrowedFd<'_>, frames: &mut [Vec<u8>]) -> usize {
    let mut sent = 0;
    for chunk in frames.chunks_mut(Batch::COUNT) {
        let mut parts: Vec<libc::iovec> =
            chunk.iter_mut().map(|f| libc::iovec { iov_base: f.as_mut_ptr().cast(), iov_len: f.len() }).collect();
        let mut messages = headers(&mut parts);
        // SAFETY: every header points to one iovec, which points to a frame as long as said; all outlive the call.
        let count =
            unsafe { libc::sendmmsg(fd.as_raw_fd(), messages.as_mut_ptr(), messages.len() as libc::c_uint, libc::MSG_DONTWAIT as _) };
        sent += count.max(0) as usize;
        if count < chunk.len() as libc::c_int {
            break;
        }
    }
    sent
}

fn headers(parts: &mut [libc::iovec]) -> Vec<libc::mmsghdr> {
    let header = |part: &mut libc::iovec| {
        // SAFETY: all zero bytes are a valid header: no address, no control data.
        let mut message: libc::mmsghdr = unsafe { zeroed() };
        message.msg_hdr.msg_iov = part;
        message.msg_hdr.msg_iovlen = 1;
        message
    };
    parts.iter_mut().map(header).collect()
}

/// Turns off checksum and segmentation offload of a device of the calling thread's namespace, so that its frames are those that a wire
/// would carry.
pub(crate) fn plain_frames(name: &str) -> io::Result<()> {
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    // ETHTOOL_STXCSUM, ETHTOOL_SSG, ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO of linux/ethtool.h.
    const OFF: [u32; 5] = [0x17, 0x19, 0x1f, 0x24, 0x2c];
    if name.len() >= libc::IFNAMSIZ {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("device name {name:?} is longer than 15 bytes")));
    }
    // SAFETY: takes numbers only; the descriptor is new and ours.
    let socket = unsafe { OwnedFd::from_raw_fd(check(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0))?) };
    for what in OFF {
        let mut value = [what, 0u32];
        // SAFETY: all zero bytes are a valid ifreq; the name fits with its zero; `value` is an ethtool_value and outlives the call.
        let result = unsafe {
            let mut request: libc::ifreq = zeroed();
            for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
                *to = from as libc::c_char;
            }
            request.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
            check(libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL as _, &mut request))
        };
        match result {
            // GRO and scatter-gather may be fixed; checksum and segmentation offload must be off.
            Err(error) if what != 0x19 && what != 0x2c => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Sends SIGKILL.
pub(crate) fn kill(pid: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::kill(pid, libc::SIGKILL) }).map(drop)
}

/// Raises this process's soft limit of open files to the hard limit.
pub(crate) fn raise_open_files() -> io::Result<()> {
    // SAFETY: all zero bytes are a valid rlimit, and both calls get pointers to a live one.
    unsafe {
        let mut limit: libc::rlimit = zeroed();
        check(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit))?;
        limit.rlim_cur = limit.rlim_max;
        check(libc::setrlimit(libc::RLIMIT_NOFILE, &limit)).map(drop)
    }
}

/// Sends SIGTERM.
pub(crate) fn terminate(pid: u32) -> io::Result<()> {
    signal(pid, libc::SIGTERM)
}

/// Sends SIGINT, as Ctrl-C does.
pub(crate) fn interrupt(pid: u32) -> io::Result<()> {
    signal(pid, libc::SIGINT)
}

fn signal(pid: u32, signal: libc::c_int) -> io::Result<()> {
    let pid = i32::try_from(pid).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}
