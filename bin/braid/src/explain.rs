//! Turns the arguments of `braid explain` into a request.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use anyhow::Context;
use braid_api::{ExplainRequest, Explanation};

use crate::cli::Explain;

/// Builds the request from the arguments.
pub(crate) fn request(args: &Explain) -> anyhow::Result<ExplainRequest> {
    let Some(destination) = &args.destination else {
        // Replaces the parser's message for a subject that is not a number, which does not help the user.
        let flow = args.subject.parse().ok().with_context(|| {
            format!("{:?} is not a flow's id: take one from `braid flows`, or add a destination to explain a program", args.subject)
        })?;
        return Ok(ExplainRequest { flow: Some(flow), ..ExplainRequest::default() });
    };
    let (address, port) = destination_of(destination)?;
    let exe = program(&args.subject);
    let name = Path::new(&args.subject).file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(ExplainRequest {
        flow: None,
        exe: exe.map(|path| path.display().to_string()),
        name,
        destination: Some(address.to_string()),
        port,
        protocol: Some(if args.udp { "udp" } else { "tcp" }.to_owned()),
        user: args.user,
        cgroup: args.cgroup.clone(),
    })
}

/// Returns a warning if the program in the request may not exist.
pub(crate) fn warning(request: &ExplainRequest, answer: &Explanation) -> Option<String> {
    let there = request.exe.as_ref().is_some_and(|exe| Path::new(exe).is_file());
    let named = request.exe.as_ref().or(request.name.as_ref())?;
    let unknown = answer.program_known == Some(false) && !there;
    unknown.then(|| format!("there is no program {named:?} here, and Braid has not seen one; the answer applies to any unknown program"))
}

/// Path of the program: as given, or looked up in PATH as a shell does. `None`: match it by name only.
fn program(subject: &str) -> Option<PathBuf> {
    if subject.contains('/') {
        // The kernel identifies programs by their file, so symbolic links are resolved.
        return Some(std::fs::canonicalize(subject).unwrap_or_else(|_| PathBuf::from(subject)));
    }
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|folder| folder.join(subject)).find(|path| path.is_file())?;
    std::fs::canonicalize(&found).ok().or(Some(found))
}

/// Parses `ADDRESS`, `ADDRESS:PORT`, `[IPV6]:PORT`, `NAME` or `NAME:PORT`.
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
    let unknown = || format!("cannot resolve {name:?}: write an address, as in 192.0.2.1:443");
    let address = (name, 0).to_socket_addrs().with_context(unknown)?.next().with_context(unknown)?;
    Ok((address.ip(), port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn asked(words: &[&str]) -> anyhow::Result<ExplainRequest> {
        let Command::Explain(args) = Cli::parse_from(["braid", "explain"].iter().chain(words)).command else { panic!() };
        request(&args)
    }

    #[test]
    fn a_single_number_is_a_flow_id() {
        assert_eq!(asked(&["17"]).unwrap(), ExplainRequest { flow: Some(17), ..ExplainRequest::default() });
        let error = format!("{:#}", asked(&["curl"]).unwrap_err());
        assert!(error.ends_with("or add a destination to explain a program"), "{error}");
    }

    #[test]
    fn a_program_and_a_destination_describe_a_future_flow() {
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
    fn regression_an_unknown_program_gives_a_warning() {
        let answer = |known: Option<bool>| {
            serde_json::from_value::<Explanation>(serde_json::json!({
                "subject": "x", "outcome": "steered", "reason": "", "scheduler": "only-one", "candidates": [], "program_known": known,
            }))
            .unwrap()
        };
        let request = asked(&["no-such-program-anywhere", "192.0.2.1"]).unwrap();
        assert!(warning(&request, &answer(Some(false))).unwrap().contains("no-such-program-anywhere"));
        assert_eq!((warning(&request, &answer(Some(true))), warning(&request, &answer(None))), (None, None));
        let here = asked(&[std::env::current_exe().unwrap().to_str().unwrap(), "192.0.2.1"]).unwrap();
        assert_eq!(warning(&here, &answer(Some(false))), None);
    }

    #[test]
    fn destinations_are_parsed_in_every_form() {
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
