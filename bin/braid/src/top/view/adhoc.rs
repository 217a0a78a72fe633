//! The view of the ad-hoc device: its radios, and the neighbours that they reach.

use braid_api::{AdhocNeighbour, AdhocRadio, AdhocStatus};
use braid_model::printable;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};

use super::{fitting, right, short_age, visible};
use crate::table::{micros, percent};
use crate::top::model::Model;

/// A column of the neighbours' table, the most important first: title, width, content.
type NeighbourColumn = (&'static str, u16, fn(&AdhocNeighbour) -> Cell<'static>);

const NEIGHBOUR_COLUMNS: [NeighbourColumn; 8] = [
    ("NEIGHBOUR", 17, |one| Cell::from(printable(&one.mac))),
    ("RADIO", 15, |one| Cell::from(printable(&one.radio))),
    ("STATE", 5, |one| Cell::from(printable(&one.state)).style(state_style(&one.state))),
    ("SHARE", 7, |one| right(percent(Some(one.share)))),
    ("RTT", 8, |one| right(micros(one.rtt_us))),
    ("LOSS", 7, |one| right(percent(one.loss))),
    ("LAST HEARD", 10, |one| right(short_age(Some(one.last_heard_ms)).map(|age| format!("{age} ago")))),
    ("BRAID", 5, |one| Cell::from(if one.braid { "yes" } else { "no" })),
];

pub(super) fn draw(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let Some(device) = &model.adhoc else { return frame.render_widget(Paragraph::new("waiting for the ad-hoc device"), area) };
    let warnings = u16::from(!device.warnings.is_empty());
    // A small terminal still has room for the neighbours.
    let rows = u16::try_from(device.radios.len() + 1).unwrap_or(u16::MAX).min((area.height / 3).max(2));
    let parts = [Constraint::Length(1), Constraint::Length(warnings), Constraint::Length(rows), Constraint::Fill(1)];
    let [head, warning, radios, neighbours] = Layout::vertical(parts).areas::<4>(area);
    frame.render_widget(headline(device), head);
    if let Some(text) = device.warnings.first() {
        frame.render_widget(Paragraph::new(format!("warning: {}", printable(text))).style(Style::new().fg(Color::Yellow)), warning);
    }
    draw_radios(frame, device, radios);
    draw_neighbours(frame, model, neighbours);
}

fn headline(device: &AdhocStatus) -> Line<'static> {
    let spread = if device.by_frame { "each frame gets a radio" } else { "each flow gets a radio" };
    let mut text = format!("ad-hoc device {} {}: {spread}", device.name, device.mac);
    if !device.authenticated {
        text.push_str(", not authenticated");
    }
    if device.saving_power {
        text.push_str(", saving power");
    }
    Line::from(printable(&text))
}

fn draw_radios(frame: &mut Frame<'_>, device: &AdhocStatus, area: Rect) {
    let row = |radio: &AdhocRadio| {
        let (state, colour) = match (radio.up, &radio.reason) {
            (true, _) => ("up".to_owned(), Color::Green),
            (false, Some(reason)) => (format!("down: {reason}"), Color::Red),
            (false, None) => ("down".to_owned(), Color::Red),
        };
        let state = Cell::from(printable(&state)).style(Style::new().fg(colour));
        Row::new([Cell::from(printable(&radio.name)), right(Some(radio.priority)), right(Some(radio.neighbours)), state])
    };
    let head = Row::new([Cell::from("RADIO"), right(Some("PRIORITY")), right(Some("NEIGHBOURS")), Cell::from("STATE")]);
    let widths = [Constraint::Length(15), Constraint::Length(8), Constraint::Length(10), Constraint::Fill(1)];
    let table = Table::new(device.radios.iter().map(row), widths).header(head.style(Style::new().add_modifier(Modifier::BOLD)));
    frame.render_widget(table.column_spacing(1), area);
}

fn draw_neighbours(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let neighbours = model.shown_neighbours();
    if neighbours.is_empty() {
        let says = match model.filter.is_empty() {
            true => "no neighbours: a host appears here once it announces itself, or once something is sent to it",
            false => "no neighbour matches the filter",
        };
        return frame.render_widget(Paragraph::new(says), area);
    }
    let columns = &NEIGHBOUR_COLUMNS[..fitting(NEIGHBOUR_COLUMNS.iter().map(|(_, width, _)| *width), area.width).0];
    let (visible, selected) = visible(model, area, neighbours.len());
    let rows = neighbours[visible].iter().map(|one| Row::new(columns.iter().map(|(_, _, cell)| cell(one))));
    let title = |(title, _, _): &NeighbourColumn| match *title {
        "NEIGHBOUR" | "RADIO" | "STATE" | "BRAID" => Cell::from(*title),
        _ => right(Some(title)),
    };
    let head = Row::new(columns.iter().map(title)).style(Style::new().add_modifier(Modifier::BOLD));
    let table = Table::new(rows, columns.iter().map(|(_, width, _)| Constraint::Length(*width)))
        .header(head)
        .column_spacing(1)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut TableState::default().with_selected(Some(selected)));
}

fn state_style(state: &str) -> Style {
    match state {
        "up" => Style::new().fg(Color::Green),
        "dead" => Style::new().fg(Color::Red),
        _ => Style::new().add_modifier(Modifier::DIM),
    }
}
