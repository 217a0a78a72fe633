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
    const [step, resolution] = days === 1 ? [300e3, '5m'] : [3600e3, '1h'];
    const asked = days;
    const [gains, history] = await Promise.all([
      get(`/v1/gains?days=${days}`).catch((failure) => failure),
      get(`/v1/history?resolution=${resolution}&since_ms=${now() - days * 86400e3}`).catch(() => ({ samples: [] })),
    ]);
    if (!alive || asked !== days) return;
    const to = history.samples.at(-1)?.at_ms ?? now();
    chart.show(history.samples, to - days * 86400e3, to, step);
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

const known = (value) => typeof value === 'number';

function showGains(gains, tiles, share, note) {
  const { energy_j: energy, money } = gains;
  const saved = (pair) => (pair && known(pair.only_one) && known(pair.actual) ? pair.only_one - pair.actual : null);
  const words = (pair, text) => {
    const left = saved(pair);
    if (left === null) return ['Not known', 'for want of figures'];
    return [text(Math.abs(left)), `${left >= 0 ? 'less' : 'more'} than one link only would take (${text(pair.only_one)})`];
  };
  const tile = (label, [figure, hint]) =>
    h(
      'div',
      { class: 'card tile' },
      h('p', { class: 'tile-label', text: label }),
      h('p', { class: 'tile-figure', text: figure }),
      h('p', { class: 'hint', text: hint }),
    );
  tiles.replaceChildren(
    tile('Outage bridged', [
      known(gains.outage_bridged_s) ? duration(gains.outage_bridged_s * 1000) : NONE,
      'a link was dead and others carried on',
    ]),
    tile('Flows moved', [count(gains.flows_moved), `to another link; ${count(gains.flows_ended)} had to end`]),
    tile('Energy', words(energy, joules)),
    tile(
      'Money',
      words(money, (value) => number(value)),
    ),
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
