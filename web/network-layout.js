// Where each part of a controller's network is in the drawing. Switches are in a column, in the order of their ids, with the links between them as arcs on the
// left. Right of each switch are its access points, then its other ports with hosts, each in the order of ports, and right of these the hosts. So what moves in
// the drawing has moved in the network.

import { keyOf, linkName } from './network-names.js';

export const WIDTH = 980;
const ARC = 150;
// A datapath id of 16 digits has room.
export const SWITCH = { x: ARC, width: 160 };
export const PLACE = { x: 356, width: 240 };
export const HOST_X = 688;
const [ROW, HOST, GAP, MARGIN] = [52, 24, 16, 10];

/** The most that is drawn: switches, places of all and of one switch, hosts of a place. */
const MOST = { switches: 40, places: 160, own: 12, hosts: 8 };

const byKey = (a, b) => (a.key < b.key ? -1 : 1);

/** `network`: the controller's answer; `links`: as from `linkMemory`. */
export function layout(network, links) {
  const switches = network.switches.map((one) => ({ key: one.datapath, one })).sort(byKey).slice(0, MOST.switches);
  const rows = rowsOf(switches, network);
  let bottom = MARGIN;
  for (const box of switches) {
    const top = bottom;
    for (const row of rows.get(box.key)) {
      const lines = Math.min(row.hosts.length, MOST.hosts);
      // Two hosts more or less change the height, one does not.
      const height = Math.max(ROW, 2 * Math.ceil(lines / 2) * HOST + 4);
      row.y = bottom + height / 2;
      bottom += height;
    }
    if (bottom === top) bottom += ROW;
    box.y = (top + bottom) / 2;
    bottom += GAP;
  }
  const places = [...rows.values()].flat();
  const hosts = places.flatMap(hostsOf).sort(byKey);
  const bulge = Math.min(56 + 26 * Math.max(switches.length - 2, 0), 190);
  return {
    // An arc is as wide as three quarters of its bulge.
    left: ARC - 0.75 * bulge - 8,
    height: Math.max(bottom - GAP + MARGIN, ROW),
    switches,
    places,
    hosts,
    // Texts in place of the hosts that are not drawn.
    more: places.filter((row) => row.hosts.length > MOST.hosts).map((row) => ({ key: row.key, y: lineOf(row, MOST.hosts - 1), count: row.hosts.length - MOST.hosts + 1 })),
    spokes: switches.flatMap((box) => rows.get(box.key).map((row) => ({ key: row.key, isDown: row.isDown, path: curve(SWITCH.x + SWITCH.width, box.y, PLACE.x, row.y) }))),
    ways: waysOf(hosts, new Map(places.map((row) => [row.key, row]))),
    arcs: arcsOf(switches, links, bulge),
  };
}

const curve = (x1, y1, x2, y2) => `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;

/** The main place of a host: the first to which its packets go, else one where it is attached. */
const mainOf = ({ active, attachments }) => active[0] ?? attachments[0];

/** The places that are drawn, by switch: access points first, then ports with hosts. */
function rowsOf(switches, { accesses, hosts }) {
  const all = new Map();
  const add = (place, access = null) => {
    const key = keyOf(place);
    if (!all.has(key)) all.set(key, { key, place, access, hosts: [] });
    return all.get(key);
  };
  accesses.forEach((access) => add(access.place, access));
  for (const host of hosts) {
    [...host.active, ...host.attachments].forEach((place) => add(place));
    const main = mainOf(host);
    if (main) add(main).hosts.push({ key: host.mac, host });
  }
  const ordered = [...all.values()].sort((a, b) => Number(!a.access) - Number(!b.access) || a.place.port - b.place.port);
  const found = new Map();
  let left = MOST.places;
  for (const { key, one } of switches) {
    const own = ordered.filter((row) => row.place.datapath === key).slice(0, Math.min(MOST.own, left));
    left -= own.length;
    for (const row of own) {
      row.port = one.ports.find(({ number }) => number === row.place.port) ?? null;
      row.isDown = row.access ? !row.access.serves : !row.port?.up;
      row.hosts.sort(byKey);
    }
    found.set(key, own);
  }
  return found;
}

/** Height of one of a place's lines. */
const lineOf = (row, line) => row.y + (line - (Math.min(row.hosts.length, MOST.hosts) - 1) / 2) * HOST;

function hostsOf(row) {
  const drawn = row.hosts.length > MOST.hosts ? row.hosts.slice(0, MOST.hosts - 1) : row.hosts;
  return drawn.map(({ key, host }, line) => ({ key, host, y: lineOf(row, line) }));
}

/** The lines between hosts and their places: the first one leads to the main place, so that it goes with the host. */
function waysOf(hosts, rows) {
  return hosts.flatMap(({ key, host, y }) => {
    const active = new Set(host.active.map(keyOf));
    const all = new Set([...active, ...host.attachments.map(keyOf)]);
    return [...all]
      .filter((place) => rows.has(place))
      .map((place, rank) => ({ key: `${key} ${rank}`, isActive: active.has(place), path: curve(PLACE.x + PLACE.width, rows.get(place).y, HOST_X - 8, y) }));
  });
}

/** The links between switches that are drawn. The further apart two switches are, the further left is the arc, up to `most`. */
function arcsOf(switches, links, most) {
  const order = new Map(switches.map(({ key }, place) => [key, place]));
  const parallel = new Map();
  return links
    .filter(({ one, other }) => order.has(one.datapath) && order.has(other.datapath))
    .map((link) => {
      const [from, to] = [order.get(link.one.datapath), order.get(link.other.datapath)].sort((a, b) => a - b);
      const pair = `${from} ${to}`;
      const before = parallel.get(pair) ?? 0;
      parallel.set(pair, before + 1);
      const bulge = Math.min(36 + 26 * Math.max(to - from - 1, 0) + 10 * before, most);
      // A link from a switch to itself is a loop.
      const apart = from === to ? 9 : 0;
      const [y1, y2] = [switches[from].y - apart, switches[to].y + apart];
      return { key: link.key, lost: link.lost, name: linkName(link), path: `M${ARC} ${y1}C${ARC - bulge} ${y1 - apart} ${ARC - bulge} ${y2 + apart} ${ARC} ${y2}` };
    });
}
