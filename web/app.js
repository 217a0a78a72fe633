// The frame of the page: session, connection, header, navigation. Each view is a module with `mount(root)`, which returns a function that unmounts
// it.

import { Stream, get } from './api.js';
import { attr, clear, h, icon, put } from './dom.js';
import { duration, plural, rateParts, watts } from './format.js';
import { connectionLamp, logo, signIn, startSession, themeButton } from './frame.js';
import { refreshPolicy } from './policy.js';
import { linkRates, on, prependSamples, store, take, notify } from './store.js';
import * as adhoc from './adhoc.js';
import * as apps from './apps.js';
import * as clients from './clients.js';
import * as events from './events.js';
import * as flows from './flows.js';
import * as gains from './gains.js';
import * as now from './now.js';
import * as peers from './peers.js';
import * as settings from './settings.js';

const VIEWS = [
  ['now', 'Now', now, 'M3 12h4l3-8 4 16 3-8h4'],
  ['flows', 'Flows', flows, 'M4 7h13m0 0-4-4m4 4-4 4M20 17H7m0 0 4-4m-4 4 4 4'],
  ['apps', 'Apps', apps, 'M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4zM14 14h6v6h-6z'],
  ['clients', 'Clients', clients, 'M3 5h12v9H3zM1 18h16M18 9h4v10h-4z'],
  ['adhoc', 'Radios', adhoc, 'M12 13v8M8.500 9.500a5 5 0 0 1 7 0M5.500 6.500a9 9 0 0 1 13 0M12 13a.010.010 0 1 0 0 .010'],
  ['peers', 'Relays', peers, 'M5 12a2 2 0 1 0 0-.01M19 6a2 2 0 1 0 0-.01M19 18a2 2 0 1 0 0-.01M7 11l10-5M7 13l10 5'],
  ['events', 'Events', events, 'M5 6h14M5 12h14M5 18h9'],
  ['gains', 'Gains', gains, 'M4 20V10m5.5 10V4M15 20v-7m5 7V8'],
  [
    'settings',
    'Settings',
    settings,
    'M4 7h9m5 0h2M4 17h2m5 0h9M15.5 9.5a2.5 2.5 0 1 0 0-5 2.5 2.5 0 0 0 0 5zM8.500 19.500a2.500 2.500 0 1 0 0-5 2.500 2.500 0 0 0 0 5z',
  ],
];

const TITLES = {
  now: 'Now',
  flows: 'Flows',
  apps: 'Applications',
  clients: 'Clients of the gateway',
  adhoc: 'Radios of the ad-hoc device',
  peers: 'Relays and paths',
  events: 'Events',
  gains: 'Gains',
  settings: 'Settings',
};

const main = document.getElementById('main');
let end = null;

function showView() {
  const wanted = location.hash.replace(/^#\/?/, '').split('?')[0] || 'now';
  const [name, , view] = VIEWS.find(([key]) => key === wanted) ?? VIEWS[0];
  end?.();
  clear(main);
  main.dataset.view = name;
  document.title = `${TITLES[name]} · Braid`;
  for (const link of document.querySelectorAll('#nav a')) attr(link, 'aria-current', link.dataset.view === name ? 'page' : null);
  main.append(h('h1', { class: 'hidden-visually', text: TITLES[name] }));
  end = view.mount(main);
  window.scrollTo(0, 0);
}

function buildNav() {
  document.getElementById('nav').append(
    h(
      'ul',
      {},
      VIEWS.map(([name, label, , path]) =>
        h('li', { hidden: HIDDEN.includes(name) }, h('a', { href: `#/${name}`, 'data-view': name, title: TITLES[name] }, icon(path), h('span', { text: label }))),
      ),
    ),
  );
}

/** Views that are in the navigation only if this machine has what they show. */
const HIDDEN = ['clients', 'adhoc'];

function showHidden() {
  const there = [clients.isGateway(), adhoc.hasAdhoc()];
  HIDDEN.forEach((name, place) => {
    document.querySelector(`#nav a[data-view="${name}"]`).parentNode.hidden = !there[place];
  });
}

function buildHeader() {
  const total = (arrow, label) => {
    const [number, unit] = [h('span', { class: 'figure', text: '–' }), h('span', { class: 'unit' })];
    const node = h(
      'div',
      { class: 'total' },
      h('span', { class: 'arrow', 'aria-hidden': 'true', text: arrow }),
      h('span', { class: 'hidden-visually', text: label }),
      number,
      unit,
    );
    return { node, show: (bps) => rateParts(bps).forEach((text, place) => put([number, unit][place], text)) };
  };
  const [down, up] = [total('↓', 'receiving'), total('↑', 'sending')];
  const facts = h('p', { class: 'facts' });
  const connection = connectionLamp(() => stream.open());
  document
    .getElementById('top')
    .append(
      h('a', { class: 'brand', href: '#/now', 'aria-label': 'Braid: go to view Now' }, logo(), h('span', { text: 'Braid' })),
      h('div', { class: 'totals' }, down.node, up.node),
      facts,
      connection.lamp,
      themeButton(() => notify('theme')),
    );
  document.getElementById('top').after(connection.banner);
  on(['status', 'policy'], () => {
    if (!store.status) return;
    put(facts, describe(store.status));
    // Sum of the rates on the links' cards.
    const shown = store.status.links.map((link) => linkRates(link));
    down.show(sum(shown, 'down'));
    up.show(sum(shown, 'up'));
  });
  on(['connection'], () => {
    connection.show(store.connection);
    if (store.connection === 'refused') askForToken();
  });
}

/** Sum of the known values; `null` if none is known. */
function sum(links, key) {
  const known = links.map((link) => link[key]).filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((total, value) => total + value, 0) : null;
}

function describe(status) {
  const power =
    store.samples
      .at(-1)
      ?.links.map((link) => link.power_w)
      .filter((value) => typeof value === 'number') ?? [];
  const battery = status.battery && `${status.battery.plugged ? 'plugged in' : 'battery'} ${Math.round(status.battery.level * 100)} %`;
  return [
    store.policy && !store.mayChange ? 'read only' : null,
    plural(status.flows, 'flow'),
    status.scheduler,
    power.length ? `links use ${watts(power.reduce((total, value) => total + value, 0))}` : null,
    battery,
    status.saving_power ? 'saving power' : null,
    `up ${duration(status.uptime_ms)}`,
  ]
    .filter(Boolean)
    .join('  ·  ');
}

let stream;

function askForToken(problem) {
  end?.();
  end = null;
  signIn(main, 'braid ui', problem);
}

async function start() {
  buildNav();
  buildHeader();
  document.querySelector('.skip').addEventListener('click', (event) => {
    event.preventDefault();
    main.focus();
  });
  const problem = await startSession();
  if (problem) return askForToken(problem);
  on(['policy', 'status'], showHidden);
  on(['connection'], () => {
    if (store.connection !== 'live') return;
    get('/v1/history?resolution=1s').then(
      (answer) => prependSamples('samples', answer.samples),
      () => {},
    );
    refreshPolicy().catch(() => {});
  });
  on(['notes'], () => {
    const { kind, level } = store.notes.at(-1);
    if (level === 'warning') put(document.getElementById('announce'), store.notes.at(-1).text);
    if (kind === 'config') refreshPolicy().catch(() => {});
  });
  stream = new Stream(take, (state, seconds) => {
    store.connection = state;
    store.retryIn = seconds ?? null;
    notify('connection');
  });
  addEventListener('hashchange', showView);
  showView();
}

start();
