// The page's copy of the daemon's state. Views read it and are notified of changes; only this module writes it.

const SAMPLES = 330;
const NOTES = 1_000;

export const store = {
  status: null,
  flows: new Map(),
  apps: [],
  peers: [],
  /** Clients of the gateway; `null` until a view has asked for them. */
  clients: null,
  /** The ad-hoc device; `null` until a view has asked for it. */
  adhoc: null,
  notes: [],
  samples: [],
  /** Samples of applications, one a second, like `samples` of links. */
  appSamples: [],
  /** Whether the history of applications was requested. */
  recalled: false,
  /** Current rate of each application's live flows: `{down, up}` in bit/s. */
  appRates: new Map(),
  policy: null,
  config: null,
  /** Whether this session may change settings. */
  mayChange: false,
  connection: 'connecting',
  retryIn: null,
};

const listeners = new Map();

/** Calls `listener` after every change of one of `names`; returns a function that removes it. */
export function on(names, listener) {
  for (const name of names) listeners.set(name, (listeners.get(name) ?? new Set()).add(listener));
  return () => names.forEach((name) => listeners.get(name).delete(listener));
}

export function notify(name) {
  for (const listener of [...(listeners.get(name) ?? [])]) listener(name);
}

/** Latest time that the daemon reported, in Unix milliseconds. The page uses it as its clock, because this device's clock may differ. */
export const now = () => store.samples.at(-1)?.at_ms ?? Date.now();

/** Handles one event of the stream. */
export function take(name, data) {
  if (name === 'flows') takeFlows(data);
  else if (name === 'note') takeNote(data);
  else if (SERIES[name]) takeSample(SERIES[name], data);
  else if (LISTS.includes(name)) store[name] = data[name];
  else store[name] = data;
  if (name === 'status') nameLinks(data.links);
  notify(name === 'note' ? 'notes' : (SERIES[name] ?? name));
}

/** Events and answers that contain a whole list, in a field with their name. */
const LISTS = ['apps', 'peers', 'clients'];

const SERIES = { sample: 'samples', app_sample: 'appSamples' };

let lastTick = null;

function takeFlows({ full, put: rows, gone }) {
  const at = performance.now();
  const seconds = lastTick === null ? null : Math.max((at - lastTick) / 1000, 0.2);
  lastTick = at;
  // A restarted daemon may reuse flow ids.
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
    // A flow that is not in the update has not changed.
    flow.down ??= known(flow.rx_bytes) ? 0 : null;
    flow.up ??= known(flow.tx_bytes) ? 0 : null;
    if (flow.down) flow.down = flow.down < 500 ? 0 : flow.down / 2;
    if (flow.up) flow.up = flow.up < 500 ? 0 : flow.up / 2;
  }
  sumApps();
}

const known = (value) => value !== null && value !== undefined;

/** Bits per second since the last tick, smoothed over two ticks; `null` until there are two counts. */
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

/** Prepends the daemon's history to a series, `samples` or `appSamples`. */
export function prependSamples(series, samples) {
  const first = store[series][0]?.at_ms ?? Infinity;
  store[series] = [...samples.filter((sample) => sample.at_ms < first), ...store[series]].slice(-SAMPLES);
  notify(series);
}

/** Current rates of a link, smoothed by the daemon; those of its newest sample if the daemon reports none. */
export function linkRates({ name, rate_down_bps, rate_up_bps }) {
  const sample = store.samples.at(-1)?.links.find((link) => link.name === name);
  return { down: rate_down_bps ?? sample?.rx_bps ?? null, up: rate_up_bps ?? sample?.tx_bps ?? null };
}

/** Number of link colours. */
export const ACCENTS = 8;

const accents = new Map();

function nameLinks(links) {
  for (const link of links) if (!accents.has(link.name)) accents.set(link.name, accents.size);
}

/** Colour index of a link: constant while the page is open, in the order of device numbers. */
export function accent(name) {
  if (!accents.has(name)) accents.set(name, accents.size);
  return accents.get(name) % ACCENTS;
}
