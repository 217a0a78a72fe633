//! The process that the user started: waits for the command, forwards signals, exits with the command's status.

use std::io::{self, PipeReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use braid_platform::linux::sys::process::{self, CHILD_ENDED, FORWARDED, Side, SignalMask, TERMINAL_STOPS};

use super::message::Message;
use super::relays::Relay;
use super::{RunError, RunOptions, supervisor};

/// Starts the supervisor, which starts the command, and waits for the command to end. Returns the command's exit status.
pub(super) fn run(options: &RunOptions, relay: Option<Relay>) -> Result<i32, RunError> {
    process::keep_ended_children();
    let signals: Vec<i32> = FORWARDED.into_iter().chain([CHILD_ENDED]).collect();
    // Before the fork, so that no signal can end the supervisor either. The command starts with the original signal mask.
    let mask = process::block_signals(&signals).map_err(refused("block signals"))?;
    process::set_child_subreaper(true).map_err(refused("adopt orphans"))?;
    let (from, to) = io::pipe().map_err(refused("make a pipe"))?;
    let supervisor = match process::fork().map_err(refused("fork"))? {
        Side::Parent(supervisor) => supervisor,
        Side::Child => {
            drop(from);
            // The terminal's stop key is for the command, and for the front, which shows the shell that the command has stopped.
            let _ = process::block_signals(&TERMINAL_STOPS);
            process::exit_now(supervisor::run(options, relay, mask, to));
        }
    };
    drop(to);
    let command = match Message::receive(&from) {
        Ok(Some(Message::Started(command))) => command,
        other => return not_started(options, mask, other.ok().flatten()),
    };
    let signals = process::signal_descriptor(&signals).map_err(refused("receive signals"))?;
    // A reader of the command's output must not wait for this process as well.
    let _ = process::silence(&[0, 1, 2]);
    let _ = process::close_inherited(&[from.as_raw_fd(), signals.as_raw_fd()]);
    Front { supervisor, command, from, signals }.wait().map_err(refused("wait for the command"))
}

fn refused(action: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |source| RunError::System { action, source }
}

/// Handles a supervisor that could not start the command; `why` is its reason.
fn not_started(options: &RunOptions, mask: SignalMask, why: Option<Message>) -> Result<i32, RunError> {
    let _ = process::set_child_subreaper(false);
    let _ = process::restore_signals(mask);
    let program = options.command[0].clone();
    match why {
        Some(Message::NoCommand(errno)) => Err(RunError::Command { program, source: io::Error::from_raw_os_error(errno) }),
        // A filter with a listener already applies to this process: from another `braid run`, or from a container.
        Some(Message::NoFilter(errno)) if errno == EBUSY => {
            warn_user!("braid: this command is already supervised; it runs without a second supervisor");
            let source = Command::new(&program).args(&options.command[1..]).exec();
            Err(RunError::Command { program, source })
        }
        Some(Message::NoFilter(errno)) => Err(RunError::Filter(io::Error::from_raw_os_error(errno))),
        _ => Err(RunError::System { action: "start the supervisor", source: io::ErrorKind::BrokenPipe.into() }),
    }
}

/// `asm-generic/errno-base.h`.
const EBUSY: i32 = 16;

struct Front {
    supervisor: i32,
    command: i32,
    from: PipeReader,
    signals: OwnedFd,
}

impl Front {
    /// Waits until the supervisor reports the command's status or, if the supervisor is gone, for the command itself.
    fn wait(&self) -> io::Result<i32> {
        loop {
            let [message, signalled] = process::poll([(self.from.as_fd(), true), (self.signals.as_fd(), true)], None)?;
            if signalled.readable {
                self.pass_signals_on()?;
            }
            if message.readable || message.hung_up {
                return match Message::receive(&self.from)? {
                    Some(Message::Ended(status)) => Ok(status),
                    _ => self.wait_alone(),
                };
            }
        }
    }

    /// The supervisor is dead, so the command is now a child of this process.
    fn wait_alone(&self) -> io::Result<i32> {
        // A process closes its descriptors before its children are reparented; once it is reaped, both have happened.
        let _ = process::wait(Some(self.supervisor), true);
        loop {
            if let Some((_, ended)) = process::wait(Some(self.command), false)? {
                return Ok(ended.code());
            }
            process::poll([(self.signals.as_fd(), true)], None)?;
            self.pass_signals_on()?;
        }
    }

    /// The command receives the terminal's signals by itself. A signal that a process sent to this process is meant for the command.
    fn pass_signals_on(&self) -> io::Result<()> {
        while let Some(signal) = process::next_signal(self.signals.as_fd())? {
            if signal.from_process && signal.number != CHILD_ENDED {
                let _ = process::send_signal(self.command, signal.number);
            }
        }
        Ok(())
    }
}
