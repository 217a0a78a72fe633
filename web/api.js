// API client: requests, errors, and the event stream. All access to the daemon goes through this module.

/** A failed request, with the error text of the server if it sent one. */
export class Failure extends Error {
  constructor(status, title, detail) {
    super(detail || title);
    this.status = status;
    this.title = title;
  }
}

async function ask(method, path, body) {
  const options = { method, headers: { accept: 'application/json' }, credentials: 'same-origin', cache: 'no-store' };
  if (body !== undefined) {
    options.headers['content-type'] = 'application/json';
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Failure(0, 'No connection', 'Braid does not answer. Check that the daemon is running.');
  }
  const text = await answer.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    if (answer.ok) throw new Failure(answer.status, 'Unreadable answer', `the answer to ${path} is not JSON`);
  }
  if (answer.ok) return value;
  throw new Failure(answer.status, value?.title ?? answer.statusText, value?.detail ?? `${path}: HTTP status ${answer.status}`);
}

export const get = (path) => ask('GET', path);
export const post = (path, body) => ask('POST', path, body ?? {});

/** Exchanges a token for a session cookie. */
export const openSession = (token) => post('/v1/session', { token });

/** Takes the token that `braid ui` put after `#` out of the address, so that the browser's history does not keep it; `null` without one. */
export function takeToken() {
  const found = /^#token=([A-Za-z0-9._~+/=-]+)$/.exec(location.hash);
  if (!found) return null;
  history.replaceState(null, '', location.pathname);
  return decodeURIComponent(found[1]);
}

const NAMES = ['status', 'flows', 'apps', 'peers', 'note', 'sample', 'app_sample'];
const SILENCE_MS = 6_000;
const LONGEST_WAIT_MS = 10_000;

/** Reads the daemon's events until the page is closed: calls `on(name, data)` for each event, `state(what, secondsToNextTry)` for the connection. */
export class Stream {
  constructor(on, state) {
    this.on = on;
    this.state = state;
    this.wait = 500;
    this.watch = setInterval(() => this.check(), 1000);
    this.open();
  }

  open() {
    clearTimeout(this.retry);
    this.source?.close();
    this.lastEventAt = performance.now();
    this.source = new EventSource('/v1/events');
    for (const name of NAMES) {
      this.source.addEventListener(name, (message) => {
        this.lastEventAt = performance.now();
        if (this.wait !== 500 || !this.live) this.state('live');
        this.live = true;
        this.wait = 500;
        this.on(name, JSON.parse(message.data));
      });
    }
    this.source.onerror = () => this.lost();
  }

  /** The browser reports only closed sockets. This check detects a daemon that hangs, and a laptop that slept. */
  check() {
    if (this.live && performance.now() - this.lastEventAt > SILENCE_MS) this.lost();
  }

  async lost() {
    this.source.close();
    clearTimeout(this.retry);
    this.live = false;
    const wait = this.wait;
    this.wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    this.state('lost', wait / 1000);
    const refused = await get('/v1/status').then(
      () => false,
      (failure) => failure.status === 401,
    );
    if (refused) this.state('refused');
    else this.retry = setTimeout(() => this.open(), wait);
  }

  stop() {
    clearInterval(this.watch);
    clearTimeout(this.retry);
    this.source.close();
  }
}
