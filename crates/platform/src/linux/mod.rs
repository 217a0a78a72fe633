//! Linux.

pub mod bpf;
pub mod seccomp;
pub mod sys;
