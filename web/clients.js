// The view Clients: the devices behind the gateway. The event stream does not have them, so the view asks for them while it is visible.

import { get } from './api.js';
import { attr, empty, h, keyed, put, repeat } from './dom.js';
import { NONE, count, duration, plural, rate, tail } from './format.js';
import { isClient, ruleOf, ruleWords } from './policy.js';
import { editClient } from './rules.js';
import { on, store, take } from './store.js';

const REFRESH_MS = 3_000;
const SHOWN = 300;

/** Whether the configuration has a gateway. */
export const isGateway = () => (store.policy?.lan ?? []).length > 0;

/** Fetches the clients into the store. */
export const loadClients = () => get('/v1/clients').then((answer) => take('clients', answer));

/** The clients by address, and the list that they are from. */
let [byAddress, listed] = [new Map(), null];

/** The client with this address; only its address if it is unknown. There may be thousands of clients, and of flows to name by them. */
export function knownClient(address) {
  if (listed !== store.clients) {
    listed = store.clients;
    byAddress = new Map(listed?.map((client) => [client.address, client]));
  }
  return byAddress.get(address) ?? { address };
}

/** Name of the client with this address, or the address. */
export const clientName = (address) => knownClient(address).name ?? address;

/** What an application is called: the file of a program, or the name of a client. */
export const applicationName = (application) => (isClient(application) ? clientName(application) : tail(application));

export function mount(root) {
  const search = h('input', {
    type: 'search',
    placeholder: 'Filter: name, address, device…',
    'aria-label': 'Filter clients',
    spellcheck: 'false',
  });
  const said = h('p', { class: 'said' });
  const rows = h('tbody');
  const table = clientTable(rows);
  const none = h('div', {});
  root.append(h('div', { class: 'tools' }, search, said), table, none);
  const show = () => {
    const all = isGateway() ? (store.clients ?? []) : [];
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = all.filter((client) => words.every((word) => searchText(client).includes(word))).sort(busiest);
    keyed(rows, found.slice(0, SHOWN), (client) => client.address, clientRow);
    put(said, found.length > SHOWN ? `${SHOWN} of ${count(found.length)}: filter to see others` : plural(found.length, 'client'));
    table.hidden = !found.length;
    none.replaceChildren(...(found.length ? [] : [placeholder(all.length)]));
  };
  const refresh = () => {
    if (isGateway() && !document.hidden) loadClients().catch(() => {});
  };
  search.addEventListener('input', show);
  const ends = [on(['clients'], show), on(['policy'], () => [refresh(), show()]), repeat(refresh, REFRESH_MS)];
  show();
  return () => ends.forEach((end) => end());
}

/** The client with the highest rate first, then the one with the most flows. */
const busiest = (a, b) => b.rate - a.rate || b.flows - a.flows || (a.address < b.address ? -1 : 1);

const searchText = ({ name, address, mac, device }) => `${name ?? ''} ${address} ${mac ?? ''} ${device}`.toLowerCase();

function placeholder(known) {
  if (!isGateway()) {
    return empty('No gateway', 'Name the devices behind which the clients are in the configuration: [gateway] lan = ["eth1"]. Then restart Braid.');
  }
  if (known) return empty('No client matches the filter');
  const behind = store.policy.lan.join(', ');
  const hint = store.clients ? `A device behind ${behind} appears here with its first flow.` : 'The list of clients is loading.';
  return empty('No clients yet', hint);
}

const HEADS = ['Client', 'Address', 'Hardware', 'Device', 'Flows', 'Receiving', 'Sending', 'Last new flow', 'Rule'];
/** Columns with numbers. */
const NUMBERS = [4, 5, 6, 7];
const numeric = (place) => (NUMBERS.includes(place) ? 'num' : null);

function clientTable(rows) {
  return h(
    'section',
    { class: 'card', 'aria-label': 'Clients' },
    h(
      'div',
      { class: 'scroll-x', tabindex: '0', role: 'region', 'aria-label': 'Clients of the gateway' },
      h(
        'table',
        { class: 'plain clients' },
        h(
          'thead',
          {},
          h(
            'tr',
            {},
            HEADS.map((text, place) => h('th', { scope: 'col', class: numeric(place), text })),
            h('td'),
          ),
        ),
        rows,
      ),
    ),
  );
}

function clientRow(first) {
  let client = first;
  const name = h('th', { scope: 'row', class: 'client-name' });
  // Narrow screens have no head.
  const cells = HEADS.slice(1).map((head, place) => h('td', { class: numeric(place + 1), 'data-label': head }));
  const flows = h('a', { href: `#/flows?filter=${encodeURIComponent(`client:${first.address}`)}` });
  cells[3].append(flows);
  const choose = h('button', { type: 'button', text: 'Choose links…', onclick: () => editClient(client) });
  const show = (now) => {
    client = now;
    const { address, mac, device, rate_down_bps, rate_up_bps, idle_ms } = client;
    const label = client.name ?? address;
    put(name, client.name ?? NONE);
    attr(name, 'title', client.name);
    attr(choose, 'aria-label', `Choose links for ${label}`);
    attr(flows, 'aria-label', `${plural(client.flows, 'flow')} of ${label}`);
    put(flows, count(client.flows));
    // The rule for this client alone, else one that names others, too.
    const [own, other] = [store.policy?.apps[ruleOf(client)], store.policy?.apps[client.rule - 1]];
    const texts = [address, mac ?? NONE, device, null, rate(rate_down_bps), rate(rate_up_bps), `${duration(idle_ms)} ago`];
    [...texts, own ? ruleWords(own) : other ? `${ruleWords(other)} (rule ${client.rule})` : 'none'].forEach((text, place) => text !== null && put(cells[place], text));
  };
  return { node: h('tr', { 'data-client': first.address }, name, cells, h('td', {}, choose)), show };
}
