// What the page knows of the daemon. Views read it and are told what changed; nobody else writes it.

const SAMPLES = 330;
const NOTES = 1_000;

export const store = {
  status: null,
  flows: new Map(),
  apps: [],
  peers: [],
  notes: [],
  samples: [],
  /** What applications moved, second by second, as `samples` tells of links. */
  appSamples: [],
  /** Whether the daemon was asked what applications moved before. */
  recalled: false,
  /** What the living flows of each application move now: `{down, up}` in bit/s. */
  appRates: new Map(),
  policy: null,
  config: null,
  /** Whether this session may change anything. */
  mayChange: false,
  connection: 'connecting',
  retryIn: null,
};

const listeners = new Map();

/** Calls `listener` after every change of one of `names`; gives what ends that. */
export function on(names, listener) {
  for (const name of names) listeners.set(name, (listeners.get(name) ?? new Set()).add(listener));
  return () => names.forEach((name) => listeners.get(name).delete(listener));
}

export function tell(name) {
  for (const listener of [...(listeners.get(name) ?? [])]) listener(name);
}

/** The newest moment the daemon spoke of, in Unix milliseconds: the page's clock, whatever this device's says. */
export const now = () => store.samples.at(-1)?.at_ms ?? Date.now();

/** Takes one event of the stream. */
export function take(name, data) {
  if (name === 'flows') takeFlows(data);
  else if (name === 'note') takeNote(data);
  else if (SERIES[name]) takeSample(SERIES[name], data);
  else if (LISTS.includes(name)) store[name] = data[name];
  else store[name] = data;
  if (name === 'status') nameLinks(data.links);
  tell(name === 'note' ? 'notes' : (SERIES[name] ?? name));
}

/** Events that hold a whole list, under its own name. */
const LISTS = ['apps', 'peers'];

const SERIES = { sample: 'samples', app_sample: 'appSamples' };

let lastTick = null;

function takeFlows({ full, put: rows, gone }) {
  const at = performance.now();
  const seconds = lastTick === null ? null : Math.max((at - lastTick) / 1000, 0.2);
  lastTick = at;
  // A daemon that was started anew may give old numbers to new flows.
  const old = full ? new Map() : store.flows;
  if (full) store.flows = new Map();
  const moved = new Set();
  for (const row of rows) {
    const before = old.get(row.id);
    row.down = speed(row.rx_bytes, before?.rx_bytes, seconds, before?.down);
    row.up = speed(row.tx_bytes, before?.tx_bytes, seconds, before?.up);
    row.born = row.age_ms === null || row.age_ms === undefined ? null : (before?.born ?? at - row.age_ms);
    store.flows.set(row.id, row);
    moved.add(row.id);
  }
  for (const id of gone ?? []) store.flows.delete(id);
  for (const flow of store.flows.values()) {
    if (moved.has(flow.id)) continue;
    // What is not sent again has not changed.
    flow.down ??= known(flow.rx_bytes) ? 0 : null;
    flow.up ??= known(flow.tx_bytes) ? 0 : null;
    if (flow.down) flow.down = flow.down < 500 ? 0 : flow.down / 2;
    if (flow.up) flow.up = flow.up < 500 ? 0 : flow.up / 2;
  }
  sumApps();
}

const known = (value) => value !== null && value !== undefined;

/** Bits per second since the last tick, smoothed over two; `null` while only one count is known. */
function speed(bytes, before, seconds, smooth) {
  if (!known(bytes) || !known(before) || seconds === null) return null;
  const raw = (Math.max(bytes - before, 0) * 8) / seconds;
  return known(smooth) ? (raw + smooth) / 2 : raw;
}

function sumApps() {
  store.appRates = new Map();
  for (const flow of store.flows.values()) {
    const sum = store.appRates.get(flow.application) ?? { down: 0, up: 0 };
    store.appRates.set(flow.application, sum);
    sum.down += flow.down ?? 0;
    sum.up += flow.up ?? 0;
  }
}

function takeNote(note) {
  if (store.notes.some((known) => known.id === note.id && known.at_ms === note.at_ms)) return;
  store.notes.push(note);
  if (store.notes.length > NOTES) store.notes.splice(0, store.notes.length - NOTES);
}

function takeSample(series, sample) {
  const known = store[series];
  if (sample.at_ms <= (known.at(-1)?.at_ms ?? 0)) return;
  known.push(sample);
  if (known.length > SAMPLES) known.splice(0, known.length - SAMPLES);
}

/** Puts what the daemon remembers of a series, `samples` or `appSamples`, before what was heard since. */
export function prependSamples(series, samples) {
  const first = store[series][0]?.at_ms ?? Infinity;
  store[series] = [...samples.filter((sample) => sample.at_ms < first), ...store[series]].slice(-SAMPLES);
  tell(series);
}

/** What a link moves now, smoothed by the daemon; its newest sample where that says nothing. */
export function linkRates({ name, rate_down_bps, rate_up_bps }) {
  const sample = store.samples.at(-1)?.links.find((link) => link.name === name);
  return { down: rate_down_bps ?? sample?.rx_bps ?? null, up: rate_up_bps ?? sample?.tx_bps ?? null };
}

/** The number of colours that links are told apart by. */
export const ACCENTS = 8;

const accents = new Map();

function nameLinks(links) {
  for (const link of links) if (!accents.has(link.name)) accents.set(link.name, accents.size);
}

/** A link's colour: the same one while the page lives, in the order of the devices' numbers. */
export function accent(name) {
  if (!accents.has(name)) accents.set(name, accents.size);
  return accents.get(name) % ACCENTS;
}
