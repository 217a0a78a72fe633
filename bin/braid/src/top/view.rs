//! Draws `braid top`: a pure function of the model and the terminal's size.

mod adhoc;

use std::ops::Range;

use braid_api::{ClientStatus, LinkState, LinkStatus};
use braid_model::{ByteCount, Rate, printable};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};

use super::model::{LiveFlow, Model, Program, View};
use crate::table::{UNKNOWN, age, micros, percent};

/// Characters of a curve, from low to high.
const STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Width of a terminal from which all columns are shown.
const WIDE: u16 = 100;

/// Layout of the screen.
struct Areas {
    head: Rect,
    warning: Rect,
    links: Rect,
    own: Rect,
    tabs: Rect,
    below: Rect,
    foot: Rect,
}

fn areas(model: &Model, area: Rect) -> Areas {
    let links = model.status.as_ref().map_or(0, |status| status.links.len());
    let warnings = u16::from(model.lost.is_some() || model.status.as_ref().is_some_and(|status| !status.warnings.is_empty()));
    // A small terminal still has room for the view below the links.
    let most = (area.height / 2).max(2);
    let link_rows = u16::try_from(links + 1).unwrap_or(u16::MAX).min(most);
    let own = u16::from(model.status.as_ref().is_some_and(|status| status.virtual_interface.is_some()));
    let parts = [1, warnings, link_rows, own, 1].map(Constraint::Length);
    let [head, warning, links, own_line, tabs] = Layout::vertical(parts).areas::<5>(area);
    let used = 2 + warnings + link_rows + own;
    let below = Rect { y: used, height: area.height.saturating_sub(used + 1), ..area };
    let foot = Rect { y: area.height.saturating_sub(1), height: 1.min(area.height), ..area };
    Areas { head, warning, links, own: own_line, tabs, below, foot }
}

/// The view whose tab is at this position, for the mouse.
pub(super) fn view_at(model: &Model, area: Rect, column: u16, row: u16) -> Option<View> {
    let mut begin = 0;
    let on_tabs = row == areas(model, area).tabs.y;
    let span = |(view, name): (View, &str)| {
        let end = begin + name.chars().count() + 2;
        let span = (view, begin..end);
        begin = end + 1;
        span
    };
    model.views().into_iter().map(span).find(|(_, span)| on_tabs && span.contains(&usize::from(column))).map(|(view, _)| view)
}

/// Draws the screen.
pub(super) fn draw(frame: &mut Frame<'_>, model: &Model) {
    let Areas { head, warning, links, own, tabs, below, foot } = areas(model, frame.area());
    frame.render_widget(headline(model), head);
    draw_warning(frame, model, warning);
    draw_links(frame, model, links);
    draw_virtual_interface(frame, model, own);
    frame.render_widget(tab_line(model), tabs);
    match model.view {
        View::Flows => draw_flows(frame, model, below),
        View::Apps => draw_apps(frame, model, below),
        View::Clients => draw_clients(frame, model, below),
        View::Radios => adhoc::draw(frame, model, below),
        View::Peers => draw_peers(frame, model, below),
        View::Events => draw_events(frame, model, below),
    }
    frame.render_widget(keys(model), foot);
}

fn headline(model: &Model) -> Line<'static> {
    let Some(status) = &model.status else { return Line::from("braid: waiting for the daemon") };
    let plural = if status.flows == 1 { "" } else { "s" };
    let mut text = format!("  {}, {} flow{plural}", status.scheduler, status.flows);
    if let Some(up) = age(status.uptime_ms) {
        text.push_str(&format!(", up {up}"));
    }
    if let Some(battery) = &status.battery {
        let state = if battery.plugged { "plugged in" } else { "on battery" };
        text.push_str(&format!(", battery {:.0} % {state}", battery.level * 100.0));
    }
    if status.saving_power {
        text.push_str(", saving power");
    }
    if let Some(utility) = status.utility {
        text.push_str(&format!(", utility {utility:.2}"));
    }
    Line::from(vec![format!("braid {}", printable(&status.version)).bold(), printable(&text).into()])
}

fn draw_warning(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let first = model.status.as_ref().and_then(|status| status.warnings.first());
    let text = match (&model.lost, first) {
        (Some(lost), _) => format!("not up to date: {}", printable(lost)),
        (None, Some(warning)) => format!("warning: {}", printable(warning)),
        (None, None) => return,
    };
    frame.render_widget(Paragraph::new(text).style(Style::new().fg(Color::Yellow)), area);
}

/// A column of the link table, the most important first: title, width, content.
type LinkColumn = (&'static str, u16, fn(&Model, &LinkStatus) -> Cell<'static>);

const LINK_COLUMNS: [LinkColumn; 9] = [
    ("LINK", 10, |_, link| Cell::from(printable(&link.name))),
    ("STATE", 8, |_, link| Cell::from(link.state.to_string()).style(state_style(link.state))),
    ("DOWN", 12, |model, link| rate(model.sample(&link.name).and_then(|sample| sample.rx_bps).or(link.rate_down_bps))),
    ("UP", 12, |model, link| rate(model.sample(&link.name).and_then(|sample| sample.tx_bps).or(link.rate_up_bps))),
    ("RTT", 8, |_, link| right(micros(link.rtt_us))),
    ("FLOWS", 5, |_, link| right(Some(link.flows))),
    ("LOSS", 6, |_, link| right(percent(link.loss))),
    ("CAPACITY", 12, |_, link| rate(link.capacity_down_bps)),
    ("POWER", 8, |model, link| right(model.sample(&link.name).and_then(|sample| sample.power_w).map(|watts| format!("{watts:.2} W")))),
];

fn draw_links(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let Some(status) = &model.status else { return };
    let (fitting, left) = fitting(LINK_COLUMNS.iter().map(|(_, width, _)| *width), area.width);
    let columns = &LINK_COLUMNS[..fitting];
    let curve = if columns.len() == LINK_COLUMNS.len() { usize::from(left).min(60) } else { 0 };
    let most = status.links.iter().flat_map(|link| model.curve(&link.name, curve)).max().unwrap_or(0);
    let row = |link: &LinkStatus| {
        let cells = columns.iter().map(|(_, _, cell)| cell(model, link));
        Row::new(cells.chain([Cell::from(sparkline(&model.curve(&link.name, curve), most))]))
    };
    let title = |(title, _, _): &LinkColumn| if matches!(*title, "LINK" | "STATE") { Cell::from(*title) } else { right(Some(title)) };
    let last = if curve >= 12 { "LAST MINUTES" } else { "" };
    let titles = Row::new(columns.iter().map(title).chain([Cell::from(last)])).style(Style::new().add_modifier(Modifier::BOLD));
    let widths = columns.iter().map(|(_, width, _)| Constraint::Length(*width)).chain([Constraint::Min(0)]);
    frame.render_widget(Table::new(status.links.iter().map(row), widths).header(titles).column_spacing(1), area);
}

/// Number of columns that fit, and the width that is left. A column is shown in full or not at all: a truncated number would be wrong.
fn fitting(widths: impl IntoIterator<Item = u16>, width: u16) -> (usize, u16) {
    let mut left = width;
    let fits = |width: &u16| left.checked_sub(width + 1).map(|rest| left = rest).is_some();
    (widths.into_iter().take_while(fits).count(), left)
}

fn draw_virtual_interface(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let Some(own) = model.status.as_ref().and_then(|status| status.virtual_interface.as_ref()) else { return };
    let plural = if own.flows == 1 { "" } else { "s" };
    let rate = |bps: Option<u64>| bps.map_or_else(|| UNKNOWN.to_owned(), |bps| Rate::from_bps(bps).to_string());
    let says = match &own.reason {
        Some(reason) => format!("down: {reason}"),
        None => {
            let (down, up) = (rate(own.rate_down_bps), rate(own.rate_up_bps));
            format!("up, {} flow{plural}, receives {down}, sends {up}, {}", own.flows, own.addresses.join(", "))
        }
    };
    let text = printable(&format!("virtual interface {}: {says}", own.name));
    let style = if own.up { Style::new() } else { Style::new().fg(Color::Yellow) };
    frame.render_widget(Paragraph::new(text).style(style), area);
}

fn rate(bps: Option<u64>) -> Cell<'static> {
    right(bps.map(|bps| Rate::from_bps(bps).to_string()))
}

fn tab_line(model: &Model) -> Line<'static> {
    let mut spans = Vec::new();
    for (view, name) in model.views() {
        let style = if view == model.view { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        spans.push(Span::styled(format!(" {name} "), style));
        spans.push(" ".into());
    }
    if model.typing || !model.filter.is_empty() {
        let cursor = if model.typing { "_" } else { "" };
        spans.push(Span::styled(format!("filter: {}{cursor}", printable(&model.filter)), Style::new().fg(Color::Cyan)));
    }
    Line::from(spans)
}

fn draw_flows(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let flows = model.shown_flows();
    let wide = area.width >= WIDE;
    let (visible, selected) = visible(model, area, flows.len());
    let rows = flows[visible].iter().map(|live| flow_row(live, wide));
    let mut widths = vec![Constraint::Fill(2), Constraint::Fill(3), Constraint::Length(10), Constraint::Length(12), Constraint::Length(12)];
    let mut head = vec![Cell::from("APPLICATION"), Cell::from("REMOTE"), Cell::from("LINK"), right(Some("DOWN")), right(Some("UP"))];
    if wide {
        widths.extend([
            Constraint::Length(10),
            Constraint::Length(10),
            Constraint::Length(8),
            Constraint::Length(9),
            Constraint::Length(7),
        ]);
        head.extend([right(Some("RECEIVED")), right(Some("SENT")), right(Some("RTT")), Cell::from("CARRY"), right(Some("AGE"))]);
    }
    let table = Table::new(rows, widths)
        .header(Row::new(head).style(Style::new().add_modifier(Modifier::BOLD)))
        .column_spacing(1)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::default().with_selected((!flows.is_empty()).then_some(selected));
    frame.render_stateful_widget(table, area, &mut state);
}

fn flow_row(live: &LiveFlow, wide: bool) -> Row<'static> {
    let flow = &live.flow;
    let rate = |bytes: Option<u64>| rate(bytes.map(|bytes| bytes.saturating_mul(8)));
    let size = |bytes: Option<u64>| right(bytes.map(|bytes| ByteCount::new(bytes).to_string()));
    let program = flow.application.rsplit('/').next().unwrap_or(&flow.application);
    let through = flow.virtual_interface.as_ref().map(|own| format!(" ({own})")).unwrap_or_default();
    let remote = format!("{} {}{through}", flow.protocol, flow.remote);
    let mut cells = vec![
        Cell::from(printable(program)),
        Cell::from(printable(&remote)),
        Cell::from(printable(&flow.link)),
        rate(live.down),
        rate(live.up),
    ];
    if wide {
        let carry = Cell::from(printable(&flow.carry));
        cells.extend([size(flow.rx_bytes), size(flow.tx_bytes), right(micros(flow.rtt_us)), carry, right(short_age(flow.age_ms))]);
    }
    Row::new(cells)
}

/// Width of a program's curve, on wide terminals.
const APP_CURVE: usize = 30;

fn draw_apps(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let wide = area.width >= WIDE;
    let row = |program: &Program| {
        let [down, up] = model.moving(&program.application);
        let mut cells = vec![Cell::from(printable(&program.application)), rate(down), rate(up)];
        if wide {
            // Programs' rates differ by factors of 100 to 1000, so each curve has its own scale.
            let curve = model.app_curve(&program.application, APP_CURVE);
            cells.push(Cell::from(Line::from(sparkline(&curve, curve.iter().copied().max().unwrap_or(0))).right_aligned()));
        }
        let ports = program.port.map(|port| if program.others > 0 { format!("{port}+{}", program.others) } else { port.to_string() });
        cells.extend([
            Cell::from(program.class.clone()),
            right(ports),
            right(program.demand_bytes.map(|bytes| ByteCount::new(bytes).to_string())),
            right(percent(program.confidence)),
            right(Some(program.flows)),
        ]);
        Row::new(cells)
    };
    let mut head = vec![Cell::from("APPLICATION"), right(Some("DOWN")), right(Some("UP"))];
    let mut widths = vec![Constraint::Fill(1), Constraint::Length(12), Constraint::Length(12)];
    if wide {
        head.push(Cell::from("LAST SECONDS"));
        widths.push(Constraint::Length(APP_CURVE as u16));
    }
    head.extend([Cell::from("CLASS"), right(Some("PORT")), right(Some("DEMAND")), right(Some("SURE")), right(Some("FLOWS"))]);
    widths.extend([12, 7, 10, 6, 5].map(Constraint::Length));
    scrolled(frame, model, area, model.shown_apps().iter().map(row).collect(), &widths, Row::new(head));
}

fn draw_clients(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let wide = area.width >= WIDE;
    let clients = model.shown_clients();
    let row = |client: &&ClientStatus| {
        let or_unknown = |text: &Option<String>| Cell::from(text.as_ref().map_or_else(|| UNKNOWN.to_owned(), |text| printable(text)));
        let mut cells = vec![
            or_unknown(&client.name),
            Cell::from(printable(&client.address)),
            rate(Some(client.rate_down_bps)),
            rate(Some(client.rate_up_bps)),
            right(Some(client.flows)),
        ];
        if wide {
            cells.extend([
                or_unknown(&client.mac),
                Cell::from(printable(&client.device)),
                right(short_age(Some(client.idle_ms))),
                right(client.rule),
            ]);
        }
        Row::new(cells)
    };
    if clients.is_empty() {
        let known = model.clients.as_ref().map(Vec::len);
        let says = match known {
            None => "waiting for the list of clients",
            Some(0) => "no clients: [gateway] in the configuration names the devices behind which they are",
            Some(_) => "no client matches the filter",
        };
        return frame.render_widget(Paragraph::new(says), area);
    }
    let mut head = vec![Cell::from("CLIENT"), Cell::from("ADDRESS"), right(Some("DOWN")), right(Some("UP")), right(Some("FLOWS"))];
    let mut widths = vec![Constraint::Fill(2), Constraint::Fill(2), Constraint::Length(12), Constraint::Length(12), Constraint::Length(6)];
    if wide {
        head.extend([Cell::from("HARDWARE"), Cell::from("DEVICE"), right(Some("NEW FLOW")), right(Some("RULE"))]);
        widths.extend([17, 10, 9, 4].map(Constraint::Length));
    }
    let (visible, selected) = visible(model, area, clients.len());
    let rows = clients[visible].iter().map(row);
    let table = Table::new(rows, widths)
        .header(Row::new(head).style(Style::new().add_modifier(Modifier::BOLD)))
        .column_spacing(1)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut TableState::default().with_selected(Some(selected)));
}

/// The rows that a table with a head shows in `area`, and the selected one among them. Only these are formatted: there may be thousands.
fn visible(model: &Model, area: Rect, rows: usize) -> (Range<usize>, usize) {
    let height = usize::from(area.height.saturating_sub(1)).max(1);
    let selected = model.selected.min(rows.saturating_sub(1));
    let begin = selected.saturating_sub(height - 1);
    (begin..rows.min(begin + height), selected - begin)
}

fn draw_peers(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let mut rows = Vec::new();
    for peer in &model.peers {
        let reason = peer.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        let name = Cell::from(printable(&format!("{} {}", peer.kind, peer.name)));
        rows.push(Row::new([name, Cell::from(printable(&format!("{}{reason}", peer.state)))]));
        for path in &peer.paths {
            let facts = [
                Some(path.reason.as_ref().map_or(path.state.to_string(), |reason| format!("{}: {reason}", path.state))),
                path.rate_bps.map(|bps| format!("rate up {}", Rate::from_bps(bps))),
                micros(path.rtt_us),
                percent(path.loss).map(|loss| format!("loss {loss}")),
            ];
            let facts: Vec<String> = facts.into_iter().flatten().collect();
            rows.push(Row::new([Cell::from(printable(&format!("  {}", path.link))), Cell::from(printable(&facts.join(", ")))]));
        }
    }
    if rows.is_empty() {
        rows.push(Row::new([Cell::from("no peers: run braid join"), Cell::from("")]));
    }
    scrolled(frame, model, area, rows, &[Constraint::Length(24), Constraint::Fill(1)], Row::new(["PEER", "STATE"]));
}

fn draw_events(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let now = model.samples.back().map(|sample| sample.at_ms);
    let row = |note: &braid_api::Note| {
        let ago = short_age(now.and_then(|now| now.checked_sub(note.at_ms))).map(|age| format!("{age} ago"));
        let style = if note.level == "warning" { Style::new().fg(Color::Yellow) } else { Style::new() };
        Row::new([right(ago), Cell::from(printable(&note.text))]).style(style)
    };
    // The newest note comes first.
    let rows = model.notes.iter().rev().map(row).collect();
    scrolled(frame, model, area, rows, &[Constraint::Length(12), Constraint::Fill(1)], Row::new([right(Some("WHEN")), Cell::from("WHAT")]));
}

fn scrolled(frame: &mut Frame<'_>, model: &Model, area: Rect, rows: Vec<Row<'static>>, widths: &[Constraint], head: Row<'static>) {
    let selected = model.selected.min(rows.len().saturating_sub(1));
    let table = Table::new(rows, widths.to_vec())
        .header(head.style(Style::new().add_modifier(Modifier::BOLD)))
        .column_spacing(1)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut TableState::default().with_selected(Some(selected)));
}

fn keys(model: &Model) -> Line<'static> {
    let order = if model.reversed { ", reversed" } else { "" };
    let text = match model.typing {
        true => "type to filter, Enter to keep, Esc to clear".to_owned(),
        false => format!(
            "q quit  Tab view  ↑↓ move  / filter  s sort ({}{order})  r reverse  m mouse{}",
            model.sort.name(),
            if model.mouse { " off" } else { "" }
        ),
    };
    Line::from(text).style(Style::new().add_modifier(Modifier::DIM))
}

fn state_style(state: LinkState) -> Style {
    match state {
        LinkState::Up => Style::new().fg(Color::Green),
        LinkState::Dead | LinkState::Down => Style::new().fg(Color::Red),
        LinkState::Excluded => Style::new().add_modifier(Modifier::DIM),
        _ => Style::new().fg(Color::Yellow),
    }
}

/// A curve, scaled to the maximum `most`; zero is a gap.
fn sparkline(values: &[u64], most: u64) -> String {
    let step = |value: u64| STEPS[(value as f64 / most.max(1) as f64 * (STEPS.len() - 1) as f64) as usize % STEPS.len()];
    values.iter().map(|value| if *value == 0 { ' ' } else { step(*value) }).collect()
}

/// An age in its largest unit.
fn short_age(ms: Option<u64>) -> Option<String> {
    let seconds = ms? / 1000;
    Some(match seconds {
        0..=99 => format!("{seconds} s"),
        100..=5999 => format!("{} min", seconds / 60),
        6000..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    })
}

fn right(text: Option<impl std::fmt::Display>) -> Cell<'static> {
    let text = text.map_or_else(|| UNKNOWN.to_owned(), |text| text.to_string());
    Cell::from(Line::from(text).right_aligned())
}
