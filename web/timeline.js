// A chart of the last minutes, hours or days, with buttons that choose the period.

import { get } from './api.js';
import { Chart } from './chart.js';
import { applicationName } from './clients.js';
import { attr, h } from './dom.js';
import { accent, now, on, prependSamples, store } from './store.js';

const RANGES = [
  ['5 min', 300e3, '1s', 1e3],
  ['1 h', 3600e3, '10s', 10e3],
  ['24 h', 86400e3, '5m', 300e3],
  ['30 d', 30 * 86400e3, '1h', 3600e3],
];
const REFRESH_MS = 10_000;
/** Number of applications shown separately; the rest is shown as one. */
const MAX_SHOWN = 5;
const OTHERS = 'Others';

/** Source of a timeline of links, coloured by `accent`. */
export const byLink = () => ({
  series: 'samples',
  path: '/v1/history',
  tint: (name) => `link-${accent(name)}`,
  read: (samples) => samples,
});

/** The busiest applications of the period, and all others together. An application keeps its colour while it is among them. */
export function byApplication() {
  const places = new Map();
  return {
    series: 'appSamples',
    path: '/v1/history/apps',
    tint: (name) => `app-${places.get(name) ?? MAX_SHOWN}`,
    title: (name) => (name === OTHERS ? name : applicationName(name)),
    read: (samples) => {
      seat(places, samples);
      return samples.map(({ at_ms, apps, rest_rx_bps, rest_tx_bps }) => {
        const others = { name: OTHERS, rx_bps: rest_rx_bps ?? 0, tx_bps: rest_tx_bps ?? 0 };
        const links = [];
        for (const { application, rx_bps, tx_bps } of apps) {
          if (places.has(application)) links.push({ name: application, rx_bps, tx_bps });
          else {
            others.rx_bps += rx_bps ?? 0;
            others.tx_bps += tx_bps ?? 0;
          }
        }
        links.sort((a, b) => places.get(a.name) - places.get(b.name));
        return { at_ms, links: others.rx_bps || others.tx_bps ? [...links, others] : links };
      });
    },
  };
}

/** Assigns places to the busiest applications; an application that already has a place keeps it. */
function seat(places, samples) {
  const sums = new Map();
  for (const { apps } of samples)
    for (const { application, rx_bps, tx_bps } of apps) sums.set(application, (sums.get(application) ?? 0) + (rx_bps ?? 0) + (tx_bps ?? 0));
  const busiest = [...sums]
    .sort((a, b) => b[1] - a[1])
    .slice(0, MAX_SHOWN)
    .map(([name]) => name);
  for (const name of [...places.keys()]) if (!busiest.includes(name)) places.delete(name);
  for (const name of busiest) {
    if (places.has(name)) continue;
    const taken = [...places.values()];
    places.set(name, Array.from({ length: MAX_SHOWN }, (_, place) => place).find((place) => !taken.includes(place)));
  }
}

/** A single application. */
export const ofApplication = (application) => ({
  series: 'appSamples',
  path: `/v1/history/apps?application=${encodeURIComponent(application)}`,
  tint: () => 'app-0',
  title: applicationName,
  read: (samples) =>
    samples.map(({ at_ms, apps }) => {
      const { rx_bps = 0, tx_bps = 0 } = apps.find((item) => item.application === application) ?? {};
      return { at_ms, links: [{ name: application, rx_bps, tx_bps }] };
    }),
});

/** `{spans, legend, node, show(source), end()}`: the buttons, the legend of names not shown elsewhere, the chart, and its removal. */
export function timeline(label, first) {
  const legend = h('ul', { class: 'names', hidden: true });
  let [range, source, old] = [RANGES[0], first, []];
  let chart = new Chart(label, source);
  const node = h('div', { class: 'timeline' }, chart.node);
  const draw = () => {
    const [, span, , step] = range;
    const samples = range === RANGES[0] ? store[source.series] : old;
    const to = samples.at(-1)?.at_ms ?? now();
    const inside = source.read(samples.filter((sample) => sample.at_ms >= to - span - step));
    chart.show(inside, to - span, to, step);
    if (!legend.hidden) showLegend(legend, chart.names(), source);
  };
  const load = async () => {
    if (range === RANGES[0]) return recall(source.series).then(draw);
    const [asked, of] = [range, source];
    const link = of.path.includes('?') ? '&' : '?';
    const answer = await get(`${of.path}${link}resolution=${range[2]}&since_ms=${now() - range[1]}`).catch(() => null);
    if (!answer || asked !== range || of !== source) return;
    old = answer.samples;
    draw();
  };
  const again = () => {
    old = [];
    draw();
    load();
  };
  const buttons = RANGES.map((item) =>
    h('button', {
      type: 'button',
      text: item[0],
      'aria-pressed': String(item === range),
      onclick: () => {
        range = item;
        buttons.forEach((button, place) => attr(button, 'aria-pressed', String(RANGES[place] === range)));
        again();
      },
    }),
  );
  const live = (series) => series === source.series && range === RANGES[0] && draw();
  const off = on(['samples', 'appSamples'], live);
  const timer = setInterval(() => range !== RANGES[0] && load(), REFRESH_MS);
  draw();
  load();
  return {
    spans: h('div', { class: 'segmented', role: 'group', 'aria-label': 'Period' }, buttons),
    legend,
    node,
    show: (other, named) => {
      source = other;
      legend.hidden = !named;
      chart.end();
      chart = new Chart(label, source);
      node.replaceChildren(chart.node);
      again();
    },
    end: () => {
      off();
      clearInterval(timer);
      chart.end();
    },
  };
}

/** Requests the history of applications once; the history of links is requested with every connection. */
export async function recall(series) {
  if (series !== 'appSamples' || store.recalled) return;
  store.recalled = true;
  await get('/v1/history/apps?resolution=1s').then(
    (answer) => prependSamples(series, answer.samples),
    () => {
      store.recalled = false;
    },
  );
}

function showLegend(legend, names, source) {
  const text = names.map((name) => `${name} ${source.tint(name)}`).join('\u0000');
  if (legend.shown === text) return;
  legend.shown = text;
  legend.replaceChildren(
    ...names.map((name) => h('li', { class: `tag ${source.tint(name)}`, title: name }, h('span', { class: 'swatch' }), source.title(name))),
  );
}
