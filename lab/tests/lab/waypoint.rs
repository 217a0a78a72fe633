//! Running direct flows pass a third host on the way, with which each end talks alone (figures 2.4 to 2.6 of Yap's thesis).

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::support::gateway::{FAR, traces};
use crate::support::moves::*;
use crate::support::*;
use braid_lab::{Filter, Lab, LinkSpec, nft};
use braid_model::Protocol;

/// The waypoint's addresses.
const WAYPOINT: [&str; 2] = FAR;

/// How long a flow's lease lasts at least: it is for 30 s, and is renewed every 10 s.
const LEASE: Duration = Duration::from_secs(20);

/// A flow from the client to the server, and a waypoint at a third host, which the client has joined as "way".
struct Flow<'a> {
    lab: &'a Lab,
    near: Up<'a>,
    _server: (Relay, Far),
    way: (Relay, Far),
    stream: TcpStream,
    id: String,
    /// The link on which it began.
    from: usize,
    round: u8,
}

fn lab_with_waypoint() -> Lab {
    NAMES[..2].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::new(name))).far(1500).start().unwrap()
}

/// `names`: the server names the waypoint.
fn flow(lab: &Lab, family: usize, names: bool) -> Flow<'_> {
    mirror(lab.server(), 7000);
    let homes = ["server", "way"].map(|name| lab.directory().join(name));
    let server = Far::start_on(lab.server(), homes[0].clone());
    let mut options = vec!["--local", "--moves"];
    if names {
        options.extend(["--through", WAYPOINT[0], "--through", WAYPOINT[1]]);
    }
    let server = (Relay::start_on(lab.server(), homes[0].clone(), &options), server);
    let way = Far::start_on(lab.far(), homes[1].clone());
    let options = ["--waypoint", "--allow", "203.0.113.0/24", "--allow", "2001:db8:113::/48"];
    let way = (Relay::start_on(lab.far(), homes[1].clone(), &options), way);
    let near = Up::start_told(lab, MOVES, &lab.directory().join("braid/state"), &["-v"]);
    let mut invite = lab.far().command(braid()).unwrap();
    let address = if family == 0 { format!("{}:5757", WAYPOINT[0]) } else { format!("[{}]:5757", WAYPOINT[1]) };
    let invited = invite.args(["relay", "invite", "--address", &address]).arg("--state-dir").arg(way.0.0.state()).output().unwrap();
    let joined = near.braid(&["join", text(&invited.stdout).trim(), "--name", "way"]);
    assert!(joined.status.success(), "{}", text(&joined.stderr));
    let to = if family == 0 { remote(10, 7000) } else { remote6(10, 7000) };
    let (stream, from) = open(lab, to);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut flow = Flow { lab, near, _server: server, way, stream, id: String::new(), from, round: 0 };
    flow.exchange(1000);
    flow.id = movable(&flow.near, to);
    flow
}

impl Flow<'_> {
    fn exchange(&mut self, size: usize) {
        self.round = self.round.wrapping_add(1);
        exchange(&mut self.stream, self.round, size);
    }

    fn moves(&self, options: &[&str]) -> std::process::Output {
        self.near.braid(&[&["move", &self.id], options].concat())
    }

    /// Moves it to the waypoint, once all paths there work.
    fn goes_to_the_waypoint(&mut self) {
        eventually("it is asked for", || self.moves(&["--through", "way"]).status.success());
        eventually("it passes the waypoint", || self.explained().contains("through the waypoint way"));
    }

    fn explained(&self) -> String {
        self.near.explain_flow(&self.id)
    }

    /// Waits until all packets of the flow use this link, and on the link the server's own port or not.
    fn uses(&mut self, link: usize, passes: bool) {
        let own = self.stream.local_addr().unwrap().port();
        let port = |port| Filter { protocol: Some(Protocol::Tcp), port: Some(port), ..Filter::default() };
        eventually(&format!("both directions use {} only, passes: {passes}", NAMES[link]), || {
            let (all, direct) = (watch_all(self.lab, port(own)), watch_all(self.lab, port(7000)));
            self.exchange(1000);
            let (all, direct) = (packets(self.lab, &all), packets(self.lab, &direct));
            all[1 - link] == 0 && all[link] > 0 && (direct[link] == 0) == passes && (passes || direct[link] == all[link])
        });
    }
}

#[test]
fn a_running_flow_passes_a_waypoint_moves_behind_it_and_goes_home() {
    if !able() {
        return;
    }
    for family in [0, 1] {
        let lab = lab_with_waypoint();
        let before = traces(&lab);
        let mut flow = flow(&lab, family, true);
        let from = flow.from;
        flow.goes_to_the_waypoint();
        flow.exchange(300_000);
        let explained = flow.explained();
        assert!(explained.contains("does not encrypt") && explained.contains(WAYPOINT[family]), "{explained}");
        for link in [1 - from, from, 1 - from] {
            let moved = flow.moves(&["--to", NAMES[link]]);
            assert!(moved.status.success(), "{}", text(&moved.stderr));
            flow.uses(link, true);
            flow.exchange(300_000);
        }
        // Without a command, when the link dies: the server does not see it.
        lab.dark(1 - from).unwrap();
        flow.exchange(300_000);
        flow.uses(from, true);
        lab.bright(1 - from).unwrap();
        assert!(flow.moves(&[]).status.success());
        flow.uses(from, false);
        flow.exchange(300_000);
        drop(flow);
        assert_eq!(traces(&lab), before);
    }
}

#[test]
fn a_flow_goes_home_when_its_waypoint_is_killed_and_loses_nothing() {
    if !able() {
        return;
    }
    for kills_daemon in [true, false] {
        let lab = lab_with_waypoint();
        let mut flow = flow(&lab, 0, true);
        flow.goes_to_the_waypoint();
        flow.exchange(100_000);
        if kills_daemon {
            flow.way.1.0.kill().unwrap();
        }
        flow.way.0.0.kill().unwrap();
        for _ in 0..3 {
            flow.exchange(100_000);
        }
        flow.uses(flow.from, false);
        eventually("it is explained", || flow.explained().contains("cannot move"));
    }
}

#[test]
fn a_flow_goes_home_when_its_waypoint_falls_silent_before_its_lease_ends() {
    if !able() {
        return;
    }
    let lab = lab_with_waypoint();
    let mut flow = flow(&lab, 0, true);
    flow.goes_to_the_waypoint();
    flow.exchange(1000);
    nft(
        &lab,
        "table inet silent { chain forward { type filter hook forward priority 0; drop; }
            chain output { type filter hook output priority 0; oifname far0 drop; }
        }",
    )
    .unwrap();
    let begun = Instant::now();
    flow.exchange(1000);
    assert!(begun.elapsed() < LEASE, "{:?}", begun.elapsed());
    let from = flow.from;
    flow.uses(from, false);
}

#[test]
fn a_server_that_does_not_name_the_waypoint_refuses_it() {
    if !able() {
        return;
    }
    let lab = lab_with_waypoint();
    let mut flow = flow(&lab, 0, false);
    eventually("it is asked for", || flow.moves(&["--through", "way"]).status.success());
    eventually("it is explained", || flow.explained().contains("names no such waypoint"));
    flow.uses(flow.from, false);
    let unknown = flow.moves(&["--through", "nobody"]);
    assert!(text(&unknown.stderr).contains("nobody is no waypoint"), "{unknown:?}");
    let to: SocketAddr = remote(10, 7000);
    assert_eq!(flow.stream.peer_addr().unwrap(), to);
}
