//! BPF system calls that `aya` lacks, and related queries of the kernel.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use braid_model::Time;

const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_MAP_LOOKUP_BATCH: libc::c_long = 24;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_ITER_CREATE: libc::c_long = 33;
const BPF_TRACE_ITER: u32 = 28;

/// The part of `union bpf_attr` for BPF_LINK_CREATE of an iterator.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
    iter_info: u64,
    iter_info_len: u32,
    pad: u32,
}

/// The part of `union bpf_attr` for BPF_PROG_TEST_RUN.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// The part of `union bpf_attr` for BPF_MAP_LOOKUP_BATCH.
#[repr(C)]
struct LookupBatch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<i32> {
    // SAFETY: `attr` is a live structure laid out as the kernel's `union bpf_attr` for this command, and its size goes with it;
    // the pointers inside refer to buffers that their makers keep alive across this call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::try_from(result).unwrap_or(i32::MAX)) }
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel just returned this descriptor to us, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Attaches an iterator program to the objects that it iterates over.
pub fn attach_iterator(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attr = LinkCreate {
        prog_fd: program.as_raw_fd() as u32,
        target_fd: 0,
        attach_type: BPF_TRACE_ITER,
        flags: 0,
        iter_info: 0,
        iter_info_len: 0,
        pad: 0,
    };
    bpf(BPF_LINK_CREATE, &mut attr).map(owned)
}

/// Starts one dump of an attached iterator. Reading the file runs the program.
pub fn start_iterator(link: BorrowedFd<'_>) -> io::Result<File> {
    let mut attr = [link.as_raw_fd() as u32, 0];
    bpf(BPF_ITER_CREATE, &mut attr).map(|fd| File::from(owned(fd)))
}

/// Runs a packet program `repeat` times on an empty packet. Returns the mean time of a run in nanoseconds.
pub fn test_run(program: BorrowedFd<'_>, repeat: u32) -> io::Result<u32> {
    run(program, &[0; 64], repeat).map(|done| done.duration)
}

/// Runs a packet program once on this packet, an Ethernet header and some 3,500 bytes at most. Returns the program's result.
pub fn run_once(program: BorrowedFd<'_>, packet: &[u8]) -> io::Result<u32> {
    run(program, packet, 1).map(|done| done.retval)
}

fn run(program: BorrowedFd<'_>, packet: &[u8], repeat: u32) -> io::Result<TestRun> {
    let mut attr = TestRun {
        prog_fd: program.as_raw_fd() as u32,
        data_size_in: packet.len() as u32,
        data_in: packet.as_ptr() as u64,
        repeat,
        ..TestRun::default()
    };
    bpf(BPF_PROG_TEST_RUN, &mut attr)?;
    Ok(attr)
}

/// Reads the first `count` values of an array map whose values have the size of `V`. Needs Linux 5.6.
///
/// # Errors
/// Those of the kernel.
pub fn read_first<V: aya::Pod>(map: BorrowedFd<'_>, count: usize) -> io::Result<Vec<V>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let (mut keys, mut values, mut next) = (vec![0u32; count], Vec::<V>::with_capacity(count), 0u32);
    let mut attr = LookupBatch {
        in_batch: 0,
        out_batch: std::ptr::from_mut(&mut next) as u64,
        keys: keys.as_mut_ptr() as u64,
        values: values.as_mut_ptr() as u64,
        count: count as u32,
        map_fd: map.as_raw_fd() as u32,
        elem_flags: 0,
        flags: 0,
    };
    match bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) {
        // The end of the map.
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
        _ => {}
    }
    // SAFETY: the kernel has written `attr.count` values to the buffer, which has room for them, and every bit pattern is a `Pod` value.
    unsafe { values.set_len((attr.count as usize).min(count)) };
    Ok(values)
}

/// Has the kernel keep the sum of a test packet's bytes, as of one from a network card, and check it after the run. Linux 6.16 has it.
const BPF_F_TEST_SKB_CHECKSUM_COMPLETE: u32 = 4;
/// Places of fields of `struct __sk_buff`, in words of 32 bits.
const SKB_MARK: usize = 2;
const SKB_GSO_SEGS: usize = 41;
const SKB_GSO_SIZE: usize = 44;

/// A packet for [`test_packet`].
#[derive(Debug, Clone, Copy)]
pub struct TestPacket<'a> {
    /// The Ethernet frame; the kernel wants its header at least, and has room for some 3,500 bytes.
    pub frame: &'a [u8],
    /// Its firewall mark.
    pub mark: u32,
    /// Payload of each segment in bytes if it is a large packet that a network card will cut; 0: it is none.
    pub segment: u16,
    /// Whether the kernel keeps the sum of its bytes, and fails with `EBADMSG` if it is wrong after the run. Older kernels fail with `EINVAL`.
    pub summed: bool,
}

/// Runs a program at tc once on a packet. Returns the program's verdict, and the packet's mark and frame afterwards.
pub fn test_packet(program: BorrowedFd<'_>, packet: &TestPacket<'_>) -> io::Result<(i32, u32, Vec<u8>)> {
    let mut frame = vec![0u8; packet.frame.len()];
    // More than `struct __sk_buff` has: the kernel wants zeroes after it.
    let mut context = [0u32; 64];
    context[SKB_MARK] = packet.mark;
    if packet.segment > 0 {
        context[SKB_GSO_SIZE] = packet.segment.into();
        context[SKB_GSO_SEGS] = frame.len().div_ceil(packet.segment.into()) as u32;
    }
    let mut after = [0u32; 64];
    let mut attr = TestRun {
        prog_fd: program.as_raw_fd() as u32,
        data_size_in: packet.frame.len() as u32,
        data_size_out: frame.len() as u32,
        data_in: packet.frame.as_ptr() as u64,
        data_out: frame.as_mut_ptr() as u64,
        repeat: 1,
        ctx_size_in: size_of_val(&context) as u32,
        ctx_size_out: size_of_val(&after) as u32,
        ctx_in: context.as_ptr() as u64,
        ctx_out: after.as_mut_ptr() as u64,
        flags: if packet.summed { BPF_F_TEST_SKB_CHECKSUM_COMPLETE } else { 0 },
        ..TestRun::default()
    };
    bpf(BPF_PROG_TEST_RUN, &mut attr)?;
    frame.truncate(attr.data_size_out as usize);
    Ok((attr.retval.cast_signed(), after[SKB_MARK], frame))
}

/// Elements that [`read_map`] reads with one call, at first and at most: the kernel refuses fewer than a bucket holds.
const BATCH: std::ops::RangeInclusive<usize> = 256..=1 << 16;

/// Reads all elements of a hash map, each once; those that are added or removed meanwhile may be missing. `K` and `V` have the sizes of the map's keys and
/// values. Needs Linux 5.6.
///
/// # Errors
/// Those of the kernel; `ENOSPC` if a bucket has an absurd number of elements.
pub fn read_map<K: aya::Pod, V: aya::Pod>(map: BorrowedFd<'_>) -> io::Result<Vec<(K, V)>> {
    let (mut room, mut position, mut next) = (*BATCH.start(), None::<u32>, 0u32);
    let mut all = Vec::new();
    loop {
        // The kernel writes whole elements into these, one after the other.
        let (mut keys, mut values) = (Vec::<K>::with_capacity(room), Vec::<V>::with_capacity(room));
        let mut attr = LookupBatch {
            in_batch: position.as_ref().map_or(0, |position| std::ptr::from_ref(position) as u64),
            out_batch: std::ptr::from_mut(&mut next) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: room as u32,
            map_fd: map.as_raw_fd() as u32,
            elem_flags: 0,
            flags: 0,
        };
        let outcome = bpf(BPF_MAP_LOOKUP_BATCH, &mut attr);
        let is_end = match &outcome {
            Ok(_) => false,
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
            // The next bucket has more elements than there is room for, and the kernel has read none.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) && room < *BATCH.end() => {
                room *= 4;
                continue;
            }
            Err(_) => return outcome.map(|_| all),
        };
        let count = (attr.count as usize).min(room);
        // SAFETY: the kernel has written `count` elements to each buffer, which has room for them, and every bit pattern is a `Pod` value.
        unsafe {
            keys.set_len(count);
            values.set_len(count);
        }
        all.extend(keys.into_iter().zip(values));
        if is_end {
            return Ok(all);
        }
        position = Some(next);
    }
}

/// Current time, on the clock that BPF programs read.
pub fn now() -> Time {
    read_clock(libc::CLOCK_MONOTONIC)
}

/// CPU time that this thread has consumed.
pub fn thread_time() -> Time {
    read_clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn read_clock(clock: libc::clockid_t) -> Time {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a live, writable timespec; both clocks always exist.
    unsafe { libc::clock_gettime(clock, &mut time) };
    Time::from_nanos(u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Waits until every BPF program that runs now has ended (some 10 ms). BPF programs run inside RCU read sections, and `membarrier`'s global command
/// waits for those.
pub fn wait_for_programs() {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: takes three integers.
    if unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) } < 0 {
        // Not available on kernels with `nohz_full`, and forbidden by some sandboxes.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Cookie of this process's network namespace.
pub fn netns_cookie() -> io::Result<u64> {
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let socket = std::net::UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
    let mut cookie = 0u64;
    let mut length = size_of_val(&cookie) as libc::socklen_t;
    // SAFETY: `cookie` and `length` are live, and `length` is the size of the buffer.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, std::ptr::from_mut(&mut cookie).cast(), &mut length)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(cookie) }
}

/// Waits for records in a ring buffer inside a tokio runtime.
#[derive(Debug)]
pub struct Ready(tokio::io::unix::AsyncFd<OwnedFd>);

impl Ready {
    /// Watches a duplicate of the ring buffer's descriptor. Must be called inside a tokio runtime.
    pub fn watch(ring: BorrowedFd<'_>) -> io::Result<Self> {
        let ring = ring.try_clone_to_owned()?;
        // SAFETY: the `AsyncFd` owns the descriptor, which stays open and the same for as long as it is registered.
        let registered = unsafe { tokio::io::unix::AsyncFd::register_with_interest(ring, tokio::io::Interest::READABLE) };
        Ok(Self(registered?))
    }

    /// Resolves when records may have arrived since the last time it resolved. Take all records before waiting again.
    pub async fn records(&self) -> io::Result<()> {
        self.0.readable().await?.clear_ready();
        Ok(())
    }
}

/// Id of the mount that holds `path`, as in `/proc/self/mountinfo`.
pub fn mount_id(path: &std::path::Path) -> io::Result<u64> {
    use std::os::unix::ffi::OsStrExt;
    const STATX_MNT_ID: u32 = 0x1000;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `statx` is a plain structure of integers, for which all zeroes is a value.
    let mut facts: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with a zero byte, and `facts` is live and writable.
    let result = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), 0, STATX_MNT_ID, &mut facts) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(facts.stx_mnt_id) }
}

/// Inode number of a running process's executable. Neither resolves its path nor contacts a file server, because either may block the caller.
pub fn exe_inode(process: u32) -> io::Result<u64> {
    let path = std::ffi::CString::new(format!("/proc/{process}/exe"))?;
    // SAFETY: `statx` is a plain structure of integers, for which all zeroes is a value.
    let mut facts: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with a zero byte, and `facts` is live and writable.
    let result = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), libc::AT_STATX_DONT_SYNC, libc::STATX_INO, &mut facts) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(facts.stx_ino) }
}

/// Opens the root of the cgroup v2 hierarchy through a private mount that does not appear in the file system.
pub fn open_cgroup2() -> io::Result<OwnedFd> {
    const FSCONFIG_CMD_CREATE: libc::c_long = 6;
    let check = |result: libc::c_long| {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::try_from(result).unwrap_or(-1)) }
    };
    // SAFETY: plain system calls on a constant string and descriptors we own.
    unsafe {
        let context = owned(check(libc::syscall(libc::SYS_fsopen, c"cgroup2".as_ptr(), 1))?);
        let none = std::ptr::null::<libc::c_char>();
        check(libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), FSCONFIG_CMD_CREATE, none, none, 0))?;
        let mount = owned(check(libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 1, 0))?);
        let root = libc::openat(mount.as_raw_fd(), c".".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC);
        Ok(owned(check(libc::c_long::from(root))?))
    }
}
