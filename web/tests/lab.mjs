// A real daemon in its own network namespace, with three links to a host that serves files and runs a relay, a virtual interface, and a phone behind it. Run it as root under `unshare --net
// --mount`.

import { execFileSync, spawn } from 'node:child_process';
import { createServer, connect } from 'node:net';
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { join } from 'node:path';

const SERVER = '198.51.100.1';
const PATIENCE_MS = 60_000;

export const LINKS = ['lab0', 'lab1', 'lab2'];

/** Address of the phone, a client of the gateway. */
export const PHONE = '192.168.7.20';

const CONFIG = `# The lab's three links.
scheduler = "max-throughput"

[gateway]
lan = ["lan0"]

[virtual]
address = "10.99.0.1/24"

${LINKS.map((name) => `[[link]]\nname = "${name}"   # kept\n`).join('\n')}`;

// Sends 200 kB a second until the client closes.
const DRIP = `require('http').createServer((request, response) => {
  const timer = setInterval(() => response.write(Buffer.alloc(20000)), 100);
  response.on('close', () => clearInterval(timer));
}).listen(8000, '${SERVER}')`;

export async function startLab(braid) {
  if (execFileSync('ip', ['-o', 'link']).toString().trim().split('\n').length > 1)
    throw new Error('this namespace has links: run this under unshare --net --mount');
  const lab = new Lab(braid);
  try {
    await lab.start();
  } catch (error) {
    await lab.stop();
    throw error;
  }
  return lab;
}

class Lab {
  constructor(braid) {
    Object.assign(this, { braid, children: [], folder: mkdtempSync('/tmp/braid-ui-'), log: '' });
    this.socket = join(this.folder, 'braid.sock');
    this.config = join(this.folder, 'braid.toml');
  }

  async start() {
    ip('link', 'set', 'lo', 'up');
    const far = this.run('unshare', ['--net', 'sleep', 'infinity']);
    await until('the far namespace', () => namespaceOf(far.pid) !== namespaceOf('self'));
    this.far = (command, ...args) => ['nsenter', ['--target', String(far.pid), '--net', command, ...args]];
    this.farNow = (...args) => execFileSync(...this.far(...args)).toString();
    this.farNow('ip', 'link', 'set', 'lo', 'up');
    this.farNow('ip', 'address', 'add', `${SERVER}/32`, 'dev', 'lo');
    LINKS.forEach((name, place) => {
      ip('link', 'add', name, 'type', 'veth', 'peer', 'name', `far${place}`);
      ip('link', 'set', `far${place}`, 'netns', String(far.pid));
      // A link-local address that appears a second or two later is a network change to Chromium, which then aborts its requests.
      ip('link', 'set', name, 'addrgenmode', 'none');
      ip('address', 'add', `10.77.${place}.2/24`, 'dev', name);
      ip('link', 'set', name, 'up');
      this.farNow('ip', 'address', 'add', `10.77.${place}.1/24`, 'dev', `far${place}`);
      this.farNow('ip', 'link', 'set', `far${place}`, 'up');
      ip('route', 'add', 'default', 'via', `10.77.${place}.1`, 'metric', String(10 + place));
    });
    const phone = this.run('unshare', ['--net', 'sleep', 'infinity']);
    await until('the phone', () => namespaceOf(phone.pid) !== namespaceOf('self'));
    this.phone = (command, ...args) => ['nsenter', ['--target', String(phone.pid), '--net', command, ...args]];
    const atPhone = (...args) => execFileSync(...this.phone('ip', ...args));
    ip('link', 'add', 'lan0', 'type', 'veth', 'peer', 'name', 'phone0');
    ip('link', 'set', 'phone0', 'netns', String(phone.pid));
    ip('link', 'set', 'lan0', 'addrgenmode', 'none');
    ip('address', 'add', '192.168.7.1/24', 'dev', 'lan0');
    ip('link', 'set', 'lan0', 'up');
    atPhone('address', 'add', `${PHONE}/24`, 'dev', 'phone0');
    atPhone('link', 'set', 'phone0', 'up');
    atPhone('route', 'add', 'default', 'via', '192.168.7.1');
    this.run(...this.far(process.execPath, '-e', DRIP));
    this.run(
      ...this.far(this.braid, 'relay', '--listen', `${SERVER}:5757`, '--allow', `${SERVER}/32`, '--state-dir', join(this.folder, 'relay')),
    );
    writeFileSync(this.config, CONFIG);
    const daemon = this.run(this.braid, [
      'daemon',
      '--config',
      this.config,
      '--state-dir',
      join(this.folder, 'state'),
      '--socket',
      this.socket,
      '--ui',
    ]);
    daemon.stderr.on('data', (data) => {
      this.log += data;
    });
    await until(
      'the daemon',
      () => daemon.exitCode === null && this.ask('status').includes('lab2'),
      () => this.log,
    );
    this.server = await door(this.socket);
    this.url = `http://127.0.0.1:${this.server.address().port}`;
  }

  run(command, args) {
    const child = spawn(command, args, { stdio: ['ignore', 'ignore', 'pipe'] });
    child.stderr.resume();
    this.children.push(child);
    return child;
  }

  /** Output of a `braid` command. */
  ask(...args) {
    try {
      return execFileSync(this.braid, [...args, '--socket', this.socket], { stdio: ['ignore', 'pipe', 'ignore'] }).toString();
    } catch {
      return '';
    }
  }

  /** URL of the page over TCP, with a one-time ticket. */
  page() {
    return this.ask('ui', '--print').trim();
  }

  /** Starts a network's controller, and resolves to the URL of its page, with a one-time ticket. */
  async network() {
    const socket = join(this.folder, 'net.sock');
    const options = ['--listen', '127.0.0.1:0', '--state-dir', join(this.folder, 'net'), '--ui', '127.0.0.1:0'];
    this.run(this.braid, ['net', 'controller', '--socket', socket, ...options]);
    await until('the controller', () => existsSync(socket));
    return execFileSync(this.braid, ['net', 'ui', '--print', '--socket', socket], { stdio: ['ignore', 'pipe', 'ignore'] }).toString().trim();
  }

  /** Starts an endless download; `words` are further arguments of curl. */
  download(...words) {
    return this.run('curl', downloading(...words));
  }

  /** The same on the phone. */
  downloadOnPhone() {
    return this.run(...this.phone('curl', ...downloading()));
  }

  invitation() {
    const args = ['relay', 'invite', '--address', `${SERVER}:5757`, '--json', '--state-dir', join(this.folder, 'relay')];
    return /braid1-[a-z0-9]+/.exec(this.farNow(this.braid, ...args))[0];
  }

  /** Cuts the link at its far end, as when a modem enters a tunnel. */
  cut(name) {
    this.farNow('ip', 'link', 'set', `far${LINKS.indexOf(name)}`, 'down');
  }

  async stop() {
    this.server?.close();
    this.ask('down');
    for (const child of this.children.reverse()) child.kill('SIGKILL');
    await sleep(200);
    rmSync(this.folder, { recursive: true, force: true });
  }
}

/** Forwards a free loopback port to the daemon's Unix socket, so that browsers can reach it. */
export async function door(socket) {
  const server = createServer((browser) => {
    const daemon = connect(socket);
    browser.pipe(daemon).pipe(browser);
    browser.on('error', () => daemon.destroy());
    daemon.on('error', () => browser.destroy());
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return server;
}

const downloading = (...words) => ['--silent', '--output', '/dev/null', ...words, `http://${SERVER}:8000/`];
const ip = (...args) => execFileSync('ip', args);
const namespaceOf = (process) => execFileSync('readlink', [`/proc/${process}/ns/net`]).toString();

/** Waits for a condition; a timeout names it. */
export async function until(what, condition, more = () => '') {
  const end = Date.now() + PATIENCE_MS;
  while (!(await condition())) {
    if (Date.now() > end) throw new Error(`timed out after a minute waiting for ${what}. ${more()}`);
    await sleep(100);
  }
}
