// A real daemon with real programs in the emulated network of `braid-lab hold`: three links, a server, a relay, devices behind the daemon's host. Needs root.

import { execFileSync, spawn } from 'node:child_process';
import { chmodSync, mkdirSync, mkdtempSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { launch } from './browser.mjs';
import { door, until } from './lab.mjs';

const LINKS = ['wlan0=12 Mbit/s, 26 ms', 'eth0=9 Mbit/s, 12 ms', 'wwan0=5 Mbit/s, 52 ms'];
/** The devices behind the host, by the names that they give. */
const DEVICES = ['television', 'till', 'camera'];
const RELAY = '203.0.113.30:5757';

const CONFIG = `# Links and rules of this laptop.
scheduler = "max-throughput"
# Do not probe other hosts for Braid.
detect = false

[gateway]
lan = ["lan0"]

[virtual]
address = "10.99.0.1/24"

[[link]]
name = "eth0"
energy = "ethernet"

[[link]]
name = "wlan0"
energy = "wifi"

[[link]]
name = "wwan0"
energy = "lte"
metered = true       # the SIM of the office
cap = "10 GB"
cost_per_gb = 2.5

# Calls use all links at once, so that a call survives the loss of a link.
[[app]]
match = { name = "call" }
class = "real-time"
carry = "bond"
relay = "home"

[[app]]
match = { exe = "/usr/bin/git" }
prefer = ["eth0", "wlan0"]
`;

/** A program that emulates a call: it sends 600 bytes every 10 ms to a server that echoes them. */
const CALL = `process.title = 'call';
const socket = require('dgram').createSocket('udp4').on('message', () => {}).on('error', () => {});
setInterval(() => socket.send(Buffer.alloc(600), 7, process.argv[1]), 10);`;

/** Starts everything, and resolves when every link is up and the relay is reached over each. */
export async function startHeld(braid, braidLab) {
  const held = new Held(braid);
  try {
    await held.start(braidLab);
  } catch (error) {
    await held.stop();
    throw error;
  }
  return held;
}

class Held {
  constructor(braid) {
    Object.assign(this, { braid, children: [], folder: mkdtempSync('/tmp/braid-pictures-'), log: '', going: true });
    this.socket = join(this.folder, 'braid.sock');
  }

  async start(braidLab) {
    this.lab = spawn(braidLab, ['hold', '--lan', String(DEVICES.length), ...LINKS], { stdio: ['pipe', 'pipe', 'inherit'] });
    const said = createInterface({ input: this.lab.stdout })[Symbol.asyncIterator]();
    const next = async () => (await said.next()).value ?? '';
    this.files = join((await next()).replace('ready ', ''), 'web/files');
    this.client = (await next()).replace('client: nsenter ', '');
    this.server = (await next()).replace('server: nsenter ', '');
    this.devices = [];
    for (const name of DEVICES) {
      const [address, where] = (await next()).split(': nsenter ');
      this.devices.push({ name, address, where });
    }
    this.publish();
    const state = join(this.folder, 'relay');
    this.run(this.server, this.braid, 'relay', '--listen', RELAY, '--allow', '203.0.113.0/24', '--state-dir', state);
    writeFileSync(join(this.folder, 'braid.toml'), CONFIG);
    const places = ['--config', join(this.folder, 'braid.toml'), '--state-dir', join(this.folder, 'state'), '--socket', this.socket];
    // As dnsmasq writes them, visible to the daemon alone.
    const leases = this.devices.map(({ name, address }) => `1 * ${address} ${name} *`).join('\n');
    const hide = 'mkdir -p /var/lib/misc && mount -t tmpfs none /var/lib/misc && echo "$0" >/var/lib/misc/dnsmasq.leases && exec "$@"';
    const daemon = this.run(this.client, 'unshare', '--mount', 'sh', '-c', hide, leases, this.braid, 'daemon', ...places);
    daemon.stderr.on('data', (data) => {
      this.log += data;
    });
    await until(
      'three links that are up',
      () => daemon.exitCode === null && this.links().filter((link) => link.state === 'up').length === 3,
      () => this.log,
    );
    const invite = ['nsenter', this.server, this.braid, 'relay', 'invite', '--address', RELAY, '--json', '--state-dir', state];
    const line = /braid1-[a-z0-9]+/.exec(execFileSync(invite[0], invite.slice(1)).toString())[0];
    this.ask('join', line, '--name', 'home');
    await until('three paths to the relay', () => this.reached() === 3, () => this.log);
    this.door = await door(this.socket);
    this.url = `http://127.0.0.1:${this.door.address().port}`;
  }

  /** Content of the server: sparse files, a page of pictures, a repository. */
  publish() {
    for (const size of [250_000, 1_500_000, 12_000_000, 4_000_000_000]) {
      const file = join(this.files, `${size}.bin`);
      writeFileSync(file, '');
      truncateSync(file, size);
    }
    const pictures = Array.from({ length: 40 }, (_, number) => `${number}.svg`);
    for (const name of pictures)
      writeFileSync(join(this.files, name), `<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><!--${'x'.repeat(30_000)}--></svg>`);
    writeFileSync(join(this.files, 'page.html'), `<!doctype html><title>page</title>${pictures.map((name) => `<img src="${name}">`).join('')}`);
    const work = join(this.folder, 'work');
    mkdirSync(work);
    writeFileSync(join(work, 'data'), Buffer.from(Array.from({ length: 2_000_000 }, (_, at) => (at * at) >> 7)));
    const git = (...words) => execFileSync('git', ['-c', 'user.name=lab', '-c', 'user.email=lab@example.org', '-C', work, ...words]);
    git('init', '-q');
    git('add', '.');
    git('commit', '-q', '-m', 'data');
    const bare = join(this.files, 'repository.git');
    git('clone', '-q', '--bare', work, bare);
    execFileSync('git', ['-C', bare, 'update-server-info']);
  }

  /** Starts the programs of a typical user; they run until the end. */
  async play() {
    const url = (host, size) => `http://203.0.113.${host}/${size}.bin`;
    const curl = (...words) => ['curl', '-sS', '-o', '/dev/null', ...words];
    this.again(0, () => curl('--limit-rate', '900k', url(10, 4_000_000_000)));
    this.again(0, () => curl('--limit-rate', '300k', url(11, 4_000_000_000)));
    this.again(900, (turn) => curl(url(12 + (turn % 6), 250_000)));
    this.again(2500, (turn) => curl(url(14 + (turn % 4), 1_500_000)));
    const aria = ['--quiet', '--allow-overwrite=true', '--file-allocation=none', '--max-overall-download-limit=350K', '-x4', '-s4'];
    this.again(500, () => curl('--interface', 'braid0', '--limit-rate', '100k', url(23, 1_500_000)));
    const [television, till, camera] = this.devices.map(({ where }) => where);
    this.again(0, () => curl('--limit-rate', '250k', url(19, 4_000_000_000)), television);
    this.again(3000, (turn) => curl(url(12 + (turn % 6), 250_000)), till);
    this.again(0, () => curl('--limit-rate', '60k', url(18, 4_000_000_000)), camera);
    this.again(4000, () => ['aria2c', ...aria, '-d', this.folder, '-o', 'image', url(20, 12_000_000)]);
    this.again(9000, (turn) => ['git', 'clone', '-q', 'http://203.0.113.22/repository.git', join(this.folder, `clone${turn}`)]);
    this.run(this.client, process.execPath, '-e', CALL, '203.0.113.25');
    const wrapper = join(this.folder, 'chromium');
    writeFileSync(wrapper, `#!/bin/sh\nexec nsenter ${this.client} ${process.env.CHROMIUM ?? '/usr/bin/chromium'} "$@"\n`);
    chmodSync(wrapper, 0o755);
    this.reader = await launch(wrapper);
    const page = await this.reader.newPage();
    this.reading = (async () => {
      for (let turn = 0; this.going; turn += 1) {
        await page.goto(`http://203.0.113.${26 + (turn % 3)}/page.html`).catch(() => {});
        await sleep(3000);
      }
    })();
  }

  /** Runs a command repeatedly, with a pause between runs, on the host or on a device. */
  async again(pause, command, where = this.client) {
    for (let turn = 0; this.going; turn += 1) {
      const child = this.run(where, ...command(turn));
      await new Promise((resolve) => child.on('close', resolve));
      await sleep(pause + 200);
    }
  }

  run(where, ...command) {
    const child = spawn('nsenter', [where, ...command], { stdio: ['ignore', 'ignore', 'pipe'] });
    child.stderr.resume();
    this.children.push(child);
    child.on('close', () => this.children.splice(this.children.indexOf(child), 1));
    return child;
  }

  ask(...words) {
    try {
      return execFileSync(this.braid, [...words, '--socket', this.socket], { stdio: ['ignore', 'pipe', 'pipe'] }).toString();
    } catch (error) {
      this.log += error.stderr ?? error;
      return '';
    }
  }

  status() {
    return JSON.parse(this.ask('status', '--json') || '{"links":[],"peers":[]}');
  }

  links() {
    return this.status().links;
  }

  state(name) {
    return this.links().find((link) => link.name === name)?.state;
  }

  reached() {
    return (this.status().peers[0]?.paths ?? []).filter((path) => path.state === 'good').length;
  }

  /** A link fails silently, as a modem in a tunnel does, or comes back. */
  async turn(name, dark) {
    this.lab.stdin.write(`${dark ? 'dark' : 'bright'} ${name}\n`);
    await until(`${name} is noticed`, () => (this.state(name) === 'up') !== dark, () => this.log);
  }

  async stop() {
    this.going = false;
    await this.reader?.close().catch(() => {});
    this.door?.close();
    this.ask('down');
    for (const child of [...this.children].reverse()) child.kill('SIGKILL');
    await this.reading;
    this.lab?.stdin.end();
    await new Promise((resolve) => (this.lab && this.lab.exitCode === null ? this.lab.on('exit', resolve) : resolve()));
    rmSync(this.folder, { recursive: true, force: true });
  }
}
