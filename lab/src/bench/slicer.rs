//! The slicer: what it adds to a packet's way to a controller and back, and how many messages it carries.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_openflow::action::Action;
use braid_openflow::flow::{FlowMod, PacketIn, PacketOut, PacketReason};
use braid_openflow::ids::{Cookie, PortNo, TableId};
use braid_openflow::matching::Match;
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::{Config, Connection, Event, Message, Side, Version};
use braid_switch::{SwitchModel, frames};
use serde_json::json;

use super::overhead::thread_time;
use super::report::Report;
use super::stats::{median, quantile};
use super::{Settings, progress};
use crate::lab::Lab;
use crate::network::CONTROLLER;
use crate::slicer::{Slicer, behind};
use crate::spec::LinkSpec;
use crate::sys;

/// Aims: milliseconds added in the median, and messages in a second.
const AIM: f64 = 0.5;
const MESSAGES: f64 = 50_000.0;
/// Packets whose ways are timed, one after the other.
const TIMED: usize = 5000;
/// Packets that are under way at once when messages are counted.
const WINDOW: usize = 256;
/// Time for which they are.
const SPAN: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "slicer",
        "The slicer",
        "`braid net slicer` between one emulated switch of OpenFlow 1.3 and one controller, on TCP connections over loopback in a namespace; beside it, in the \
         same run, the same switch and controller without it. Both are threads of the benchmark. Latency: the switch sends a packet to the controller, which answers by a packet-out; the time until the switch has it, one packet at \
         a time. Messages: 256 packets are under way at once for 10 s; each is answered by a packet-out and, for every fourth one, a flow-mod that replaces an entry. Counted are the messages of both directions that pass the slicer. CPU: the slicer's share of one processor meanwhile. There are 1 and 64 slices; the others have a VLAN each, and no controller.",
    );
    let (timed, span) = if settings.quick { (500, Duration::from_secs(1)) } else { (TIMED, SPAN) };
    for slices in [1, 64] {
        let outcome = measure(&settings.braid, slices, timed, span).with_context(|| format!("{slices} slices"))?;
        let Outcome { bare, sliced, messages, cpu, alone } = &outcome;
        let added = median(sliced) - median(bare);
        let row = vec![
            slices.to_string(),
            format!("{:.3} ms", median(bare)),
            format!("{:.3} ms", median(sliced)),
            format!("{added:.3} ms"),
            format!("{:.3} ms", quantile(sliced, 0.95)),
            format!("{alone:.0}/s"),
            format!("{messages:.0}/s"),
            format!("{:.0} %", 100.0 * cpu),
        ];
        progress(&row.join(", "));
        report.row(
            "A packet's way to the controller and back, and messages:",
            "slices | without slicer, median | with slicer, median | added | with slicer, 95 % | messages without slicer | messages with slicer | CPU of slicer",
            row,
        );
        report.aim(format!("{slices} slices: at most {AIM} ms added in the median"), format!("{added:.3} ms"), added <= AIM);
        report.aim(format!("{slices} slices: {MESSAGES:.0} messages in a second"), format!("{messages:.0}"), *messages >= MESSAGES);
        report.measured(
            json!({"slices": slices, "bare_ms": bare, "sliced_ms": sliced, "messages": messages, "bare_messages": alone, "cpu": cpu}),
        );
        settings.keep(&report)?;
    }
    Ok(report)
}

struct Outcome {
    /// Milliseconds.
    bare: Vec<f64>,
    sliced: Vec<f64>,
    /// In a second: with the slicer, and without.
    messages: f64,
    alone: f64,
    cpu: f64,
}

fn measure(braid: &Path, slices: usize, timed: usize, span: Duration) -> Result<Outcome> {
    let lab = Lab::builder().link(LinkSpec::direct("eth0")).start()?;
    let controller = serve(&lab, behind(1))?;
    let mut bare = Switch::connect(&lab, controller)?;
    let direct = bare.timed(timed)?;
    let (alone, _) = bare.flood(span)?;
    drop(bare);
    let mut configuration = format!(
        "[[slice]]\nname = \"measured\"\ncontrollers = [\"{controller}\"]\nmax_messages = 1000000\nmax_packets = 1000000\n[[slice.space]]\nports = [1, 2]\nmatch = \"vlan=none\"\n"
    );
    for number in 1..slices {
        configuration += &format!("[[slice]]\nname = \"s{number}\"\n[[slice.space]]\nmatch = \"vlan={number}\"\n");
    }
    let slicer = Slicer::start(&lab, braid, "slicer", CONTROLLER, &configuration)?;
    crate::network::eventually("the slicer answers", || Ok(slicer.status()?.is_object()))?;
    let mut sliced = Switch::connect(&lab, CONTROLLER)?;
    let times = sliced.timed(timed)?;
    let before = thread_time(slicer.pid())?;
    let begin = Instant::now();
    let (messages, _) = sliced.flood(span)?;
    let cpu = (thread_time(slicer.pid())? - before) / begin.elapsed().as_secs_f64();
    // Each message comes in and goes out.
    Ok(Outcome { bare: direct, sliced: times, messages, alone, cpu })
}

/// A controller that answers each packet, in a thread.
fn serve(lab: &Lab, address: SocketAddr) -> Result<SocketAddr> {
    let listener = lab.client().run(|| TcpListener::bind(address))?.context("cannot listen for switches")?;
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            thread::spawn(move || answer(stream));
        }
    });
    Ok(address)
}

fn answer(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let config = Config { versions: vec![Version::V1_3], max_outstanding: 1 << 20, ..Config::new(Side::Controller) };
    let mut connection = Connection::new(config, sys::now());
    let (mut piece, mut out, mut count) = ([0; 64 << 10], Vec::new(), 0u64);
    loop {
        connection.poll_output(&mut out);
        stream.write_all(&out)?;
        out.clear();
        let size = stream.read(&mut piece)?;
        ensure!(size > 0, "ended");
        connection.receive(sys::now(), &piece[..size]);
        while let Some(event) = connection.poll_event() {
            let packet = match event {
                Event::Ready { .. } => {
                    let miss = FlowMod { priority: 0, instructions: to_controller(), ..FlowMod::default() };
                    connection.send(Message::FlowMod(miss))?;
                    continue;
                }
                Event::Message { message, .. } => match *message {
                    Message::PacketIn(packet) => packet,
                    _ => continue,
                },
                _ => continue,
            };
            count += 1;
            if count.is_multiple_of(4) {
                let host = frames::host((count / 4 % 200) as u8);
                let flow =
                    FlowMod { matching: Match::new([Oxm::mac(Field::EthDst, host)]), instructions: to_controller(), ..FlowMod::default() };
                connection.send(Message::FlowMod(flow))?;
            }
            let actions = vec![Action::output(PortNo(2))];
            connection.send(Message::PacketOut(PacketOut { buffer: None, in_port: PortNo(1), actions, data: packet.data }))?;
        }
    }
}

fn to_controller() -> Vec<braid_openflow::action::Instruction> {
    vec![braid_openflow::action::Instruction::ApplyActions(vec![Action::output(PortNo::CONTROLLER)])]
}

/// An emulated switch whose controller has a miss entry.
struct Switch {
    model: SwitchModel,
    stream: TcpStream,
    piece: Vec<u8>,
    cookie: Cookie,
}

impl Switch {
    /// Connects, and waits until the controller's entry is there.
    fn connect(lab: &Lab, to: SocketAddr) -> Result<Self> {
        let stream = lab.client().run(|| TcpStream::connect(to))?.context("cannot connect the switch")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut model = SwitchModel::new(1, Version::V1_3, 4);
        [1, 2].into_iter().for_each(|port| model.set_port(port, true));
        model.connect(sys::now());
        let mut switch = Self { model, stream, piece: vec![0; 64 << 10], cookie: Cookie(0) };
        let is_miss = |flow: &braid_switch::Flow| {
            flow.instructions == to_controller() && !flow.fields.contains(&Oxm::exact(Field::EthType, 0x88ccu16))
        };
        while !switch.model.flows.iter().any(is_miss) {
            switch.step()?;
        }
        let miss = switch.model.flows.iter().find(|flow| is_miss(flow)).context("the entry is there")?;
        switch.cookie = miss.cookie;
        Ok(switch)
    }

    /// Writes what there is, and reads once. Returns the packets that left.
    fn step(&mut self) -> Result<usize> {
        self.write()?;
        let size = self.stream.read(&mut self.piece).context("no answer")?;
        ensure!(size > 0, "the connection was closed");
        let out = self.model.receive(sys::now(), &self.piece[..size]);
        Ok(out.len())
    }

    fn write(&mut self) -> Result<()> {
        let mut bytes = Vec::new();
        if self.model.connection.as_mut().context("connected")?.poll_output(&mut bytes) {
            self.stream.write_all(&bytes)?;
        }
        Ok(())
    }

    fn packet(&mut self, number: u64) -> Result<()> {
        let data = frames::datagram(frames::host(1), frames::host(2), 53, number);
        let packet = PacketIn {
            buffer: None,
            total_len: data.len() as u16,
            reason: PacketReason::NoMatch,
            table: TableId(0),
            cookie: self.cookie,
            matching: Match::new([Oxm::in_port(PortNo(1))]),
            data,
        };
        self.model.connection.as_mut().context("connected")?.notify(Message::PacketIn(packet))?;
        Ok(())
    }

    /// Milliseconds until each packet is back.
    fn timed(&mut self, count: usize) -> Result<Vec<f64>> {
        let mut times = Vec::with_capacity(count);
        for number in 0..count {
            let begin = Instant::now();
            self.packet(number as u64)?;
            while self.step()? == 0 {}
            times.push(begin.elapsed().as_secs_f64() * 1e3);
        }
        Ok(times)
    }

    /// Keeps packets under way. Returns the messages in a second: packet-ins, packet-outs, flow-mods.
    fn flood(&mut self, span: Duration) -> Result<(f64, usize)> {
        let (begin, mut sent, mut back) = (Instant::now(), 0usize, 0usize);
        let before = self.model.flow_mods;
        while begin.elapsed() < span {
            while sent - back < WINDOW {
                self.packet(sent as u64)?;
                sent += 1;
            }
            back += self.step()?;
        }
        let seconds = begin.elapsed().as_secs_f64();
        while back < sent {
            back += self.step()?;
        }
        let messages = 2 * back + (self.model.flow_mods - before);
        Ok((messages as f64 / seconds, back))
    }
}
