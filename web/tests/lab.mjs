// A living daemon in a network namespace of its own: three links to a host that serves and relays. Run it
// under `unshare --net --mount`, as root.

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

// Sends for as long as somebody listens, 200 kB a second.
const DRIP = `require('http').createServer((request, response) => {
  const timer = setInterval(() => response.write(Buffer.alloc(20000)), 100);
  response.on('close', () => clearInterval(timer));
}).listen(8000, '${SERVER}')`;

export async function startLab(braid) {
  if (execFileSync('ip', ['-o', 'link']).toString().trim().split('\n').length > 1)
    throw new Error('this namespace has links: start under unshare --net --mount');
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
      // An address of its own, a second or two later, is a change of network to Chromium, which gives up what it loads then.
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

  /** What the command line says. */
  ask(...args) {
    try {
      return execFileSync(this.braid, [...args, '--socket', this.socket], { stdio: ['ignore', 'pipe', 'ignore'] }).toString();
    } catch {
      return '';
    }
  }

  /** Where the page is over TCP, with a ticket that is good once. */
  page() {
    return this.ask('ui', '--print').trim();
  }

  /** A download that does not end. */
  download() {
    return this.run('curl', ['--silent', '--output', '/dev/null', `http://${SERVER}:8000/`]);
  }

  invitation() {
    const args = ['relay', 'invite', '--address', `${SERVER}:5757`, '--json', '--state-dir', join(this.folder, 'relay')];
    return /braid1-[a-z0-9]+/.exec(this.farNow(this.braid, ...args))[0];
  }

  /** The link's far end goes away, as a modem in a tunnel does. */
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

/** A way for browsers to the daemon's Unix socket, on a free port of the loopback: bytes, unchanged. */
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

/** Waits for a condition; tells what was waited for. */
export async function until(what, condition, more = () => '') {
  const end = Date.now() + PATIENCE_MS;
  while (!(await condition())) {
    if (Date.now() > end) throw new Error(`${what}: not within a minute. ${more()}`);
    await sleep(100);
  }
}
