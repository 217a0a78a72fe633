//! The files of the web pages, embedded in the program.

use std::sync::OnceLock;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ring::digest::{SHA256, digest};

/// Every file with its path below `web/`.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/pages.rs"));

/// A file's entity tag and compressed form.
struct Prepared {
    tag: String,
    /// Compressed form; `None` if it is not smaller than the file.
    gzip: Option<Vec<u8>>,
}

/// The file at `path`, which is `/` (the file `first`) or `/assets/...`; `None` if there is none.
pub(super) fn page(first: &str, path: &str, asked: &HeaderMap) -> Option<Response> {
    let name = if path == "/" { first } else { path.strip_prefix("/assets/")? };
    // The page may have a directory of its own named `assets`.
    let found = |name: &str| FILES.iter().position(|(file, _)| *file == name);
    let index = found(name).or_else(|| found(&format!("assets/{name}")))?;
    let (name, bytes) = FILES[index];
    let prepared = &prepared()[index];
    let says = |name, what: &str| asked.get(name).and_then(|value| value.to_str().ok()).is_some_and(|value| value.contains(what));
    // Browsers revalidate at each visit, so that they get the new page after an upgrade.
    let common = [(header::ETAG, prepared.tag.as_str()), (header::CACHE_CONTROL, "no-cache"), (header::VARY, "Accept-Encoding")];
    if says(header::IF_NONE_MATCH, &prepared.tag) {
        return Some((StatusCode::NOT_MODIFIED, common).into_response());
    }
    let kind = [(header::CONTENT_TYPE, media_type(name))];
    Some(match prepared.gzip.as_deref().filter(|_| says(header::ACCEPT_ENCODING, "gzip")) {
        Some(small) => (common, kind, [(header::CONTENT_ENCODING, "gzip")], small).into_response(),
        None => (common, kind, bytes).into_response(),
    })
}

fn prepared() -> &'static [Prepared] {
    static PREPARED: OnceLock<Vec<Prepared>> = OnceLock::new();
    PREPARED.get_or_init(|| FILES.iter().map(|(_, bytes)| prepare(bytes)).collect())
}

fn prepare(bytes: &[u8]) -> Prepared {
    let hash: String = digest(&SHA256, bytes).as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    let written = std::io::Write::write_all(&mut encoder, bytes).and_then(|()| encoder.finish());
    Prepared { tag: format!("\"{hash}\""), gzip: written.ok().filter(|small| small.len() < bytes.len()) }
}

fn media_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map_or("", |(_, kind)| kind) {
        "html" => "text/html; charset=utf-8",
        "js" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "ico" => "image/x-icon",
        "woff2" => "font/woff2",
        "webmanifest" => "application/manifest+json",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::site::Site;
    use http_body_util::BodyExt;

    fn asked(name: header::HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, value.parse().unwrap())])
    }

    const FIRST: &str = "index.html";

    #[tokio::test]
    async fn the_page_is_compressed_on_request_and_revalidated_by_its_tag() {
        let plain = page(FIRST, "/", &HeaderMap::new()).unwrap();
        let tag = plain.headers()[header::ETAG].to_str().unwrap().to_owned();
        assert_eq!(plain.headers()[header::CONTENT_TYPE], "text/html; charset=utf-8");
        let whole = plain.into_body().collect().await.unwrap().to_bytes();
        assert!(whole.starts_with(b"<!doctype html>") || whole.starts_with(b"<!DOCTYPE html>"));
        let small = page(FIRST, "/", &asked(header::ACCEPT_ENCODING, "br, gzip")).unwrap();
        assert_eq!(small.headers()[header::CONTENT_ENCODING], "gzip");
        let small = small.into_body().collect().await.unwrap().to_bytes();
        let mut unpacked = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&*small), &mut unpacked).unwrap();
        assert!(unpacked == whole && small.len() < whole.len());
        assert_eq!(page(FIRST, "/", &asked(header::IF_NONE_MATCH, &tag)).unwrap().status(), StatusCode::NOT_MODIFIED);
    }

    #[test]
    fn other_paths_have_no_page() {
        for path in ["/assets/", "/assets/../Cargo.toml", "/assets/index.htm", "/index.html", "", "/assets//etc/passwd"] {
            assert!(page(FIRST, path, &HeaderMap::new()).is_none(), "{path}");
        }
    }

    #[tokio::test]
    async fn each_program_has_its_own_page() {
        for (site, module) in [(Site::Daemon, "/assets/app.js"), (Site::Controller, "/assets/network.js")] {
            let body = page(site.page(), "/", &HeaderMap::new()).unwrap().into_body().collect().await.unwrap().to_bytes();
            assert!(std::str::from_utf8(&body).unwrap().contains(module), "{site:?}");
            assert!(page(site.page(), module, &HeaderMap::new()).is_some(), "{module}");
        }
    }
}
