//! Linux.

pub mod bpf;
pub mod process;
pub mod seccomp;
pub mod sockdiag;
pub mod sys;
