//! Turns what was typed after `braid explain` into a request.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use anyhow::Context;
use braid_api::{ExplainRequest, Explanation};

use crate::cli::Explain;

/// The request for what was typed.
pub(crate) fn request(typed: &Explain) -> anyhow::Result<ExplainRequest> {
    let Some(destination) = &typed.destination else {
        // What the parser says of a text that is no number helps nobody.
        let flow = typed.subject.parse().ok().with_context(|| {
            format!("{:?} is not a flow's id: take one from `braid flows`, or add a destination to explain a program", typed.subject)
        })?;
        return Ok(ExplainRequest { flow: Some(flow), ..ExplainRequest::default() });
    };
    let (address, port) = destination_of(destination)?;
    let exe = program(&typed.subject);
    let name = Path::new(&typed.subject).file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(ExplainRequest {
        flow: None,
        exe: exe.map(|path| path.display().to_string()),
        name,
        destination: Some(address.to_string()),
        port,
        protocol: Some(if typed.udp { "udp" } else { "tcp" }.to_owned()),
        user: typed.user,
        cgroup: typed.cgroup.clone(),
    })
}

/// A word of warning where what was asked about may be no program at all.
pub(crate) fn doubt(request: &ExplainRequest, answer: &Explanation) -> Option<String> {
    let there = request.exe.as_ref().is_some_and(|exe| Path::new(exe).is_file());
    let named = request.exe.as_ref().or(request.name.as_ref())?;
    let unknown = answer.program_known == Some(false) && !there;
    unknown.then(|| {
        format!("no program {named:?} is known: there is none of that name here, and none has been seen; any unknown one would go so")
    })
}

/// The program's path: as given, or found as a shell would; `None` leaves it to the name.
fn program(subject: &str) -> Option<PathBuf> {
    if subject.contains('/') {
        // The kernel knows programs by their file, so links are followed.
        return Some(std::fs::canonicalize(subject).unwrap_or_else(|_| PathBuf::from(subject)));
    }
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|folder| folder.join(subject)).find(|path| path.is_file())?;
    std::fs::canonicalize(&found).ok().or(Some(found))
}

/// `ADDRESS`, `ADDRESS:PORT`, `[IPV6]:PORT`, `NAME` or `NAME:PORT`.
fn destination_of(text: &str) -> anyhow::Result<(IpAddr, Option<u16>)> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok((address.ip(), Some(address.port())));
    }
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse() {
        return Ok((address, None));
    }
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) => (name, Some(port.parse().ok().with_context(|| format!("{port:?} is not a port: write 1 to 65535"))?)),
        None => (text, None),
    };
    let unknown = || format!("no address is known for {name:?}: write an address, as in 192.0.2.1:443");
    let address = (name, 0).to_socket_addrs().with_context(unknown)?.next().with_context(unknown)?;
    Ok((address.ip(), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn asked(words: &[&str]) -> anyhow::Result<ExplainRequest> {
        let Command::Explain(typed) = Cli::parse_from(["braid", "explain"].iter().chain(words)).command else { panic!() };
        request(&typed)
    }

    #[test]
    fn a_number_alone_is_a_flow() {
        assert_eq!(asked(&["17"]).unwrap(), ExplainRequest { flow: Some(17), ..ExplainRequest::default() });
        let error = format!("{:#}", asked(&["curl"]).unwrap_err());
        assert!(error.ends_with("or add a destination to explain a program"), "{error}");
    }

    #[test]
    fn a_program_and_a_destination_are_a_flow_to_come() {
        let request = asked(&["/nonexistent/tool", "[2001:db8::1]:53", "--udp", "--user", "7"]).unwrap();
        let expected = ExplainRequest {
            flow: None,
            exe: Some("/nonexistent/tool".into()),
            name: Some("tool".into()),
            destination: Some("2001:db8::1".into()),
            port: Some(53),
            protocol: Some("udp".into()),
            user: Some(7),
            cgroup: None,
        };
        assert_eq!(request, expected);
        assert!(asked(&["no-such-program-anywhere", "192.0.2.1"]).unwrap().exe.is_none());
    }

    #[test]
    fn regression_a_program_that_nobody_knows_is_doubted() {
        let answer = |known: Option<bool>| {
            serde_json::from_value::<Explanation>(serde_json::json!({
                "subject": "x", "outcome": "steered", "reason": "", "scheduler": "only-one", "candidates": [], "program_known": known,
            }))
            .unwrap()
        };
        let request = asked(&["no-such-program-anywhere", "192.0.2.1"]).unwrap();
        assert!(doubt(&request, &answer(Some(false))).unwrap().contains("no-such-program-anywhere"));
        assert_eq!((doubt(&request, &answer(Some(true))), doubt(&request, &answer(None))), (None, None));
        let here = asked(&[std::env::current_exe().unwrap().to_str().unwrap(), "192.0.2.1"]).unwrap();
        assert_eq!(doubt(&here, &answer(Some(false))), None);
    }

    #[test]
    fn destinations_are_read_in_every_form() {
        for (text, address, port) in [
            ("192.0.2.1", "192.0.2.1", None),
            ("192.0.2.1:443", "192.0.2.1", Some(443)),
            ("2001:db8::1", "2001:db8::1", None),
            ("[2001:db8::1]", "2001:db8::1", None),
            ("[2001:db8::1]:443", "2001:db8::1", Some(443)),
        ] {
            assert_eq!(destination_of(text).unwrap(), (address.parse().unwrap(), port), "{text}");
        }
        assert!(format!("{:#}", destination_of("192.0.2.1:http").unwrap_err()).ends_with("is not a port: write 1 to 65535"));
    }
}
