//! `braid ui` and `braid net ui`: open the web page.

use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use braid_api::{UiAddress, UiRequest};

use crate::client;

/// Requests the page's address, opens it if there is a desktop, and prints it in any case. With `print` it is only printed.
pub(crate) fn open(socket: &Path, print: bool) -> anyhow::Result<()> {
    let here = !print && desktop();
    let address: UiAddress = client::send(socket, "/v1/ui", &UiRequest { here })?;
    let mut out = io::stdout();
    if here && Command::new("xdg-open").arg(&address.url).stdout(Stdio::null()).stderr(Stdio::null()).spawn().is_ok() {
        writeln!(out, "opening the page in your browser; if it does not open, use this address within two minutes:")?;
    } else if !print {
        writeln!(out, "open this address in a browser within two minutes:")?;
    }
    writeln!(out, "{}", crate::printable_lines(&address.url))?;
    if print {
        // On standard error, so that standard output contains only the address.
        let hint = "(valid for one browser, within two minutes; programs send `Authorization: Bearer` with the token in the file ui-token below the state directory)";
        let _ = writeln!(io::stderr(), "{hint}");
    }
    if !address.may_change && !print {
        writeln!(out, "this session is read-only: only root and members of the group braid can change settings")?;
    }
    Ok(())
}

/// Whether a browser can be opened. Not for root, whose browser would not be the user's.
fn desktop() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    (set("DISPLAY") || set("WAYLAND_DISPLAY")) && !set("SUDO_USER") && std::env::var_os("USER").is_none_or(|user| user != "root")
}
