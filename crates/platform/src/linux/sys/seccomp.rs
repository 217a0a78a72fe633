//! System calls behind `braid run`: the filter, its listener, and the queries a supervisor makes about an intercepted system call.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use libc::{c_int, c_long, c_void, sock_filter};

/// A system call of a supervised thread that waits for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawCall {
    /// Identifies the waiting call; the answer must contain it.
    pub id: u64,
    /// Id of the calling thread in this process's PID namespace; 0 if the thread is not visible there.
    pub thread: i32,
    /// Number of the system call on this architecture.
    pub number: c_long,
    /// Arguments of the system call.
    pub args: [u64; 6],
}

/// Which calls a filter intercepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Calls with a destination: `connect`, `sendto` with an address, `sendmsg` and `sendmmsg`.
    Destinations,
    /// Also calls that return an address or a connect's result: `getpeername`, `getsockname`, `recvfrom` with a buffer for an address, `recvmsg`,
    /// `recvmmsg`, and `getsockopt` of `SO_ERROR`.
    Conversations,
}

/// Installs the filter on the calling thread and all its future children, and returns the listener that receives their calls.
///
/// The calls of `scope` wait for the listener's answer. `io_uring_setup` fails with `ENOSYS`, because a ring could connect without passing the
/// filter. Everything else passes, including every call with a system call ABI other than the machine's own (32-bit x86, x32).
///
/// A thread without `CAP_SYS_ADMIN` must first set `no_new_privs`, which prevents later programs from gaining privileges. This is done only if the
/// kernel requires it.
///
/// # Errors
/// `EBUSY` if the thread is already under a filter with a listener. `EINVAL` or `ENOSYS` if the kernel lacks the feature. `EPERM` if it is forbidden,
/// for example by a container.
pub fn install_filter(scope: Scope) -> io::Result<OwnedFd> {
    let program = filter_program(scope);
    match install(&program) {
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {}
        other => return other,
    }
    // SAFETY: PR_SET_NO_NEW_PRIVS takes four integers and touches no memory.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
    install(&program)
}

fn install(program: &[sock_filter]) -> io::Result<OwnedFd> {
    let waits_killable = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    // Killable waits (5.19) prevent a program's signals from restarting a call that is being answered. Older kernels lack them.
    match seccomp(program, waits_killable) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => seccomp(program, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER),
        other => other,
    }
}

fn seccomp(program: &[sock_filter], flags: libc::c_ulong) -> io::Result<OwnedFd> {
    let length = u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?;
    let program = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut() };
    // SAFETY: `program` describes a live slice of that length, which the kernel copies and does not write to.
    let fd = check(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) })?;
    // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xC000_00B7;

/// x32 has the architecture value of x86_64 and sets this bit in the call number.
const X32_BIT: u32 = 0x4000_0000;

/// The classic BPF program that [`install_filter`] installs.
fn filter_program(scope: Scope) -> Vec<sock_filter> {
    let number = offset_of!(libc::seccomp_data, nr) as u32;
    let arch = offset_of!(libc::seccomp_data, arch) as u32;
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const NOTIFY: u32 = libc::SECCOMP_RET_USER_NOTIF;
    const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
    let always: &[c_long] = match scope {
        Scope::Destinations => &[libc::SYS_connect, libc::SYS_sendmsg, libc::SYS_sendmmsg],
        Scope::Conversations => &[
            libc::SYS_connect,
            libc::SYS_sendmsg,
            libc::SYS_sendmmsg,
            libc::SYS_recvmsg,
            libc::SYS_recvmmsg,
            libc::SYS_getpeername,
            libc::SYS_getsockname,
        ],
    };
    let mut program = vec![
        load(arch),
        if_equal(AUDIT_ARCH, 1),
        ret(ALLOW),
        load(number),
        unless_at_least(X32_BIT, 1),
        ret(ALLOW),
        unless_equal(libc::SYS_io_uring_setup as u32, 1),
        ret(REFUSE),
    ];
    for call in always {
        program.extend([unless_equal(*call as u32, 1), ret(NOTIFY)]);
    }
    // Test both halves of the address pointer. Both supported architectures are little-endian.
    let with_address = |program: &mut Vec<sock_filter>, call: c_long| {
        let address = argument_offset(4);
        program.extend([unless_equal(call as u32, 6), load(address), unless_equal(0, 3), load(address + 4), unless_equal(0, 1)]);
        program.extend([ret(ALLOW), ret(NOTIFY)]);
    };
    with_address(&mut program, libc::SYS_sendto);
    if scope == Scope::Conversations {
        with_address(&mut program, libc::SYS_recvfrom);
        program.extend([unless_equal(libc::SYS_getsockopt as u32, 5), load(argument_offset(1)), unless_equal(libc::SOL_SOCKET as u32, 3)]);
        program.extend([load(argument_offset(2)), unless_equal(libc::SO_ERROR as u32, 1), ret(NOTIFY)]);
    }
    program.push(ret(ALLOW));
    program
}

/// Offset of the lower half of a call's argument.
const fn argument_offset(index: usize) -> u32 {
    (offset_of!(libc::seccomp_data, args) + index * size_of::<u64>()) as u32
}

const fn statement(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

const fn load(offset: u32) -> sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

const fn ret(action: u32) -> sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, action)
}

const fn jump(test: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: (libc::BPF_JMP | test | libc::BPF_K) as u16, jt, jf, k }
}

const fn if_equal(k: u32, skip: u8) -> sock_filter {
    jump(libc::BPF_JEQ, k, skip, 0)
}

const fn unless_equal(k: u32, skip: u8) -> sock_filter {
    jump(libc::BPF_JEQ, k, 0, skip)
}

const fn unless_at_least(k: u32, skip: u8) -> sock_filter {
    jump(libc::BPF_JGE, k, 0, skip)
}

/// Waits until a supervised thread makes an intercepted call.
///
/// # Errors
/// `ENOENT` if the thread died or was interrupted; call again. `EINTR` if a signal arrived.
pub fn receive(listener: BorrowedFd<'_>) -> io::Result<RawCall> {
    // SAFETY: all-zero is a valid value of this plain structure, and the kernel demands it.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `seccomp_notif` to a local variable.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) }.into())?;
    Ok(RawCall { id: call.id, thread: call.pid as i32, number: call.data.nr.into(), args: call.data.args })
}

/// Lets the call `id` continue as if it had not been intercepted.
///
/// # Errors
/// `ENOENT` if the call no longer waits. `EINPROGRESS` if it has not been received yet, or is already answered.
pub fn answer_continue(listener: BorrowedFd<'_>, id: u64) -> io::Result<()> {
    let mut answer = libc::seccomp_notif_resp { id, val: 0, error: 0, flags: libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32 };
    // SAFETY: the kernel reads one `seccomp_notif_resp` from a local variable.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) }.into())?;
    Ok(())
}

/// Gives the call `id` this result instead of the kernel: a value or an error number.
///
/// # Errors
/// Those of [`answer_continue`].
pub fn answer(listener: BorrowedFd<'_>, id: u64, result: Result<i64, c_int>) -> io::Result<()> {
    let (val, error) = match result {
        Ok(value) => (value, 0),
        Err(number) => (0, -number),
    };
    let mut answer = libc::seccomp_notif_resp { id, val, error, flags: 0 };
    // SAFETY: the kernel reads one `seccomp_notif_resp` from a local variable.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) }.into())?;
    Ok(())
}

/// Puts a copy of `file` in place of the caller's descriptor `fd`, and closes what `fd` referred to. `closes_on_exec` sets the descriptor's flag. The
/// call still waits for its answer. Since Linux 5.9.
///
/// # Errors
/// `ENOENT` if the call no longer waits.
pub fn replace_descriptor(listener: BorrowedFd<'_>, id: u64, fd: RawFd, file: BorrowedFd<'_>, closes_on_exec: bool) -> io::Result<()> {
    let flags = libc::SECCOMP_ADDFD_FLAG_SETFD as u32;
    let newfd_flags = if closes_on_exec { libc::O_CLOEXEC as u32 } else { 0 };
    let request = libc::seccomp_notif_addfd { id, flags, srcfd: file.as_raw_fd() as u32, newfd: fd as u32, newfd_flags };
    // SAFETY: the kernel reads one `seccomp_notif_addfd` from a local variable.
    check(unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ADDFD, &raw const request) }.into())?;
    Ok(())
}

/// Whether the call `id` still waits. Only then does data that was read by its thread id come from that thread.
pub fn is_waiting(listener: BorrowedFd<'_>, id: u64) -> bool {
    // SAFETY: the kernel reads one u64 from a local variable.
    unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &raw const id) == 0 }
}

/// Requests wake-ups on the waker's CPU, which halves the cost of an answer (Linux 6.6). Has no effect on older kernels.
pub fn wake_on_same_cpu(listener: BorrowedFd<'_>) -> bool {
    const SYNC_WAKE_UP: libc::c_ulong = 1;
    // SAFETY: this request takes its flags by value.
    unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS, SYNC_WAKE_UP) == 0 }
}

/// Reads another process's memory at `address`. Returns the number of bytes read, which is smaller if the mapping ends.
///
/// # Errors
/// `EPERM` if the process may not be accessed. `ESRCH` if it is gone. `EFAULT` if nothing is mapped there.
pub fn read_memory(thread: i32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast::<c_void>(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as usize as *mut c_void, iov_len: into.len() };
    // SAFETY: `local` is a live buffer of that length; `remote` is an address of the other process, which the kernel checks.
    let read = unsafe { libc::process_vm_readv(thread, &raw const local, 1, &raw const remote, 1, 0) };
    check(read as c_long).map(|count| count as usize)
}

/// The memory of another thread's process, held by descriptors. A process that later gets the same thread id, or another program that the process
/// starts, has another memory, to which nothing is written.
#[derive(Debug)]
pub struct ProcessMemory {
    bytes: File,
    regions: File,
}

impl ProcessMemory {
    /// Opens the current memory of the thread.
    ///
    /// # Errors
    /// `EPERM` or `EACCES` if the process may not be accessed. `ENOENT` or `ESRCH` if it is gone.
    pub fn open(thread: i32) -> io::Result<Self> {
        let bytes = OpenOptions::new().write(true).open(format!("/proc/{thread}/mem"))?;
        Ok(Self { bytes, regions: File::open(format!("/proc/{thread}/maps"))? })
    }

    /// Writes all bytes at `address`. Memory that the program itself may not write is not written either, although the kernel would allow it, as for
    /// a debugger.
    ///
    /// # Errors
    /// `EFAULT` if there is no writable memory, or if the memory no longer exists.
    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        let fault = || io::Error::from_raw_os_error(libc::EFAULT);
        let end = address.checked_add(bytes.len() as u64).ok_or_else(fault)?;
        let mut checked = address;
        while checked < end {
            let region = self.region(checked)?.filter(|region| region.writable).ok_or_else(fault)?;
            checked = region.end;
        }
        self.bytes.write_all_at(bytes, address).map_err(|_| fault())
    }

    /// The region that contains `address`.
    fn region(&self, address: u64) -> io::Result<Option<Region>> {
        match self.query_region(address) {
            // Before Linux 6.11 the kernel lacks the query.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => self.read_region(address),
            outcome => outcome,
        }
    }

    fn query_region(&self, address: u64) -> io::Result<Option<Region>> {
        let mut query = RegionQuery { size: size_of::<RegionQuery>() as u64, address, ..RegionQuery::default() };
        // SAFETY: the kernel reads and writes one structure, whose size is passed, in a local variable.
        match check(unsafe { libc::ioctl(self.regions.as_raw_fd(), PROCMAP_QUERY, &raw mut query) }.into()) {
            Ok(_) => Ok(Some(Region { end: query.end, writable: query.permissions & VMA_WRITABLE != 0 })),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Finds the region in the kernel's text: lines `BEGIN-END rwxp ...` in ascending order.
    fn read_region(&self, address: u64) -> io::Result<Option<Region>> {
        let mut text = &self.regions;
        text.seek(SeekFrom::Start(0))?;
        for line in BufReader::with_capacity(16 << 10, text).lines() {
            let line = line?;
            let mut words = line.split([' ', '-']);
            let mut number = || words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
            let (Some(begin), Some(end)) = (number(), number()) else { continue };
            if address < end {
                let writable = words.next().is_some_and(|permissions| permissions.as_bytes().get(1) == Some(&b'w'));
                return Ok((begin <= address).then_some(Region { end, writable }));
            }
        }
        Ok(None)
    }
}

/// The rest of a region, up to `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Region {
    end: u64,
    writable: bool,
}

/// `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct RegionQuery {
    size: u64,
    flags: u64,
    address: u64,
    begin: u64,
    end: u64,
    permissions: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::Ioctl = (3 << 30 | (size_of::<RegionQuery>() as u32) << 16 | (b'f' as u32) << 8 | 17) as libc::Ioctl;
const VMA_WRITABLE: u64 = 2;

/// Duplicates `fd` of the process that `thread` belongs to. Close the copy soon, because a connection closes only with its last descriptor.
///
/// # Errors
/// `EPERM` if the process may not be accessed. `ESRCH` or `EBADF` if the process or its descriptor is gone.
pub fn duplicate(thread: i32, fd: RawFd) -> io::Result<OwnedFd> {
    // A thread may have its own descriptor table, so use the thread itself if the kernel supports it (6.9), otherwise its process.
    let process = match pidfd_open(thread, libc::PIDFD_THREAD) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => match pidfd_open(thread, 0) {
            Err(_) => pidfd_open(super::process::thread_group(thread)?, 0)?,
            Ok(process) => process,
        },
        other => other?,
    };
    // SAFETY: takes three integers.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })?;
    // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// A descriptor of a process, or with `PIDFD_THREAD` of a thread. It is readable once the process has ended, and never means another one.
///
/// # Errors
/// Errors of `pidfd_open`.
pub(super) fn pidfd_open(thread: i32, flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, thread, flags) })?;
    // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Reads a socket option of type `int`.
///
/// # Errors
/// Errors of `getsockopt`.
pub fn int_option(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut length = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `value`, and the length to `length`; both are local variables.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut length) }.into())?;
    Ok(value)
}

/// Sets a socket option of type `int`.
///
/// # Errors
/// Errors of `setsockopt`.
pub fn set_int_option(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    let length = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `length` bytes from `value`.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length) }.into())?;
    Ok(())
}

/// Reads a socket option of any type, at most 256 bytes.
///
/// # Errors
/// Errors of `getsockopt`.
pub fn raw_option(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<Vec<u8>> {
    let mut value = vec![0u8; 256];
    let mut length = value.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `value`, and the length to `length`.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &raw mut length) }.into())?;
    value.truncate(length as usize);
    Ok(value)
}

/// Sets a socket option of any type.
///
/// # Errors
/// Errors of `setsockopt`.
pub fn set_raw_option(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &[u8]) -> io::Result<()> {
    // SAFETY: the kernel reads as many bytes from `value` as it has.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), value.len() as libc::socklen_t) }.into())?;
    Ok(())
}

/// Whether a TCP socket waits for the answer to its SYN.
///
/// # Errors
/// Errors of `getsockopt`.
pub fn tcp_is_connecting(socket: BorrowedFd<'_>) -> io::Result<bool> {
    const TCP_SYN_SENT: u8 = 2;
    Ok(tcp_state(socket)? == TCP_SYN_SENT)
}

/// Whether a TCP socket is in the state in which `connect` would start a connection (neither connecting nor connected).
///
/// # Errors
/// Errors of `getsockopt`.
pub fn tcp_is_closed(socket: BorrowedFd<'_>) -> io::Result<bool> {
    const TCP_CLOSE: u8 = 7;
    Ok(tcp_state(socket)? == TCP_CLOSE)
}

fn tcp_state(socket: BorrowedFd<'_>) -> io::Result<u8> {
    let mut state = 0u8;
    let mut length = 1;
    let at = (&raw mut state).cast();
    // SAFETY: the kernel writes the first `length` bytes of `tcp_info`, whose first byte is the state.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, at, &raw mut length) }.into())?;
    Ok(state)
}

/// Reads a 64-bit socket option of level `SOL_SOCKET`.
///
/// # Errors
/// Errors of `getsockopt`.
pub fn wide_option(socket: BorrowedFd<'_>, name: c_int) -> io::Result<u64> {
    let mut value = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    let at = (&raw mut value).cast();
    // SAFETY: the kernel writes at most `length` bytes to `value`.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, at, &raw mut length) }.into())?;
    Ok(value)
}

/// Result of [`receive_message`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Length of the datagram; larger than the buffer only if `MSG_TRUNC` was requested.
    pub length: usize,
    /// Size of the control messages in bytes.
    pub control: usize,
    /// Flags such as `MSG_TRUNC`.
    pub flags: c_int,
}

/// Receives one datagram and its control messages without waiting. Does not query the sender.
///
/// # Errors
/// Errors of `recvmsg`; `EAGAIN` if no datagram is pending.
pub fn receive_message(socket: BorrowedFd<'_>, into: &mut [u8], control: &mut [u64], flags: c_int) -> io::Result<Received> {
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: all-zero is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), std::mem::size_of_val(control) as _);
    // SAFETY: the message refers to live buffers of the stated sizes.
    let length = check(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags | libc::MSG_DONTWAIT) } as c_long)?;
    Ok(Received { length: length as usize, control: message.msg_controllen as usize, flags: message.msg_flags })
}

/// Sends one message, with these control messages (complete `cmsghdr`s), to the socket's peer without waiting.
///
/// # Errors
/// Errors of `sendmsg`.
pub fn send_message(socket: BorrowedFd<'_>, bytes: &[u8], control: &[u8], flags: c_int) -> io::Result<usize> {
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all-zero is a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    if !control.is_empty() {
        (message.msg_control, message.msg_controllen) = (control.as_ptr().cast_mut().cast(), control.len() as _);
    }
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the message refers to live buffers of the stated sizes, which the kernel only reads.
    check(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) } as c_long).map(|sent| sent as usize)
}

/// Removes the peer of a connected datagram socket and, unless its program bound one, the local address.
///
/// # Errors
/// Errors of `connect`.
pub fn disconnect(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: all-zero is a valid `sockaddr`; its family is AF_UNSPEC.
    let none: libc::sockaddr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel reads one `sockaddr` from a local variable.
    check(unsafe { libc::connect(socket.as_raw_fd(), &raw const none, size_of::<libc::sockaddr>() as libc::socklen_t) }.into())?;
    Ok(())
}

fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const NOTIFY: u32 = libc::SECCOMP_RET_USER_NOTIF;

    /// The filter's result, computed by running the program as the kernel would.
    fn verdict(scope: Scope, number: c_long, arch: u32, args: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend((number as u32).to_ne_bytes());
        data.extend(arch.to_ne_bytes());
        data.extend(0u64.to_ne_bytes());
        args.iter().for_each(|arg| data.extend(arg.to_ne_bytes()));
        let program = filter_program(scope);
        let (mut at, mut accumulator) = (0, 0u32);
        loop {
            let step = program[at];
            let code = u32::from(step.code);
            at += 1;
            if code == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS {
                let offset = step.k as usize;
                accumulator = u32::from_ne_bytes(data[offset..offset + 4].try_into().unwrap());
            } else if code == libc::BPF_RET | libc::BPF_K {
                return step.k;
            } else {
                let holds = match code & 0xF0 {
                    libc::BPF_JEQ => accumulator == step.k,
                    libc::BPF_JGE => accumulator >= step.k,
                    other => panic!("unknown jump {other:#x}"),
                };
                at += usize::from(if holds { step.jt } else { step.jf });
            }
        }
    }

    #[test]
    fn regression_open_memory_does_not_refer_to_the_next_program_of_the_process() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; read go; exec sh -c 'echo other; read end'"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (number, mut said) = (child.id(), BufReader::new(child.stdout.take().unwrap()).lines());
        let stack = || {
            let text = std::fs::read_to_string(format!("/proc/{number}/maps")).unwrap();
            let line = text.lines().find(|line| line.contains("[stack]")).unwrap().to_owned();
            u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap()
        };
        assert_eq!(said.next().unwrap().unwrap(), "one");
        let memory = ProcessMemory::open(number as i32).unwrap();
        memory.write(stack(), &[0]).unwrap();
        child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        assert_eq!(said.next().unwrap().unwrap(), "other");
        // Same process id, another program: the address is mapped and writable there, but the old handle writes nothing.
        ProcessMemory::open(number as i32).unwrap().write(stack(), &[0]).unwrap();
        assert_eq!(memory.write(stack(), &[0]).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn only_memory_writable_by_its_program_is_written() {
        static CONSTANT: [u8; 4096] = [7; 4096];
        let memory = ProcessMemory::open(std::process::id() as i32).unwrap();
        let mut room = vec![0u8; 3 << 20];
        let bytes = vec![5; room.len()];
        memory.write(room.as_mut_ptr() as u64, &bytes).unwrap();
        assert_eq!(room, bytes);
        for wrong in [CONSTANT.as_ptr() as u64, 0, 8, u64::MAX - 1, 1 << 62] {
            assert_eq!(memory.write(wrong, &[1, 2, 3]).unwrap_err().raw_os_error(), Some(libc::EFAULT), "{wrong:#x}");
        }
        assert!(CONSTANT.iter().all(|byte| *byte == 7));
        // Both methods agree, including in gaps.
        for address in [room.as_ptr() as u64, CONSTANT.as_ptr() as u64, 0, 4096] {
            let read = memory.read_region(address).unwrap();
            assert_eq!(read.map(|region| region.writable), memory.region(address).unwrap().map(|region| region.writable), "{address:#x}");
        }
    }

    const BOTH: [Scope; 2] = [Scope::Destinations, Scope::Conversations];
    const POINTERS: [u64; 5] = [1, 1 << 31, 1 << 32, 0x7fff_0000_0000, u64::MAX];

    #[test]
    fn the_filter_intercepts_calls_with_a_destination() {
        for scope in BOTH {
            for number in [libc::SYS_connect, libc::SYS_sendmsg, libc::SYS_sendmmsg] {
                assert_eq!(verdict(scope, number, AUDIT_ARCH, [0; 6]), NOTIFY);
            }
            assert_eq!(verdict(scope, libc::SYS_sendto, AUDIT_ARCH, [0; 6]), ALLOW);
            for address in POINTERS {
                assert_eq!(verdict(scope, libc::SYS_sendto, AUDIT_ARCH, [0, 0, 0, 0, address, 0]), NOTIFY, "{address:#x}");
            }
        }
    }

    #[test]
    fn the_filter_intercepts_queries_of_addresses_only_in_the_wider_scope() {
        let verdicts = |number, args| BOTH.map(|scope| verdict(scope, number, AUDIT_ARCH, args));
        for number in [libc::SYS_getpeername, libc::SYS_getsockname, libc::SYS_recvmsg, libc::SYS_recvmmsg] {
            assert_eq!(verdicts(number, [0; 6]), [ALLOW, NOTIFY]);
        }
        assert_eq!(verdicts(libc::SYS_recvfrom, [0; 6]), [ALLOW; 2]);
        for address in POINTERS {
            assert_eq!(verdicts(libc::SYS_recvfrom, [0, 0, 0, 0, address, 0]), [ALLOW, NOTIFY], "{address:#x}");
        }
        let option = |level: i32, name: i32| verdicts(libc::SYS_getsockopt, [3, level as u64, name as u64, 1, 1, 0]);
        assert_eq!(option(libc::SOL_SOCKET, libc::SO_ERROR), [ALLOW, NOTIFY]);
        assert_eq!(option(libc::SOL_SOCKET, libc::SO_TYPE), [ALLOW; 2]);
        assert_eq!(option(libc::IPPROTO_TCP, libc::SO_ERROR), [ALLOW; 2]);
    }

    #[test]
    fn the_filter_lets_other_calls_pass_and_rejects_io_uring() {
        let refused = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
        for scope in BOTH {
            for number in [libc::SYS_read, libc::SYS_write, libc::SYS_bind, libc::SYS_execve, libc::SYS_seccomp, libc::SYS_close] {
                assert_eq!(verdict(scope, number, AUDIT_ARCH, [1; 6]), ALLOW);
            }
            assert_eq!(verdict(scope, libc::SYS_io_uring_setup, AUDIT_ARCH, [0; 6]), refused);
        }
    }

    #[test]
    fn other_system_call_abis_pass() {
        const I386: u32 = 0x4000_0003;
        for scope in BOTH {
            assert_eq!(verdict(scope, libc::SYS_connect, I386, [1; 6]), ALLOW);
            assert_eq!(verdict(scope, libc::SYS_connect | c_long::from(X32_BIT), AUDIT_ARCH, [1; 6]), ALLOW);
        }
    }

    #[test]
    fn memory_and_descriptors_of_this_process_can_be_accessed() {
        let secret = *b"destination";
        let mut seen = [0u8; 11];
        let me = std::process::id() as i32;
        assert_eq!(read_memory(me, secret.as_ptr() as u64, &mut seen).unwrap(), secret.len());
        assert_eq!(seen, secret);
        assert_eq!(read_memory(me, 8, &mut seen).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        let mut changed = [0u8; 3];
        ProcessMemory::open(me).unwrap().write(changed.as_mut_ptr() as u64, b"new").unwrap();
        assert_eq!(std::hint::black_box(changed), *b"new");
        static FIXED: &str = "constant";
        assert_eq!(
            ProcessMemory::open(me).unwrap().write(FIXED.as_ptr() as u64, b"v").unwrap_err().raw_os_error(),
            Some(libc::EFAULT),
            "{FIXED}"
        );
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let copy = std::net::UdpSocket::from(duplicate(me, socket.as_raw_fd()).unwrap());
        assert_eq!(copy.local_addr().unwrap(), socket.local_addr().unwrap());
    }

    #[test]
    fn options_are_read_and_written() {
        use std::os::fd::AsFd;
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        set_int_option(socket.as_fd(), libc::SOL_IP, libc::IP_TTL, 7).unwrap();
        assert_eq!(int_option(socket.as_fd(), libc::SOL_IP, libc::IP_TTL).unwrap(), 7);
        socket.connect("127.0.0.1:9").unwrap();
        disconnect(socket.as_fd()).unwrap();
        assert!(socket.peer_addr().is_err());
        assert_ne!(wide_option(socket.as_fd(), libc::SO_COOKIE).unwrap(), 0);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!tcp_is_closed(listener.as_fd()).unwrap());
    }
}
