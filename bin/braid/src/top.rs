//! `braid top`: links, flows, applications, peers and events at a glance, as they change. It asks the API's
//! `/v1/events`, and its histories once, so that curves do not begin empty.

mod model;
#[cfg(test)]
mod tests;
mod view;

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use ratatui::crossterm::event::{
    self, DisableMouseCapture, EnableMouseCapture, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers, MouseButton, MouseEvent,
    MouseEventKind,
};
use ratatui::crossterm::{execute, terminal};
use ratatui::layout::{Rect, Size};

use crate::client;
use model::{Model, Press};

/// The daemon is asked again after it was lost.
const AGAIN: Duration = Duration::from_secs(1);

/// Something to take in.
enum UiEvent {
    Heard(String, String),
    Lost(String),
    Key(KeyEvent),
    Mouse(MouseEvent),
    Resized,
}

/// Shows what happens until the user has seen enough.
pub(crate) fn run(socket: &Path) -> anyhow::Result<()> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        anyhow::bail!("braid top needs a terminal: use braid status, braid flows and the like in scripts");
    }
    if let Ok((columns, rows)) = terminal::size()
        && (columns == 0 || rows == 0)
    {
        anyhow::bail!("the terminal tells no size, so nothing can be drawn: give it one, as in `stty cols 100 rows 30`");
    }
    // Where nobody answers now, an error says more than an empty screen.
    client::listen(socket, "/v1/events", |_, _| ControlFlow::Break(()))?;
    let (send, events) = mpsc::channel();
    let (hearing, path) = (send.clone(), socket.to_owned());
    std::thread::spawn(move || hear(&path, &hearing));
    std::thread::spawn(move || read_keys(&send));
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, &events);
    // Also where it was not taken: that does no harm.
    let released = execute!(io::stdout(), DisableMouseCapture);
    ratatui::try_restore()?;
    released?;
    shown
}

fn show(terminal: &mut ratatui::DefaultTerminal, events: &mpsc::Receiver<UiEvent>) -> anyhow::Result<()> {
    let mut model = Model::default();
    let mut taken = false;
    loop {
        if std::mem::replace(&mut taken, model.mouse) != model.mouse {
            if model.mouse { execute!(io::stdout(), EnableMouseCapture) } else { execute!(io::stdout(), DisableMouseCapture) }?;
        }
        terminal.draw(|frame| view::draw(frame, &model))?;
        let mut next = events.recv().ok();
        // What waits is taken in before anything is drawn again.
        while let Some(one) = next {
            if !take_in(&mut model, one, terminal.size()?) {
                return Ok(());
            }
            next = match events.recv_timeout(Duration::from_millis(10)) {
                Ok(more) => Some(more),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
        }
    }
}

/// False to end.
fn take_in(model: &mut Model, event: UiEvent, size: Size) -> bool {
    match event {
        UiEvent::Heard(name, data) => model.hear(&name, &data),
        UiEvent::Lost(why) => model.lose(why),
        UiEvent::Key(key) => return press(key).is_none_or(|press| model.press(press)),
        UiEvent::Mouse(mouse) => return click(model, mouse, size).is_none_or(|press| model.press(press)),
        UiEvent::Resized => {}
    }
    true
}

/// Listens for as long as there is somebody to tell, and begins again when the daemon was lost.
fn hear(socket: &Path, tell: &Sender<UiEvent>) {
    loop {
        // Of what links and applications did before; without it the curves begin now.
        for (name, path) in [("history", "/v1/history"), ("app_history", "/v1/history/apps")] {
            let past = client::read::<serde_json::Value>(socket, path);
            if past.is_ok_and(|past| tell.send(UiEvent::Heard(name.to_owned(), past.to_string())).is_err()) {
                return;
            }
        }
        let heard = client::listen(socket, "/v1/events", |name, data| match tell.send(UiEvent::Heard(name.to_owned(), data.to_owned())) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        });
        let why = heard.map_or_else(|error| error.to_string(), |()| "the daemon has ended".to_owned());
        if tell.send(UiEvent::Lost(why)).is_err() {
            return;
        }
        std::thread::sleep(AGAIN);
    }
}

fn read_keys(tell: &Sender<UiEvent>) {
    while let Ok(event) = event::read() {
        let ui_event = match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => UiEvent::Key(key),
            Event::Mouse(mouse) => UiEvent::Mouse(mouse),
            Event::Resize(..) => UiEvent::Resized,
            _ => continue,
        };
        if tell.send(ui_event).is_err() {
            return;
        }
    }
}

fn click(model: &Model, mouse: MouseEvent, size: Size) -> Option<Press> {
    match mouse.kind {
        MouseEventKind::ScrollUp => Some(Press::Move(-3)),
        MouseEventKind::ScrollDown => Some(Press::Move(3)),
        MouseEventKind::Down(MouseButton::Left) => {
            view::view_at(model, Rect::new(0, 0, size.width, size.height), mouse.column, mouse.row).map(Press::View)
        }
        _ => None,
    }
}

fn press(key: KeyEvent) -> Option<Press> {
    Some(match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Press::Interrupt,
        KeyCode::Char(c) => Press::Char(c),
        KeyCode::Enter => Press::Enter,
        KeyCode::Esc => Press::Escape,
        KeyCode::Backspace => Press::Backspace,
        KeyCode::Tab | KeyCode::Right => Press::NextView,
        KeyCode::BackTab | KeyCode::Left => Press::PreviousView,
        KeyCode::Up => Press::Move(-1),
        KeyCode::Down => Press::Move(1),
        KeyCode::PageUp => Press::Move(-20),
        KeyCode::PageDown => Press::Move(20),
        KeyCode::Home => Press::First,
        KeyCode::End => Press::Last,
        _ => return None,
    })
}
