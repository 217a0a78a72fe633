// The drawing of a controller's network. Its parts are kept from answer to answer, so that a host that moves is seen to move.

import { attr, h, keyed, put, s } from './dom.js';
import { count, percent, plural } from './format.js';
import { HOST_X, PLACE, SWITCH, WIDTH, layout } from './network-layout.js';
import { BUSY, placeName, short, switchState, usedShare } from './network-names.js';

const LEGEND =
  'Thick lines lead to where a host’s packets go, dashed ones to where else it is attached. A filled circle is a host that runs Braid. A dashed arc is a link that was ' +
  'lost in the last five minutes.';

export function topology() {
  const layers = ['arcs', 'spokes', 'ways', 'switches', 'places', 'hosts', 'more'].map((name) => [name, s('g', {})]);
  const drawing = s('svg', { class: 'net', role: 'img' }, layers.map(([, layer]) => layer));
  const omitted = h('p', { class: 'hint' });
  const node = h('div', {}, h('div', { class: 'scroll-x', tabindex: '0', role: 'region', 'aria-label': 'Drawing of the network' }, drawing), omitted, h('p', { class: 'hint', text: LEGEND }));
  const makers = { arcs: line, spokes: line, ways: line, switches: switchBox, places: placeBox, hosts: hostMark, more: moreText };
  const show = (network, links) => {
    const plan = layout(network, links);
    attr(drawing, 'viewBox', `${plan.left} 0 ${WIDTH - plan.left} ${plan.height}`);
    attr(drawing, 'aria-label', summary(network, links));
    for (const [name, layer] of layers) keyed(layer, plan[name], ({ key }) => key, makers[name]);
    const hidden = [plan.switches.length < network.switches.length, plan.hosts.length < network.hosts.length];
    omitted.hidden = !hidden.includes(true);
    put(omitted, `${count(plan.switches.length)} of ${plural(network.switches.length, 'switch', 'switches')} and ${count(plan.hosts.length)} of ${plural(network.hosts.length, 'host')} are drawn. The tables have all.`);
  };
  return { node, show };
}

function summary({ switches, accesses, hosts }, links) {
  const lost = links.filter((link) => link.lost);
  const parts = [plural(switches.length, 'switch', 'switches'), plural(links.length - lost.length, 'link'), plural(accesses.length, 'access point'), plural(hosts.length, 'host')];
  const gone = lost.length ? `. Lost: ${lost.map(({ one, other }) => `${placeName(one)} to ${placeName(other)}`).join(', ')}` : '';
  return `Drawing of ${parts.join(', ')}${gone}. The tables below have the same.`;
}

const moveTo = (node, x, y) => {
  node.style.transform = `translate(${x}px, ${y}px)`;
};

const clip = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** An arc between switches, a line from a switch to its port, or from that to a host. */
function line() {
  const title = s('title');
  const node = s('path', {}, title);
  const show = ({ path, name, lost, isDown, isActive }) => {
    attr(node, 'd', path);
    attr(node, 'class', lost ? 'net-lost' : isDown || isActive === false ? 'net-idle' : isActive ? 'net-active' : 'net-line');
    attr(node, 'data-link', name);
    put(title, name ? `${name}${lost ? ', lost' : ''}` : '');
  };
  return { node, show };
}

function switchBox({ key }) {
  const [name, note] = [s('text', { class: 'net-name', x: 12, y: -3, text: clip(short(key), 16) }), s('text', { class: 'net-note', x: 12, y: 13 })];
  const node = s('g', { 'data-switch': short(key) }, s('rect', { class: 'net-box', y: -21, width: SWITCH.width, height: 42, rx: 9 }), name, note);
  const show = ({ one, y }) => {
    const [label, tone] = switchState(one.state);
    moveTo(node, SWITCH.x, y);
    put(note, label);
    attr(note, 'class', `net-note tone-${tone}`);
  };
  return { node, show };
}

/** An access point with its load, or another port with hosts. */
function placeBox({ key }) {
  const [name, note, load] = [s('text', { class: 'net-name', x: 12, y: -3 }), s('text', { class: 'net-note', x: 12, y: 13 }), s('text', { class: 'net-note net-end', x: PLACE.width - 12, y: 13 })];
  const [track, bar] = ['net-track', 'net-load'].map((style) => s('rect', { class: style, x: 164, y: -13, width: 64, height: 7, rx: 3 }));
  const node = s('g', { 'data-place': key }, s('rect', { class: 'net-box', y: -21, width: PLACE.width, height: 42, rx: 9 }), name, note, track, bar, load);
  const show = ({ place, access, port, isDown, y }) => {
    moveTo(node, PLACE.x, y);
    const used = access ? usedShare(access) : null;
    const number = `port ${place.port}`;
    put(name, access ? access.id : clip(port?.name || number, 20));
    put(note, access ? [access.kind, access.channel === null ? null : `ch ${access.channel}`, number].filter(Boolean).join(' · ') : number);
    put(load, isDown ? 'down' : access ? percent(used, 0) : '');
    attr(load, 'class', `net-note net-end tone-${isDown ? 'bad' : 'idle'}`);
    for (const part of [track, bar]) attr(part, 'display', access && !isDown ? null : 'none');
    attr(bar, 'width', Math.round(64 * (used ?? 0)));
    attr(bar, 'data-tone', used !== null && used > BUSY ? 'warn' : null);
  };
  return { node, show };
}

function hostMark({ key }) {
  const [title, circle, label] = [s('title'), s('circle', { r: 6 }), s('text', { class: 'net-name', x: 14, y: 4 })];
  const node = s('g', { 'data-host': key }, title, circle, label);
  const show = ({ host, y }) => {
    moveTo(node, HOST_X, y);
    // An IPv4 address has room.
    const address = host.addresses.find((text) => text.includes('.'));
    put(label, address ? `${address} · ${host.mac}` : host.mac);
    attr(circle, 'class', host.client ? 'net-host net-client' : 'net-host');
    put(title, `${[host.mac, ...host.addresses].join(', ')}; at ${host.active.map(placeName).join(' and ') || 'no port'}; manager ${host.manager}`);
  };
  return { node, show };
}

function moreText() {
  const node = s('text', { class: 'net-note' });
  const show = ({ y, count: hosts }) => {
    moveTo(node, HOST_X, y + 4);
    put(node, `and ${plural(hosts, 'other host')}`);
  };
  return { node, show };
}
