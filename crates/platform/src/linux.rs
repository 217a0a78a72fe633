//! Linux backend.

pub mod battery;
pub mod bpf;
pub mod doctor;
pub mod model;
pub mod motion;
pub mod netlink;
pub mod owner;
pub mod probe;
pub mod process;
pub mod resolvers;
pub mod reverse_path;
pub mod seccomp;
pub mod sockdiag;
pub mod sys;
pub mod watch;
pub mod worker;
