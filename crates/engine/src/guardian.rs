//! The guardian: a small process that outlives the daemon and takes its rules and routes down when it dies, however it dies.
//!
//! The BPF programs need no guardian: they are held by the daemon's descriptors and go with it.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use braid_platform::linux::netlink;

/// The daemon's end. While it lives, the guardian waits.
pub struct Guardian {
    child: Child,
}

impl Guardian {
    /// Starts the guardian: this program again, with `arguments` (the hidden subcommand). Its standard input is a pipe that ends
    /// when this process does.
    pub fn start(arguments: &[&str]) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        // A group of its own: Ctrl-C at the terminal is for the daemon.
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        Ok(Self { child: command.spawn()? })
    }

    /// Ends the guardian without a sweep by it: the caller has swept, or will.
    pub fn dismiss(mut self) {
        if let Some(mut pipe) = self.child.stdin.take() {
            let _ = io::Write::write_all(&mut pipe, b"q");
        }
        let _ = self.child.wait();
    }
}

/// The guardian's whole life: waits for the pipe to end, then sweeps.
pub fn watch() -> anyhow::Result<()> {
    let mut word = [0];
    loop {
        match io::stdin().read(&mut word) {
            Ok(0) => break,
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let swept = netlink::sweep()?;
    tracing::info!(?swept, "the daemon is gone; its rules and routes are taken down");
    Ok(())
}
