// A table that creates only the visible rows. Rows keep their places while the pointer or the keyboard focus is on them.

import { attr, fresh, h, put } from './dom.js';

const SPARE = 8;
const RESORT_MS = 2_000;

/**
 * `columns`: `{key, label, text(row), sort(row), num, cell(row, node)}`; `cell` fills a cell by itself. A click or Enter calls `open(row)`.
 * `show(rows)` takes all rows that match the filter.
 */
export class Table {
  constructor({ label, columns, key, open, sort }) {
    Object.assign(this, { columns, key, open, order: sort, rows: [], pool: [], active: null, sortedAt: 0, first: 0, version: 0 });
    this.base = fresh('row');
    this.heads = columns.map((column, place) => {
      const button = h('button', { type: 'button', text: column.label, onclick: () => this.sortBy(column.key) });
      return h('div', { role: 'columnheader', class: `c-${column.key}${column.num ? ' num' : ''}`, 'aria-colindex': place + 1 }, button);
    });
    this.spacer = h('div', { class: 'rows', role: 'rowgroup' });
    this.body = h(
      'div',
      { class: 'scroll', tabindex: '0', role: 'grid', 'aria-label': label, 'aria-colcount': columns.length },
      h('div', { role: 'rowgroup', class: 'head' }, h('div', { role: 'row', class: 'tr', 'aria-rowindex': '1' }, this.heads)),
      this.spacer,
    );
    this.node = h('div', { class: 'table' }, this.body);
    this.body.addEventListener('scroll', () => this.plan(), { passive: true });
    this.body.addEventListener('keydown', (event) => this.keydown(event));
    this.body.addEventListener('click', (event) => this.click(event));
    this.body.addEventListener('pointerenter', () => {
      this.held = true;
    });
    this.body.addEventListener('pointerleave', () => {
      this.held = false;
    });
    this.body.addEventListener('focus', () => this.choose(Math.max(this.index(), 0)));
    this.observer = new ResizeObserver(() => this.plan());
    this.observer.observe(this.body);
    this.markHeads();
  }

  end() {
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }

  show(rows) {
    const due = performance.now() - this.sortedAt > RESORT_MS && !this.held && this.body.getAttribute('aria-activedescendant') === null;
    if (due || !this.rows.length || this.force) this.rows = this.sorted(rows);
    else this.rows = this.settled(rows);
    this.force = false;
    this.version += 1;
    attr(this.body, 'aria-rowcount', this.rows.length + 1);
    this.plan();
  }

  /** Sorts the next rows at once, for example after a change of the filter. */
  reorder() {
    this.force = true;
  }

  /** The rows in their former order; new ones last. */
  settled(rows) {
    const now = new Map(rows.map((row) => [this.key(row), row]));
    const kept = this.rows.map((row) => now.get(this.key(row))).filter(Boolean);
    kept.forEach((row) => now.delete(this.key(row)));
    return [...kept, ...now.values()];
  }

  sorted(rows) {
    this.sortedAt = performance.now();
    const column = this.columns.find(({ key }) => key === this.order.key);
    const turn = this.order.down ? -1 : 1;
    const value = new Map(rows.map((row) => [row, column.sort(row)]));
    return [...rows].sort((a, b) => turn * compare(value.get(a), value.get(b), turn) || compare(this.key(a), this.key(b), 1));
  }

  sortBy(key) {
    const column = this.columns.find((item) => item.key === key);
    this.order = this.order.key === key ? { key, down: !this.order.down } : { key, down: Boolean(column.num) };
    this.markHeads();
    this.rows = this.sorted(this.rows);
    this.body.scrollTop = 0;
    this.plan();
  }

  markHeads() {
    this.heads.forEach((head, place) =>
      attr(head, 'aria-sort', this.columns[place].key === this.order.key ? (this.order.down ? 'descending' : 'ascending') : null),
    );
  }

  plan() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    this.high ||= this.measure();
    this.spacer.style.height = `${this.rows.length * this.high}px`;
    const seen = Math.ceil(this.body.clientHeight / this.high) + SPARE * 2;
    this.first = Math.max(0, Math.min(Math.floor(this.body.scrollTop / this.high) - SPARE, this.rows.length - seen));
    const wanted = Math.min(seen, this.rows.length);
    while (this.pool.length < wanted) this.pool.push(this.makeRow());
    this.pool.forEach((slot, place) => {
      // A row keeps its slot while scrolling, so that only rows that become visible are rewritten.
      const at = this.first + ((((place - this.first) % this.pool.length) + this.pool.length) % this.pool.length);
      const row = at < this.first + wanted ? this.rows[at] : undefined;
      slot.node.hidden = !row;
      if (row && (slot.at !== at || slot.row !== row || slot.version !== this.version)) this.fill(slot, row, at);
    });
    this.markActive();
  }

  measure() {
    const probe = this.makeRow();
    const high = probe.node.getBoundingClientRect().height || 40;
    probe.node.remove();
    return high;
  }

  makeRow() {
    const cells = this.columns.map((column, place) =>
      h('div', {
        role: 'gridcell',
        class: `c-${column.key}${column.num ? ' num' : ''}`,
        'aria-colindex': place + 1,
        'data-label': column.label,
      }),
    );
    const node = h('div', { role: 'row', class: 'tr' }, cells);
    this.spacer.append(node);
    return { node, cells };
  }

  fill(slot, row, at) {
    Object.assign(slot, { row, version: this.version });
    if (slot.at !== at) {
      slot.at = at;
      slot.node.id = `${this.base}-${at}`;
      slot.node.style.transform = `translateY(${at * this.high}px)`;
      attr(slot.node, 'aria-rowindex', at + 2);
      slot.node.classList.toggle('odd', at % 2 === 1);
    }
    this.columns.forEach((column, place) => (column.cell ? column.cell(row, slot.cells[place]) : put(slot.cells[place], column.text(row))));
  }

  index() {
    return this.active === null ? -1 : this.rows.findIndex((row) => this.key(row) === this.active);
  }

  choose(at) {
    if (!this.rows.length) return;
    this.active = this.key(this.rows[at]);
    this.markActive();
  }

  markActive() {
    const at = this.index();
    const on = at >= this.first && document.activeElement === this.body;
    this.pool.forEach((slot) => slot.node.classList.toggle('active', on && slot.at === at && !slot.node.hidden));
    attr(this.body, 'aria-activedescendant', on ? `${this.base}-${at}` : null);
  }

  keydown(event) {
    if (event.target !== this.body) return;
    const page = Math.max(Math.floor(this.body.clientHeight / this.high) - 1, 1);
    const at = Math.max(this.index(), 0);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: this.rows.length - 1 }[
      event.key
    ];
    if (event.key === 'Enter' && this.index() >= 0) {
      event.preventDefault();
      this.open(this.rows[this.index()]);
    }
    if (to === undefined) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(to, 0), this.rows.length - 1));
    this.reveal(this.index());
  }

  reveal(at) {
    const [top, head] = [at * this.high, this.heads[0].parentNode.offsetHeight];
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    const low = top + this.high + head - this.body.clientHeight;
    if (low > this.body.scrollTop) this.body.scrollTop = low;
    this.plan();
  }

  click(event) {
    const found = event.target.closest('.rows .tr');
    const slot = found && this.pool.find(({ node }) => node === found);
    if (!slot) return;
    this.choose(slot.at);
    this.open(this.rows[slot.at]);
  }
}

/** Unknown values come last in either sort direction. */
function compare(a, b, turn) {
  const [noA, noB] = [a === null || a === undefined, b === null || b === undefined];
  if (noA || noB) return (Number(noA) - Number(noB)) * turn;
  return a < b ? -1 : a > b ? 1 : 0;
}
