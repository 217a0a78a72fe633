//! Who may do what.
//!
//! Over the Unix socket the kernel says who connected: everybody may read; root, the daemon's own user and members of the group `braid` may
//! change. Over TCP a token says it, or the cookie that a browser got for one: a cookie counts for programs of the user who began its session,
//! as `sock_diag` tells, since browsers show it to whoever listens on another port of this machine. A browser is also made to say which page asks (the `Origin`,
//! `Sec-Fetch-Site`), and by which name it came (the `Host`), so that neither another site nor one that gives its own name this machine's
//! address (DNS rebinding) gets anywhere.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use braid_api::Problem;
use braid_api::openapi::{Needs, operation};
use braid_bond::host::Source;
use braid_peer::quota;
use braid_platform::linux::sys::access::peer_groups;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::net::UnixStream;

use super::{Api, Refusal};

/// Who comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// A user of this machine, by the kernel's word.
    User(u32),
    /// A program of this machine whose user cannot be told.
    Somebody,
    /// An address, or its network.
    Address(Source),
}

/// A permit of an API client.
pub(crate) type ApiPermit = quota::Permit<Origin>;

/// Members of this group may change.
const GROUP: &str = "braid";
/// The cookie's name.
const COOKIE: &str = "braid-session";
/// Sessions, and tickets, that are remembered of those that may change, and as many of those that may read; the oldest goes first.
const SESSIONS: usize = 64;
/// How long a session lasts.
const SESSION: Duration = Duration::from_secs(7 * 86_400);
/// How long a ticket waits to be used.
const TICKET: Duration = Duration::from_secs(120);
/// Nothing but the page's own files is loaded, run or framed.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; \
                      manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Who is connected.
#[derive(Debug, Clone)]
pub(super) enum ApiClient {
    /// By the Unix socket, as the kernel says.
    Local { user: u32, may_change: bool },
    /// By TCP: each request says for itself what it may do.
    Remote(Arc<ApiPermit>),
}

/// Where a session counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seat {
    /// With programs of this user on this machine.
    User(u32),
    /// Nowhere: a program on this machine whose user cannot be told.
    Nobody,
    /// On other machines.
    Elsewhere,
}

impl From<Origin> for Seat {
    fn from(origin: Origin) -> Self {
        match origin {
            Origin::User(user) => Self::User(user),
            Origin::Somebody => Self::Nobody,
            Origin::Address(_) => Self::Elsewhere,
        }
    }
}

impl ApiClient {
    /// Who is at the other end of a Unix socket; `own` is the daemon's user.
    pub(super) fn of(stream: &UnixStream, own: u32) -> Self {
        let user = stream.peer_cred().ok();
        let trusted = user.is_some_and(|user| user.uid() == 0 || user.uid() == own);
        let member = || {
            let group = group_number(&std::fs::read_to_string("/etc/group").unwrap_or_default(), GROUP);
            let first = user.map(|user| user.gid());
            group.is_some_and(|group| first == Some(group) || peer_groups(stream).is_ok_and(|groups| groups.contains(&group)))
        };
        Self::Local { user: user.map_or(u32::MAX, |user| user.uid()), may_change: trusted || member() }
    }

    /// Whether the kernel says that it may change something.
    pub(super) fn may_change(&self) -> bool {
        matches!(self, Self::Local { may_change: true, .. })
    }

    /// Whom it counts for.
    pub(super) fn origin(&self) -> Origin {
        match self {
            Self::Local { user, .. } => Origin::User(*user),
            Self::Remote(permit) => permit.origin(),
        }
    }
}

fn group_number(groups: &str, name: &str) -> Option<u32> {
    let mut lines = groups.lines().map(|line| line.split(':'));
    lines.find_map(|mut fields| if fields.next() == Some(name) { fields.nth(1)?.parse().ok() } else { None })
}

/// What TCP clients show, and what they get for it.
#[derive(Debug)]
pub(super) struct Keys {
    full: String,
    reading: String,
    sessions: Mutex<VecDeque<Known>>,
    tickets: Mutex<VecDeque<Known>>,
    names: Vec<String>,
    tls: bool,
}

#[derive(Debug)]
struct Known {
    hash: [u8; 32],
    needs: Needs,
    /// Where it counts; `None`: anywhere.
    seat: Option<Seat>,
    since: Instant,
}

/// Remembers one more, for which the oldest makes room that allows as much: who may only read makes nobody else come anew.
fn remember(known: &mut VecDeque<Known>, one: Known) {
    let alike = |known: &Known| known.needs == one.needs;
    if known.iter().filter(|known| alike(known)).count() >= SESSIONS
        && let Some(oldest) = known.iter().position(alike)
    {
        known.remove(oldest);
    }
    known.push_back(one);
}

impl Keys {
    /// Reads the tokens in `folder`, and makes them where there are none. `names` are those that clients may come by, besides addresses and
    /// `localhost`.
    ///
    /// # Errors
    /// Those of reading and writing the files.
    pub(super) fn open(folder: &Path, names: Vec<String>, tls: bool) -> io::Result<Self> {
        let full = token(&folder.join("ui-token"))?;
        let reading = token(&folder.join("ui-token-read"))?;
        let names = names.into_iter().map(|name| name.to_ascii_lowercase()).collect();
        Ok(Self { full, reading, sessions: Mutex::default(), tickets: Mutex::default(), names, tls })
    }

    /// The token for what a client may do.
    pub(super) fn token(&self, needs: Needs) -> &str {
        if needs == Needs::Changing { &self.full } else { &self.reading }
    }

    /// What `token` allows.
    fn allows(&self, token: &str) -> Option<Needs> {
        // Both are compared, in a time that says nothing of where they differ.
        let (full, reading) = (same(token, &self.full), same(token, &self.reading));
        if full { Some(Needs::Changing) } else { reading.then_some(Needs::Reading) }
    }

    /// What begins one session, soon: an address is seen by others where it stands in a command line or a browser's history, a token must
    /// not be. With a `user`, only that user's programs on this machine can begin it. `None` where the system gives no random numbers.
    pub(super) fn ticket(&self, needs: Needs, user: Option<u32>) -> Option<String> {
        let ticket = random().ok()?;
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        tickets.retain(|known| known.since.elapsed() < TICKET);
        remember(&mut tickets, Known { hash: hash(&ticket), needs, seat: user.map(Seat::User), since: Instant::now() });
        Some(ticket)
    }

    fn redeem(&self, ticket: &str, seat: Seat) -> Option<Needs> {
        let wanted = hash(ticket);
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        tickets.retain(|known| known.since.elapsed() < TICKET);
        let counts = |known: &Known| equal(&known.hash, &wanted) && known.seat.is_none_or(|wanted| wanted == seat);
        let at = tickets.iter().position(counts)?;
        tickets.remove(at).map(|known| known.needs)
    }

    /// Begins a session by a token or a ticket: what it allows, and the cookie.
    pub(super) fn begin(&self, token: &str, seat: Seat) -> Option<(Needs, HeaderValue)> {
        let needs = self.allows(token).or_else(|| self.redeem(token, seat))?;
        let cookie = random().ok()?;
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|known| known.since.elapsed() < SESSION);
        remember(&mut sessions, Known { hash: hash(&cookie), needs, seat: Some(seat), since: Instant::now() });
        let secure = if self.tls { "; Secure" } else { "" };
        let text = format!("{COOKIE}={cookie}; Path=/; HttpOnly; SameSite=Strict; Max-Age={}{secure}", SESSION.as_secs());
        Some((needs, HeaderValue::from_str(&text).ok()?))
    }

    fn session(&self, cookie: &str, seat: Seat) -> Option<Needs> {
        let (wanted, mut found) = (hash(cookie), None);
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|known| known.since.elapsed() < SESSION);
        for known in sessions.iter() {
            if equal(&known.hash, &wanted) && known.seat == Some(seat) && seat != Seat::Nobody {
                found = Some(known.needs);
            }
        }
        found
    }

    /// What a request's headers allow.
    fn of(&self, headers: &HeaderMap, seat: Seat) -> Option<Needs> {
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        if let Some(given) = text(header::AUTHORIZATION) {
            return self.allows(given.strip_prefix("Bearer ")?.trim());
        }
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut pairs = cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
        self.session(pairs.find(|(name, _)| *name == COOKIE)?.1, seat)
    }

    /// Whether a client may come by this `Host`: any address, since names only can be made to mean another machine.
    fn knows(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if !name.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        let lower = name.to_ascii_lowercase();
        name.parse::<IpAddr>().is_ok() || lower == "localhost" || self.names.contains(&lower)
    }

    /// The page's address for people.
    pub(super) fn address(&self, listening: SocketAddr) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        match self.names.first().filter(|_| listening.ip().is_unspecified()) {
            Some(name) => format!("{scheme}://{name}:{}/", listening.port()),
            None if listening.ip().is_unspecified() => format!("{scheme}://localhost:{}/", listening.port()),
            None => format!("{scheme}://{listening}/"),
        }
    }
}

/// Looks at every request before it is answered, and gives every answer the headers that keep browsers in bounds.
pub(super) async fn guard(
    State(api): State<Api>,
    ConnectInfo(client): ConnectInfo<ApiClient>,
    mut request: Request,
    next: Next,
) -> Response {
    let may = match judge(&api, &client, &request) {
        Ok(may) => may,
        Err(refusal) => return bounded(refusal.into_response()),
    };
    let _permit = match (may, &client) {
        (May(Needs::Changing), ApiClient::Remote(permit)) => {
            permit.keep();
            None
        }
        (May(Needs::Reading), _) => match api.reading.try_take(client.origin()) {
            Some(permit) => Some(permit),
            None => return bounded(too_many_requests().into_response()),
        },
        _ => None,
    };
    request.extensions_mut().insert(may);
    bounded(next.run(request).await)
}

fn too_many_requests() -> Refusal {
    let detail = "as many questions of those who may only read are being answered as may be: ask again in a moment, and fewer at a time";
    Refusal(Problem::new(429, "Too many requests", detail))
}

/// What the client of a request may do.
#[derive(Debug, Clone, Copy)]
pub(super) struct May(pub(super) Needs);

fn judge(api: &Api, client: &ApiClient, request: &Request) -> Result<May, Refusal> {
    let needs = operation(request.method().as_str(), request.uri().path()).map_or(Needs::Nothing, |operation| operation.needs);
    let refuse = |status, title, detail: &str| Err(Refusal(Problem::new(status, title, detail)));
    let may = match (client, &api.keys) {
        (ApiClient::Local { may_change, .. }, _) => Some(if *may_change { Needs::Changing } else { Needs::Reading }),
        (ApiClient::Remote(_), None) => None,
        (ApiClient::Remote(permit), Some(keys)) => {
            of_this_site(keys, request)?;
            keys.of(request.headers(), permit.origin().into())
        }
    };
    match may {
        _ if needs == Needs::Nothing => Ok(May(may.unwrap_or(Needs::Nothing))),
        Some(may) if may >= needs => Ok(May(may)),
        Some(_) if matches!(client, ApiClient::Remote(_)) => {
            refuse(403, "Not allowed", "the read-only token changes nothing: use the full one")
        }
        Some(_) => {
            let detail = "only root, the daemon's own user and members of the group braid may do this: run the command with sudo";
            refuse(403, "Not allowed", detail)
        }
        None if request.headers().contains_key(header::AUTHORIZATION) => refuse(
            401,
            "Unknown token",
            "the `Authorization` shows no token of this daemon: write `Bearer` and what stands in the file ui-token (or ui-token-read, to look \
             only) of its state directory; the address that `braid ui` prints begins one session of a browser, and its token is none for programs",
        ),
        None => refuse(401, "No token", "say who you are by `Authorization: Bearer TOKEN`, or open the page by `braid ui`"),
    }
}

/// Whether a request comes by a name of this machine, and from a page of its own where it could do harm.
fn of_this_site(keys: &Keys, request: &Request) -> Result<(), Refusal> {
    let headers = request.headers();
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let host = text(header::HOST).unwrap_or("");
    if !keys.knows(host) {
        let detail = format!("{host:?} is no name of this machine: use its address, or start braid up with --ui-name");
        return Err(Refusal(Problem::new(421, "Misdirected", detail)));
    }
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(());
    }
    let scheme = if keys.tls { "https" } else { "http" };
    let foreign_origin = text(header::ORIGIN).is_some_and(|origin| !origin.eq_ignore_ascii_case(&format!("{scheme}://{host}")));
    let foreign_site = text(HeaderName::from_static("sec-fetch-site")).is_some_and(|site| site != "same-origin" && site != "none");
    if foreign_origin || foreign_site {
        return Err(Refusal(Problem::new(403, "Another site", "a page of another site may not change anything here")));
    }
    Ok(())
}

fn bounded(mut response: Response) -> Response {
    let unauthorised = response.status() == StatusCode::UNAUTHORIZED;
    let headers = response.headers_mut();
    let mut set = |name, value| drop(headers.insert(name, HeaderValue::from_static(value)));
    set(header::CONTENT_SECURITY_POLICY, POLICY);
    set(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(header::X_FRAME_OPTIONS, "DENY");
    set(header::REFERRER_POLICY, "no-referrer");
    set(HeaderName::from_static("cross-origin-opener-policy"), "same-origin");
    set(HeaderName::from_static("cross-origin-resource-policy"), "same-origin");
    if unauthorised {
        set(header::WWW_AUTHENTICATE, "Bearer");
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The token in a file, made where there is none; nobody else may read it.
fn token(path: &Path) -> io::Result<String> {
    match std::fs::read_to_string(path) {
        Ok(text) if text.trim().len() >= 32 => return Ok(text.trim().to_owned()),
        // Half a token, of a start that was cut short, lets nobody in.
        Ok(_) => std::fs::remove_file(path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let fresh = random()?;
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "{fresh}")?;
    file.sync_all()?;
    Ok(fresh)
}

/// 256 bits as text.
fn random() -> io::Result<String> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| io::Error::other("the system gives no random numbers"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn hash(text: &str) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, text.as_bytes()).as_ref());
    hash
}

fn same(one: &str, other: &str) -> bool {
    equal(&hash(one), &hash(other))
}

/// Compares to the end, wherever they differ.
fn equal(one: &[u8; 32], other: &[u8; 32]) -> bool {
    one.iter().zip(other).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn keys(folder: &Path, tls: bool) -> Keys {
        Keys::open(folder, vec!["Router.Lan".into()], tls).unwrap()
    }

    #[test]
    fn tokens_are_made_once_and_nobody_else_may_read_them() {
        let folder = tempfile::tempdir().unwrap();
        let first = keys(folder.path(), false);
        let again = keys(folder.path(), false);
        assert_eq!((&first.full, &first.reading), (&again.full, &again.reading));
        assert!(first.full.len() == 64 && first.full != first.reading);
        for name in ["ui-token", "ui-token-read"] {
            assert_eq!(std::fs::metadata(folder.path().join(name)).unwrap().permissions().mode() & 0o777, 0o600);
        }
        std::fs::write(folder.path().join("ui-token"), "").unwrap();
        let mended = keys(folder.path(), false);
        assert!(mended.full.len() == 64 && mended.allows("").is_none() && mended.allows(&first.full).is_none());
    }

    #[test]
    fn a_token_or_its_cookie_says_what_a_client_may() {
        let folder = tempfile::tempdir().unwrap();
        let keys = keys(folder.path(), true);
        let seat = Seat::User(1000);
        let bearer = |token: &str| HeaderMap::from_iter([(header::AUTHORIZATION, format!("Bearer {token}").parse().unwrap())]);
        assert_eq!(keys.of(&bearer(keys.token(Needs::Changing)), seat), Some(Needs::Changing));
        assert_eq!(keys.of(&bearer(keys.token(Needs::Reading)), seat), Some(Needs::Reading));
        assert_eq!((keys.of(&bearer("x"), seat), keys.of(&HeaderMap::new(), seat), keys.begin("x", seat).is_none()), (None, None, true));
        let (may, cookie) = keys.begin(keys.token(Needs::Reading), seat).unwrap();
        let cookie = cookie.to_str().unwrap();
        assert!(may == Needs::Reading && cookie.contains("HttpOnly; SameSite=Strict") && cookie.ends_with("; Secure"), "{cookie}");
        let pair = cookie.split(';').next().unwrap();
        let with = |text: String| HeaderMap::from_iter([(header::COOKIE, text.parse().unwrap())]);
        assert_eq!(keys.of(&with(format!("a=b; {pair}")), seat), Some(Needs::Reading));
        assert_eq!(keys.of(&with(format!("{pair}0")), seat), None);
        let ticket = keys.ticket(Needs::Changing, None).unwrap();
        assert_eq!(keys.of(&bearer(&ticket), seat), None, "a ticket is no token");
        assert_eq!(keys.begin(&ticket, seat).map(|begun| begun.0), Some(Needs::Changing));
        assert!(keys.begin(&ticket, seat).is_none(), "it begins one session");
        for _ in 0..SESSIONS {
            keys.begin(keys.token(Needs::Reading), seat).unwrap();
        }
        assert_eq!(keys.of(&with(pair.to_owned()), seat), None, "sessions are bounded: the oldest goes");
    }

    /// The ticket stands in the browser's command line, and a cookie is shown to every port of this machine.
    #[test]
    fn regression_another_users_ticket_or_cookie_opens_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let keys = keys(folder.path(), false);
        let ticket = keys.ticket(Needs::Changing, Some(1000)).unwrap();
        for thief in [Seat::User(1001), Seat::Elsewhere, Seat::Nobody] {
            assert!(keys.begin(&ticket, thief).is_none(), "{thief:?}");
        }
        let (_, cookie) = keys.begin(&ticket, Seat::User(1000)).expect("whoever asked for it");
        let pair = cookie.to_str().unwrap().split(';').next().unwrap().to_owned();
        let headers = HeaderMap::from_iter([(header::COOKIE, pair.parse().unwrap())]);
        assert_eq!(keys.of(&headers, Seat::User(1000)), Some(Needs::Changing));
        for thief in [Seat::User(1001), Seat::Elsewhere, Seat::Nobody] {
            assert_eq!(keys.of(&headers, thief), None, "{thief:?}");
        }
        let (_, cookie) = keys.begin(keys.token(Needs::Changing), Seat::Elsewhere).unwrap();
        let pair = cookie.to_str().unwrap().split(';').next().unwrap().to_owned();
        let headers = HeaderMap::from_iter([(header::COOKIE, pair.parse().unwrap())]);
        assert_eq!((keys.of(&headers, Seat::Elsewhere), keys.of(&headers, Seat::User(0))), (Some(Needs::Changing), None));
    }

    #[test]
    fn regression_who_may_only_look_pushes_nobody_out_who_may_change() {
        let folder = tempfile::tempdir().unwrap();
        let keys = keys(folder.path(), false);
        let seat = Seat::User(0);
        let ticket = keys.ticket(Needs::Changing, None).unwrap();
        let (_, cookie) = keys.begin(keys.token(Needs::Changing), seat).unwrap();
        for _ in 0..2 * SESSIONS {
            keys.ticket(Needs::Reading, None).unwrap();
            keys.begin(keys.token(Needs::Reading), seat).unwrap();
        }
        let pair = cookie.to_str().unwrap().split(';').next().unwrap().to_owned();
        assert_eq!(keys.of(&HeaderMap::from_iter([(header::COOKIE, pair.parse().unwrap())]), seat), Some(Needs::Changing));
        assert!(keys.begin(&ticket, seat).is_some());
        assert_eq!(keys.tickets.lock().unwrap().len(), SESSIONS);
    }

    #[test]
    fn names_that_others_could_have_made_are_not_known() {
        let folder = tempfile::tempdir().unwrap();
        let keys = keys(folder.path(), false);
        for host in ["127.0.0.1:5759", "[::1]:5759", "[::1]", "localhost", "LOCALHOST:80", "10.0.0.1:5759", "router.lan:5759"] {
            assert!(keys.knows(host), "{host}");
        }
        for host in
            ["", "evil.example", "evil.example:5759", "127.0.0.1.evil.example", "localhost.evil.example:1", "router.lan.evil", ":5759"]
        {
            assert!(!keys.knows(host), "{host}");
        }
        assert_eq!(keys.address("127.0.0.1:5759".parse().unwrap()), "http://127.0.0.1:5759/");
        assert_eq!(keys.address("0.0.0.0:5759".parse().unwrap()), "http://router.lan:5759/");
    }

    #[test]
    fn the_group_is_found_by_its_name() {
        let groups = "root:x:0:\nbraider:x:7:\nbraid:x:990:ada\nbroken\n";
        assert_eq!(
            (group_number(groups, "braid"), group_number(groups, "nobody"), group_number("braid:x:?:", "braid")),
            (Some(990), None, None)
        );
    }
}
