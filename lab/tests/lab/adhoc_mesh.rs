//! The ad-hoc device in a network over several hops, whose nodes move: six nodes with three lossy radios each, and a routing daemon on each device.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::Duration;

use crate::support::*;
use braid_lab::{AdhocHost, Babel, Mesh, Reach};

const NODES: usize = 6;
const CHANNELS: usize = 3;
/// Frames of a thousand that each radio loses.
const LOSS: u32 = 50;
/// After some three minutes babeld forgets how near a destination was (the source GC time of RFC 8966, appendix B), and takes any route.
const ROUTE_LIMIT: Duration = Duration::from_secs(300);
/// Between two looks at all devices.
const PAUSE: Duration = Duration::from_millis(100);

/// The nodes in a row, where each reaches the next.
type Row = [usize; NODES];

/// The row at first, and after each movement, in which two neighbours have passed each other. The first and the last node stay.
const ROWS: [Row; 4] = [[0, 1, 2, 3, 4, 5], [0, 2, 1, 3, 4, 5], [0, 2, 1, 4, 3, 5], [0, 2, 4, 1, 3, 5]];

/// Who reaches whom in the `step`-th row. Later, each two nodes have two channels in common, which change.
fn reach(step: usize) -> Reach {
    let links = ROWS[step].windows(2).enumerate();
    let channels = |link: usize| (0..CHANNELS).filter(move |channel| step == 0 || *channel != (link + step) % CHANNELS);
    links.flat_map(|(link, two)| channels(link).map(|channel| (two[0].min(two[1]), two[0].max(two[1]), channel))).collect()
}

/// Pairs of nodes with a channel in common.
fn pairs(reach: &Reach) -> BTreeSet<(usize, usize)> {
    reach.iter().map(|(one, other, _)| (*one, *other)).collect()
}

/// The devices, by node, with the node of each address.
struct Devices<'a> {
    mesh: &'a Mesh,
    daemons: Vec<Babel>,
    hosts: Vec<AdhocHost<'a>>,
    nodes: BTreeMap<String, usize>,
}

impl<'a> Devices<'a> {
    fn start(mesh: &'a Mesh) -> Self {
        let hosts: Vec<AdhocHost<'_>> = (0..NODES).map(|number| mesh.device(&braid(), number).unwrap()).collect();
        let mac = |host: &AdhocHost<'_>| host.status().unwrap().unwrap()["mac"].as_str().unwrap().to_owned();
        let nodes = hosts.iter().enumerate().map(|(number, host)| (mac(host), number)).collect();
        Self { mesh, daemons: Vec::new(), hosts, nodes }
    }

    /// Neighbours of a node, with the channels over which each is up, and the sum of its shares.
    fn neighbours(&self, node: usize) -> BTreeMap<usize, (BTreeSet<usize>, f64)> {
        let mut found: BTreeMap<usize, (BTreeSet<usize>, f64)> = BTreeMap::new();
        for row in self.hosts[node].neighbours().unwrap() {
            let (channels, share) = found.entry(self.nodes[row["mac"].as_str().unwrap()]).or_default();
            *share += row["share"].as_f64().unwrap();
            if row["state"] == "up" {
                channels.insert(row["radio"].as_str().unwrap()[1..].parse().unwrap());
            }
        }
        found
    }

    /// Pairs that are up, as both nodes see them. `None`: a node has a neighbour that is not up over any radio, or only one of the two has the pair.
    fn reach(&self) -> Option<Reach> {
        let mut seen: BTreeMap<(usize, usize, usize), usize> = BTreeMap::new();
        for node in 0..NODES {
            for (other, (channels, _)) in self.neighbours(node) {
                if channels.is_empty() {
                    return None;
                }
                channels.into_iter().for_each(|channel| *seen.entry((node.min(other), node.max(other), channel)).or_default() += 1);
            }
        }
        seen.values().all(|count| *count == 2).then(|| seen.into_keys().collect())
    }

    /// Those of these pairs of which a node has no way to the other.
    fn lost(&self, pairs: &BTreeSet<(usize, usize)>) -> Vec<(usize, usize)> {
        let neighbours: Vec<_> = (0..NODES).map(|node| self.neighbours(node)).collect();
        let has = |from: usize, to: usize| neighbours[from].get(&to).is_some_and(|(_, share)| *share > 0.0);
        pairs.iter().copied().filter(|(one, other)| !has(*one, *other) || !has(*other, *one)).collect()
    }
}

impl Drop for Devices<'_> {
    /// Shows what the nodes have if the test fails.
    fn drop(&mut self) {
        if thread::panicking() {
            for (number, host) in self.hosts.iter().enumerate() {
                let neighbours = host.braid("neighbours").map(|output| text(&output.stdout)).unwrap_or_default();
                let routes = run(self.mesh, number, "ip route").1;
                eprintln!("--- node {number}, {:?}\n{}\n{neighbours}\n{routes}", self.nodes, host.log());
            }
        }
    }
}

fn run(mesh: &Mesh, node: usize, line: &str) -> (bool, String) {
    let mut words = line.split_whitespace();
    let output = mesh.node(node).command(words.next().unwrap()).unwrap().args(words).output().unwrap();
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// The hops to the last node, if it answers the first one.
fn hops(mesh: &Mesh) -> Option<u32> {
    let (answered, output) = run(mesh, 0, &format!("ping -c 1 -W 1 -I {} {}", Mesh::address(0), Mesh::address(NODES - 1)));
    let ttl: u32 = output.split_once("ttl=")?.1.split(' ').next()?.parse().ok()?;
    answered.then(|| 65 - ttl)
}

/// Devices and what tc has at them.
fn traces(mesh: &Mesh) -> Vec<String> {
    let of = |node: usize| {
        let links = run(mesh, node, "ip -o link").1;
        let links: Vec<&str> = links.lines().map(|line| line.split(" qlen").next().unwrap()).collect();
        links.join("\n") + &run(mesh, node, "tc qdisc").1 + &run(mesh, node, "ip maddress").1
    };
    (0..NODES).map(of).collect()
}

/// babeld waits for an answer of a destination that has come farther away before it uses a longer route to it. Under loss that takes seconds, or minutes.
#[test]
#[ignore = "the routing daemon may take minutes: make test-mesh"]
fn routes_over_several_hops_come_back_when_nodes_move() {
    if !able() {
        return;
    }
    let mesh = Mesh::start(NODES, CHANNELS, LOSS).unwrap();
    let before = traces(&mesh);
    {
        mesh.set_reach(&reach(0)).unwrap();
        let mut devices = Devices::start(&mesh);
        eventually("each node has its neighbours over all radios", || devices.reach() == Some(reach(0)));
        devices.daemons = (0..NODES).map(|number| mesh.babel(number).unwrap()).collect();
        let (took, way) = wait_route(&mesh, || ());
        println!("the first route took {took:.1?}");
        assert_eq!(way, 5);
        for (step, row) in ROWS.iter().enumerate().skip(1) {
            let staying = pairs(&reach(step - 1)).intersection(&pairs(&reach(step))).copied().collect();
            mesh.set_reach(&reach(step)).unwrap();
            let mut lost = BTreeSet::new();
            let (took, way) = wait_route(&mesh, || lost.extend(devices.lost(&staying)));
            println!("movement {step}: the route took {took:.1?}; {} of {} neighbours stayed", staying.len(), NODES - 1);
            assert_eq!(way, 5);
            let next = run(&mesh, 0, &format!("ip route get {}", Mesh::address(NODES - 1))).1;
            assert!(next.contains(&format!("via {} dev vi0", Mesh::device_address(row[1]))), "{next}");
            let took = eventually("each node has its neighbours, and no others", || {
                thread::sleep(PAUSE);
                lost.extend(devices.lost(&staying));
                devices.reach() == Some(reach(step))
            });
            println!("movement {step}: the neighbours of all nodes took {took:.1?} more");
            assert!(lost.is_empty(), "living neighbours that were lost: {lost:?}");
        }
    }
    assert_eq!(traces(&mesh), before, "the devices are gone, and the radios are as before");
}

/// Waits until the last node answers. Returns how long that took, and the hops; calls `also` meanwhile.
fn wait_route(mesh: &Mesh, mut also: impl FnMut()) -> (Duration, u32) {
    let mut way = None;
    let took = within(ROUTE_LIMIT, "there is a route to the last node", || {
        also();
        way = hops(mesh);
        way.is_some()
    });
    (took, way.unwrap())
}
