// The view Gains: what Braid saved over the last days, compared with using one link only.

import { get } from './api.js';
import { Chart } from './chart.js';
import { attr, clear, h, put } from './dom.js';
import { NONE, bytes, count, duration, joules, number } from './format.js';
import { accent, now } from './store.js';

const SPANS = [
  [1, 'Day'],
  [7, 'Week'],
  [30, 'Month'],
];

export function mount(root) {
  let days = 30;
  let alive = true;
  const tiles = h('div', { class: 'tiles' });
  const share = h('div', { class: 'shares big' });
  const note = h('p', { class: 'hint' });
  const chart = new Chart('Throughput of each link over the days');
  const buttons = SPANS.map(([value, label]) =>
    h('button', {
      type: 'button',
      text: label,
      'aria-pressed': String(value === days),
      onclick: () => {
        days = value;
        buttons.forEach((button, place) => attr(button, 'aria-pressed', String(SPANS[place][0] === days)));
        load();
      },
    }),
  );
  root.append(
    h('div', { class: 'tools' }, h('div', { class: 'segmented', role: 'group', 'aria-label': 'Period' }, buttons), note),
    tiles,
    h('section', { class: 'card' }, h('h2', { text: 'Data by link' }), share),
    h(
      'section',
      { class: 'card' },
      h(
        'div',
        { class: 'card-head' },
        h('h2', { text: 'Throughput' }),
        h('p', { class: 'legend', text: 'received above the line, sent below' }),
      ),
      chart.node,
    ),
  );
  const load = async () => {
    const asked = days;
    const [gains, [samples, step]] = await Promise.all([get(`/v1/gains?days=${days}`).catch((failure) => failure), history(days)]);
    if (!alive || asked !== days) return;
    const to = samples.at(-1)?.at_ms ?? now();
    // A history shorter than the period uses the full width.
    const from = Math.max(to - days * 86400e3, (samples[0]?.at_ms ?? 0) - step);
    chart.show(samples, from, to, step);
    if (gains instanceof Error) put(note, gains.message);
    else showGains(gains, tiles, share, note);
  };
  load();
  const timer = setInterval(load, 30_000);
  return () => {
    alive = false;
    clearInterval(timer);
    chart.end();
  };
}

const RESOLUTIONS = [
  ['1h', 3600e3],
  ['5m', 300e3],
  ['10s', 10e3],
];
/** With fewer samples than this, the next finer resolution is used. */
const FEW = 12;

/** Samples of the last days and their interval; a finer resolution if Braid has not run for long. */
async function history(days) {
  for (const [resolution, step] of RESOLUTIONS.slice(days === 1 ? 1 : 0)) {
    const answer = await get(`/v1/history?resolution=${resolution}&since_ms=${now() - days * 86400e3}`).catch(() => null);
    if (answer && (answer.samples.length >= FEW || resolution === '10s')) return [answer.samples, step];
  }
  return [[], 10e3];
}

const known = (value) => typeof value === 'number';

function showGains(gains, tiles, share, note) {
  const { energy_j: energy, money } = gains;
  const saved = (pair) => (pair && known(pair.only_one) && known(pair.actual) ? pair.only_one - pair.actual : null);
  const words = (name, extra, verb, pair, text) => {
    const left = saved(pair);
    if (left === null) return [name, 'Unknown', 'not enough data yet'];
    const other = `A single link would ${verb} ${text(pair.only_one).replace(' ', '\u00a0')}`;
    return [left >= 0 ? `${name} saved` : extra, text(Math.abs(left)), other];
  };
  const tile = ([label, figure, hint]) =>
    h(
      'div',
      { class: 'card tile' },
      h('p', { class: 'tile-label', text: label }),
      h('p', { class: 'tile-figure', text: figure }),
      h('p', { class: 'hint', text: hint }),
    );
  tiles.replaceChildren(
    tile([
      'Outages bridged',
      known(gains.outage_bridged_s) ? duration(gains.outage_bridged_s * 1000) : NONE,
      'The system’s own link was dead, and Braid used others',
    ]),
    tile(['Flows moved', count(gains.flows_moved), `To another link; ${count(gains.flows_ended)} were ended`]),
    tile(words('Energy', 'Extra energy', 'use', energy, joules)),
    tile(words('Money', 'Extra cost', 'cost', money, (value) => number(value))),
  );
  put(note, gains.estimated ? 'A model estimates the energy and money that a single link would use.' : '');
  clear(share);
  const all = gains.links.reduce((sum, link) => sum + (link.rx_bytes ?? 0) + (link.tx_bytes ?? 0), 0);
  if (!all) share.append(h('p', { class: 'hint', text: 'No traffic yet.' }));
  else
    share.append(
      ...gains.links.map((link) => {
        const sum = (link.rx_bytes ?? 0) + (link.tx_bytes ?? 0);
        const bar = h('span', { class: 'bar' });
        bar.style.width = `${(sum / all) * 100}%`;
        return h(
          'div',
          { class: `share link-${accent(link.name)}` },
          h('span', { text: link.name }),
          h('span', { class: 'track' }, bar),
          h('span', { class: 'num', text: `${bytes(sum)} (${Math.round((sum / all) * 100)} %)` }),
          h('span', { class: 'num hint', text: `↓ ${bytes(link.rx_bytes)}  ↑ ${bytes(link.tx_bytes)}` }),
        );
      }),
    );
}
