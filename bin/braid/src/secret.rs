//! Secrets that must not be command arguments: other users of the machine can see arguments, and shells record them.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::{Context, bail};
use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers, read};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};

/// Maximum length of a secret in bytes.
const MAX_LENGTH: usize = 8192;

/// Returns the secret that was `given`. Without one, asks for it on a terminal, where `what` names it. For `-`, or without a terminal, reads the
/// first line of standard input.
pub(crate) fn line(given: Option<String>, what: &str) -> anyhow::Result<String> {
    match given {
        Some(given) if given != "-" => Ok(given),
        None if io::stdin().is_terminal() => ask(&format!("{what}: ")).with_context(|| format!("cannot read the {what}")),
        _ => {
            let line = first_line(io::stdin().lock()).with_context(|| format!("cannot read the {what} from standard input"))?;
            if line.is_empty() {
                bail!("standard input has no {what}: write one to it, or run this command on a terminal");
            }
            Ok(line)
        }
    }
}

fn first_line(from: impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    from.take(MAX_LENGTH as u64).read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

/// Asks for a secret on the terminal without echo.
///
/// # Errors
/// `Interrupted` for Ctrl-C, otherwise the terminal's error.
pub(crate) fn ask(prompt: &str) -> io::Result<String> {
    // Raw mode comes first, so that input typed before the prompt is not echoed.
    enable_raw_mode()?;
    let prompted = write!(io::stderr(), "{prompt}").and_then(|()| io::stderr().flush());
    let typed = prompted.and_then(|()| typed());
    let restored = disable_raw_mode();
    writeln!(io::stderr())?;
    restored.and(typed)
}

fn typed() -> io::Result<String> {
    let mut text = String::new();
    loop {
        let Event::Key(key) = read()? else { continue };
        if key.kind == KeyEventKind::Release {
            continue;
        }
        match (key.code, key.modifiers.contains(KeyModifiers::CONTROL)) {
            (KeyCode::Char('c'), true) => return Err(io::Error::new(io::ErrorKind::Interrupted, "interrupted by Ctrl-C")),
            // End of a line, typed (Enter) or pasted (Ctrl-J), and end of input (Ctrl-D).
            (KeyCode::Enter, _) | (KeyCode::Char('j' | 'd'), true) => return Ok(text.trim().to_owned()),
            (KeyCode::Backspace, _) => drop(text.pop()),
            (KeyCode::Char(letter), false) if text.len() < MAX_LENGTH => text.push(letter),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_line_is_read_and_a_given_secret_wins() {
        assert_eq!(first_line(&b"  braid1-x \nmore\n"[..]).unwrap(), "braid1-x");
        assert!(first_line(&b"\n"[..]).unwrap().is_empty() && first_line(&[0xff, 0xfe][..]).is_err());
        assert!(first_line(&vec![b'a'; 1 << 20][..]).unwrap().len() <= MAX_LENGTH);
        assert_eq!(line(Some("braid1-x".to_owned()), "invitation").unwrap(), "braid1-x");
    }
}
