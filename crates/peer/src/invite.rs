//! The invitation line that lets a client join: `braid relay invite` prints it, `braid join` reads it.
//!
//! The line is `braid1-` followed by RFC 4648 base32 in lower case without padding. It needs no quoting in a shell or a URL, and in upper
//! case it fits the dense alphanumeric mode of QR codes. The parser accepts either case and ignores white space. The bytes are:
//!
//! | bytes | what |
//! |---|---|
//! | 32 | the relay's public key |
//! | 16 | the token |
//! | 1 | number of addresses that follow, 1 to 8 |
//! | each | 1: kind (4: IPv4, 6: IPv6, 1: name); 4, 16, or 1 + length: the host; 2: the port, big-endian |
//! | 1 + length | the client's name; length 0: the client chooses |
//! | 5 | the first bytes of SHA-256 over `braid1-` and all bytes before |
//!
//! The digest detects typing errors, not attacks: an attacker who can change the line can write another. The parser locates a single wrong,
//! missing, surplus or swapped character by trying all corrections.

use std::fmt;
use std::net::IpAddr;

use data_encoding::BASE32_NOPAD_NOCASE;
use qrcode::render::unicode::Dense1x2;
use qrcode::{EcLevel, QrCode};
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroize;

use crate::name::ClientName;
use braid_model::address::{Address, Host};
use braid_model::key::PublicKey;

const PREFIX: &str = "braid1-";

/// Maximum number of addresses in an invitation.
pub const ADDRESS_LIMIT: usize = 8;

/// Upper bound for the length of an invitation: eight names of 253 characters, and all other fields.
const TEXT_LIMIT: usize = 4096;

/// Maximum length for which single errors are located.
const SEARCH_LIMIT: usize = 600;

/// Length of the digest in bytes.
const DIGEST: usize = 5;

/// Secret that lets an unknown key become a client, once.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; 16]);

/// The system's random number generator failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot create an invitation: the system provides no random numbers")]
pub struct NoRandomness;

impl Token {
    /// Creates a token of sixteen random bytes.
    pub fn generate() -> Result<Self, NoRandomness> {
        let mut bytes = [0; 16];
        SystemRandom::new().fill(&mut bytes).map_err(|_| NoRandomness)?;
        Ok(Self(bytes))
    }

    /// The secret bytes. Send them only to a relay that has proved its key.
    pub fn reveal(&self) -> &[u8; 16] {
        &self.0
    }

    /// SHA-256 of the token, which the registry stores instead of it. A random token needs no salt and no slow hash.
    pub fn digest(&self) -> [u8; 32] {
        sha256(&self.0)
    }
}

impl From<[u8; 16]> for Token {
    fn from(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(secret)")
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// An invitation to a relay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invite {
    /// The relay's key, which the client pins.
    pub relay: PublicKey,
    /// Token that the client redeems.
    pub token: Token,
    /// Addresses at which the relay listens; 1 to [`ADDRESS_LIMIT`].
    addresses: Vec<Address>,
    /// Name for the client; `None`: the client chooses.
    pub name: Option<ClientName>,
}

/// Reason why a text is not a valid invitation. Positions count from 1 and do not include white space.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InviteError {
    /// The text does not start like an invitation.
    #[error("this is not an invitation, which begins with \"braid1-\"; copy the whole line that \"braid relay invite\" printed")]
    NotAnInvite,
    /// The invitation has another version.
    #[error("this invitation has version {0}, and this program supports version 1; install a later version of braid here")]
    Version(String),
    /// The text is longer than any invitation.
    #[error("this text is longer than any invitation; copy only the line that \"braid relay invite\" printed")]
    TooLong,
    /// An invalid character.
    #[error("character {position}, {found:?}, is not valid in an invitation (only letters and the digits 2 to 7 are); copy it again")]
    Character {
        /// Position, counted from 1.
        position: usize,
        /// Character found.
        found: char,
    },
    /// One character is wrong.
    #[error("character {position}, {found:?} after {after:?}, is mistyped: it should be {right:?}")]
    Mistyped {
        /// Position, counted from 1.
        position: usize,
        /// Text before it.
        after: String,
        /// Character found.
        found: char,
        /// Correct character.
        right: char,
    },
    /// One character is missing.
    #[error("a character is missing after {after:?}: {right:?} should be character {position}")]
    Missing {
        /// Position, counted from 1.
        position: usize,
        /// Text before it.
        after: String,
        /// Missing character.
        right: char,
    },
    /// One character is superfluous.
    #[error("character {position}, {found:?} after {after:?}, is superfluous: remove it")]
    Surplus {
        /// Position, counted from 1.
        position: usize,
        /// Text before it.
        after: String,
        /// Character found.
        found: char,
    },
    /// Two adjacent characters are swapped.
    #[error("characters {position} and {}, after {after:?}, are swapped", position + 1)]
    Swapped {
        /// Position of the first one, counted from 1.
        position: usize,
        /// Text before them.
        after: String,
    },
    /// Several errors.
    #[error("several characters are wrong or missing (the text has {0}); copy the whole line again")]
    Damaged(usize),
    /// The digest is right, but this program cannot use the content.
    #[error("this invitation is complete, but not usable: {0}; ask for another, created by the version of braid that runs here")]
    Content(&'static str),
}

/// The number of addresses is out of range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an invitation holds 1 to {ADDRESS_LIMIT} addresses, but {0} were given; give those that clients reach first")]
pub struct AddressCount(usize);

impl Invite {
    /// Creates an invitation.
    pub fn new(relay: PublicKey, token: Token, addresses: Vec<Address>, name: Option<ClientName>) -> Result<Self, AddressCount> {
        match addresses.len() {
            1..=ADDRESS_LIMIT => Ok(Self { relay, token, addresses, name }),
            count => Err(AddressCount(count)),
        }
    }

    /// Addresses at which the relay listens, 1 to [`ADDRESS_LIMIT`]; the first is preferred.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The invitation line. It holds the secret token: show it only to the invited user.
    pub fn to_line(&self) -> String {
        let mut body = self.relay.as_bytes().to_vec();
        body.extend(self.token.reveal());
        body.push(self.addresses.len() as u8);
        for address in &self.addresses {
            match &address.host {
                Host::Ip(IpAddr::V4(ip)) => {
                    body.push(4);
                    body.extend(ip.octets());
                }
                Host::Ip(IpAddr::V6(ip)) => {
                    body.push(6);
                    body.extend(ip.octets());
                }
                Host::Name(name) => {
                    body.push(1);
                    put_text(&mut body, name.as_str());
                }
            }
            body.extend(address.port().to_be_bytes());
        }
        put_text(&mut body, self.name.as_ref().map(ClientName::as_str).unwrap_or_default());
        body.extend(digest(&body));
        format!("{PREFIX}{}", BASE32_NOPAD_NOCASE.encode(&body).to_ascii_lowercase())
    }

    /// Parses an invitation line.
    pub fn parse(text: &str) -> Result<Self, InviteError> {
        if text.len() > 2 * TEXT_LIMIT {
            return Err(InviteError::TooLong);
        }
        let line: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_ascii_lowercase()).collect();
        if line.len() > TEXT_LIMIT {
            return Err(InviteError::TooLong);
        }
        let coded = after_prefix(&line)?;
        if let Some(body) = decode(&coded) {
            return read_body(&body);
        }
        Err(locate_error(&coded))
    }

    /// The line as a QR code of half-block characters, for dark text on a light background: lines of equal length that end with a line feed.
    /// `None` if the line is too long for a QR code.
    pub fn to_qr(&self) -> Option<String> {
        let code = QrCode::with_error_correction_level(self.to_line().to_ascii_uppercase(), EcLevel::L).ok()?;
        let mut picture = code.render::<Dense1x2>().build();
        picture.push('\n');
        Some(picture)
    }
}

fn put_text(body: &mut Vec<u8>, text: &str) {
    // Host names and client names are shorter than 256 bytes.
    body.push(text.len() as u8);
    body.extend(text.as_bytes());
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut digest = [0; 32];
    digest.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref());
    digest
}

fn digest(body: &[u8]) -> [u8; DIGEST] {
    let whole = sha256(&[PREFIX.as_bytes(), body].concat());
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&whole[..DIGEST]);
    digest
}

/// The characters after `braid1-`.
fn after_prefix(line: &[char]) -> Result<Vec<char>, InviteError> {
    let start: String = line.iter().take(24).collect();
    let rest = start.strip_prefix("braid").ok_or(InviteError::NotAnInvite)?;
    let (version, _) = rest.split_once('-').ok_or(InviteError::NotAnInvite)?;
    match version {
        "1" => Ok(line[PREFIX.len()..].to_vec()),
        other if !other.is_empty() && other.bytes().all(|byte| byte.is_ascii_digit()) => Err(InviteError::Version(other.to_owned())),
        _ => Err(InviteError::NotAnInvite),
    }
}

/// The bytes before the digest, if the digest is right.
fn decode(coded: &[char]) -> Option<Vec<u8>> {
    let text: Option<Vec<u8>> = coded.iter().map(|c| u8::try_from(*c).ok()).collect();
    let mut body = BASE32_NOPAD_NOCASE.decode(&text?).ok()?;
    let claimed = body.split_off(body.len().checked_sub(DIGEST)?);
    (claimed == digest(&body)).then_some(body)
}

/// Locates the single error in `coded` by trying all corrections.
fn locate_error(coded: &[char]) -> InviteError {
    const LETTERS: &str = "abcdefghijklmnopqrstuvwxyz234567";
    let strange: Vec<usize> = (0..coded.len()).filter(|index| !LETTERS.contains(coded[*index])).collect();
    let unnamed = match strange.first() {
        Some(index) => InviteError::Character { position: PREFIX.len() + index + 1, found: coded[*index] },
        None => InviteError::Damaged(PREFIX.len() + coded.len()),
    };
    if coded.len() > SEARCH_LIMIT || strange.len() > 1 {
        return unnamed;
    }
    let position = |index: usize| PREFIX.len() + index + 1;
    let after = |index: usize| {
        let before = PREFIX.chars().chain(coded[..index].iter().copied()).collect::<Vec<_>>();
        before[before.len() - 6..].iter().collect::<String>()
    };
    // An invalid character is the error itself. Without one, any position may be wrong.
    let places = strange.first().map_or(0..coded.len(), |index| *index..index + 1);
    let mut tried = coded.to_vec();
    for index in places.clone() {
        let found = coded[index];
        for right in LETTERS.chars() {
            tried[index] = right;
            if decode(&tried).is_some() {
                return InviteError::Mistyped { position: position(index), after: after(index), found, right };
            }
        }
        tried[index] = found;
        tried.remove(index);
        if decode(&tried).is_some() {
            return InviteError::Surplus { position: position(index), after: after(index), found };
        }
        tried.insert(index, found);
    }
    if !strange.is_empty() {
        return unnamed;
    }
    for index in 1..coded.len() {
        tried.swap(index - 1, index);
        if decode(&tried).is_some() {
            return InviteError::Swapped { position: position(index - 1), after: after(index - 1) };
        }
        tried.swap(index - 1, index);
    }
    for index in 0..=coded.len() {
        tried.insert(index, 'a');
        for right in LETTERS.chars() {
            tried[index] = right;
            if decode(&tried).is_some() {
                return InviteError::Missing { position: position(index), after: after(index), right };
            }
        }
        tried.remove(index);
    }
    unnamed
}

/// Parses a body whose digest is right.
fn read_body(body: &[u8]) -> Result<Invite, InviteError> {
    let short = || InviteError::Content("it ends too early");
    let mut rest = body;
    let mut take = |count: usize| {
        let (taken, left) = rest.split_at_checked(count).ok_or_else(short)?;
        rest = left;
        Ok(taken)
    };
    let relay = PublicKey::from(<[u8; 32]>::try_from(take(32)?).map_err(|_| short())?);
    let token = Token(<[u8; 16]>::try_from(take(16)?).map_err(|_| short())?);
    let mut addresses = Vec::new();
    for _ in 0..take(1)?[0] {
        let host = match take(1)?[0] {
            4 => Host::Ip(<[u8; 4]>::try_from(take(4)?).map_err(|_| short())?.into()),
            6 => Host::Ip(<[u8; 16]>::try_from(take(16)?).map_err(|_| short())?.into()),
            1 => {
                let length = usize::from(take(1)?[0]);
                let name = std::str::from_utf8(take(length)?).ok().and_then(|name| name.parse().ok());
                Host::Name(name.ok_or(InviteError::Content("it holds an invalid host name"))?)
            }
            _ => return Err(InviteError::Content("it holds an address of an unknown kind")),
        };
        let port = u16::from_be_bytes(<[u8; 2]>::try_from(take(2)?).map_err(|_| short())?);
        addresses.push(Address::new(host, port).ok_or(InviteError::Content("it holds an address with port 0"))?);
    }
    let name = match usize::from(take(1)?[0]) {
        0 => None,
        length => {
            let name = std::str::from_utf8(take(length)?).ok().and_then(|name| name.parse().ok());
            Some(name.ok_or(InviteError::Content("it holds an invalid client name"))?)
        }
    };
    if !rest.is_empty() {
        return Err(InviteError::Content("it holds more data than this version supports"));
    }
    Invite::new(relay, token, addresses, name).map_err(|_| InviteError::Content("it holds no address, or too many"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    fn sample() -> Invite {
        let addresses = vec!["relay.example.org:5757".parse().unwrap(), "[2001:db8::1]:443".parse().unwrap()];
        Invite::new([7; 32].into(), Token([9; 16]), addresses, Some("laptop".parse().unwrap())).unwrap()
    }

    fn resealed(change: impl FnOnce(&mut Vec<u8>)) -> Result<Invite, InviteError> {
        let line: Vec<char> = sample().to_line().chars().collect();
        let mut body = decode(&line[PREFIX.len()..]).unwrap();
        change(&mut body);
        body.extend(digest(&body));
        Invite::parse(&format!("{PREFIX}{}", BASE32_NOPAD_NOCASE.encode(&body)))
    }

    #[test]
    fn the_line_is_as_documented() {
        // Golden: every later version must read the line of an earlier one.
        let line = "braid1-a4dqobyha4dqobyha4dqobyha4dqobyha4dqobyha4dqobyha4dqscijbeeqscijbeeqscijbeeqsaqbcfzgk3dbpexgk6dbnvygyzjon5zgoft5ayqacdnyaaaaaaaaaaaaaaaaaaaqdoygnrqxa5dpoc5hqkqhz4";
        assert_eq!(sample().to_line(), line);
        assert_eq!(Invite::parse(line), Ok(sample()));
    }

    #[test]
    fn it_is_read_in_either_case_and_across_lines() {
        let line = sample().to_line();
        assert!(line.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'), "nothing in it needs quoting: {line}");
        assert_eq!(Invite::parse(&line), Ok(sample()));
        let (start, end) = line.split_at(50);
        assert_eq!(Invite::parse(&format!("  {}\r\n  {} \n", start.to_ascii_uppercase(), end)), Ok(sample()));
    }

    #[test]
    fn a_text_that_is_not_an_invitation_is_rejected() {
        for text in ["", "hello", "braid", "braid-", "braidx-aaaa", "https://example.org", "braid1", "бraid1-"] {
            assert_eq!(Invite::parse(text), Err(InviteError::NotAnInvite), "{text}");
        }
        assert_eq!(Invite::parse("braid2-aaaa"), Err(InviteError::Version("2".to_owned())));
        assert_eq!(Invite::parse(&"a".repeat(10_000)), Err(InviteError::TooLong));
        assert_eq!(Invite::parse("braid1-"), Err(InviteError::Damaged(7)));
    }

    #[test]
    fn every_single_error_is_located() {
        let line: Vec<char> = sample().to_line().chars().collect();
        let parse = |chars: &[char]| Invite::parse(&chars.iter().collect::<String>()).unwrap_err();
        for index in (PREFIX.len()..line.len()).step_by(17) {
            let right = line[index];
            for found in ['a', '0', '!', 'é'].into_iter().filter(|found| *found != right) {
                let mut wrong = line.clone();
                wrong[index] = found;
                let after = line[index - 6..index].iter().collect();
                assert_eq!(parse(&wrong), InviteError::Mistyped { position: index + 1, after, found, right });
            }
            let mut short = line.clone();
            short.remove(index);
            assert!(matches!(parse(&short), InviteError::Missing { right: named, .. } if named == right), "{}", parse(&short));
            let mut long = line.clone();
            long.insert(index, '1');
            assert!(matches!(parse(&long), InviteError::Surplus { position, found: '1', .. } if position == index + 1));
            let mut swapped = line.clone();
            swapped.swap(index - 1, index);
            if index > PREFIX.len() && line[index - 1] != right {
                assert!(matches!(parse(&swapped), InviteError::Swapped { position, .. } if position == index), "{}", parse(&swapped));
            }
        }
    }

    #[test]
    fn several_errors_are_reported_as_damage() {
        let line = sample().to_line();
        let half = &line[..line.len() / 2];
        assert_eq!(Invite::parse(half), Err(InviteError::Damaged(half.len())));
        let strange = format!("{}??", &line[..line.len() - 2]);
        assert_eq!(Invite::parse(&strange), Err(InviteError::Character { position: line.len() - 1, found: '?' }));
    }

    #[test]
    fn a_line_with_a_valid_digest_and_invalid_content_is_rejected() {
        let said = |result: Result<Invite, InviteError>| result.unwrap_err().to_string();
        assert!(said(resealed(|body| body.truncate(40))).contains("too early"));
        assert!(said(resealed(|body| body.push(0))).contains("more data than"));
        assert!(said(resealed(|body| body[48] = 0)).contains("not usable"));
        assert!(said(resealed(|body| body[49] = 9)).contains("unknown kind"));
        assert!(said(resealed(|body| body[51] = b' ')).contains("host name"));
        assert!(said(resealed(|body| *body.last_mut().unwrap() = 0x1b)).contains("client name"));
    }

    #[test]
    fn an_invitation_has_one_to_eight_addresses() {
        let address: Address = "192.0.2.1:1".parse().unwrap();
        assert!(Invite::new([0; 32].into(), Token([0; 16]), vec![], None).is_err());
        assert!(Invite::new([0; 32].into(), Token([0; 16]), vec![address.clone(); 8], None).is_ok());
        assert!(Invite::new([0; 32].into(), Token([0; 16]), vec![address; 9], None).is_err());
    }

    #[test]
    fn debug_output_does_not_show_the_token() {
        let shown = format!("{:?}", Invite { token: Token([0xab; 16]), ..sample() });
        assert!(shown.contains("secret") && !shown.contains("171") && !shown.to_lowercase().contains("ab, ab"), "{shown}");
    }

    #[test]
    fn the_qr_code_holds_the_line() {
        let invite = sample();
        let picture = invite.to_qr().unwrap();
        let code = QrCode::with_error_correction_level(invite.to_line().to_ascii_uppercase(), EcLevel::L).unwrap();
        let rows: Vec<Vec<char>> = picture.lines().map(|line| line.chars().collect()).collect();
        let width = code.width() + 8;
        assert!(rows.len() == width.div_ceil(2) && rows.iter().all(|row| row.len() == width), "four light modules on each side");
        assert!(width <= 70 && rows.len() <= 35, "it fits a terminal: {width} x {}", rows.len());
        for y in 0..code.width() {
            for x in 0..code.width() {
                let half = rows[(y + 4) / 2][x + 4];
                let dark = if (y + 4) % 2 == 0 { matches!(half, '█' | '▀') } else { matches!(half, '█' | '▄') };
                assert_eq!(dark, code[(x, y)] == qrcode::Color::Dark, "{x} {y}");
            }
        }
    }

    fn addresses() -> impl Strategy<Value = Vec<Address>> {
        let host = prop_oneof![
            any::<u32>().prop_map(|bits| Host::Ip(Ipv4Addr::from(bits).into())),
            any::<u128>().prop_map(|bits| Host::Ip(Ipv6Addr::from(bits).into())),
            "[a-z0-9_-]{1,63}(\\.[a-z0-9-]{1,20}){0,3}\\.[a-z]{2,9}".prop_map(|name| Host::Name(name.parse().unwrap())),
        ];
        proptest::collection::vec((host, 1..=u16::MAX).prop_map(|(host, port)| Address::new(host, port).unwrap()), 1..=ADDRESS_LIMIT)
    }

    proptest! {
        // Each case searches for a single error that does not exist.
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn the_parser_rejects_arbitrary_text(text in "\\PC{0,200}", coded in "[a-z2-7]{0,200}") {
            prop_assert!(Invite::parse(&text).is_err());
            let line = format!("{PREFIX}{coded}");
            prop_assert!(Invite::parse(&line).is_err());
        }
    }

    proptest! {
        #[test]
        fn every_invitation_round_trips_through_text(
            key: [u8; 32], token: [u8; 16], addresses in addresses(), name in proptest::option::of("[a-zA-Z0-9][a-zA-Z0-9._-]{0,40}"),
        ) {
            let name = name.map(|name| name.parse().unwrap());
            let invite = Invite::new(key.into(), Token(token), addresses, name).unwrap();
            prop_assert_eq!(Invite::parse(&invite.to_line()), Ok(invite));
        }

        #[test]
        fn the_parser_handles_arbitrary_bytes_with_a_valid_digest(mut body in proptest::collection::vec(any::<u8>(), 0..300), few in 0..3u8) {
            if let Some(count) = body.get_mut(48) {
                *count = few;
            }
            body.extend(digest(&body));
            let line = format!("{PREFIX}{}", BASE32_NOPAD_NOCASE.encode(&body).to_ascii_lowercase());
            match Invite::parse(&line) {
                Ok(invite) => prop_assert_eq!(invite.to_line(), line, "one invitation has one line"),
                Err(error) => prop_assert!(matches!(error, InviteError::Content(_)), "{}", error),
            }
        }

        #[test]
        fn a_changed_line_is_never_another_invitation(at in 7usize..140, found in "[a-z2-7]") {
            let mut line = sample().to_line();
            let at = at.min(line.len() - 1);
            line.replace_range(at..=at, &found);
            prop_assert!(Invite::parse(&line).map_or(true, |invite| invite == sample()));
        }
    }
}
