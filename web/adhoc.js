// The view Radios: the ad-hoc device, drawn as who is reached how, and its neighbours. The view asks for them while it is visible.

import { get } from './api.js';
import { clear, empty, h, keyed, put, repeat, s } from './dom.js';
import { NONE, count, duration, plural } from './format.js';
import { on, store, take } from './store.js';

const REFRESH_MS = 2_000;
/** Neighbours in the drawing; all are in the table. */
const DRAWN = 12;
const WIDTH = 720;
const ROW = 46;

export const hasAdhoc = () => Boolean(store.status?.adhoc);

export function mount(root) {
  const drawing = h('section', { class: 'card', 'aria-label': 'Who is reached over which radio' });
  const warnings = h('div', {});
  const rows = h('tbody');
  const table = neighbourTable(rows);
  const none = h('div', {});
  root.append(warnings, drawing, table, none);
  const show = () => {
    const device = hasAdhoc() ? store.adhoc : null;
    drawing.hidden = !device;
    table.hidden = !device?.neighbours.length;
    clear(none);
    clear(warnings);
    if (!device) {
      none.append(hasAdhoc() ? empty('Loading', 'The ad-hoc device is loading.') : empty('No ad-hoc device', 'Name its radios in the configuration: [adhoc] radios = ["wlan0", "eth0"].'));
      return;
    }
    warnings.append(...device.warnings.map((text) => h('p', { class: 'banner', role: 'status', text })));
    clear(drawing);
    drawing.append(h('h2', { text: `${device.name} · ${device.mac}` }), draw(device), h('p', { class: 'hint', text: summary(device) }));
    if (!device.neighbours.length) none.append(empty('No neighbours yet', 'A host appears here once it announces itself, or once something is sent to it.'));
    keyed(rows, device.neighbours, (one) => `${one.mac} ${one.radio}`, neighbourRow);
  };
  const refresh = () => {
    if (hasAdhoc() && !document.hidden) get('/v1/adhoc').then((answer) => take('adhoc', answer)).catch(() => {});
  };
  const ends = [on(['adhoc'], show), on(['status'], () => hasAdhoc() === Boolean(store.adhoc) || [refresh(), show()]), repeat(refresh, REFRESH_MS)];
  show();
  return () => ends.forEach((end) => end());
}

function summary({ radios, neighbours, authenticated, by_frame: byFrame, saving_power: saving, counts }) {
  const hosts = new Set(neighbours.map((one) => one.mac)).size;
  const parts = [
    `${plural(hosts, 'neighbour')} over ${plural(radios.length, 'radio')}`,
    byFrame ? 'each frame gets a radio' : 'each flow gets a radio',
    `${count(counts.duplicates)} copies of broadcasts dropped`,
    authenticated ? 'authenticated' : 'not authenticated',
  ];
  if (saving) parts.push('saving power');
  return parts.join(' · ');
}

/** This host on the left, its radios in the middle, the neighbours on the right: a line's width is the share of the radio, a dashed one is not used. */
function draw({ name, radios, neighbours }) {
  const hosts = [...new Set(neighbours.map((one) => one.mac))].slice(0, DRAWN);
  const height = Math.max(radios.length, hosts.length, 2) * ROW + 20;
  const middle = (place, all) => (height * (place + 0.5)) / Math.max(all, 1);
  const colour = (place) => `var(--link-${place % 8})`;
  const line = (x1, y1, x2, y2, props) => s('path', { d: `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`, fill: 'none', ...props });
  const node = s('svg', { viewBox: `0 0 ${WIDTH} ${height}`, class: 'reach', role: 'img', 'aria-label': 'Radios and the neighbours that they reach' });
  radios.forEach((radio, place) => {
    const y = middle(place, radios.length);
    node.append(line(96, height / 2, 270, y, { stroke: colour(place), 'stroke-width': 2, 'stroke-dasharray': radio.up ? null : '3 5' }));
    for (const one of neighbours.filter((row) => row.radio === radio.name && hosts.includes(row.mac))) {
      const used = one.share > 0 && one.state === 'up';
      const to = middle(hosts.indexOf(one.mac), hosts.length);
      node.append(line(362, y, 520, to, { stroke: colour(place), 'stroke-width': used ? 1.5 + 6 * one.share : 1.5, 'stroke-dasharray': used ? null : '3 5', opacity: one.state === 'up' ? 1 : 0.45 }));
    }
    node.append(s('rect', { x: 270, y: y - 15, width: 92, height: 30, rx: 8, class: 'reach-box' }), s('text', { x: 316, y: y + 4, class: 'reach-name', text: radio.name }));
  });
  node.append(s('circle', { cx: 62, cy: height / 2, r: 34, class: 'reach-box' }), s('text', { x: 62, y: height / 2 + 4, class: 'reach-name', text: name }));
  hosts.forEach((mac, place) => node.append(s('text', { x: 530, y: middle(place, hosts.length) + 4, class: 'reach-host', text: mac })));
  return node;
}

const HEADS = ['Neighbour', 'Radio', 'State', 'Share', 'Round trip', 'Loss', 'Heard', 'Runs Braid'];
const NUMBERS = [3, 4, 5, 6];
const numeric = (place) => (NUMBERS.includes(place) ? 'num' : null);

function neighbourTable(rows) {
  const heads = HEADS.map((text, place) => h('th', { scope: 'col', class: numeric(place), text }));
  return h(
    'section',
    { class: 'card', 'aria-label': 'Neighbours' },
    h('div', { class: 'scroll-x', tabindex: '0', role: 'region', 'aria-label': 'Neighbours by radio' }, h('table', { class: 'plain' }, h('thead', {}, h('tr', {}, heads)), rows)),
  );
}

const percent = (share) => `${Math.round(share * 100)} %`;

function neighbourRow(first) {
  const cells = HEADS.map((head, place) => h(place ? 'td' : 'th', { scope: place ? null : 'row', class: numeric(place), 'data-label': head }));
  const show = (one) => {
    const trip = one.rtt_us === null ? NONE : `${(one.rtt_us / 1000).toFixed(2)} ms`;
    const texts = [one.mac, one.radio, one.state, percent(one.share), trip, one.loss === null ? NONE : percent(one.loss), `${duration(one.last_heard_ms)} ago`, one.braid ? 'yes' : 'no'];
    texts.forEach((text, place) => put(cells[place], text));
  };
  return { node: h('tr', { 'data-neighbour': `${first.mac} ${first.radio}` }, cells), show };
}
