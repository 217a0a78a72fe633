//! All `unsafe` of the crate: system calls without a safe library, and layouts shared with the kernel's side.

pub mod abi;
pub mod access;
pub mod bpf;
pub mod datagram;
pub mod process;
pub mod seccomp;
pub mod socket;
pub mod watch;
