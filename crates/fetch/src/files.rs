//! Groups URLs by file, and derives file names.

use std::path::{Path, PathBuf};

use url::Url;

use crate::credentials::decode;
use crate::error::FetchError;
use crate::options::{Checksum, Output};

/// One file to download.
#[derive(Debug, Clone, PartialEq)]
pub struct Download {
    /// URLs of the same file (mirrors).
    pub urls: Vec<Url>,
    /// Destination of the file.
    pub output: Output,
    /// Expected checksum.
    pub checksum: Option<Checksum>,
    /// Weight φ relative to other files.
    pub weight: f64,
}

/// Parses URLs and groups those of one file: all of them if `output` names it (`-` is standard output), otherwise those whose paths end in the same
/// name. Files go into `directory`.
///
/// # Errors
/// An invalid URL.
pub fn group(urls: &[String], output: Option<&Path>, directory: &Path) -> Result<Vec<Download>, FetchError> {
    let mut downloads: Vec<Download> = Vec::new();
    for text in urls {
        let url = address(text)?;
        let target = match output {
            Some(path) if path == Path::new("-") => Output::Standard,
            Some(path) => Output::File(directory.join(path)),
            None => Output::File(directory.join(remote_name(&url))),
        };
        match downloads.iter_mut().find(|download| download.output == target) {
            Some(download) if download.urls.contains(&url) => {}
            Some(download) => download.urls.push(url),
            None => downloads.push(Download { urls: vec![url], output: target, checksum: None, weight: 1.0 }),
        }
    }
    Ok(downloads)
}

/// Parses a URL; without a scheme it is http, as in curl.
fn address(text: &str) -> Result<Url, FetchError> {
    let refused = |reason: &str| FetchError::Url { url: text.to_owned(), reason: reason.to_owned() };
    let full = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let url: Url = full.parse().map_err(|error: url::ParseError| refused(&error.to_string()))?;
    match url.scheme() {
        "http" | "https" if url.host_str().is_some() => {}
        _ => return Err(refused("only http and https are supported")),
    }
    if url.as_str().parse::<hyper::Uri>().is_err() {
        return Err(refused("it cannot be used in a request"));
    }
    Ok(url)
}

/// Last component of the URL's path as a file name: never a path, and never a hidden file that the server chose by accident.
pub fn remote_name(url: &Url) -> PathBuf {
    let last = url.path_segments().and_then(|mut parts| parts.next_back()).unwrap_or("");
    let name: String = decode(last).chars().map(|c| if c == '/' || c.is_control() { '_' } else { c }).collect();
    match name.as_str() {
        "" | "." | ".." => "index.html".into(),
        name => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_with_the_same_file_name_are_mirrors() {
        let urls = ["http://a/x.iso", "https://b/deep/x.iso?k", "c.example/y", "http://a/x.iso"].map(str::to_owned);
        let downloads = group(&urls, None, Path::new("/d")).unwrap();
        let shape: Vec<_> = downloads.iter().map(|download| (download.urls.len(), download.output.clone())).collect();
        assert_eq!(shape, [(2, Output::File("/d/x.iso".into())), (1, Output::File("/d/y".into()))]);
        assert_eq!(group(&urls, Some(Path::new("-")), Path::new(".")).unwrap()[0].urls.len(), 3);
    }

    #[test]
    fn file_names_from_servers_are_never_paths() {
        let name = |url: &str| remote_name(&url.parse().unwrap()).to_string_lossy().into_owned();
        assert_eq!(name("http://a/b%20c.txt?x=/y"), "b c.txt");
        assert_eq!(name("http://a/..%2f..%2fetc%2fpasswd"), ".._.._etc_passwd");
        assert_eq!(
            (name("http://a/"), name("http://a/x/%2e%2e"), name("http://a/%00%zz")),
            ("index.html".into(), "index.html".into(), "_%zz".into())
        );
    }

    #[test]
    fn invalid_urls_are_rejected() {
        for bad in ["", "ftp://a/b", "http://", "http://[::1", "file:///x"] {
            assert!(group(&[bad.to_owned()], None, Path::new(".")).is_err(), "{bad}");
        }
    }
}
