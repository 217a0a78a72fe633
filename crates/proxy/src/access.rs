//! Access control of the proxy.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use braid_platform::linux::netlink::is_own_address;
use braid_platform::linux::sockdiag::Owner;
use braid_platform::linux::sys::process::own_user;
use data_encoding::BASE64;
use ipnet::IpNet;
use ring::digest::{SHA256, digest};
use thiserror::Error;

/// Maximum size of a password file, in bytes.
const MAX_FILE_SIZE: u64 = 1 << 20;

/// Which clients may use the proxy: by network, by local user, and by password.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// Networks of clients that are allowed besides loopback.
    pub networks: Vec<IpNet>,
    /// Local users that are allowed if no passwords are required.
    pub users: Users,
    /// Names and passwords; if empty, no password is required.
    pub credentials: Credentials,
}

/// Users of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Users {
    /// All users.
    All,
    /// These users, by number.
    These(BTreeSet<u32>),
}

impl Default for Users {
    /// The proxy's own user, and root, who can act as any user.
    fn default() -> Self {
        Self::These([own_user(), 0].into())
    }
}

/// Reason why a client is denied.
#[derive(Debug, Error)]
pub(crate) enum AccessDenied {
    /// The client is in no allowed network.
    #[error("its address is in none of the networks of --allow")]
    Network,
    /// The client belongs to another user.
    #[error(
        "it is a program of this machine's user {0}; \"--allow-user {0}\" allows that user, --passwords allows everyone with a password"
    )]
    User(u32),
    /// The owner is unknown: the program has already closed its socket, or it is in another network namespace.
    #[error("no program of this machine holds its other end")]
    NoOwner,
    /// The kernel did not report the owner.
    #[error("the kernel did not report its user ({0}); \"--allow-user all\" allows every user of this machine")]
    OwnerUnknown(io::Error),
}

impl Access {
    /// Checks whether a client is allowed. `owner` returns the owner of the socket at the client's end, if that is on this machine.
    pub(crate) fn check(&self, client: IpAddr, owner: impl FnOnce() -> io::Result<Option<Owner>>) -> Result<(), AccessDenied> {
        let client = client.to_canonical();
        if !client.is_loopback() && !self.networks.iter().any(|network| network.contains(&client)) {
            return Err(AccessDenied::Network);
        }
        let Users::These(users) = &self.users else { return Ok(()) };
        if !self.credentials.is_empty() {
            return Ok(());
        }
        // Local programs may also connect from this machine's other addresses.
        match owner() {
            Ok(Some(Owner { user: Some(user), .. })) if users.contains(&user) => Ok(()),
            Ok(Some(Owner { user: Some(user), .. })) => Err(AccessDenied::User(user)),
            Ok(Some(Owner { user: None, .. })) => Err(AccessDenied::NoOwner),
            // A socket that is already closed has no owner.
            Ok(None) | Err(_) if !client.is_loopback() && !is_own_address(client).unwrap_or(false) => Ok(()),
            Ok(None) => Err(AccessDenied::NoOwner),
            Err(error) => Err(AccessDenied::OwnerUnknown(error)),
        }
    }
}

/// Names and the digests of their passwords.
#[derive(Debug, Clone, Default)]
pub struct Credentials(BTreeMap<String, Vec<u8>>);

/// Reason why a password file cannot be used.
#[derive(Debug, Error)]
pub enum CredentialsError {
    /// The file cannot be read.
    #[error("cannot read {0}: {1}")]
    Io(String, io::Error),
    /// Other users can read the passwords.
    #[error("other users can read {0}: run \"chmod 600\" on it, and change the passwords")]
    Readable(String),
    /// The file is too long.
    #[error("{0} is longer than 1 MiB, so it is not a list of passwords")]
    Long(String),
    /// A line lacks a name or a password.
    #[error("line {1} of {0} is not \"name:password\", with 1 to 255 bytes each")]
    Line(String, usize),
    /// A name occurs twice.
    #[error("line {1} of {0} repeats the name {2}")]
    Twice(String, usize, String),
}

impl Credentials {
    /// Reads lines of `name:password` from a file that only its owner can read. Ignores empty lines and lines that start with `#`.
    pub fn read(path: &Path) -> Result<Self, CredentialsError> {
        let name = path.display().to_string();
        let failed = |error| CredentialsError::Io(name.clone(), error);
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.mode() & 0o077 != 0 {
            return Err(CredentialsError::Readable(name));
        }
        let mut text = String::new();
        file.take(MAX_FILE_SIZE + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > MAX_FILE_SIZE {
            return Err(CredentialsError::Long(name));
        }
        Self::parse(&text, &name)
    }

    fn parse(text: &str, file: &str) -> Result<Self, CredentialsError> {
        let mut all = BTreeMap::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#')) {
            let fits = |part: &str| (1..=255).contains(&part.len());
            let parts = line.split_once(':').filter(|(name, password)| fits(name) && fits(password));
            let (name, password) = parts.ok_or_else(|| CredentialsError::Line(file.to_owned(), number + 1))?;
            if all.insert(name.to_owned(), secret(password.as_bytes())).is_some() {
                return Err(CredentialsError::Twice(file.to_owned(), number + 1, name.to_owned()));
            }
        }
        Ok(Self(all))
    }

    /// Whether no password is required.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the name has this password. Compares digests, so that the time reveals nothing about the password.
    pub fn allow(&self, name: &str, password: &[u8]) -> bool {
        let shown = secret(password);
        self.0.get(name).is_some_and(|kept| *kept == shown)
    }

    /// The name in a `Proxy-Authorization: Basic` header (RFC 7617), if its password is right.
    pub(crate) fn basic(&self, header: &[u8]) -> Option<String> {
        let header = std::str::from_utf8(header).ok()?;
        let (scheme, value) = header.split_once(' ')?;
        let text = String::from_utf8(BASE64.decode(value.trim().as_bytes()).ok()?).ok()?;
        let (name, password) = text.split_once(':')?;
        (scheme.eq_ignore_ascii_case("basic") && self.allow(name, password.as_bytes())).then(|| name.to_owned())
    }
}

fn secret(password: &[u8]) -> Vec<u8> {
    digest(&SHA256, password).as_ref().to_vec()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn of(user: Option<u32>) -> io::Result<Option<Owner>> {
        Ok(Some(Owner { cookie: 1, user }))
    }

    #[test]
    fn only_loopback_and_named_networks_are_allowed() {
        let access = Access { networks: vec!["192.168.7.0/24".parse().unwrap()], users: Users::All, ..Access::default() };
        let admits = |access: &Access, ip: &str| access.check(ip.parse().unwrap(), || Ok(None)).is_ok();
        assert!(["127.0.0.1", "::1", "192.168.7.9", "::ffff:192.168.7.9"].iter().all(|ip| admits(&access, ip)));
        assert!(!admits(&access, "192.168.8.1") && !admits(&access, "2001:db8::1"));
        assert!(!admits(&Access { users: Users::All, ..Access::default() }, "192.168.7.9"));
    }

    #[test]
    fn regression_another_user_of_this_machine_is_denied() {
        let access = Access { networks: vec!["192.168.7.0/24".parse().unwrap()], ..Access::default() };
        let check = |access: &Access, ip: &str, owner| access.check(ip.parse().unwrap(), || owner);
        for ip in ["127.0.0.1", "::1", "192.168.7.1", "::ffff:127.0.0.1"] {
            assert!(check(&access, ip, of(Some(own_user()))).is_ok() && check(&access, ip, of(Some(0))).is_ok(), "{ip}");
            assert!(matches!(check(&access, ip, of(Some(4_000_000))), Err(AccessDenied::User(4_000_000))), "{ip}");
            assert!(matches!(check(&access, ip, of(None)), Err(AccessDenied::NoOwner)), "a closed socket: {ip}");
        }
        let unable = || Err(io::ErrorKind::Unsupported.into());
        assert!(check(&access, "192.168.7.9", Ok(None)).is_ok() && check(&access, "192.168.7.9", unable()).is_ok(), "another machine");
        assert!(matches!(check(&access, "127.0.0.1", Ok(None)), Err(AccessDenied::NoOwner)));
        assert!(matches!(check(&access, "127.0.0.1", unable()), Err(AccessDenied::OwnerUnknown(_))));
        let named = Access { users: Users::These([4_000_000].into()), ..Access::default() };
        assert!(check(&named, "127.0.0.1", of(Some(4_000_000))).is_ok());
        let asked = Access { credentials: Credentials::parse("ann:x\n", "f").unwrap(), ..Access::default() };
        assert!(check(&asked, "127.0.0.1", of(Some(4_000_000))).is_ok(), "the password decides");
    }

    #[test]
    fn passwords_are_read_and_checked() {
        let all = Credentials::parse("# who\n\nann:one:two\nbob:x\n", "f").unwrap();
        assert!(all.allow("ann", b"one:two") && all.allow("bob", b"x") && !all.allow("bob", b"one:two") && !all.allow("", b""));
        let basic = |text: &str| all.basic(format!("basic {}", BASE64.encode(text.as_bytes())).as_bytes());
        assert_eq!(basic("ann:one:two"), Some("ann".to_owned()));
        assert_eq!((basic("ann:one"), basic("ann"), all.basic(b"Basic %%%"), all.basic(b"\xff")), (None, None, None, None));
    }

    #[test]
    fn errors_name_the_line_of_the_file() {
        let told = |text: &str| Credentials::parse(text, "f").unwrap_err().to_string();
        assert!(told("ann:x\nbob").contains("line 2 of f"));
        assert!(told("ann:x\nann:y").contains("repeats the name ann"));
        assert!(told(":x").contains("line 1"));
    }

    #[test]
    fn a_password_file_readable_by_others_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("passwords");
        std::fs::write(&path, "ann:x\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert!(matches!(Credentials::read(&path), Err(CredentialsError::Readable(_))));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert!(Credentials::read(&path).unwrap().allow("ann", b"x"));
        assert!(Credentials::read(&dir.path().join("none")).unwrap_err().to_string().contains("cannot read"));
    }
}
