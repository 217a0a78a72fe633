//! A headless Chromium that loads a page of pictures through a proxy.

use std::ffi::OsString;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::lab::Lab;
use crate::web::Web;

/// Number of pictures of the page, some 10 kB each.
pub const PICTURES: usize = 100;

/// Timeout of a browser including its start; `timeout` then ends it.
const LIMIT: &str = "300";

/// The browser: the program that `CHROMIUM` names, else `chromium`.
fn program() -> OsString {
    std::env::var_os("CHROMIUM").unwrap_or_else(|| "chromium".into())
}

/// Whether a browser is installed. It is an error if the one that `CHROMIUM` names is missing.
pub fn installed() -> Result<bool> {
    let program = program();
    let runs = Command::new(&program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|end| end.success());
    ensure!(runs || std::env::var_os("CHROMIUM").is_none(), "CHROMIUM names {}, which does not run", program.display());
    Ok(runs)
}

/// Serves a page of [`PICTURES`] and returns its address, without the scheme.
pub fn publish(web: &Web) -> Result<String> {
    let mut page = String::from("<!doctype html><title>page</title><body>");
    for number in 0..PICTURES {
        let picture = format!("<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><!--{}--></svg>", "x".repeat(10_000 + number));
        web.publish(&format!("{number}.svg"), picture.as_bytes())?;
        page += &format!("<img src='/{number}.svg'>");
    }
    // Counted once all pictures have loaded or failed.
    page += "<script>addEventListener('load', () => document.title = [...document.images].filter(i => i.naturalWidth > 0).length + ' pictures')\
             </script>";
    Ok(web.publish("page.html", page.as_bytes())?.0)
}

/// Number of pictures of the page at `url` that a browser in the client namespace shows. It uses only `proxy`, `HOST:PORT`, and does not
/// check certificates. 0 if the page itself did not load.
pub fn pictures(lab: &Lab, proxy: &str, url: &str) -> Result<usize> {
    let home = tempfile::tempdir_in(lab.directory())?;
    let mut command = lab.client().command("timeout")?;
    command.args(["--kill-after=10", LIMIT]).arg(program());
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--ignore-certificate-errors", "--dump-dom"]);
    command.arg(format!("--user-data-dir={}", home.path().display())).arg(format!("--proxy-server=http://{proxy}")).arg(url);
    let output = command.env("HOME", home.path()).stdin(Stdio::null()).output().context("cannot run chromium")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "chromium ended with {} at {url}: {}", output.status, said.trim());
    Ok(shown(&String::from_utf8_lossy(&output.stdout)))
}

/// Number of pictures that the page's title reports.
fn shown(document: &str) -> usize {
    let title = document.split_once("<title>").and_then(|(_, rest)| rest.split_once(" pictures</title>"));
    title.and_then(|(count, _)| count.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn a_page_reports_how_many_pictures_it_shows() {
        assert_eq!(shown("<!DOCTYPE html><html><head><title>97 pictures</title></head><body>"), 97);
        assert_eq!(shown("<html><head><title>page</title>"), 0);
        assert_eq!(shown("<html><head><title>203.0.113.10</title></head>ERR_PROXY_CONNECTION_FAILED"), 0);
    }
}
