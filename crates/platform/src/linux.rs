//! Linux backend.

pub mod battery;
pub mod bpf;
pub mod client_sockets;
pub mod doctor;
pub mod gateway;
mod keepalive;
pub mod late;
pub mod leases;
pub mod model;
pub mod motion;
pub mod netlink;
pub mod outlet;
pub mod owner;
pub mod probe;
pub mod process;
pub mod resolvers;
pub mod reverse_path;
pub mod seccomp;
pub mod sockdiag;
pub mod supplicant;
pub mod sys;
pub mod tun;
pub mod watch;
pub mod worker;
