// The view Gains: what Braid brought in the last days, against using one link only.

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
    h('div', { class: 'tools' }, h('div', { class: 'segmented', role: 'group', 'aria-label': 'Span of time' }, buttons), note),
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
    // What is younger than the span is shown in full width.
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
/** Fewer samples than these make no picture. */
const FEW = 12;

/** The samples of the last days and how far they are apart: finer ones where Braid has not run for long. */
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
  const words = (name, verb, pair, text) => {
    const left = saved(pair);
    if (left === null) return [name, 'Not known', 'not enough data yet'];
    const other = `One link only would ${verb} ${text(pair.only_one).replace(' ', '\u00a0')}`;
    return [`${name} ${left >= 0 ? 'saved' : 'spent more'}`, text(Math.abs(left)), other];
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
      'Outage bridged',
      known(gains.outage_bridged_s) ? duration(gains.outage_bridged_s * 1000) : NONE,
      'The system’s own link was dead; others carried on',
    ]),
    tile(['Flows moved', count(gains.flows_moved), `To another link; ${count(gains.flows_ended)} had to end`]),
    tile(words('Energy', 'take', energy, joules)),
    tile(words('Money', 'cost', money, (value) => number(value))),
  );
  put(note, gains.estimated ? 'Energy and money against one link only are estimated by the model.' : '');
  clear(share);
  const all = gains.links.reduce((sum, link) => sum + (link.rx_bytes ?? 0) + (link.tx_bytes ?? 0), 0);
  if (!all) share.append(h('p', { class: 'hint', text: 'Nothing was moved yet.' }));
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
