//! A minimal `braid run`: `run [--scheduler S] [--link L]... [--relay R] [--carry C] -- COMMAND...`. The integration tests use it.

use std::process::ExitCode;

use braid_decide::policy::{Carry, Scheduler};
use braid_run::{RunOptions, main as run};

fn main() -> ExitCode {
    let (scheduler, carry) = (Scheduler::default(), Carry::default());
    let mut options = RunOptions { scheduler, links: Vec::new(), carry, relay: None, relay_wait: None, command: Vec::new() };
    let mut words = std::env::args_os().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().and_then(|value| value.into_string().ok()).unwrap_or_default();
        match word.to_str() {
            Some("--scheduler") => {
                let name = value();
                let Some(scheduler) = Scheduler::ALL.into_iter().find(|scheduler| scheduler.name() == name) else {
                    eprintln!("no scheduler is named {name:?}");
                    return ExitCode::from(2);
                };
                options.scheduler = scheduler;
            }
            Some("--link") => options.links.push(value()),
            Some("--relay") => options.relay = Some(value()),
            Some("--carry") => {
                let name = value();
                let Some((_, carry)) = Carry::ALL.into_iter().find(|(known, _)| *known == name) else {
                    eprintln!("no carry mode is named {name:?}");
                    return ExitCode::from(2);
                };
                options.carry = carry;
            }
            _ => break,
        }
    }
    options.command = words.collect();
    let code = run(options).unwrap_or_else(|error| {
        eprintln!("braid: {error}");
        error.exit_code()
    });
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
