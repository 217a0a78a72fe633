// A mock daemon: the API's shapes with made-up, repeatable values, for the page's tests and screenshots.

import { createServer } from 'node:http';
import { readFile } from 'node:fs/promises';
import { createHash } from 'node:crypto';
import { join } from 'node:path';
import { Config } from './mock-config.mjs';
import { changed } from './mock-network.mjs';

const WEB = join(import.meta.dirname, '..');
const TYPES = { html: 'text/html; charset=utf-8', js: 'text/javascript', css: 'text/css', svg: 'image/svg+xml' };
const CSP =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; " +
  "form-action 'none'; frame-ancestors 'none'";

export const EPOCH = Date.UTC(2026, 4, 12, 8, 42, 0);

/** Pseudo-random numbers from 0 to 1, the same for the same seed. */
function dice(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const LINKS = [
  { name: 'eth0', kind: 'wired', index: 2, down: 48e6, up: 12e6, rtt: 11_800, loss: 0.0002, cost: 0, watts: 0.42 },
  { name: 'wlan0', kind: 'wireless', index: 3, down: 31e6, up: 9e6, rtt: 23_400, loss: 0.0061, cost: 0, watts: 0.91 },
  { name: 'wwan0', kind: 'cellular', index: 5, down: 18e6, up: 5e6, rtt: 47_900, loss: 0.012, cost: 2.5, watts: 1.73 },
];

const PROGRAMS = [
  ['/usr/lib/firefox/firefox', 'firefox', 'browser', 443, 9e5],
  ['/usr/bin/curl', 'curl', 'bulk', 443, 8e6],
  ['/opt/zoom/zoom', 'zoom', 'real-time', 8801, 2.4e7],
  ['/usr/bin/ssh', 'ssh', 'unclassified', 22, 4e4],
  ['/usr/bin/rsync', 'rsync', 'bulk', 873, 1.2e8],
  ['/usr/bin/obs', 'obs', 'real-time', 1935, 4.1e8],
  ['/usr/bin/apt-get', 'apt-get', 'bulk', 80, 3.1e7],
  ['<img src=x onerror=alert(1)>', '<script>', 'unclassified', 9999, null],
];

/** Sorts the busiest first, like the daemon. */
const appsSample = (at_ms, apps) => ({
  at_ms,
  apps: apps.sort((a, b) => b.rx_bps + b.tx_bps - a.rx_bps - a.tx_bps).slice(0, 16),
  rest_rx_bps: 0,
  rest_tx_bps: 0,
});

/** A response in the daemon's format. */
const versioned = (content) => ({ schema_version: 1, ...content });

/** Requests with a body that need no right to change anything. */
const READING = ['/v1/explain', '/v1/config/preview'];

/** An event: the answer to `GET` of its name, or a note. */
const payload = (event, data) => (['status', 'apps', 'peers'].includes(event) ? versioned(data) : data);

/**
 * Starts the mock on a loopback port, by default a free one. `live: false` freezes its values. `lan`: the LAN devices of a gateway; `crowd`: number of
 * further clients, with hostile names and a flow each; `own`: the virtual interface, `{reason}` if it does not work; `adhoc`: the ad-hoc device. With a `network`
 * it is a network's controller instead.
 */
export async function startMock({ seed = 1, flows = 42, live = true, readOnly = false, token = null, port = 0, lan = [], crowd = 0, own = null, adhoc = null, network = null } = {}) {
  const mock = new Mock({ seed, flows, readOnly, token, lan, crowd, own, adhoc, network });
  const server = createServer((request, response) =>
    mock.answer(request, response).catch((error) => {
      response.writeHead(500).end(String(error));
    }),
  );
  await new Promise((resolve) => server.listen(port, '127.0.0.1', resolve));
  mock.url = `http://127.0.0.1:${server.address().port}`;
  const timer = setInterval(() => (live ? mock.tick() : mock.send('status', mock.status())), 1000);
  mock.stop = () =>
    new Promise((resolve) => {
      clearInterval(timer);
      mock.drop();
      server.close(resolve);
      server.closeAllConnections();
    });
  mock.port = server.address().port;
  return mock;
}

class Mock {
  constructor({ seed, flows, readOnly, token, lan, crowd, own, adhoc, network }) {
    Object.assign(this, { roll: dice(seed), readOnly, token, crowd, own, adhoc, network, at: EPOCH, listeners: new Set(), posted: [] });
    this.config = new Config(lan, own);
    this.programRules = [];
    this.facts = [{ name: 'battery', value: '0.80', source: 'system' }];
    this.links = LINKS.map((link) => ({ ...link, state: 'up', rx: 0, tx: 0, energy: 0, rx_bps: 0, tx_bps: 0 }));
    this.flows = new Map();
    this.notes = [];
    this.samples = [];
    this.appSamples = [];
    this.nextFlow = 1;
    this.peers = [this.relay('home', 'relay.example.org:5757')];
    for (let count = 0; count < flows; count += 1) this.openFlow();
    this.note('policy', 'info', 'Braid 0.1.0 started with 3 links; scheduler max-throughput');
    this.note('link', 'info', 'wlan0 is up: 192.168.1.23, by way of 192.168.1.1');
    this.note('peer', 'info', 'Relay home is reached over 3 links');
    this.at -= 300_000;
    for (let step = 0; step < 300; step += 1) this.step();
    if (lan.length) this.openClientFlows();
    if (own && !own.reason) this.openOwnFlows();
  }

  setFact({ name, value, for_ms }) {
    this.facts = this.facts.filter((fact) => fact.name !== name);
    if (value !== null) this.facts.push({ name, value, source: 'set', remaining_ms: for_ms ?? null });
    return { message: value === null ? `${name} is cleared` : `${name} is ${value}`, warnings: [] };
  }

  removeRule({ name }) {
    this.programRules = this.programRules.filter((rule) => rule.name !== name);
    return { message: `${name} is removed`, warnings: [] };
  }

  relay(name, address) {
    return {
      name,
      kind: 'relay',
      address,
      state: 'up',
      reason: null,
      paths: LINKS.map((link) => ({
        link: link.name,
        state: 'good',
        rtt_us: link.rtt + 3000,
        cwnd: 120_000,
        rate_bps: link.up * 0.95,
        loss: link.loss,
        queued: 18_200,
        rx_bytes: 8.1e8,
        tx_bytes: 7.7e7,
      })),
    };
  }

  /** Clients of the gateway: the first has a name, and flows. */
  clients() {
    const rule = this.config.model.apps.findIndex((app) => app.match.client === '192.168.7.0/24') + 1 || null;
    const client = (name, address, mac, flows, rate_down_bps, rate_up_bps, idle_ms) => ({
      ...{ name, address, mac, device: this.config.lan[0], flows, rule: address.startsWith('192.168.7.') ? rule : null },
      ...{ rate: rate_down_bps + rate_up_bps, rate_down_bps, rate_up_bps, idle_ms },
    });
    if (!this.config.lan.length) return [];
    return [
      client('television', '192.168.7.20', '02:00:00:00:00:20', 2, 12e6, 3e5, 4000),
      client(null, '192.168.7.21', '02:00:00:00:00:21', 0, 0, 0, 320_000),
      client('television', 'fd07::20', '02:00:00:00:00:20', 0, 0, 0, 65_000),
      ...Array.from({ length: this.crowd }, (_, place) => client(crowdName(place), crowdAddress(place), null, 1, place, 0, 1000 * place)),
    ];
  }

  openClientFlows() {
    const crowd = Array.from({ length: this.crowd }, (_, place) => crowdAddress(place));
    // The address of the third client begins like that of the first.
    ['192.168.7.20', '192.168.7.20', '192.168.7.200', ...crowd].forEach((client, count) => {
      const flow = this.openFlow();
      Object.assign(flow, { application: client, client, name: null, pid: null, user: null, local: `${client}:${50_000 + count}`, fast_path: true });
    });
  }

  /** Flows of programs through the virtual interface. */
  openOwnFlows() {
    for (let count = 0; count < 2; count += 1) {
      const [application, name] = PROGRAMS[1 + count];
      Object.assign(this.openFlow(), { application, name, local: `10.99.0.1:${50_000 + count}`, virtual_interface: 'braid0' });
    }
  }

  ownStatus() {
    if (!this.own) return null;
    const up = !this.own.reason;
    const flows = [...this.flows.values()].filter((flow) => flow.virtual_interface).length;
    const [rate_down_bps, rate_up_bps] = up ? [4_200_000, 310_000] : [null, null];
    return { name: 'braid0', addresses: ['10.99.0.1', 'fd99::1'], up, reason: this.own.reason ?? null, flows, rate_down_bps, rate_up_bps };
  }

  openFlow() {
    const id = this.nextFlow++;
    const [application, name, kind, port, demand] = PROGRAMS[Math.floor(this.roll() ** 1.6 * PROGRAMS.length)];
    const rule = this.config.ruleFor(application);
    const usable = this.links.filter((link) => link.state === 'up' && (!rule?.links || rule.links.includes(link.name)));
    const link = usable[Math.floor(this.roll() ** 1.3 * usable.length)] ?? this.links[0];
    const bonded = kind === 'real-time' && id % 3 === 0;
    const byte = () => Math.floor(this.roll() * 254) + 1;
    this.flows.set(id, {
      id,
      application,
      name,
      protocol: kind === 'real-time' ? 'udp' : 'tcp',
      local: `192.168.1.23:${40000 + (id % 20000)}`,
      remote:
        id % 9
          ? `${[93, 151, 203][id % 3]}.${byte()}.${byte()}.${byte()}:${port}`
          : `[2001:db8:${byte().toString(16)}::${byte().toString(16)}]:${port}`,
      link: link.name,
      carry: bonded ? 'bond' : 'direct',
      scheduler: this.config.model.scheduler,
      rx_bytes: Math.floor(this.roll() * 4e6),
      tx_bytes: Math.floor(this.roll() * 3e5),
      rtt_us: Math.floor(link.rtt * (1 + this.roll() / 3)),
      age_ms: Math.floor(this.roll() * 300_000),
      pid: 2000 + id,
      user: 1000,
      class: kind,
      demand_bytes: demand,
      retransmissions: id % 7 ? 0 : 3,
      delivery_rate_bps: null,
      rule: rule ? 1 : null,
      energy_j: null,
      peer: bonded ? 'home' : null,
      appetite: this.roll() ** 6,
      by_link: bonded
        ? this.links.map((item) => ({ link: item.name, rx_bytes: Math.floor(item.down / 40), tx_bytes: Math.floor(item.up / 60) }))
        : [],
    });
    return this.flows.get(id);
  }

  /** Advances the mock by one second; returns the flows that changed and those that ended. */
  step() {
    this.at += 1000;
    const phase = this.at / 1000;
    this.links.forEach((link, place) => {
      const wave = 0.5 + 0.28 * Math.sin(phase / (37 + 11 * place) + place * 2) + 0.12 * Math.sin(phase / 7 + place) + 0.08 * this.roll();
      link.rx_bps = link.state === 'up' ? Math.round(link.down * Math.max(wave, 0.02)) : 0;
      link.tx_bps = link.state === 'up' ? Math.round(link.up * Math.max(wave * 0.7 - 0.1, 0.01)) : 0;
      link.rx += link.rx_bps / 8;
      link.tx += link.tx_bps / 8;
      link.energy += link.watts * wave;
    });
    this.samples.push(this.sample());
    if (this.samples.length > 300) this.samples.shift();
    const put = [];
    const moved = new Map();
    for (const flow of this.flows.values()) {
      if (flow.appetite < 0.02) continue;
      const [down, up] = [Math.floor(flow.appetite * 900_000 * (0.6 + 0.4 * this.roll())), Math.floor(flow.appetite * 60_000)];
      flow.rx_bytes += down;
      flow.tx_bytes += up;
      put.push(flow);
      const app = moved.get(flow.application) ?? { application: flow.application, rx_bps: 0, tx_bps: 0, flows: 0 };
      moved.set(flow.application, { ...app, rx_bps: app.rx_bps + down * 8, tx_bps: app.tx_bps + up * 8, flows: app.flows + 1 });
    }
    this.appSamples.push(appsSample(this.at, [...moved.values()]));
    if (this.appSamples.length > 300) this.appSamples.shift();
    return put;
  }

  sample() {
    return {
      at_ms: this.at,
      links: this.links.map(({ name, rx_bps, tx_bps, rtt, loss, watts, down }) => ({
        name,
        rx_bps,
        tx_bps,
        rtt_us: rtt,
        loss,
        power_w: Math.round(((watts * rx_bps) / down) * 1000) / 1000,
      })),
    };
  }

  tick() {
    const put = this.step();
    const gone = [];
    if (this.flows.size > 5) {
      const oldest = this.flows.keys().next().value;
      this.flows.delete(oldest);
      gone.push(oldest);
      put.push(this.openFlow());
    }
    this.send('status', this.status());
    this.send('flows', { full: false, put: put.filter((flow) => this.flows.has(flow.id)).map(row), gone });
    this.send('sample', this.samples.at(-1));
    this.send('app_sample', this.appSamples.at(-1));
  }

  note(kind, level, text) {
    const note = { id: this.notes.length + 1, at_ms: this.at, kind, level, text };
    this.notes.push(note);
    this.send('note', note);
  }

  /** A link fails: its flows move or end, and a note reports it. */
  kill(name) {
    this.links.find((link) => link.name === name).state = 'dead';
    const other = this.links.find((link) => link.state === 'up').name;
    const moved = [...this.flows.values()].filter((flow) => flow.link === name);
    moved.forEach((flow) => {
      flow.link = other;
    });
    for (const peer of this.peers) peer.paths.find((path) => path.link === name).state = 'dead';
    this.note('link', 'warning', `${name} went dark; ${moved.length} flows moved to ${other}, 3 ended`);
    this.send('peers', { peers: this.peers });
    this.send('status', this.status());
    this.send('flows', { full: false, put: moved.map(row), gone: [] });
  }

  /** Closes all streams, like a daemon that stops. */
  drop() {
    for (const response of this.listeners) response.destroy();
    this.listeners.clear();
  }

  send(event, data) {
    const text = `event: ${event}\ndata: ${JSON.stringify(payload(event, data))}\n\n`;
    for (const response of this.listeners) response.write(event === 'note' ? `id: ${data.id}\n${text}` : text);
  }

  status() {
    const policy = this.config.policy();
    return {
      version: '0.1.0',
      scheduler: policy.scheduler,
      flows: this.flows.size,
      peers: this.peers,
      interception: 'ebpf',
      uptime_ms: this.at - EPOCH + 8_000_000,
      config: '/etc/braid/braid.toml',
      counters: {},
      battery: { level: 0.72, plugged: false, power_w: 8.4 },
      utility: this.config.model.scheduler === 'operetta' && typeof this.config.model.utility === 'number' ? this.config.model.utility : null,
      saving_power: false,
      warnings: [],
      virtual_interface: this.ownStatus(),
      adhoc: this.adhoc?.name ?? null,
      links: this.links.map((link) => this.linkStatus(link, policy)),
    };
  }

  linkStatus(link, policy) {
    const entry = policy.links.find((item) => item.devices.includes(link.name));
    return {
      name: link.name,
      state: link.state,
      kind: link.kind,
      index: link.index,
      addresses: ['192.168.1.23/24'],
      capacity_down_bps: link.down,
      capacity_up_bps: link.up,
      rtt_us: link.state === 'up' ? link.rtt : null,
      loss: link.state === 'up' ? link.loss : null,
      rx_bytes: Math.round(link.rx),
      tx_bytes: Math.round(link.tx),
      flows: [...this.flows.values()].filter((flow) => flow.link === link.name).length,
      reason: link.state === 'dead' ? 'nothing answers: gateway, last destination' : null,
      role: entry?.role ?? 'normal',
      rate_down_bps: link.rx_bps,
      rate_up_bps: link.tx_bps,
      metered: entry?.metered ?? false,
      cap_bytes: entry?.cap_bytes ?? null,
      used_bytes: entry?.cap_bytes ? 3.4e9 : null,
      energy_j: Math.round(link.energy),
      energy_down_j_per_gb: 240,
      cost_per_gb: link.cost || null,
    };
  }

  apps() {
    return PROGRAMS.slice(0, 7)
      .flatMap(([application, name, kind, port, demand]) => {
        const flows = [...this.flows.values()].filter((flow) => flow.application === application).length;
        return [
          {
            application,
            name,
            port,
            class: kind,
            class_source: kind === 'bulk' ? 'pattern' : 'executable',
            demand_bytes: demand,
            samples: 140 + (port % 97),
            confidence: 0.93,
            age_ms: 42_000,
            rate_down_bps: demand / 3,
            rate_up_bps: demand / 40,
            max_rate_down_bps: demand,
            max_rate_up_bps: demand / 20,
            flows,
            energy_j: demand / 2e5,
          },
        ];
      })
      .concat([PROGRAMS[7].slice(0, 2), ...(this.config.lan.length ? [['192.168.7.20', '192.168.7.20']] : [])].map(unlearnt));
  }

  history(resolution) {
    const [step, count] = { '1s': [1e3, 300], '10s': [1e4, 360], '5m': [3e5, 288], '1h': [36e5, 720] }[resolution];
    if (resolution === '1s') return { resolution_ms: step, samples: this.samples };
    const samples = Array.from({ length: count }, (_, place) => {
      const at = this.at - (count - 1 - place) * step;
      const day = 0.55 + 0.45 * Math.sin(((at / 3_600_000 - 9) / 24) * Math.PI * 2);
      const noise = (seed) => 0.5 + 0.5 * Math.abs((Math.sin(place * 12.9898 + seed * 78.233) * 43758.5453) % 1);
      return {
        at_ms: at,
        links: LINKS.map((link, slot) => ({
          name: link.name,
          rx_bps: Math.round(link.down * 0.6 * day * noise(slot)),
          tx_bps: Math.round(link.up * 0.4 * day * noise(slot + 5)),
          rtt_us: link.rtt,
          loss: link.loss,
          power_w: link.watts * day,
        })),
      };
    });
    return { resolution_ms: step, samples };
  }

  /** History of applications: the last minutes as simulated, before that a share of the links' traffic. */
  appHistory(resolution, application) {
    const { resolution_ms, samples } = this.history(resolution);
    const shares = PROGRAMS.slice(0, 7).map(([name], place) => [name, 0.5 ** (place + 1)]);
    const sum = (links, key) => links.reduce((all, link) => all + link[key], 0);
    const made = samples.map(({ at_ms, links }) =>
      appsSample(
        at_ms,
        shares.map(([name, share]) => ({
          application: name,
          rx_bps: Math.round(sum(links, 'rx_bps') * share),
          tx_bps: Math.round(sum(links, 'tx_bps') * share),
          flows: 3,
        })),
      ),
    );
    const only = (sample) => (application ? { ...sample, apps: sample.apps.filter((app) => app.application === application) } : sample);
    return { resolution_ms, samples: (resolution === '1s' ? this.appSamples : made).map(only) };
  }

  gains(days) {
    return {
      links: LINKS.map(({ name, down, up }) => ({ name, rx_bytes: down * days * 90, tx_bytes: up * days * 40 })),
      flows_moved: 61 * days,
      flows_ended: 7 * days,
      outage_bridged_s: 83 * days,
      energy_j: { actual: 5200 * days, only_one: 6900 * days },
      money: null,
      estimated: true,
    };
  }

  tradeoff() {
    const points = Array.from({ length: 21 }, (_, place) => {
      const utility = place / 20;
      return {
        utility,
        throughput_bps: Math.round(48e6 + 49e6 * utility),
        power_w: Math.round((0.45 + 1.2 * utility + 1.5 * utility ** 3) * 1000) / 1000,
      };
    });
    return { points };
  }

  explain() {
    return {
      subject: 'curl',
      outcome: 'steered',
      link: 'eth0',
      runner_up: 'wlan0',
      reason: 'eth0 would end it first: in 1.90 s, wlan0 in 2.71 s.',
      rule: null,
      rule_text: null,
      scheduler: 'max-throughput',
      class: 'bulk',
      affinity: null,
      demand_bytes: 8e6,
      direction: 'down',
      candidates: this.links.map((link, place) => ({
        link: link.name,
        allowed: true,
        reason: null,
        load_bytes: 3.4e6 * (place + 1),
        capacity_bps: link.down,
        finish_us: 1_900_000 + place * 810_000,
        virtual_start: null,
        rank: place,
        flows: 4,
      })),
    };
  }

  async answer(request, response) {
    const url = new URL(request.url, 'http://mock');
    const json = (value, status = 200, headers = {}) =>
      response
        .writeHead(status, { 'content-type': status < 400 ? 'application/json' : 'application/problem+json', ...headers })
        .end(JSON.stringify(value));
    const problem = (status, title, detail) => json({ type: 'about:blank', title, status, detail }, status);
    if (!url.pathname.startsWith('/v1/')) return this.file(url.pathname, response);
    let body = '';
    for await (const part of request) body += part;
    const sent = body ? JSON.parse(body) : {};
    if (request.method === 'POST') this.posted.push([url.pathname, sent]);
    if (request.method === 'POST' && url.pathname === '/v1/session') {
      if (sent.token !== this.token) return problem(401, 'Unauthorized', 'That is not the token; “braid ui” prints it.');
      return json({ message: 'signed in' }, 200, { 'set-cookie': `braid=${this.token}; HttpOnly; SameSite=Strict; Path=/` });
    }
    if (this.token && !(request.headers.cookie ?? '').includes(`braid=${this.token}`))
      return problem(401, 'Unauthorized', 'A token is needed.');
    if (url.pathname === '/v1/events') return this.stream(response);
    if (this.readOnly && request.method === 'POST' && !READING.includes(url.pathname))
      return problem(403, 'Forbidden', 'This session may only read: open the page with “braid ui” as a member of the group braid.');
    const reply = this.reply(request.method, url, sent);
    if (reply === undefined) return problem(404, 'Not found', url.pathname);
    return reply.problem ? problem(...reply.problem) : json(versioned(reply));
  }

  stream(response) {
    response.writeHead(200, { 'content-type': 'text/event-stream', 'cache-control': 'no-store' });
    this.listeners.add(response);
    response.on('close', () => this.listeners.delete(response));
    const one = (event, data) => response.write(`event: ${event}\ndata: ${JSON.stringify(payload(event, data))}\n\n`);
    one('status', this.status());
    one('flows', { full: true, put: [...this.flows.values()].map(row), gone: [] });
    one('apps', { apps: this.apps() });
    one('peers', { peers: this.peers });
    one('sample', this.samples.at(-1));
    one('app_sample', this.appSamples.at(-1));
    this.notes.slice(-100).forEach((note) => one('note', note));
  }

  reply(method, url, sent) {
    if (this.network) return this.ofController(method, url.pathname, sent);
    const get = {
      '/v1/status': () => this.status(),
      '/v1/policy': () => this.config.policy(),
      '/v1/config': () => this.config.view(),
      '/v1/session': () => ({ may_change: !this.readOnly }),
      '/v1/context': () => ({ facts: this.facts }),
      '/v1/rules': () => ({ rules: this.programRules }),
      '/v1/history': () => this.history(url.searchParams.get('resolution')),
      '/v1/history/apps': () => this.appHistory(url.searchParams.get('resolution'), url.searchParams.get('application')),
      '/v1/gains': () => this.gains(Number(url.searchParams.get('days'))),
      '/v1/tradeoff': () => this.tradeoff(),
      '/v1/notes': () => ({ notes: this.notes }),
      '/v1/clients': () => ({ clients: this.clients() }),
      '/v1/adhoc': () => this.adhoc,
    };
    const post = {
      '/v1/explain': () => this.explain(),
      '/v1/config/preview': () => this.config.preview(sent),
      '/v1/config': () => this.apply(sent),
      '/v1/context': () => this.setFact(sent),
      '/v1/rules': () => this.removeRule(sent),
      '/v1/config/undo': () => this.config.undo(),
      '/v1/join': () => this.join(sent),
      '/v1/leave': () => this.leave(sent),
      '/v1/move': () => ({ message: '1 flow moved', warnings: [] }),
    };
    return (method === 'GET' ? get : post)[url.pathname]?.();
  }

  ofController(method, path, sent) {
    if (path === '/v1/session') return { may_change: !this.readOnly };
    if (path !== '/v1/network') return { problem: [409, 'Not here', 'this socket is that of a network controller'] };
    return method === 'GET' ? this.network : changed(this.network, sent);
  }

  apply(sent) {
    const answer = this.config.apply(sent);
    if (!answer.problem) {
      this.note('config', 'info', `Settings changed: ${answer.changes.join('; ')}`);
      this.send('status', this.status());
    }
    return answer;
  }

  join({ line, name }) {
    if (!line.startsWith('braid1-'))
      return { problem: [422, 'Not an invitation', 'An invitation begins with “braid1-”; copy the whole line.'] };
    this.peers.push(this.relay(name ?? 'relay.example.net', 'relay.example.net:5757'));
    this.send('peers', { peers: this.peers });
    this.note('peer', 'info', `Joined relay ${name}`);
    return { message: `joined ${name ?? 'relay.example.net'}`, warnings: [] };
  }

  leave({ name }) {
    this.peers = this.peers.filter((peer) => peer.name !== name);
    this.send('peers', { peers: this.peers });
    return { message: `left ${name}`, warnings: [] };
  }

  async file(path, response) {
    const first = this.network ? 'network.html' : 'index.html';
    const name = path === '/' ? first : path.replace(/^\/assets\//, '');
    if (!/^[a-z-]+\.(html|js|css|svg)$/.test(name)) return response.writeHead(404).end();
    const data = await readFile(join(WEB, name)).catch(() => null);
    if (!data) return response.writeHead(404).end();
    return response
      .writeHead(200, {
        'content-type': TYPES[name.split('.').at(-1)],
        'content-security-policy': CSP,
        'x-content-type-options': 'nosniff',
        etag: `"${createHash('sha256').update(data).digest('hex').slice(0, 16)}"`,
      })
      .end(data);
  }
}

const row = ({ appetite, ...flow }) => flow;

/** Address and name of the client at this place of the crowd. */
const crowdAddress = (place) => `10.7.${place >> 8}.${place & 255}`;
const crowdName = (place) => (place % 2 ? `${'x'.repeat(58)}-${place}` : `<img src=x onerror="document.title='run'">&quot;\u202e${place}`);

/** An application of which nothing is learnt yet. */
const unlearnt = ([application, name]) => ({
  ...{ application, name, port: null, class: 'unclassified', class_source: null, demand_bytes: null, samples: 0, confidence: null, age_ms: null },
  ...{ rate_down_bps: null, rate_up_bps: null, max_rate_down_bps: null, max_rate_up_bps: null, flows: 2, energy_j: null },
});
