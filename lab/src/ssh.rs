//! A real SSH server in the server namespace, with temporary keys and without the system's configuration, and sessions with it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::lab::Lab;

/// The server's last octet on the lab's Internet: 203.0.113.10.
const HOST: u8 = 10;
/// Interval between typed lines.
const EVERY: Duration = Duration::from_millis(100);
/// Timeout for server and session to start.
const LIMIT: Duration = Duration::from_secs(60);

/// sshd on port 22 of 203.0.113.10. It ends when this value is dropped.
#[derive(Debug)]
pub struct Ssh {
    sshd: Child,
    home: PathBuf,
}

impl Ssh {
    /// Starts sshd and waits until it answers. Needs root.
    pub fn start(lab: &Lab) -> Result<Self> {
        let home = lab.directory().join("ssh");
        fs::create_dir_all(&home)?;
        for name in ["host", "user"] {
            let mut command = Command::new("ssh-keygen");
            let made = command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(home.join(name)).output();
            ensure!(made.context("cannot run ssh-keygen: run lab/install-deps.sh")?.status.success(), "ssh-keygen failed");
        }
        fs::copy(home.join("user.pub"), home.join("authorized"))?;
        let host = fs::read_to_string(home.join("host.pub"))?;
        fs::write(home.join("known_hosts"), format!("{} {host}", Lab::internet(HOST)))?;
        fs::write(home.join("sshd.conf"), configuration(&home))?;
        // A locked account cannot log in, and root's account is often locked.
        fs::write(home.join("shadow"), "root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n")?;
        let log = File::create(home.join("log"))?;
        // The system's service, which is not used here, creates sshd's directory in /run. This mount is visible only to this sshd.
        let script = "mount --bind \"$0/shadow\" /etc/shadow && mount -t tmpfs -o mode=755 none /run && mkdir -m 755 /run/sshd \
                      && exec \"$(command -v sshd || echo /usr/sbin/sshd)\" -D -e -f \"$0/sshd.conf\"";
        let mut command = lab.server().command("unshare")?;
        command.args(["--mount", "sh", "-c", script]).arg(&home);
        let sshd = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().context("cannot run unshare")?;
        let mut ssh = Self { sshd, home };
        let begin = Instant::now();
        while !lab.server().run(|| TcpStream::connect((Lab::internet(HOST), 22)).is_ok())? {
            let said = || fs::read_to_string(ssh.home.join("log")).unwrap_or_default();
            if let Some(status) = ssh.sshd.try_wait()? {
                bail!("sshd ended at once ({status}): {}; run lab/install-deps.sh", said().trim());
            }
            ensure!(begin.elapsed() < LIMIT, "sshd does not answer after {LIMIT:?}: {}", said().trim());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(ssh)
    }

    /// Starts a session in the client, on a new terminal that echoes typed lines.
    pub fn session(&self, lab: &Lab) -> Result<Session> {
        let mut command = lab.client().command("ssh")?;
        command.args(["-tt", "-F", "none", "-i"]).arg(self.home.join("user"));
        command.arg("-o").arg(format!("UserKnownHostsFile={}", self.home.join("known_hosts").display()));
        for option in [
            "GlobalKnownHostsFile=/dev/null",
            "IdentitiesOnly=yes",
            "BatchMode=yes",
            "LogLevel=ERROR",
            "TCPKeepAlive=no",
            "ConnectTimeout=15",
        ] {
            command.args(["-o", option]);
        }
        command.arg(format!("root@{}", Lab::internet(HOST))).arg("stty raw -echo && echo ready && exec cat");
        let log = File::create(self.home.join("session"))?;
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).spawn();
        Session::begin(child.context("cannot run ssh: run lab/install-deps.sh")?).with_context(|| {
            let said = |name: &str| fs::read_to_string(self.home.join(name)).unwrap_or_default();
            format!("no SSH session: {} {}", said("session").trim(), said("log").trim())
        })
    }
}

impl Drop for Ssh {
    fn drop(&mut self) {
        let _ = self.sshd.kill();
        let _ = self.sshd.wait();
    }
}

fn configuration(home: &Path) -> String {
    let home = home.display();
    format!(
        "Port 22
ListenAddress 0.0.0.0
HostKey {home}/host
AuthorizedKeysFile {home}/authorized
PidFile none
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
TCPKeepAlive no
PrintMotd no
"
    )
}

/// A session that types a numbered line every 100 ms and waits for its echo.
#[derive(Debug)]
pub struct Session {
    child: Child,
    typed: Arc<Mutex<Typed>>,
}

#[derive(Debug, Default)]
struct Typed {
    /// When each line was typed.
    lines: Vec<Instant>,
    /// When each line was echoed.
    echoes: Vec<Instant>,
    /// The error that ended the session, if any.
    trouble: Option<String>,
    done: bool,
}

impl Session {
    fn begin(mut child: Child) -> Result<Self> {
        let input = child.stdin.take().context("ssh has no input")?;
        let mut output = BufReader::new(child.stdout.take().context("ssh has no output")?);
        let session = Self { child, typed: Arc::default() };
        let mut line = String::new();
        output.read_line(&mut line)?;
        ensure!(line.trim() == "ready", "its first line is {line:?}, not \"ready\"");
        let typed = Arc::clone(&session.typed);
        thread::spawn(move || type_lines(input, &typed));
        let typed = Arc::clone(&session.typed);
        thread::spawn(move || read_lines(output, &typed));
        Ok(session)
    }

    /// Number of echoed lines, all of them correct and in order.
    pub fn echoed(&self) -> usize {
        self.lock().echoes.len()
    }

    /// The longest wait for the echo of a line typed in the span, so far.
    pub fn longest_wait(&self, from: Instant, to: Instant) -> Duration {
        let now = Instant::now();
        let typed = self.lock();
        let echo = |number: usize| typed.echoes.get(number).copied().unwrap_or(now);
        let waits = typed.lines.iter().enumerate().filter(|(_, at)| (from..to).contains(*at));
        waits.map(|(number, at)| echo(number).saturating_duration_since(*at)).max().unwrap_or_default()
    }

    /// Stops typing and waits for outstanding echoes. Fails if the session has ended, or a line was lost or changed.
    pub fn end(mut self) -> Result<usize> {
        self.lock().done = true;
        let begin = Instant::now();
        loop {
            {
                let typed = self.lock();
                if let Some(trouble) = &typed.trouble {
                    bail!("the SSH session: {trouble}");
                }
                if typed.echoes.len() == typed.lines.len() {
                    break;
                }
                let missing = typed.lines.len() - typed.echoes.len();
                ensure!(begin.elapsed() < LIMIT, "the SSH session: {missing} lines were not echoed within {LIMIT:?}");
            }
            thread::sleep(Duration::from_millis(10));
        }
        let ended = self.child.try_wait()?;
        ensure!(ended.is_none(), "the SSH session ended unexpectedly ({ended:?})");
        Ok(self.echoed())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Typed> {
        self.typed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.lock().done = true;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn type_lines(mut input: ChildStdin, typed: &Mutex<Typed>) {
    loop {
        let number = {
            let mut typed = typed.lock().unwrap_or_else(PoisonError::into_inner);
            if typed.done {
                break;
            }
            typed.lines.push(Instant::now());
            typed.lines.len() - 1
        };
        if writeln!(input, "line {number}").and_then(|()| input.flush()).is_err() {
            typed.lock().unwrap_or_else(PoisonError::into_inner).trouble.get_or_insert_with(|| "it takes no more input".to_owned());
            break;
        }
        thread::sleep(EVERY);
    }
    // ssh runs while its input is open.
    while !typed.lock().unwrap_or_else(PoisonError::into_inner).ended() {
        thread::sleep(Duration::from_millis(10));
    }
}

impl Typed {
    fn ended(&self) -> bool {
        self.trouble.is_some() || (self.done && self.echoes.len() == self.lines.len())
    }
}

fn read_lines(output: impl BufRead, typed: &Mutex<Typed>) {
    for (number, line) in output.lines().enumerate() {
        let at = Instant::now();
        let mut typed = typed.lock().unwrap_or_else(PoisonError::into_inner);
        match line {
            Ok(line) if line == format!("line {number}") => typed.echoes.push(at),
            Ok(line) => drop(typed.trouble.get_or_insert_with(|| format!("{line:?} came back for line {number}"))),
            Err(error) => drop(typed.trouble.get_or_insert_with(|| error.to_string())),
        }
    }
    typed.lock().unwrap_or_else(PoisonError::into_inner).trouble.get_or_insert_with(|| "it has ended".to_owned());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_and_changed_lines_are_found() {
        let typed = Mutex::new(Typed::default());
        read_lines(&b"line 0\nline 1\nline 3\n"[..], &typed);
        let typed = typed.into_inner().unwrap();
        assert_eq!((typed.echoes.len(), typed.trouble.as_deref()), (2, Some("\"line 3\" came back for line 2")));
    }
}
