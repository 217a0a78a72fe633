//! `braid ui`: opens the web page.

use std::io::{self, Write};
use std::process::{Command, Stdio};

use braid_api::{UiAddress, UiRequest};

use crate::cli::Ui;
use crate::client;

/// Asks for the page's address, opens it where there is a desktop, and tells it in any case.
pub(crate) fn open(command: &Ui) -> anyhow::Result<()> {
    let here = !command.print && desktop();
    let address: UiAddress = client::send(&command.daemon.socket, "/v1/ui", &UiRequest { here })?;
    let mut out = io::stdout();
    if here && Command::new("xdg-open").arg(&address.url).stdout(Stdio::null()).stderr(Stdio::null()).spawn().is_ok() {
        writeln!(out, "the page opens in your browser; if it does not, go to (within two minutes):")?;
    } else if !command.print {
        writeln!(out, "open this in a browser within two minutes:")?;
    }
    writeln!(out, "{}", crate::printable_lines(&address.url))?;
    if command.print {
        // Beside the address, which a script takes from standard output.
        let hint = "(good for one browser, within two minutes; programs show `Authorization: Bearer` and the token in ui-token of the state directory)";
        let _ = writeln!(io::stderr(), "{hint}");
    }
    if !address.may_change && !command.print {
        writeln!(out, "you may look, not change: members of the group braid may, and root")?;
    }
    Ok(())
}

/// Whether a browser could be opened: root's would not be the user's.
fn desktop() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    (set("DISPLAY") || set("WAYLAND_DISPLAY")) && !set("SUDO_USER") && std::env::var_os("USER").is_none_or(|user| user != "root")
}
