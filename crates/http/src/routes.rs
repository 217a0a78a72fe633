//! The handler of each path.

use axum::body::{Body as Content, Bytes};
use axum::extract::rejection::{BytesRejection, JsonRejection, QueryRejection};
use axum::extract::{ConnectInfo, DefaultBodyLimit, Extension, Query, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::IncomingStream;
use axum::{Json, Router, extract::connect_info::Connected, middleware};
use braid_api::openapi::{Needs, OPERATIONS};
use braid_api::{
    Accepted, App, ConfigView, Explanation, List, Note, Problem, Resolution, Rewritten, RuleChange, Session, SessionRequest, UiAddress,
    UiRequest, Versioned,
};
use serde::Deserialize;
use tokio::sync::oneshot;

use super::access::{ApiClient, Permission, guard};
use super::connections::Connections;
use super::tcp::TcpConnections;
use super::{Api, CORE_TIMEOUT, Refusal, ReplySender, Request, metrics, pages, programs};

/// Maximum size of a request body, in bytes.
const MAX_BODY: usize = 256 << 10;
/// The checked-in output of [`braid_api::openapi::document`].
const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json"));

/// Warning about a rule that cannot end with its program.
const UNSEEN: &str = "Braid does not see the process at the other end, as in another process namespace, so only the lease ends the rule";

type Core = State<Api>;
type Reply<T> = Result<Json<Versioned<T>>, Refusal>;
type Body<T> = Result<Json<T>, JsonRejection>;
type ParsedQuery<T> = Result<Query<T>, QueryRejection>;

impl Connected<IncomingStream<'_, Connections>> for ApiClient {
    fn connect_info(stream: IncomingStream<'_, Connections>) -> Self {
        stream.io().client()
    }
}

impl Connected<IncomingStream<'_, TcpConnections>> for ApiClient {
    fn connect_info(stream: IncomingStream<'_, TcpConnections>) -> Self {
        stream.io().client()
    }
}

/// All routes, behind the [`guard`].
pub(super) fn router(api: Api) -> Router {
    Router::new()
        .route("/v1/status", get(async |core: Core| ask(core, Request::Status).await))
        .route("/v1/links", get(async |core: Core| list(core, Request::Links).await))
        .route("/v1/flows", get(flows))
        .route("/v1/apps", get(apps))
        .route("/v1/policy", get(async |core: Core| ask(core, Request::Policy).await))
        .route("/v1/peers", get(async |core: Core| list(core, Request::Peers).await))
        .route("/v1/metrics", get(prometheus))
        .route("/v1/events", get(events))
        .route("/v1/history", get(history))
        .route("/v1/history/apps", get(app_history))
        .route("/v1/notes", get(notes))
        .route("/v1/gains", get(gains))
        .route("/v1/tradeoff", get(async |core: Core| list(core, Request::Tradeoff).await))
        .route("/v1/config", get(config).post(async |core: Core, body| ask_with_body(core, body, Request::Apply).await))
        .route("/v1/config/preview", post(async |core: Core, body| ask_with_body(core, body, Request::Preview).await))
        .route("/v1/config/undo", post(async |core: Core| ask(core, Request::Undo).await))
        .route("/v1/openapi.json", get(async || ([(header::CONTENT_TYPE, "application/json")], DOCUMENT)))
        .route("/v1/session", get(current_session).post(session))
        .route("/v1/ui", post(ui))
        .route("/v1/explain", post(async |core: Core, body| ask_with_body::<_, Explanation>(core, body, Request::Explain).await))
        .route("/v1/join", post(async |core: Core, body| ask_with_body::<_, Accepted>(core, body, Request::Join).await))
        .route("/v1/leave", post(async |core: Core, body| ask_with_body::<_, Accepted>(core, body, Request::Leave).await))
        .route("/v1/move", post(async |core: Core, body| ask_with_body::<_, Accepted>(core, body, Request::Move).await))
        .route("/v1/clients", get(async |core: Core| list(core, Request::Clients).await))
        .route(
            "/v1/context",
            get(async |core: Core| list(core, Request::Facts).await)
                .post(async |core: Core, body| ask_with_body::<_, Accepted>(core, body, Request::SetFact).await),
        )
        .route(
            "/v1/rewrites",
            get(async |core: Core| list(core, Request::Rewrites).await)
                .post(async |core: Core, body| ask_with_body::<_, Rewritten>(core, body, Request::Rewrite).await),
        )
        .route("/v1/rules", get(async |core: Core| list(core, Request::ProgramRules).await).post(change_rule))
        .route(
            "/v1/adhoc",
            get(async |core: Core| ask(core, Request::Adhoc).await)
                .post(async |core: Core, body| ask_with_body::<_, Accepted>(core, body, Request::ChangeAdhoc).await),
        )
        .route(
            "/v1/network",
            get(async |core: Core| ask(core, Request::Network).await)
                .post(async |core: Core, body| ask_with_body::<_, Accepted>(core, body, Request::ChangeNetwork).await),
        )
        .route(
            "/v1/slices",
            get(async |core: Core| ask(core, Request::Slices).await)
                .post(async |core: Core, body| ask_with_body::<_, Accepted>(core, body, Request::ChangeSlices).await),
        )
        .route("/v1/adhoc/up", post(async |core: Core, body| ask_with_body::<_, Accepted>(core, body, Request::AdhocUp).await))
        .route("/v1/adhoc/down", post(async |core: Core| ask(core, Request::AdhocDown).await))
        .route("/v1/reload", post(async |core: Core| ask(core, Request::Reload).await))
        .route("/v1/down", post(async |core: Core| ask(core, Request::Down).await))
        .fallback(page_or_not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn_with_state(api.clone(), guard))
        .with_state(api)
}

async fn exchange<T>(api: &Api, request: impl FnOnce(ReplySender<T>) -> Request) -> Result<T, Refusal> {
    let (reply, wait) = oneshot::channel();
    let ending = || Refusal(Problem::new(503, "Ending", api.site.ending()));
    let exchange = async {
        api.core.send(request(reply)).await.map_err(|_| ending())?;
        wait.await.map_err(|_| ending())?.map_err(Refusal::from)
    };
    let silent = |_| Err(Refusal(Problem::new(504, "No answer", api.site.silent())));
    tokio::time::timeout(CORE_TIMEOUT, exchange).await.unwrap_or_else(silent)
}

async fn ask<T>(State(api): Core, request: impl FnOnce(ReplySender<T>) -> Request) -> Reply<T> {
    exchange(&api, request).await.map(versioned)
}

async fn list<T>(State(api): Core, request: impl FnOnce(ReplySender<Vec<T>>) -> Request) -> Reply<List<T>> {
    exchange(&api, request).await.map(List::of).map(versioned)
}

fn versioned<T>(content: T) -> Json<Versioned<T>> {
    Json(Versioned::of(content))
}

/// Sends a request with a body to the core.
async fn ask_with_body<B, T>(core: Core, body: Body<B>, request: impl FnOnce(B, ReplySender<T>) -> Request) -> Reply<T> {
    let body = parse_body(body)?;
    ask(core, |reply| request(body, reply)).await
}

/// Changes a program's rule. The task continues if the client does not wait, so that the program's end is awaited whatever the core has done.
async fn change_rule(State(api): Core, ConnectInfo(client): ConnectInfo<ApiClient>, body: Body<RuleChange>) -> Reply<Accepted> {
    let change = parse_body(body)?;
    let process = client.process().filter(|_| !change.stays).cloned();
    let unseen = matches!(client, ApiClient::Local { .. }) && process.is_none() && !change.stays && change.rule.is_some();
    let changed = tokio::spawn(async move {
        let program = process.as_deref().map(programs::program);
        let adds = change.rule.is_some();
        let answer = exchange(&api, |reply| Request::ChangeRule(change, program, reply)).await;
        if let Some(process) = process.filter(|_| adds) {
            api.programs.watch(process, api.core.clone());
        }
        answer
    });
    let failed = |_| Refusal(Problem::new(500, "Failed", "the change of the rule has failed: see the daemon's log"));
    let mut accepted = changed.await.map_err(failed)??;
    accepted.warnings.extend(unseen.then(|| UNSEEN.to_owned()));
    Ok(versioned(accepted))
}

/// Parses a body.
fn parse_body<T>(body: Body<T>) -> Result<T, Refusal> {
    body.map(|Json(parsed)| parsed).map_err(|error| match error.status().as_u16() {
        413 => too_much(),
        415 => Refusal(Problem::new(415, "Not JSON", "send JSON with the header `Content-Type: application/json`")),
        _ => not_understood(&error.body_text()),
    })
}

fn too_much() -> Refusal {
    Refusal(Problem::new(413, "Too much", format!("the body is larger than {MAX_BODY} bytes")))
}

fn not_understood(why: &str) -> Refusal {
    Refusal(Problem::new(400, "Not understood", why))
}

/// Parses the query string.
fn parse_query<T>(query: ParsedQuery<T>) -> Result<T, Refusal> {
    query.map(|Query(parsed)| parsed).map_err(|error| not_understood(&error.body_text()))
}

async fn prometheus(State(api): Core) -> Result<Response, Refusal> {
    let status = exchange(&api, Request::Status).await?;
    let clients = exchange(&api, Request::Clients).await.unwrap_or_default();
    let adhoc = match status.adhoc {
        Some(_) => exchange(&api, Request::Adhoc).await.ok(),
        None => None,
    };
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], metrics::text(&status, &clients, adhoc.as_ref())).into_response())
}

async fn events(
    State(api): Core,
    Extension(Permission(may)): Extension<Permission>,
    ConnectInfo(client): ConnectInfo<ApiClient>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let after = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.trim().parse().ok());
    let detail = "too many event listeners: close some pages of Braid";
    // Subscribe before reading the initial state, so that no event is lost between the two.
    let listener = api.live.listen(client.origin(), may).ok_or_else(|| Refusal(Problem::new(429, "Too many listeners", detail)))?;
    let first = exchange(&api, |reply| Request::Subscribe(after, reply)).await?;
    Ok(listener.stream(blocking(move || first.opening()).await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HistoryQuery {
    #[serde(default)]
    resolution: Resolution,
    #[serde(default)]
    since_ms: u64,
}

/// There may be thousands of flows: a blocking thread serializes them, once for all concurrent requests.
async fn flows(State(api): Core) -> Result<Response, Refusal> {
    let flows = exchange(&api, Request::Flows).await?;
    let text = match flows.written() {
        Some(text) => text,
        None => blocking(move || flows.text()).await?,
    };
    Ok(json(text))
}

/// A blocking thread serializes the core's data.
async fn apps(State(api): Core) -> Result<Response, Refusal> {
    let apps = exchange(&api, Request::Apps).await?;
    Ok(json(blocking(move || serde_json::to_vec(&Versioned::of(List::<App>::of(apps.list()))).unwrap_or_default()).await?))
}

/// A blocking thread reads the file, because the disk may be slow.
async fn config(State(api): Core) -> Reply<ConfigView> {
    let look = exchange(&api, Request::Config).await?;
    blocking(move || look.view()).await?.map(versioned).map_err(Refusal::from)
}

fn json(text: impl Into<Content>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text.into()).into_response()
}

/// Runs slow work on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
    let failed = |_| Refusal(Problem::new(500, "Not written", "cannot serialize the answer: see the daemon's log"));
    tokio::task::spawn_blocking(work).await.map_err(failed)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AppHistoryQuery {
    #[serde(default)]
    resolution: Resolution,
    #[serde(default)]
    since_ms: u64,
    application: Option<String>,
}

async fn app_history(core: Core, query: ParsedQuery<AppHistoryQuery>) -> Reply<braid_api::AppHistory> {
    let AppHistoryQuery { resolution, since_ms, application } = parse_query(query)?;
    ask(core, |reply| Request::AppHistory(resolution, since_ms, application, reply)).await
}

async fn history(core: Core, query: ParsedQuery<HistoryQuery>) -> Reply<braid_api::History> {
    let HistoryQuery { resolution, since_ms } = parse_query(query)?;
    ask(core, |reply| Request::History(resolution, since_ms, reply)).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NotesQuery {
    #[serde(default)]
    since: u64,
}

async fn notes(core: Core, query: ParsedQuery<NotesQuery>) -> Reply<List<Note>> {
    let NotesQuery { since } = parse_query(query)?;
    list(core, |reply| Request::Notes(since, reply)).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GainsQuery {
    days: Option<u32>,
}

async fn gains(core: Core, query: ParsedQuery<GainsQuery>) -> Reply<braid_api::Gains> {
    let days = parse_query(query)?.days.unwrap_or(30);
    if days > 400 {
        return Err(not_understood("days is over 400, the maximum that is kept"));
    }
    ask(core, |reply| Request::Gains(days, reply)).await
}

async fn current_session(Extension(Permission(needs)): Extension<Permission>) -> Json<Versioned<Session>> {
    versioned(Session { may_change: needs == Needs::Changing })
}

/// Exchanges a token for a cookie, which scripts cannot read.
async fn session(State(api): Core, ConnectInfo(client): ConnectInfo<ApiClient>, body: Body<SessionRequest>) -> Result<Response, Refusal> {
    let request = parse_body(body)?;
    let Some(keys) = &api.keys else {
        return Err(Refusal(Problem::new(409, "No tokens", "there is no page (--ui), so there are no tokens")));
    };
    let wrong = || {
        let detail = format!("this token is not valid: open the page with `{}`", api.site.command());
        Refusal(Problem::new(401, "Not a token", detail))
    };
    let (needs, cookie): (Needs, HeaderValue) = keys.begin(api.site.cookie(), &request.token, client.origin().into()).ok_or_else(wrong)?;
    Ok(([(header::SET_COOKIE, cookie)], versioned(Session { may_change: needs == Needs::Changing })).into_response())
}

/// The page's address, with a ticket that grants the client's own access right.
async fn ui(
    State(api): Core,
    Extension(Permission(needs)): Extension<Permission>,
    ConnectInfo(client): ConnectInfo<ApiClient>,
    body: Result<Bytes, BytesRejection>,
) -> Reply<UiAddress> {
    let body = body.map_err(|error| if error.status().as_u16() == 413 { too_much() } else { not_understood(&error.body_text()) })?;
    let asked = if body.is_empty() { Ok(UiRequest::default()) } else { serde_json::from_slice(&body) };
    let here = asked.map_err(|error| not_understood(&error.to_string()))?.here;
    let (Some(keys), Some(page)) = (&api.keys, &api.page) else {
        return Err(Refusal(Problem::new(409, "No page", api.site.no_page())));
    };
    let user = match client {
        ApiClient::Local { user, .. } if here => Some(user),
        _ => None,
    };
    let ticket =
        keys.ticket(needs, user).ok_or_else(|| Refusal(Problem::new(503, "No ticket", "the system provides no random numbers")))?;
    Ok(versioned(UiAddress { url: format!("{page}#token={ticket}"), may_change: needs == Needs::Changing }))
}

/// Serves the page's files, or reports an unknown path.
async fn page_or_not_found(State(api): Core, request: HttpRequest) -> Response {
    let path = request.uri().path();
    if matches!(request.method().as_str(), "GET" | "HEAD")
        && let Some(page) = pages::page(api.site.page(), path, request.headers())
    {
        return page;
    }
    let mut known: Vec<&str> = OPERATIONS.iter().map(|operation| operation.path).collect();
    known.sort();
    known.dedup();
    Refusal(Problem::new(404, "Not found", format!("unknown path {path}: see {}", known.join(", ")))).into_response()
}

async fn wrong_method(request: HttpRequest) -> Refusal {
    let detail = format!("{} does not support {}: use GET to read, POST for commands and explain", request.uri().path(), request.method());
    Refusal(Problem::new(405, "Wrong method", detail))
}
