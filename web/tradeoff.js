// The utility of throughput: a slider, and the model's prediction for each of its positions.

import { get } from './api.js';
import { previewButton } from './change.js';
import { attr, card, field, full, h, put, s, select } from './dom.js';
import { NONE, rate, watts } from './format.js';
import { store } from './store.js';

const [WIDE, HIGH, PAD] = [640, 150, 6];
const MODES = [
  ['fixed', 'the slider (ENGR at 0, MID at 0.5, XPUT at 1)'],
  ['battery', 'the battery level (U1)'],
  ['step', 'a step at a battery level (U2)'],
  ['match-default', 'as fast as the system’s own choice, for less (CUR-OS)'],
];
const STEP = { threshold: 0.3, above: 1, below: 0.2 };
const REFRESH_MS = 10_000;

export function tradeoff() {
  let points = [];
  let touched = false;
  const mode = select(MODES, 'fixed');
  const slider = h('input', { type: 'range', min: '0', max: '1', step: '0.05', value: '1', class: 'slider' });
  const [speed, power, price] = [h('dd', { text: NONE }), h('dd', { text: NONE }), h('dd', { text: NONE })];
  const plot = curves();
  const note = h('p', { class: 'hint' });
  const edits = () => {
    const found = [{ op: 'set', path: ['utility'], value: chosen() }];
    if (store.policy?.scheduler !== 'operetta') found.unshift({ op: 'set', path: ['scheduler'], value: 'operetta' });
    touched = false;
    return found;
  };
  const button = previewButton(edits, () => show());
  const step = Object.fromEntries(
    Object.entries(STEP).map(([key, value]) => [key, h('input', { type: 'number', min: '0', max: '1', step: '0.05', value: String(value) })]),
  );
  const stepFields = h(
    'div',
    { class: 'form-grid', hidden: true },
    field('Battery level', step.threshold, '0 to 1'),
    field('α at or above it', step.above),
    field('α below it', step.below),
  );
  const chosen = () => {
    if (mode.value === 'fixed') return Number(slider.value);
    if (mode.value !== 'step') return mode.value;
    return Object.fromEntries(Object.entries(step).map(([key, input]) => [key, Number(input.value)]));
  };
  const read = () => {
    const at = Number(slider.value);
    const point = points.find((item) => Math.abs(item.utility - at) < 0.001);
    put(speed, rate(point?.throughput_bps));
    put(power, watts(point?.power_w));
    const joule = point?.throughput_bps && typeof point.power_w === 'number' ? (point.power_w / point.throughput_bps) * 8e9 : null;
    put(price, joule === null ? NONE : `${joule.toFixed(0)} J / GB`);
    plot.mark(at, point);
    attr(slider, 'aria-valuetext', `${Math.round(at * 100)} %: ${rate(point?.throughput_bps)}, ${watts(point?.power_w)}`);
    slider.disabled = mode.value !== 'fixed';
    stepFields.hidden = mode.value !== 'step';
  };
  const touch = () => {
    touched = true;
    button.disabled = false;
    read();
  };
  slider.addEventListener('input', touch);
  mode.addEventListener('change', touch);
  Object.values(step).forEach((input) => input.addEventListener('input', touch));
  const load = () =>
    get('/v1/tradeoff').then(
      (answer) => {
        points = answer.points;
        plot.show(points);
        read();
      },
      () => {},
    );
  const show = () => {
    put(
      note,
      store.policy && store.policy.scheduler !== 'operetta'
        ? 'Only the scheduler “Thrifty” (operetta) uses this; applying switches to it.'
        : '',
    );
    if (touched) return;
    const setting = store.policy?.utility_setting;
    mode.value = setting?.function ?? 'fixed';
    slider.value = String(store.status?.utility ?? setting?.value ?? 1);
    Object.entries(step).forEach(([key, input]) => {
      input.value = String(setting?.[key] ?? STEP[key]);
    });
    button.disabled = true;
    read();
  };
  load();
  const timer = setInterval(load, REFRESH_MS);
  const fact = (label, value, kind) => h('div', { class: `fact ${kind}` }, h('dt', { text: label }), value);
  const node = card(
    'utility',
    'Speed against energy',
    h(
      'dl',
      { class: 'tradeoff-facts', 'aria-live': 'off' },
      fact('Expected throughput', speed, 'is-speed'),
      fact('Expected power', power, 'is-power'),
      fact('Energy', price, ''),
    ),
    h(
      'div',
      { class: 'tradeoff' },
      plot.node,
      h('label', { class: 'hidden-visually', for: 'alpha', text: 'Utility of throughput (α)' }),
      slider,
      h('p', { class: 'ends' }, h('span', { text: 'least energy' }), h('span', { text: 'most throughput' })),
    ),
    h('div', { class: 'form-grid' }, full('α follows', mode)),
    stepFields,
    note,
    h('div', { class: 'row-actions end' }, button),
  );
  slider.id = 'alpha';
  return { node, show, end: () => clearInterval(timer) };
}

/** Two curves over α, each scaled to its own maximum, and the position of the slider. */
function curves() {
  const [speed, power] = [s('path', { class: 'curve speed' }), s('path', { class: 'curve power' })];
  const line = s('line', { class: 'curve-at', y1: 0, y2: HIGH });
  // Zero-length lines with round caps stay round when the picture is stretched.
  const [onSpeed, onPower] = [s('path', { class: 'curve-dot speed' }), s('path', { class: 'curve-dot power' })];
  const grid = [0.25, 0.5, 0.75, 1].map((share) => s('line', { class: 'curve-grid', x1: PAD, x2: WIDE - PAD, y1: y(share), y2: y(share) }));
  const node = s(
    'svg',
    { viewBox: `0 0 ${WIDE} ${HIGH}`, class: 'curves', 'aria-hidden': 'true', preserveAspectRatio: 'none' },
    grid,
    line,
    speed,
    power,
    onSpeed,
    onPower,
  );
  let peaks = [0, 0];
  const peak = (points, key) => Math.max(0, ...points.map((point) => point[key]).filter((value) => typeof value === 'number'));
  const path = (points, key, most) => {
    const known = points.filter((point) => typeof point[key] === 'number' && most > 0);
    return known.length > 1 ? `M${known.map((point) => `${x(point.utility)},${y(point[key] / most)}`).join('L')}` : '';
  };
  const dot = (node, at, value, most) => {
    attr(node, 'd', typeof value === 'number' && most > 0 ? `M${x(at)},${y(value / most)}h0.01` : null);
  };
  return {
    node,
    show: (points) => {
      peaks = [peak(points, 'throughput_bps'), peak(points, 'power_w')];
      attr(speed, 'd', path(points, 'throughput_bps', peaks[0]));
      attr(power, 'd', path(points, 'power_w', peaks[1]));
    },
    mark: (at, point) => {
      attr(line, 'x1', x(at));
      attr(line, 'x2', x(at));
      dot(onSpeed, at, point?.throughput_bps, peaks[0]);
      dot(onPower, at, point?.power_w, peaks[1]);
    },
  };
}

const x = (utility) => PAD + utility * (WIDE - 2 * PAD);
const y = (share) => HIGH - PAD - share * (HIGH - 2 * PAD);
