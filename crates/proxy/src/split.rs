//! Splits downloads among links: selects the downloads, and opens connections for their parts.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use braid_fetch::splice::{Offer, Spliced, Splicer, StartedDownload};
use braid_fetch::{BoxStream, DownloadLink, FetchError, Network};
use braid_model::PerFamily;
use braid_model::address::Address;
use hyper::body::{Body, Incoming};
use hyper::header::{AUTHORIZATION, HeaderMap, RANGE, UPGRADE};
use hyper::http::response::Parts;
use hyper::{Method, Request, Uri};

use crate::outbound::{ConnectionRoute, Origin, Outbound, Share};

/// A request whose answer may be split, as the server receives it.
pub(crate) struct Candidate {
    address: Uri,
    pub(crate) headers: HeaderMap,
}

impl Candidate {
    /// A candidate if the answer to this request may be split: it reads a whole file, and repeated requests for parts of it have no effect.
    pub(crate) fn of(request: &Request<Incoming>) -> Option<Self> {
        let headers = request.headers();
        // These schemes authenticate the connection, not each request.
        let of_connection = |value: &hyper::header::HeaderValue| {
            let scheme = value.as_bytes().split(|byte| *byte == b' ').next().unwrap_or_default();
            [b"negotiate".as_slice(), b"ntlm"].iter().any(|known| scheme.eq_ignore_ascii_case(known))
        };
        let plain = request.method() == Method::GET && request.body().is_end_stream();
        let asked =
            headers.contains_key(RANGE) || headers.contains_key(UPGRADE) || headers.get_all(AUTHORIZATION).iter().any(of_connection);
        (plain && !asked).then(|| Self { address: request.uri().clone(), headers: HeaderMap::new() })
    }

    /// The replacement for the body, if the answer is large enough and may be split; else the body.
    pub(crate) fn splice(
        self,
        splicer: &Splicer,
        outbound: &Arc<dyn Outbound>,
        (origin, target, route): (&Origin, &Address, ConnectionRoute),
        parts: &Parts,
        body: Incoming,
    ) -> Result<Spliced, Incoming> {
        let Some(offer) = Offer::of(parts.status, &parts.headers) else { return Err(body) };
        let Some(Share { links, weight }) = outbound.share(origin, route) else { return Err(body) };
        let highest = links.iter().map(|(link, _)| link + 1).max().unwrap_or(0).max(route.link + 1);
        let mut named = vec![DownloadLink { families: PerFamily { v4: true, v6: true }, ..DownloadLink::default() }; highest];
        for (link, name) in &links {
            named[*link].name.clone_from(name);
        }
        let links = links.into_iter().map(|(link, _)| link).collect();
        let name = format!("{} {:?} {target} {}", origin.client.ip(), origin.user, route.remote);
        let network = Arc::new(RouteNetwork { outbound: outbound.clone(), origin: origin.clone(), route, links: named });
        let Self { address, headers } = self;
        let begun = StartedDownload { name, network, links, link: route.link, weight, address, headers, offer, body };
        splicer.splice(begun).map_err(|begun| begun.body)
    }
}

/// Opens more connections to the remote address of a first one, over any link.
struct RouteNetwork {
    outbound: Arc<dyn Outbound>,
    origin: Origin,
    route: ConnectionRoute,
    links: Vec<DownloadLink>,
}

impl Network for RouteNetwork {
    fn links(&self) -> &[DownloadLink] {
        &self.links
    }

    fn connect<'a>(
        &'a self,
        link: usize,
        host: &'a str,
        port: u16,
    ) -> Pin<Box<dyn Future<Output = Result<BoxStream, FetchError>> + Send + 'a>> {
        Box::pin(async move {
            let opened = self.outbound.connect_by(&self.origin, ConnectionRoute { link, ..self.route }).await;
            let told = |error: std::io::Error| FetchError::Connect {
                host: format!("{host}:{port}"),
                link: self.links[link].name.clone(),
                reason: error.to_string(),
            };
            Ok(Box::new(opened.map_err(told)?) as BoxStream)
        })
    }
}
