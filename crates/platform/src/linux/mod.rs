//! Linux.

pub mod bpf;
pub mod netlink;
pub mod process;
pub mod seccomp;
pub mod sockdiag;
pub mod sys;
