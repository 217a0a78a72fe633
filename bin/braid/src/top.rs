//! `braid top`: shows links, flows, applications, peers and events live. It reads the API's `/v1/events`, and first the histories, so that curves do
//! not start empty. The events do not have the gateway's clients and the ad-hoc device's neighbours, so it asks for them while they are shown.

mod model;
#[cfg(test)]
mod tests;
mod view;

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ratatui::crossterm::event::{
    self, DisableMouseCapture, EnableMouseCapture, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers, MouseButton, MouseEvent,
    MouseEventKind,
};
use ratatui::crossterm::{execute, terminal};
use ratatui::layout::{Rect, Size};

use crate::client;
use model::{Action, Model, Polled};

/// Delay before the connection to the daemon is retried.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Input of the event loop.
enum UiEvent {
    Api(String, String),
    Lost(String),
    Key(KeyEvent),
    Mouse(MouseEvent),
    Resized,
}

/// Runs until the user quits.
pub(crate) fn run(socket: &Path) -> anyhow::Result<()> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        anyhow::bail!("braid top needs a terminal: use commands such as braid status and braid flows in scripts");
    }
    if let Ok((columns, rows)) = terminal::size()
        && (columns == 0 || rows == 0)
    {
        anyhow::bail!("the terminal reports no size: set one, as in `stty cols 100 rows 30`");
    }
    // Without a daemon, an error message is better than an empty screen.
    client::listen(socket, "/v1/events", |_, _| ControlFlow::Break(()))?;
    let (send, events) = mpsc::channel();
    let (events_to, path) = (send.clone(), socket.to_owned());
    let polled = Arc::new(Mutex::new(None));
    let wanted = polled.clone();
    std::thread::spawn(move || read_events(&path, &events_to, &wanted));
    std::thread::spawn(move || read_keys(&send));
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, &events, &polled);
    // Harmless if the mouse was not captured.
    let released = execute!(io::stdout(), DisableMouseCapture);
    ratatui::try_restore()?;
    released?;
    shown
}

fn show(terminal: &mut ratatui::DefaultTerminal, events: &mpsc::Receiver<UiEvent>, polled: &Mutex<Option<Polled>>) -> anyhow::Result<()> {
    let mut model = Model::default();
    let mut taken = false;
    loop {
        if std::mem::replace(&mut taken, model.mouse) != model.mouse {
            if model.mouse { execute!(io::stdout(), EnableMouseCapture) } else { execute!(io::stdout(), DisableMouseCapture) }?;
        }
        *polled.lock().unwrap_or_else(PoisonError::into_inner) = model.view.polled();
        terminal.draw(|frame| view::draw(frame, &model))?;
        let mut next = events.recv().ok();
        // Handle all pending input before drawing again.
        while let Some(one) = next {
            if !handle(&mut model, one, terminal.size()?) {
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

/// Returns false to quit.
fn handle(model: &mut Model, event: UiEvent, size: Size) -> bool {
    match event {
        UiEvent::Api(name, data) => model.on_event(&name, &data),
        UiEvent::Lost(why) => model.on_lost(why),
        UiEvent::Key(key) => return action_of(key).is_none_or(|action| model.handle(action)),
        UiEvent::Mouse(mouse) => return click(model, mouse, size).is_none_or(|action| model.handle(action)),
        UiEvent::Resized => {}
    }
    true
}

/// Reads the API's events until the receiver is gone, and reconnects when the daemon is lost.
fn read_events(socket: &Path, sender: &Sender<UiEvent>, polled: &Mutex<Option<Polled>>) {
    loop {
        // Past samples of links and applications; without them the curves start empty.
        for (name, path) in [("history", "/v1/history"), ("app_history", "/v1/history/apps")] {
            let past = client::read::<serde_json::Value>(socket, path);
            if past.is_ok_and(|past| sender.send(UiEvent::Api(name.to_owned(), past.to_string())).is_err()) {
                return;
            }
        }
        let api = |name: &str, data: String| match sender.send(UiEvent::Api(name.to_owned(), data)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        };
        let result = client::listen(socket, "/v1/events", |name, data| {
            let wanted = *polled.lock().unwrap_or_else(PoisonError::into_inner);
            // The status comes once a second.
            if name == "status"
                && let Some((event, path)) = wanted
                && let Ok(answer) = client::read::<serde_json::Value>(socket, path)
            {
                api(event, answer.to_string())?;
            }
            api(name, data.to_owned())
        });
        let why = result.map_or_else(|error| error.to_string(), |()| "the daemon has ended".to_owned());
        if sender.send(UiEvent::Lost(why)).is_err() {
            return;
        }
        std::thread::sleep(RETRY_DELAY);
    }
}

fn read_keys(sender: &Sender<UiEvent>) {
    while let Ok(event) = event::read() {
        let ui_event = match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => UiEvent::Key(key),
            Event::Mouse(mouse) => UiEvent::Mouse(mouse),
            Event::Resize(..) => UiEvent::Resized,
            _ => continue,
        };
        if sender.send(ui_event).is_err() {
            return;
        }
    }
}

fn click(model: &Model, mouse: MouseEvent, size: Size) -> Option<Action> {
    match mouse.kind {
        MouseEventKind::ScrollUp => Some(Action::Move(-3)),
        MouseEventKind::ScrollDown => Some(Action::Move(3)),
        MouseEventKind::Down(MouseButton::Left) => {
            view::view_at(model, Rect::new(0, 0, size.width, size.height), mouse.column, mouse.row).map(Action::View)
        }
        _ => None,
    }
}

fn action_of(key: KeyEvent) -> Option<Action> {
    Some(match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Action::Interrupt,
        KeyCode::Char(c) => Action::Char(c),
        KeyCode::Enter => Action::Enter,
        KeyCode::Esc => Action::Escape,
        KeyCode::Backspace => Action::Backspace,
        KeyCode::Tab | KeyCode::Right => Action::NextView,
        KeyCode::BackTab | KeyCode::Left => Action::PreviousView,
        KeyCode::Up => Action::Move(-1),
        KeyCode::Down => Action::Move(1),
        KeyCode::PageUp => Action::Move(-20),
        KeyCode::PageDown => Action::Move(20),
        KeyCode::Home => Action::First,
        KeyCode::End => Action::Last,
        _ => return None,
    })
}
