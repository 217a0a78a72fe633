//! Forwards requests to their servers.

use std::sync::{Arc, Mutex, PoisonError};

use braid_fetch::splice::SpliceError;
use braid_model::address::Address;
use braid_peer::destination::DialError;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::ext::on_informational;
use hyper::header::{EXPECT, HOST, HeaderValue};
use hyper::{Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::sync::oneshot;

use crate::answer::{BUFFER, BodyError, ProxyResponse, plain, unreachable};
use crate::deferred_body::DeferredBody;
use crate::headers::remove_hop_by_hop;
use crate::outbound::{ConnectionRoute, Opened, Origin, Outbound};
use crate::shared::{Shared, join_upgraded};
use crate::split::Candidate;

/// The connection that a client's requests reuse as long as they go to one server.
#[derive(Default)]
pub(crate) struct Upstream(Mutex<Option<ServerConnection>>);

/// An open connection to a server.
struct ServerConnection {
    target: Address,
    route: Option<ConnectionRoute>,
    sender: SendRequest<DeferredBody>,
}

/// Reason why there is no answer.
#[derive(Debug, Error)]
pub(crate) enum ForwardError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("{0} closed the connection: {1}")]
    Broken(Address, hyper::Error),
    #[error("cannot forward the request: {0}")]
    Request(&'static str),
}

impl ForwardError {
    /// The response for the client.
    pub(crate) fn answer(&self) -> ProxyResponse {
        match self {
            Self::Dial(error) => unreachable(error),
            Self::Broken(..) => plain(StatusCode::BAD_GATEWAY, &self.to_string()),
            Self::Request(_) => plain(StatusCode::BAD_REQUEST, &self.to_string()),
        }
    }
}

impl Upstream {
    /// Forwards one request, and returns its response. If both ends switch protocols, also forwards bytes both ways afterwards.
    pub(crate) async fn forward(
        &self,
        mut request: Request<Incoming>,
        origin: &Origin,
        target: &Address,
        shared: &Shared,
    ) -> Result<ProxyResponse, ForwardError> {
        let client = hyper::upgrade::on(&mut request);
        let mut candidate = Candidate::of(&request);
        let (onward, upgrades) = outgoing(request)?;
        candidate.iter_mut().for_each(|candidate| candidate.headers.clone_from(onward.headers()));
        let (mut response, route) = self.send(onward, origin, target, &shared.outbound).await?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS && upgrades {
            let server = hyper::upgrade::on(&mut response);
            tokio::spawn(async move {
                if let (Ok(client), Ok(server)) = tokio::join!(client, server) {
                    join_upgraded(client, TokioIo::new(server)).await;
                }
            });
        } else if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(plain(StatusCode::BAD_GATEWAY, "the server switched protocols without a request for it"));
        }
        let (mut parts, body) = response.into_parts();
        remove_hop_by_hop(&mut parts.headers, parts.status == StatusCode::SWITCHING_PROTOCOLS);
        parts.version = Version::HTTP_11;
        parts.extensions.clear();
        let whole = |body: Incoming| body.map_err(BodyError::from).boxed_unsync();
        let body = match candidate.zip(route) {
            Some((candidate, route)) => match candidate.splice(&shared.splicer, &shared.outbound, (origin, target, route), &parts, body) {
                Ok(spliced) => spliced.map_err(log_broken).boxed_unsync(),
                Err(body) => whole(body),
            },
            None => whole(body),
        };
        Ok(Response::from_parts(parts, body))
    }

    /// Sends over the open connection, or over a new one. If the server has closed the open one, the request is retried on a new one.
    async fn send(
        &self,
        mut request: Request<DeferredBody>,
        origin: &Origin,
        target: &Address,
        outbound: &Arc<dyn Outbound>,
    ) -> Result<(Response<Incoming>, Option<ConnectionRoute>), ForwardError> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(ServerConnection { route, mut sender, .. }) = kept.filter(|kept| kept.target == *target && !kept.sender.is_closed())
            && sender.ready().await.is_ok()
        {
            match sender.try_send_request(request).await {
                Ok(response) => {
                    self.keep(target, route, sender);
                    return Ok((response, route));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(ForwardError::Broken(target.clone(), error.into_error())),
                },
            }
        }
        let Opened { stream, route } = outbound.connect(origin, target).await?;
        let broken = |error| ForwardError::Broken(target.clone(), error);
        let (mut sender, connection) = http1::Builder::new().max_buf_size(BUFFER).handshake(TokioIo::new(stream)).await.map_err(broken)?;
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a server connection has ended");
            }
        });
        let response = sender.send_request(request).await.map_err(broken)?;
        self.keep(target, route, sender);
        Ok((response, route))
    }

    fn keep(&self, target: &Address, route: Option<ConnectionRoute>, sender: SendRequest<DeferredBody>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(ServerConnection { target: target.clone(), route, sender });
    }
}

/// Reports a split download that cannot continue: the client's connection breaks, and the log has the reason.
fn log_broken(error: SpliceError) -> BodyError {
    tracing::warn!("{error}");
    error.into()
}

/// The request as the server receives it, and whether it asks to switch protocols.
fn outgoing(request: Request<Incoming>) -> Result<(Request<DeferredBody>, bool), ForwardError> {
    let (parts, body) = request.into_parts();
    let authority = parts.uri.authority().ok_or(ForwardError::Request("it has no target"))?;
    let host = HeaderValue::from_str(authority.as_str()).map_err(|_| ForwardError::Request("its target is not a valid host"))?;
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let uri: Uri = path.parse().map_err(|_| ForwardError::Request("its path is not valid"))?;
    let mut headers = parts.headers;
    let upgrades = remove_hop_by_hop(&mut headers, true);
    headers.insert(HOST, host);
    let waits = headers.get(EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    let (tell, wanted) = oneshot::channel();
    let body = if waits { DeferredBody::waiting(body, wanted) } else { DeferredBody::ready(body) };
    let mut onward = Request::new(body);
    (*onward.method_mut(), *onward.uri_mut(), *onward.headers_mut()) = (parts.method, uri, headers);
    if waits {
        let tell = Mutex::new(Some(tell));
        on_informational(&mut onward, move |response| {
            if response.status() == StatusCode::CONTINUE
                && let Some(tell) = tell.lock().unwrap_or_else(PoisonError::into_inner).take()
            {
                let _ = tell.send(());
            }
        });
    }
    Ok((onward, upgrades))
}
