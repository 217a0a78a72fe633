// A real daemon in its own network namespace, with three links to a host that serves files and runs a relay. Run it as root under `unshare --net
// --mount`.

import { execFileSync, spawn } from 'node:child_process';
import { createServer, connect } from 'node:net';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { join } from 'node:path';

const SERVER = '198.51.100.1';
const PATIENCE_MS = 60_000;

export const LINKS = ['lab0', 'lab1', 'lab2'];

const CONFIG = `# The lab's three links.
scheduler = "max-throughput"

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

  /** Starts an endless download. */
  download() {
    return this.run('curl', ['--silent', '--output', '/dev/null', `http://${SERVER}:8000/`]);
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
