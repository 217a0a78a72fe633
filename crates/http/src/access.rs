//! Authentication and authorization of API clients.
//!
//! On the Unix socket the kernel identifies the client: every user may read; root, the daemon's own user and members of the group `braid` may
//! change. Over TCP a client authenticates with a token, or with the cookie that a browser received for a token. A cookie is valid only
//! for programs of the user who started its session, which `sock_diag` reports, because browsers send it to every port of this machine. A
//! browser must also come from an allowed page (`Origin`, `Sec-Fetch-Site`) and by an allowed name (`Host`), which excludes other sites, and
//! sites that point their own name to this machine's address (DNS rebinding).

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
use braid_platform::linux::sys::access::{PeerProcess, peer_groups, peer_process};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use tokio::net::UnixStream;

use super::{Api, Refusal};

/// Origin of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// A user of this machine, as the kernel reports.
    User(u32),
    /// A program on this machine whose user is unknown.
    Somebody,
    /// A remote address, or its network.
    Address(Source),
}

/// A permit of an API client.
pub(crate) type ApiPermit = quota::Permit<Origin>;

/// Members of this group have full access.
const GROUP: &str = "braid";
/// Maximum number of sessions, and of tickets, for each access right; the oldest is removed first.
const MAX_SESSIONS: usize = 64;
/// Lifetime of a session.
const SESSION_LIFETIME: Duration = Duration::from_secs(7 * 86_400);
/// Lifetime of an unused ticket.
const TICKET_LIFETIME: Duration = Duration::from_secs(120);
/// The browser loads, runs and frames only the page's own files.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; \
                      manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A connected client.
#[derive(Debug, Clone)]
pub(super) enum ApiClient {
    /// On the Unix socket, identified by the kernel.
    Local {
        user: u32,
        may_change: bool,
        /// The process that connected, if it may change things and the kernel shows it.
        process: Option<Arc<PeerProcess>>,
    },
    /// Over TCP: each request authenticates itself.
    Remote(Arc<ApiPermit>),
}

/// Where a session or ticket is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionScope {
    /// For programs of this user on this machine.
    User(u32),
    /// For no client: the user of a local program is unknown.
    Nobody,
    /// For other machines.
    Elsewhere,
}

impl From<Origin> for SessionScope {
    fn from(origin: Origin) -> Self {
        match origin {
            Origin::User(user) => Self::User(user),
            Origin::Somebody => Self::Nobody,
            Origin::Address(_) => Self::Elsewhere,
        }
    }
}

impl ApiClient {
    /// The client at the other end of a Unix socket; `own` is the daemon's user.
    pub(super) fn of(stream: &UnixStream, own: u32) -> Self {
        let user = stream.peer_cred().ok();
        let trusted = user.is_some_and(|user| user.uid() == 0 || user.uid() == own);
        let member = || {
            let group = group_number(&std::fs::read_to_string("/etc/group").unwrap_or_default(), GROUP);
            let first = user.map(|user| user.gid());
            group.is_some_and(|group| first == Some(group) || peer_groups(stream).is_ok_and(|groups| groups.contains(&group)))
        };
        let may_change = trusted || member();
        let process = may_change.then(|| peer_process(stream).ok()).flatten().map(Arc::new);
        Self::Local { user: user.map_or(u32::MAX, |user| user.uid()), may_change, process }
    }

    /// Whether the kernel's identification grants full access.
    pub(super) fn may_change(&self) -> bool {
        matches!(self, Self::Local { may_change: true, .. })
    }

    /// The process at the other end, if the kernel identifies it and it may change things.
    pub(super) fn process(&self) -> Option<&Arc<PeerProcess>> {
        match self {
            Self::Local { process, .. } => process.as_ref(),
            Self::Remote(_) => None,
        }
    }

    /// The origin that quotas count the client for.
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

/// Tokens, tickets and sessions of TCP clients.
#[derive(Debug)]
pub(super) struct Keys {
    full: String,
    reading: String,
    sessions: Mutex<VecDeque<Grant>>,
    tickets: Mutex<VecDeque<Grant>>,
    names: Vec<String>,
    tls: bool,
}

#[derive(Debug)]
struct Grant {
    hash: [u8; 32],
    needs: Needs,
    /// Where it is valid; `None`: anywhere.
    scope: Option<SessionScope>,
    since: Instant,
}

/// Adds an entry; at the limit, removes the oldest with the same access right, so that read-only clients cannot displace others.
fn remember(known: &mut VecDeque<Grant>, one: Grant) {
    let alike = |known: &Grant| known.needs == one.needs;
    if known.iter().filter(|known| alike(known)).count() >= MAX_SESSIONS
        && let Some(oldest) = known.iter().position(alike)
    {
        known.remove(oldest);
    }
    known.push_back(one);
}

impl Keys {
    /// Reads the tokens in `folder`, and creates missing ones. `names` are the host names that clients may use, besides addresses and
    /// `localhost`.
    ///
    /// # Errors
    /// The files cannot be read or written.
    pub(super) fn open(folder: &Path, names: Vec<String>, tls: bool) -> io::Result<Self> {
        let full = token(&folder.join("ui-token"))?;
        let reading = token(&folder.join("ui-token-read"))?;
        let names = names.into_iter().map(|name| name.to_ascii_lowercase()).collect();
        Ok(Self { full, reading, sessions: Mutex::default(), tickets: Mutex::default(), names, tls })
    }

    /// The token that grants this access right.
    pub(super) fn token(&self, needs: Needs) -> &str {
        if needs == Needs::Changing { &self.full } else { &self.reading }
    }

    /// The access right that `token` grants.
    fn allows(&self, token: &str) -> Option<Needs> {
        // Both comparisons run in constant time.
        let (full, reading) = (same(token, &self.full), same(token, &self.reading));
        if full { Some(Needs::Changing) } else { reading.then_some(Needs::Reading) }
    }

    /// Creates a ticket, which starts one session within a short time: a page address may be visible in a command line or in a browser's
    /// history, so it must not hold a token. With a `user`, only that user's programs on this machine can use it. `None` if the system provides
    /// no random numbers.
    pub(super) fn ticket(&self, needs: Needs, user: Option<u32>) -> Option<String> {
        let ticket = random().ok()?;
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        tickets.retain(|known| known.since.elapsed() < TICKET_LIFETIME);
        remember(&mut tickets, Grant { hash: hash(&ticket), needs, scope: user.map(SessionScope::User), since: Instant::now() });
        Some(ticket)
    }

    fn redeem(&self, ticket: &str, scope: SessionScope) -> Option<Needs> {
        let wanted = hash(ticket);
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        tickets.retain(|known| known.since.elapsed() < TICKET_LIFETIME);
        let counts = |known: &Grant| equal(&known.hash, &wanted) && known.scope.is_none_or(|wanted| wanted == scope);
        let at = tickets.iter().position(counts)?;
        tickets.remove(at).map(|known| known.needs)
    }

    /// Starts a session with a token or a ticket. Returns its access right and the cookie, which is called `name`.
    pub(super) fn begin(&self, name: &str, token: &str, scope: SessionScope) -> Option<(Needs, HeaderValue)> {
        let needs = self.allows(token).or_else(|| self.redeem(token, scope))?;
        let cookie = random().ok()?;
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|known| known.since.elapsed() < SESSION_LIFETIME);
        remember(&mut sessions, Grant { hash: hash(&cookie), needs, scope: Some(scope), since: Instant::now() });
        let secure = if self.tls { "; Secure" } else { "" };
        let text = format!("{name}={cookie}; Path=/; HttpOnly; SameSite=Strict; Max-Age={}{secure}", SESSION_LIFETIME.as_secs());
        Some((needs, HeaderValue::from_str(&text).ok()?))
    }

    fn session(&self, cookie: &str, scope: SessionScope) -> Option<Needs> {
        let (wanted, mut found) = (hash(cookie), None);
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|known| known.since.elapsed() < SESSION_LIFETIME);
        for known in sessions.iter() {
            if equal(&known.hash, &wanted) && known.scope == Some(scope) && scope != SessionScope::Nobody {
                found = Some(known.needs);
            }
        }
        found
    }

    /// The access right that a request's headers grant; `cookie` is the name of the session's cookie.
    fn of(&self, cookie: &str, headers: &HeaderMap, scope: SessionScope) -> Option<Needs> {
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        if let Some(given) = text(header::AUTHORIZATION) {
            return self.allows(given.strip_prefix("Bearer ")?.trim());
        }
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut pairs = cookies.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
        self.session(pairs.find(|(name, _)| *name == cookie)?.1, scope)
    }

    /// Whether a client may use this `Host`. Any address is allowed, because only names can be made to point to another machine.
    fn allows_host(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if !name.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        let lower = name.to_ascii_lowercase();
        name.parse::<IpAddr>().is_ok() || lower == "localhost" || self.names.contains(&lower)
    }

    /// Address of the page, for users.
    pub(super) fn address(&self, listening: SocketAddr) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        match self.names.first().filter(|_| listening.ip().is_unspecified()) {
            Some(name) => format!("{scheme}://{name}:{}/", listening.port()),
            None if listening.ip().is_unspecified() => format!("{scheme}://localhost:{}/", listening.port()),
            None => format!("{scheme}://{listening}/"),
        }
    }
}

/// Authorizes every request before its handler runs, and adds security headers to every answer.
pub(super) async fn guard(
    State(api): State<Api>,
    ConnectInfo(client): ConnectInfo<ApiClient>,
    mut request: Request,
    next: Next,
) -> Response {
    let may = match authorize(&api, &client, &request) {
        Ok(may) => may,
        Err(refusal) => return with_security_headers(refusal.into_response()),
    };
    let _permit = match (may, &client) {
        (Permission(Needs::Changing), ApiClient::Remote(permit)) => {
            permit.keep();
            None
        }
        (Permission(Needs::Reading), _) => match api.reading.try_take(client.origin()) {
            Some(permit) => Some(permit),
            None => return with_security_headers(too_many_requests().into_response()),
        },
        _ => None,
    };
    request.extensions_mut().insert(may);
    with_security_headers(next.run(request).await)
}

fn too_many_requests() -> Refusal {
    let detail = "too many concurrent requests of read-only clients: retry in a moment, with fewer at a time";
    Refusal(Problem::new(429, "Too many requests", detail))
}

/// Access right of the client of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Permission(pub(super) Needs);

fn authorize(api: &Api, client: &ApiClient, request: &Request) -> Result<Permission, Refusal> {
    let needs = operation(request.method().as_str(), request.uri().path()).map_or(Needs::Nothing, |operation| operation.needs);
    let refuse = |status, title, detail: &str| Err(Refusal(Problem::new(status, title, detail)));
    let may = match (client, &api.keys) {
        (ApiClient::Local { may_change, .. }, _) => Some(if *may_change { Needs::Changing } else { Needs::Reading }),
        (ApiClient::Remote(_), None) => None,
        (ApiClient::Remote(permit), Some(keys)) => {
            check_site(keys, request)?;
            keys.of(api.site.cookie(), request.headers(), permit.origin().into())
        }
    };
    match may {
        _ if needs == Needs::Nothing => Ok(Permission(may.unwrap_or(Needs::Nothing))),
        Some(may) if may >= needs => Ok(Permission(may)),
        Some(_) if matches!(client, ApiClient::Remote(_)) => {
            refuse(403, "Not allowed", "the read-only token cannot change anything: use the full token")
        }
        Some(_) => {
            let detail = "only root, the daemon's own user and members of the group braid may do this: run the command with sudo";
            refuse(403, "Not allowed", detail)
        }
        None if request.headers().contains_key(header::AUTHORIZATION) => refuse(
            401,
            "Unknown token",
            &format!(
                "the `Authorization` header holds no valid token: send `Bearer` and the content of the file ui-token (or ui-token-read, for \
                read access) below the state directory; the address that `{}` prints starts one browser session, and its token is not for programs",
                api.site.command()
            ),
        ),
        None => {
            let command = api.site.command();
            refuse(401, "No token", &format!("authenticate with `Authorization: Bearer TOKEN`, or open the page with `{command}`"))
        }
    }
}

/// Checks that a request uses a name of this machine and, if it may change something, comes from a page of this server.
fn check_site(keys: &Keys, request: &Request) -> Result<(), Refusal> {
    let headers = request.headers();
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let host = text(header::HOST).unwrap_or("");
    if !keys.allows_host(host) {
        let detail = format!("{host:?} is not a name of this machine: use its address, or add the name with --ui-name");
        return Err(Refusal(Problem::new(421, "Misdirected", detail)));
    }
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(());
    }
    let scheme = if keys.tls { "https" } else { "http" };
    let foreign_origin = text(header::ORIGIN).is_some_and(|origin| !origin.eq_ignore_ascii_case(&format!("{scheme}://{host}")));
    let foreign_site = text(HeaderName::from_static("sec-fetch-site")).is_some_and(|site| site != "same-origin" && site != "none");
    if foreign_origin || foreign_site {
        return Err(Refusal(Problem::new(403, "Another site", "a page of another site must not change anything here")));
    }
    Ok(())
}

fn with_security_headers(mut response: Response) -> Response {
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

/// Reads the token in a file, or creates it if there is none; only the owner may read the file.
fn token(path: &Path) -> io::Result<String> {
    match std::fs::read_to_string(path) {
        Ok(text) if text.trim().len() >= 32 => return Ok(text.trim().to_owned()),
        // A truncated token, from an interrupted start, is invalid.
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

/// 256 random bits in hexadecimal.
fn random() -> io::Result<String> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| io::Error::other("the system provides no random numbers"))?;
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

/// Compares in constant time.
fn equal(one: &[u8; 32], other: &[u8; 32]) -> bool {
    one.iter().zip(other).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const COOKIE: &str = "braid-session";

    fn keys(folder: &Path, tls: bool) -> Keys {
        Keys::open(folder, vec!["Router.Lan".into()], tls).unwrap()
    }

    #[test]
    fn tokens_are_created_once_and_are_private() {
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
    fn a_token_or_its_cookie_grants_its_access_right() {
        let folder = tempfile::tempdir().unwrap();
        let keys = keys(folder.path(), true);
        let scope = SessionScope::User(1000);
        let bearer = |token: &str| HeaderMap::from_iter([(header::AUTHORIZATION, format!("Bearer {token}").parse().unwrap())]);
        assert_eq!(keys.of(COOKIE, &bearer(keys.token(Needs::Changing)), scope), Some(Needs::Changing));
        assert_eq!(keys.of(COOKIE, &bearer(keys.token(Needs::Reading)), scope), Some(Needs::Reading));
        assert_eq!(
            (keys.of(COOKIE, &bearer("x"), scope), keys.of(COOKIE, &HeaderMap::new(), scope), keys.begin(COOKIE, "x", scope).is_none()),
            (None, None, true)
        );
        let (may, cookie) = keys.begin(COOKIE, keys.token(Needs::Reading), scope).unwrap();
        let cookie = cookie.to_str().unwrap();
        assert!(may == Needs::Reading && cookie.contains("HttpOnly; SameSite=Strict") && cookie.ends_with("; Secure"), "{cookie}");
        let pair = cookie.split(';').next().unwrap();
        let with = |text: String| HeaderMap::from_iter([(header::COOKIE, text.parse().unwrap())]);
        assert_eq!(keys.of(COOKIE, &with(format!("a=b; {pair}")), scope), Some(Needs::Reading));
        assert_eq!(keys.of(COOKIE, &with(format!("{pair}0")), scope), None);
        assert_eq!(
            keys.of("braid-net-session", &with(pair.to_owned()), scope),
            None,
            "a browser has sessions with both pages of a machine"
        );
        let ticket = keys.ticket(Needs::Changing, None).unwrap();
        assert_eq!(keys.of(COOKIE, &bearer(&ticket), scope), None, "a ticket is not a token");
        assert_eq!(keys.begin(COOKIE, &ticket, scope).map(|begun| begun.0), Some(Needs::Changing));
        assert!(keys.begin(COOKIE, &ticket, scope).is_none(), "it starts one session");
        for _ in 0..MAX_SESSIONS {
            keys.begin(COOKIE, keys.token(Needs::Reading), scope).unwrap();
        }
        assert_eq!(keys.of(COOKIE, &with(pair.to_owned()), scope), None, "sessions are bounded: the oldest is removed");
    }

    /// The ticket is visible in the browser's command line, and the browser sends the cookie to every port of this machine.
    #[test]
    fn regression_another_users_ticket_or_cookie_grants_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let keys = keys(folder.path(), false);
        let ticket = keys.ticket(Needs::Changing, Some(1000)).unwrap();
        for thief in [SessionScope::User(1001), SessionScope::Elsewhere, SessionScope::Nobody] {
            assert!(keys.begin(COOKIE, &ticket, thief).is_none(), "{thief:?}");
        }
        let (_, cookie) = keys.begin(COOKIE, &ticket, SessionScope::User(1000)).expect("the user who requested it");
        let pair = cookie.to_str().unwrap().split(';').next().unwrap().to_owned();
        let headers = HeaderMap::from_iter([(header::COOKIE, pair.parse().unwrap())]);
        assert_eq!(keys.of(COOKIE, &headers, SessionScope::User(1000)), Some(Needs::Changing));
        for thief in [SessionScope::User(1001), SessionScope::Elsewhere, SessionScope::Nobody] {
            assert_eq!(keys.of(COOKIE, &headers, thief), None, "{thief:?}");
        }
        let (_, cookie) = keys.begin(COOKIE, keys.token(Needs::Changing), SessionScope::Elsewhere).unwrap();
        let pair = cookie.to_str().unwrap().split(';').next().unwrap().to_owned();
        let headers = HeaderMap::from_iter([(header::COOKIE, pair.parse().unwrap())]);
        assert_eq!(
            (keys.of(COOKIE, &headers, SessionScope::Elsewhere), keys.of(COOKIE, &headers, SessionScope::User(0))),
            (Some(Needs::Changing), None)
        );
    }

    #[test]
    fn regression_read_only_clients_do_not_displace_sessions_with_full_access() {
        let folder = tempfile::tempdir().unwrap();
        let keys = keys(folder.path(), false);
        let scope = SessionScope::User(0);
        let ticket = keys.ticket(Needs::Changing, None).unwrap();
        let (_, cookie) = keys.begin(COOKIE, keys.token(Needs::Changing), scope).unwrap();
        for _ in 0..2 * MAX_SESSIONS {
            keys.ticket(Needs::Reading, None).unwrap();
            keys.begin(COOKIE, keys.token(Needs::Reading), scope).unwrap();
        }
        let pair = cookie.to_str().unwrap().split(';').next().unwrap().to_owned();
        assert_eq!(keys.of(COOKIE, &HeaderMap::from_iter([(header::COOKIE, pair.parse().unwrap())]), scope), Some(Needs::Changing));
        assert!(keys.begin(COOKIE, &ticket, scope).is_some());
        assert_eq!(keys.tickets.lock().unwrap().len(), MAX_SESSIONS);
    }

    #[test]
    fn foreign_host_names_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let keys = keys(folder.path(), false);
        for host in ["127.0.0.1:5759", "[::1]:5759", "[::1]", "localhost", "LOCALHOST:80", "10.0.0.1:5759", "router.lan:5759"] {
            assert!(keys.allows_host(host), "{host}");
        }
        for host in
            ["", "evil.example", "evil.example:5759", "127.0.0.1.evil.example", "localhost.evil.example:1", "router.lan.evil", ":5759"]
        {
            assert!(!keys.allows_host(host), "{host}");
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
