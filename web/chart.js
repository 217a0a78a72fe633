// Throughput over time on a canvas: links are stacked; received is above the line, sent below it.

import { h, keyed, put } from './dom.js';
import { NONE, clock, rate, rateParts } from './format.js';
import { accent, on } from './store.js';

const LEFT = 64;
const BOTTOM = 22;
const TOP = 8;
/** Name of the row with the sum in the tooltip; no link or application has this name. */
const TOTAL = '\u0000';

const LINKS = { tint: (name) => `link-${accent(name)}` };

/**
 * A chart of `[{at_ms, links: [{name, rx_bps, tx_bps}]}]`. `show(samples, from, to, step)` takes Unix milliseconds. Applications can be stacked
 * instead of links: `tint(name)` returns the colour of a name, which is a class and a custom property; `title(name)` returns its label.
 */
export class Chart {
  constructor(label, { tint, title = (name) => name } = LINKS) {
    Object.assign(this, { tint, title });
    this.canvas = h('canvas', { class: 'plot', role: 'img', 'aria-label': label, tabindex: '0' });
    this.label = label;
    this.tip = h('div', { class: 'tip', hidden: true });
    this.none = h('p', { class: 'chart-none', text: 'No data recorded in this period yet', hidden: true });
    this.node = h('div', { class: 'chart' }, this.canvas, this.tip, this.none);
    this.data = { samples: [], from: 0, to: 1, step: 1000 };
    this.pointed = null;
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.node);
    this.off = on(['theme'], () => this.draw());
    this.canvas.addEventListener('pointermove', (event) => this.point(event.offsetX));
    this.canvas.addEventListener('pointerleave', () => this.point(null));
    this.canvas.addEventListener('blur', () => this.point(null));
    this.canvas.addEventListener('keydown', (event) => this.key(event));
  }

  end() {
    this.observer.disconnect();
    this.off();
  }

  show(samples, from, to, step) {
    this.data = { samples: samples.filter((sample) => sample.at_ms >= from - step && sample.at_ms <= to), from, to, step };
    this.none.hidden = this.data.samples.length > 0;
    this.draw();
    this.explain();
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const { samples } = this.data;
    if (!samples.length) return;
    const at = this.pointed === null ? samples.length : samples.indexOf(this.nearest(this.pointed));
    const next = samples[Math.min(Math.max(at + move, 0), samples.length - 1)];
    this.point(this.x(next.at_ms));
  }

  point(x) {
    this.pointed = x;
    this.draw();
    this.explain();
  }

  x(at) {
    const { from, to } = this.data;
    return LEFT + ((this.width - LEFT) * (at - from)) / (to - from);
  }

  nearest(x) {
    const { samples, from, to } = this.data;
    const at = from + ((x - LEFT) / (this.width - LEFT)) * (to - from);
    return samples.reduce((best, sample) => (!best || Math.abs(sample.at_ms - at) < Math.abs(best.at_ms - at) ? sample : best), null);
  }

  explain() {
    const sample = this.pointed === null ? null : this.nearest(this.pointed);
    this.tip.hidden = !sample;
    if (!sample) return;
    const all = { name: TOTAL, rx_bps: total(sample, 'rx_bps') ?? 0, tx_bps: total(sample, 'tx_bps') ?? 0 };
    const rows = sample.links.length === 1 ? sample.links : [...sample.links, all];
    if (!this.tip.firstChild) this.tip.append(h('p', { class: 'tip-time' }), h('div', { class: 'tip-rows' }));
    put(this.tip.firstChild, clock(sample.at_ms));
    keyed(
      this.tip.lastChild,
      rows,
      (row) => row.name,
      (row) => {
        const [down, up] = [h('span', { class: 'num' }), h('span', { class: 'num' })];
        const swatch = h('span', { class: row.name === TOTAL ? 'swatch none' : `swatch ${this.tint(row.name)}` });
        const name = row.name === TOTAL ? 'Total' : this.title(row.name);
        return {
          node: h('div', { class: 'tip-row' }, swatch, h('span', { class: 'tip-name', text: name }), down, up),
          show: ({ rx_bps, tx_bps }) => {
            put(down, `↓ ${rate(rx_bps)}`);
            put(up, `↑ ${rate(tx_bps)}`);
          },
        };
      },
    );
    const x = this.x(sample.at_ms);
    const room = this.tip.offsetWidth + 24;
    this.tip.style.left = `${x + room > this.width ? Math.max(x - room + 8, 4) : x + 14}px`;
  }

  draw() {
    const box = this.node.getBoundingClientRect();
    if (!box.width) return;
    const ratio = Math.min(devicePixelRatio || 1, 3);
    this.width = box.width;
    this.height = box.height;
    const [wide, high] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) Object.assign(this.canvas, { width: wide, height: high });
    const pen = this.canvas.getContext('2d');
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    this.colours = colours(this.node);
    const names = this.names();
    const scale = this.scale();
    this.grid(pen, scale);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width - LEFT, this.height - BOTTOM);
    pen.clip();
    for (const run of runs(this.data.samples, this.data.step)) {
      this.area(pen, run, names, 'rx_bps', -scale.perBit, scale.zero);
      this.area(pen, run, names, 'tx_bps', scale.perBit, scale.zero);
    }
    pen.restore();
    this.axis(pen, scale);
    if (this.pointed !== null && this.data.samples.length) this.cross(pen);
    this.describe();
  }

  /** Names of all stacked bands, from the zero line outwards. */
  names() {
    const found = new Set(this.data.samples.flatMap((sample) => sample.links.map((link) => link.name)));
    return [...found].sort((a, b) => (this.tint(a) < this.tint(b) ? -1 : 1));
  }

  /** Position of the zero line, and pixels per bit per second: both halves share one scale. */
  scale() {
    const peak = (key) => Math.max(0, ...this.data.samples.map((sample) => total(sample, key) ?? 0));
    const [down, up] = [Math.max(peak('rx_bps'), 10_000) * 1.08, Math.max(peak('tx_bps'), 5_000) * 1.15];
    const room = this.height - BOTTOM - TOP;
    const share = Math.min(Math.max(down / (down + up), 0.25), 0.9);
    const perBit = Math.min((room * share) / down, (room * (1 - share)) / up);
    return { zero: TOP + room * share, perBit, down: (room * share) / perBit, up: (room * (1 - share)) / perBit };
  }

  grid(pen, { zero, perBit, down, up }) {
    pen.font = `11px ${this.colours.font}`;
    pen.textAlign = 'right';
    pen.textBaseline = 'middle';
    const step = nice(Math.max(down, up) / 5);
    for (let value = -Math.floor(up / step) * step; value <= down; value += step) {
      const y = Math.round(zero - value * perBit) + 0.5;
      pen.strokeStyle = this.colours.grid;
      pen.lineWidth = 1;
      line(pen, LEFT, y, this.width, y);
      pen.fillStyle = this.colours.faint;
      if (Math.abs(value) < step / 2) continue;
      const [figure, unit] = rateParts(Math.abs(value));
      pen.fillText(`${+figure} ${unit}`, LEFT - 8, Math.min(Math.max(y, 7), this.height - BOTTOM - 6));
    }
  }

  axis(pen, { zero }) {
    pen.strokeStyle = this.colours.axis;
    pen.lineWidth = 1;
    line(pen, LEFT, Math.round(zero) + 0.5, this.width, Math.round(zero) + 0.5);
    pen.fillStyle = this.colours.faint;
    pen.textAlign = 'right';
    pen.fillText('0', LEFT - 8, zero);
    pen.textBaseline = 'alphabetic';
    const { from, to } = this.data;
    const gap = timeStep((to - from) / Math.max(Math.floor((this.width - LEFT) / 76), 2));
    const shift = new Date(to).getTimezoneOffset() * 60_000;
    for (let at = Math.ceil((from - shift) / gap) * gap + shift; at <= to; at += gap) {
      const x = this.x(at);
      const label = timeLabel(at, gap);
      const half = pen.measureText(label).width / 2;
      if (x - half < LEFT || x + half > this.width) continue;
      pen.textAlign = 'center';
      pen.fillText(label, x, this.height - 6);
    }
  }

  area(pen, run, names, key, perBit, zero) {
    const base = run.map(() => 0);
    // A line of background colour separates two bands if samples are far enough apart to leave room for it.
    const parted = (this.width - LEFT) * (this.data.step / (this.data.to - this.data.from)) >= 2;
    const x = run.map((sample) => this.x(sample.at_ms));
    for (const name of names) {
      const top = run.map((sample, at) => base[at] + (sample.links.find((link) => link.name === name)?.[key] ?? 0));
      if (top.every((value, at) => value === base[at])) continue;
      pen.beginPath();
      top.forEach((value, at) => pen.lineTo(x[at], zero + value * perBit));
      for (let at = run.length - 1; at >= 0; at -= 1) pen.lineTo(x[at], zero + base[at] * perBit);
      pen.closePath();
      pen.fillStyle = this.colours.read(`--${this.tint(name)}`);
      pen.globalAlpha = key === 'rx_bps' ? 0.82 : 0.55;
      pen.fill();
      pen.globalAlpha = 1;
      if (parted && base.some((value) => value > 0)) {
        pen.beginPath();
        base.forEach((value, at) => pen.lineTo(x[at], zero + value * perBit));
        pen.strokeStyle = this.colours.paper;
        pen.lineWidth = 1;
        pen.stroke();
      }
      top.forEach((value, at) => {
        base[at] = value;
      });
    }
  }

  cross(pen) {
    const x = Math.round(this.x(this.nearest(this.pointed).at_ms)) + 0.5;
    pen.strokeStyle = this.colours.ink;
    pen.lineWidth = 1;
    pen.setLineDash([3, 3]);
    line(pen, x, TOP, x, this.height - BOTTOM);
    pen.setLineDash([]);
  }

  describe() {
    const last = this.data.samples.at(-1);
    const words = last
      ? last.links.map((link) => `${this.title(link.name)} receives ${rate(link.rx_bps)} and sends ${rate(link.tx_bps)}`).join('; ')
      : NONE;
    this.canvas.setAttribute('aria-label', `${this.label}. Latest: ${words}. Use the left and right arrow keys to read other times.`);
  }
}

function line(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

const total = (sample, key) => {
  const known = sample.links.map((link) => link[key]).filter((value) => typeof value === 'number');
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
};

/** Groups samples without gaps between them: gaps are not drawn. */
function runs(samples, step) {
  const found = [];
  for (const sample of samples) {
    const before = found.at(-1)?.at(-1);
    if (before && sample.at_ms - before.at_ms <= step * 3.5) found.at(-1).push(sample);
    else found.push([sample]);
  }
  // A single sample covers the time before it, like all samples.
  return found.map((run) => (run.length > 1 ? run : [{ ...run[0], at_ms: run[0].at_ms - step }, run[0]]));
}

/** The next of 1, 2, 5 times a power of ten. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value) * power;
}

const SECOND = 1000;
const STEPS = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000];
const timeStep = (wanted) => (STEPS.find((step) => step * SECOND >= wanted) ?? STEPS.at(-1)) * SECOND;

function timeLabel(at, gap) {
  if (gap >= 86_400 * SECOND) return new Date(at).toLocaleDateString('en-GB', { day: 'numeric', month: 'short' });
  return gap >= 60 * SECOND ? clock(at).slice(0, 5) : clock(at);
}

function colours(node) {
  const style = getComputedStyle(node);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    font: style.fontFamily,
    grid: read('--grid'),
    axis: read('--axis'),
    faint: read('--ink-2'),
    ink: read('--ink'),
    paper: read('--card'),
    read,
  };
}
