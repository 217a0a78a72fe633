//! Progress of a long run: a bar on a terminal, a line for each experiment elsewhere.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const WIDTH: usize = 30;
/// Minimum time between two writes to a terminal.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// Shared by all threads.
pub(super) struct Progress {
    terminal: bool,
    all: usize,
    state: Mutex<State>,
}

struct State {
    done: usize,
    /// Name of each experiment, and its number of remaining measurements.
    left: Vec<(&'static str, usize)>,
    written: Option<Instant>,
}

impl Progress {
    /// Progress for experiments with the given names and numbers of measurements.
    pub(super) fn new(experiments: Vec<(&'static str, usize)>) -> Self {
        let all = experiments.iter().map(|(_, count)| count).sum();
        let state = State { done: 0, left: experiments, written: None };
        Self { terminal: io::stderr().is_terminal(), all, state: Mutex::new(state) }
    }

    /// Counts one measurement of the experiment at this index.
    pub(super) fn step(&self, experiment: usize) {
        // Progress output never fails the run: ignore a poisoned lock and a closed standard error.
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.done += 1;
        let (name, left) = &mut state.left[experiment];
        *left -= 1;
        let (name, ended) = (*name, *left == 0);
        let mut out = io::stderr();
        if !self.terminal {
            if ended {
                let _ = writeln!(out, "{name}: measured ({} of {} measurements)", state.done, self.all);
            }
            return;
        }
        if state.done == self.all {
            let _ = write!(out, "\r\x1b[K");
        } else if state.written.is_none_or(|written| written.elapsed() > MIN_INTERVAL) {
            state.written = Some(Instant::now());
            let _ = write!(out, "\r{} {}/{} {name}\x1b[K", bar(state.done, self.all), state.done, self.all);
        }
        let _ = out.flush();
    }
}

fn bar(done: usize, all: usize) -> String {
    let full = done * WIDTH / all.max(1);
    format!("[{}{}]", "#".repeat(full), " ".repeat(WIDTH - full))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_fills_from_the_left() {
        assert_eq!(bar(0, 9), format!("[{}]", " ".repeat(WIDTH)));
        assert_eq!(bar(1, 2), format!("[{}{}]", "#".repeat(WIDTH / 2), " ".repeat(WIDTH / 2)));
        assert_eq!(bar(9, 9), format!("[{}]", "#".repeat(WIDTH)));
    }
}
