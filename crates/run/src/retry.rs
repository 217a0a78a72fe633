//! Begins a connect again over another link if its link does not answer: a link that died in silence would keep it waiting for minutes.
//!
//! The supervisor begins the connect itself and defers the answer to the call. If the link answers, the call continues, and the kernel returns the
//! result. Otherwise a second socket with the same settings connects over another link, and takes the place of the first one in the program
//! ([`Settings::twin`]). The first socket cannot be used again, because without privilege a bound socket keeps its device.
//!
//! A blocking connect waits here for at most [`HOLD_TIMEOUT`], and the first of its two sockets that gets an answer wins. A non-blocking connect returns
//! `EINPROGRESS` as soon as its link has answered, or its second socket has begun. Because it should not wait at all, the supervisor does this only for
//! a link without any recent sign of life.

use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_model::Time;
use braid_platform::linux::process;
use braid_platform::linux::seccomp::{Listener, RawCall, Settings, Socket};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Builder, Handle};

use super::choice::Choice;
use super::held::{HOLD_TIMEOUT, HeldCalls, Hold};

/// Attends to connects until this process ends.
pub(super) struct Retry {
    listener: Arc<Listener>,
    choice: Arc<Choice>,
    held: Arc<HeldCalls>,
    runtime: Handle,
}

/// A connect that was begun for its program, whose call waits.
struct Connect {
    call: RawCall,
    /// The socket's descriptor in the caller.
    fd: RawFd,
    socket: Socket,
    settings: Settings,
    remote: SocketAddr,
    blocks: bool,
    /// Time to wait for an answer over the first link.
    wait: Duration,
    begun: Time,
    _hold: Hold,
}

/// A socket that waits for the answer to its SYN.
type Waiting = AsyncFd<Socket>;

impl Retry {
    /// Starts the thread that waits for answers.
    pub(super) fn start(listener: Arc<Listener>, choice: Arc<Choice>, held: Arc<HeldCalls>) -> io::Result<Arc<Self>> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        std::thread::Builder::new().spawn(move || runtime.block_on(std::future::pending::<()>()))?;
        Ok(Arc::new(Self { listener, choice, held, runtime: handle }))
    }

    /// Connects `socket`, which was bound to a link for `call`, and answers the call later. Returns `false` if the call should continue instead.
    pub(super) fn take(self: &Arc<Self>, call: &RawCall, fd: RawFd, socket: Socket, remote: SocketAddr) -> bool {
        let (begun, blocks) = (self.choice.now(), !socket.is_nonblocking());
        // The supervisor connects in the program's place, so the program must be confined as the supervisor is.
        if !process::is_confined_alike(call.thread) {
            return false;
        }
        let Some(wait) = self.choice.chooser().retry_after(begun, socket.inode(), blocks) else { return false };
        // A timeout of the program's own would begin again when the call continues.
        if socket.connects_late() || socket.send_timeout().is_some_and(|limit| limit <= HOLD_TIMEOUT) {
            return false;
        }
        if !blocks && socket.sole_reference(call, fd).is_none() {
            return false;
        }
        let Some(settings) = socket.settings() else { return false };
        // After an error the call continues, and gets the same error.
        if socket.begin(remote).is_err() {
            return false;
        }
        let hold = self.held.hold(call.id);
        let connect = Connect { call: *call, fd, socket, settings, remote, blocks, wait, begun, _hold: hold };
        let retry = self.clone();
        self.runtime.spawn(async move { retry.attend(connect).await });
        true
    }

    async fn attend(&self, connect: Connect) {
        let Connect { call, fd, socket, settings, remote, blocks, wait, begun, _hold } = connect;
        let (inode, cookie, start) = (socket.inode(), socket.cookie(), Instant::now());
        let Ok(first) = waiting(socket) else { return self.release(&call, blocks) };
        if tokio::time::timeout(wait, answered(&first)).await.is_ok() {
            self.report(begun, inode, &first);
            drop(first);
            return self.release(&call, blocks);
        }
        let Some((second, closes_on_exec)) = self.begin_elsewhere(&call, fd, first.get_ref(), (&settings, remote)) else {
            drop(first);
            return self.release(&call, blocks);
        };
        let twin = second.get_ref().inode();
        let mut replaces = true;
        if blocks {
            tokio::select! {
                () = answered(&first) => {
                    self.report(begun, inode, &first);
                    replaces = false;
                }
                // An error over the other link says nothing about the first one.
                () = answered(&second) => match second.get_ref().connected() {
                    true => self.report(begun, twin, &second),
                    false => replaces = false,
                },
                // Only one SYN was lost if the link has shown that it works.
                () = tokio::time::sleep(HOLD_TIMEOUT.saturating_sub(start.elapsed())) => {
                    replaces = !self.choice.chooser().is_proven_since(begun, inode);
                }
            }
        }
        replaces = replaces && self.listener.replace(&call, (fd, cookie), second.get_ref(), closes_on_exec).is_ok();
        self.choice.chooser().withdraw(self.choice.now(), if replaces { inode } else { twin });
        // A connection closes only with its last descriptor.
        drop((first, second));
        self.release(&call, blocks);
    }

    /// Begins the connect over another link, with a second socket. Returns it, and whether the program's descriptor closes when it starts another
    /// program. `None` if there is no other link, or if a second socket could not take the place of the first one.
    fn begin_elsewhere(
        &self,
        call: &RawCall,
        fd: RawFd,
        first: &Socket,
        (settings, remote): (&Settings, SocketAddr),
    ) -> Option<(Waiting, bool)> {
        let (now, inode) = (self.choice.now(), first.inode());
        self.choice.chooser().on_unanswered(now, inode);
        let closes_on_exec = first.sole_reference(call, fd)?;
        let second = settings.twin().ok()??;
        let twin = second.inode();
        let link = self.choice.chooser().stream_elsewhere(now, inode, twin)?;
        let begun = second.bind(link).and_then(|()| second.begin(remote)).and_then(|()| waiting(second));
        if begun.is_err() {
            self.choice.chooser().withdraw(now, twin);
        }
        Some((begun.ok()?, closes_on_exec))
    }

    /// Records that a link has answered.
    fn report(&self, begun: Time, inode: u64, socket: &Waiting) {
        if socket.get_ref().connected() {
            self.choice.chooser().on_answer(self.choice.now(), begun, inode);
        }
    }

    /// Lets the program go on: it waits in the kernel for a blocking connect, and polls for the result of another.
    fn release(&self, call: &RawCall, blocks: bool) {
        if blocks {
            self.listener.continue_call(call.id);
        } else {
            self.listener.answer(call.id, Err(libc::EINPROGRESS));
        }
    }
}

#[expect(deprecated, reason = "its replacement is unsafe code, for types that do not own their descriptor; a `Socket` does")]
fn waiting(socket: Socket) -> io::Result<Waiting> {
    Waiting::with_interest(socket, Interest::WRITABLE)
}

/// Waits until the connect has succeeded or failed.
async fn answered(socket: &Waiting) {
    while let Ok(mut ready) = socket.writable().await {
        if !socket.get_ref().is_connecting() {
            return;
        }
        ready.clear_ready();
    }
}
