//! Secrets, which have no place among a command's arguments: other users of the machine see those, and shells keep them.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::{Context, bail};
use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers, read};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};

/// The longest secret.
const LONGEST: usize = 8192;

/// What was `given`. For `-`, or where nothing was, the first line of standard input; on a terminal it is asked for by `what` it is.
pub(crate) fn line(given: Option<String>, what: &str) -> anyhow::Result<String> {
    match given {
        Some(given) if given != "-" => Ok(given),
        None if io::stdin().is_terminal() => ask(&format!("{what}: ")).with_context(|| format!("the {what} cannot be read")),
        _ => {
            let line = first_line(io::stdin().lock()).with_context(|| format!("the {what} cannot be read from standard input"))?;
            if line.is_empty() {
                bail!("no {what} came on standard input: write one to it, or run this on a terminal, which is asked");
            }
            Ok(line)
        }
    }
}

fn first_line(from: impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    from.take(LONGEST as u64).read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

/// Asks for a secret on the terminal, and shows nothing of it.
///
/// # Errors
/// `Interrupted` for Ctrl-C, else those of the terminal.
pub(crate) fn ask(prompt: &str) -> io::Result<String> {
    // First: what is typed at the prompt, however early, is not shown.
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
            (KeyCode::Char('c'), true) => return Err(io::Error::new(io::ErrorKind::Interrupted, "it was given up")),
            // The end of a line, as typed, as pasted, and that of all input.
            (KeyCode::Enter, _) | (KeyCode::Char('j' | 'd'), true) => return Ok(text.trim().to_owned()),
            (KeyCode::Backspace, _) => drop(text.pop()),
            (KeyCode::Char(letter), false) if text.len() < LONGEST => text.push(letter),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_counts_and_a_given_one_is_taken() {
        assert_eq!(first_line(&b"  braid1-x \nmore\n"[..]).unwrap(), "braid1-x");
        assert!(first_line(&b"\n"[..]).unwrap().is_empty() && first_line(&[0xff, 0xfe][..]).is_err());
        assert!(first_line(&vec![b'a'; 1 << 20][..]).unwrap().len() <= LONGEST);
        assert_eq!(line(Some("braid1-x".to_owned()), "invitation").unwrap(), "braid1-x");
    }
}
