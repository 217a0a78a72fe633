// The page of a network's controller: it draws the network, lists its parts, and changes how hosts move. It asks for the network while it is visible.

import { get } from './api.js';
import { clear, empty, h, put, repeat } from './dom.js';
import { plural } from './format.js';
import { connectionLamp, logo, signIn, startSession, themeButton } from './frame.js';
import { linkMemory, linkName, short, switchState } from './network-names.js';
import { accessTable, hostTable, switchTable } from './network-tables.js';
import { store } from './store.js';
import { topology } from './topology.js';

const REFRESH_MS = 1_000;
/** Time after which a request without an answer counts as a lost connection. */
const SILENCE_MS = 6_000;
/** Opens this page with a token. */
const COMMAND = 'braid net ui';

const main = document.getElementById('main');

function buildHeader(connection) {
  const facts = h('p', { class: 'facts' });
  document
    .getElementById('top')
    .append(h('a', { class: 'brand', href: '/', 'aria-label': 'Braid: network' }, logo(), h('span', { text: 'Braid' })), facts, connection.lamp, themeButton());
  document.getElementById('top').after(connection.banner);
  return facts;
}

/** The views of the network, and what they have in common. */
function buildViews(facts, refresh) {
  const remember = linkMemory();
  const drawing = topology();
  const [switches, accesses, hosts] = [switchTable(), accessTable(), hostTable(refresh)];
  const none = h('div', {});
  const views = h(
    'div',
    { class: 'network' },
    h('section', { class: 'card', 'aria-labelledby': 'topology' }, h('h2', { id: 'topology', text: 'Topology' }), none, drawing.node),
    switches.node,
    accesses.node,
    hosts.node,
  );
  let troubles = null;
  const show = (network) => {
    const links = remember(network.links, performance.now());
    if (views.parentNode !== main) {
      clear(main);
      main.append(h('h1', { class: 'hidden-visually', text: 'Network' }), views);
    }
    const hasSwitches = network.switches.length > 0;
    none.replaceChildren(...(hasSwitches ? [] : [noSwitch(network)]));
    drawing.node.hidden = switches.node.hidden = !hasSwitches;
    for (const view of [drawing, switches, accesses, hosts]) view.show(network, links);
    put(facts, describe(network, links));
    troubles = announce(network, links, troubles);
  };
  return show;
}

const noSwitch = ({ listens }) =>
  empty('No switch yet', `Connect switches to ${listens.join(' or ')}, for example with “ovs-vsctl set-controller br0 tcp:ADDRESS:PORT” (ssl: in place of tcp: if the controller uses TLS).`);

function describe({ switches, accesses, hosts, converged }, links) {
  return [
    store.mayChange ? null : 'read only',
    plural(switches.length, 'switch', 'switches'),
    plural(links.filter((link) => !link.lost).length, 'link'),
    plural(accesses.length, 'access point'),
    plural(hosts.length, 'host'),
    converged ? 'all entries are in place' : 'entries are changing',
  ]
    .filter(Boolean)
    .join('  ·  ');
}

/** Reports new troubles to screen readers; returns all. `before` is `null` at first, when none is new. */
function announce({ switches }, links, before) {
  const now = new Set([
    ...links.filter((link) => link.lost).map((link) => `Link ${linkName(link)} is lost.`),
    ...links.filter((link) => link.small && !link.lost).map((link) => `Link ${linkName(link)} drops packets of 1500 bytes.`),
    ...switches.filter(({ state }) => switchState(state)[1] === 'bad').map(({ datapath, state }) => `Switch ${short(datapath)} is ${switchState(state)[0].toLowerCase()}.`),
  ]);
  const fresh = [...now].filter((text) => before && !before.has(text));
  if (fresh.length) put(document.getElementById('announce'), fresh.join(' '));
  return now;
}

async function start() {
  let state = 'connecting';
  let since = null;
  const connection = connectionLamp(() => refresh());
  const turn = (name) => {
    if (state === name) return;
    state = name;
    connection.show(name);
  };
  const show = buildViews(buildHeader(connection), () => refresh());
  const read = async () => {
    // Rights may differ after a restart.
    if (state !== 'live') store.mayChange = (await get('/v1/session')).may_change;
    return get('/v1/network');
  };
  const refresh = async () => {
    if (since !== null) {
      if (performance.now() - since > SILENCE_MS) turn('lost');
      return;
    }
    if (document.hidden) return;
    since = performance.now();
    const answer = await read().catch((failure) => failure);
    since = null;
    if (!(answer instanceof Error)) {
      turn('live');
      show(answer);
    } else if (answer.status === 401) {
      end();
      turn('refused');
      signIn(main, COMMAND);
    } else {
      turn('lost');
      if (answer.status === 404) main.replaceChildren(empty('No network', answer.message));
    }
  };
  const problem = await startSession();
  if (problem) {
    turn('refused');
    signIn(main, COMMAND, problem);
    return;
  }
  const end = repeat(refresh, REFRESH_MS);
}

start();
