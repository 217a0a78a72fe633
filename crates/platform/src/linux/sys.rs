//! All `unsafe` code of the crate: system calls that no safe library offers, and layouts shared with the BPF programs.

pub mod abi;
pub mod access;
pub mod bpf;
pub mod datagram;
pub mod process;
pub mod seccomp;
pub mod socket;
pub mod tun;
pub mod watch;
