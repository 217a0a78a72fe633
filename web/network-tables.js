// The tables of a controller's network: switches, access points, hosts. The last one has the changes for hosts.

import { post } from './api.js';
import { dialog, mayAct, toast } from './change.js';
import { attr, card, empty, field, h, keyed, put, select } from './dom.js';
import { NONE, count, percent, plural, rate } from './format.js';
import { BUSY, keyOf, linkName, placeName, short, switchState, usedShare } from './network-names.js';

/** Rows of a table; the filter finds others. */
const SHOWN = 300;
/** Ports, links or addresses that are named in a cell. */
const NAMED = 6;

/** A table with columns `[head, cell(item), isNumber]`, where `cell` returns a text or `[text, tone]`. `action(item)` makes the last cell of a row. */
function table(label, columns, action) {
  const style = ([, , isNumber]) => (isNumber ? 'num' : null);
  const rows = h('tbody');
  const heads = columns.map((column) => h('th', { scope: 'col', class: style(column), text: column[0] }));
  const node = h(
    'div',
    { class: 'scroll-x', tabindex: '0', role: 'region', 'aria-label': label },
    h('table', { class: 'plain' }, h('thead', {}, h('tr', {}, heads, action && h('td'))), rows),
  );
  const row = (first) => {
    const cells = columns.map((column, place) => h(place ? 'td' : 'th', { scope: place ? null : 'row', class: style(column) }));
    const part = action?.(first);
    const show = (item) => {
      columns.forEach((column, place) => {
        const [text, tone] = [column[1](item)].flat();
        put(cells[place], text);
        attr(cells[place], 'class', tone ? `tone-${tone}` : style(column));
      });
      part?.show(item);
    };
    return { node: h('tr', { 'data-row': first.key }, cells, part && h('td', { class: 'act' }, part.node)), show };
  };
  return { node, show: (items) => keyed(rows, items.slice(0, SHOWN), ({ key }) => key, row) };
}

function some(texts) {
  const named = texts.length > NAMED ? [...texts.slice(0, NAMED), `${count(texts.length - NAMED)} more`] : texts;
  return named.length ? named.join(', ') : NONE;
}

const SWITCH_COLUMNS = [
  ['Switch', ({ one }) => short(one.datapath)],
  ['State', ({ one }) => switchState(one.state)],
  ['From', ({ one }) => one.peer],
  ['Ports up', ({ one }) => `${count(one.ports.filter((port) => port.up).length)} of ${count(one.ports.length)}`, true],
  ['Entries', ({ one }) => count(one.entries), true],
  ['Links', ({ links }) => presentLinks(links.filter((link) => !link.lost))],
  ['Lost links', ({ links }) => lostLinks(links.filter((link) => link.lost))],
  ['Ports that are down', ({ one }) => some(one.ports.filter((port) => !port.up).map(({ number, name }) => (name ? `${number} ${name}` : `${number}`)))],
];

function presentLinks(links) {
  const names = some(links.map((link) => (link.small ? `${linkName(link)} (small frames only)` : linkName(link))));
  return links.some((link) => link.small) ? [names, 'bad'] : names;
}

const lostLinks = (links) => (links.length ? [some(links.map(linkName)), 'bad'] : NONE);

export function switchTable() {
  const { node, show } = table('Switches of the network', SWITCH_COLUMNS);
  const showAll = ({ switches }, links) => {
    const ends = new Map(switches.map(({ datapath }) => [datapath, []]));
    for (const link of links) new Set([link.one.datapath, link.other.datapath]).forEach((datapath) => ends.get(datapath)?.push(link));
    show(switches.map((one) => ({ key: one.datapath, one, links: ends.get(one.datapath) })));
  };
  return { node: card('switches', 'Switches', node), show: showAll };
}

/** What is reserved from hosts and to hosts, and whether the switch enforces it. */
function reserved({ reserved_up_bps: up, reserved_down_bps: down, enforces_up: of_up, enforces_down: of_down }) {
  if (!up && !down) return NONE;
  const text = `${rate(up)} from, ${rate(down)} to`;
  return (up && !of_up) || (down && !of_down) ? [`${text} (only counted)`, 'warn'] : text;
}

const ACCESS_COLUMNS = [
  ['Access point', ({ one }) => one.id],
  ['Port', ({ one }) => placeName(one.place)],
  ['Kind', ({ one }) => one.kind],
  ['Channel', ({ one }) => one.channel ?? NONE, true],
  ['State', ({ one }) => (one.serves ? ['Up', 'good'] : ['Down', 'bad'])],
  ['Hosts', ({ hosts }) => count(hosts), true],
  ['From hosts', ({ one }) => rate(one.rate_up_bps), true],
  ['To hosts', ({ one }) => rate(one.rate_down_bps), true],
  ['Capacity', ({ one }) => rate(one.capacity_bps), true],
  ['Reserved', ({ one }) => reserved(one), true],
  ['In use', ({ one }) => percent(usedShare(one), 0), true],
  ['Load', ({ one }) => (usedShare(one) === null ? NONE : usedShare(one) > BUSY ? ['Busy', 'warn'] : 'Normal')],
];

export function accessTable() {
  const { node, show } = table('Access points of the network', ACCESS_COLUMNS);
  const section = card('accesses', 'Access points', node);
  const showAll = ({ accesses, hosts }) => {
    section.hidden = !accesses.length;
    const used = new Map();
    for (const place of hosts.flatMap((host) => host.active.map(keyOf))) used.set(place, (used.get(place) ?? 0) + 1);
    show(accesses.map((one) => ({ key: one.id, one, hosts: used.get(keyOf(one.place)) ?? 0 })));
  };
  return { node: section, show: showAll };
}

const HOST_COLUMNS = [
  ['Host', ({ one }) => one.mac],
  ['Addresses', ({ one }) => some(one.addresses)],
  ['Attached at', ({ one }) => some(one.attachments.map(placeName))],
  ['Packets go to', ({ one }) => some(one.active.map(placeName))],
  ['Manager', ({ one }) => one.manager],
  ['Runs Braid', ({ one }) => (one.client ? 'yes' : 'no')],
];

/** `changed` is called after a change. */
export function hostTable(changed) {
  const search = h('input', { type: 'search', placeholder: 'Filter: address, port, manager…', 'aria-label': 'Filter hosts', spellcheck: 'false' });
  const said = h('p', { class: 'said' });
  const none = h('div', {});
  let network = { hosts: [] };
  const { node, show } = table('Hosts of the network', HOST_COLUMNS, () => changeButton((host) => changeHost(host, network, changed)));
  const showAll = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = network.hosts.filter((host) => words.every((word) => searchText(host).includes(word)));
    show(found.map((one) => ({ key: one.mac, one })));
    node.hidden = !found.length;
    none.replaceChildren(...(found.length ? [] : [empty(network.hosts.length ? 'No host matches the filter' : 'No host has sent a packet yet')]));
    put(said, found.length > SHOWN ? `${SHOWN} of ${count(found.length)}: filter to see others` : plural(found.length, 'host'));
  };
  search.addEventListener('input', showAll);
  const take = (answer) => {
    network = answer;
    showAll();
  };
  return { node: card('hosts', 'Hosts', h('div', { class: 'tools' }, search, said), node, none), show: take };
}

const searchText = ({ mac, addresses, attachments, manager, client }) => [mac, ...addresses, ...attachments.map(placeName), manager, client ? 'braid' : ''].join(' ').toLowerCase();

function changeButton(open) {
  let host;
  const node = h('button', { type: 'button', text: 'Change…', onclick: () => open(host) });
  const show = ({ one }) => {
    host = one;
    attr(node, 'aria-label', `Change host ${one.mac}`);
  };
  return { node, show };
}

/** What the managers do, as in the handbook. */
const MANAGERS = {
  hard: 'to the place where the host was seen last',
  hoolock: 'to the new place; the old link is held for a while',
  'n-cast': 'to both places for a while',
  predict: 'as hoolock; a host with a weak signal is asked to go where most went',
  balance: 'as hoolock; hosts are moved away from busy access points',
};

/** A dialog with the changes for a host. */
function changeHost(host, { managers, accesses }, changed) {
  if (!mayAct()) return;
  const problem = h('p', { class: 'problem', role: 'alert', hidden: true });
  const send = async (change) => {
    try {
      const { message, warnings } = await post('/v1/network', { host: host.mac, ...change });
      box.close();
      toast([message, ...(warnings ?? [])].join('. '));
      changed();
    } catch (failure) {
      problem.hidden = false;
      put(problem, failure.message);
    }
  };
  const names = managers.map((name) => [name, MANAGERS[name] ? `${name}: ${MANAGERS[name]}` : name]);
  const manager = select(names, host.manager);
  const there = new Set(host.active.map(keyOf));
  const others = accesses.filter((access) => access.serves && !there.has(keyOf(access.place)));
  const to = select(others.map(accessOption), others[0]?.id);
  const why = !host.client ? 'This host does not run Braid, so it cannot be asked to go to an access point.' : others.length ? null : 'There is no other access point to go to.';
  const box = dialog(`Host ${host.mac}`, [
    form([field('Mobility manager: where its packets go while it moves', manager)], 'Choose', () => send({ manager: manager.value })),
    why ? h('p', { class: 'hint', text: why }) : form([field('Access point', to)], 'Ask it to go there', () => send({ to: to.value })),
    problem,
  ]);
}

const accessOption = (access) => {
  const used = usedShare(access);
  const load = used === null ? '' : `, ${percent(used, 0)} in use`;
  return [access.id, `${access.id} (${access.kind} at ${placeName(access.place)}${load})`];
};

function form(fields, text, send) {
  const node = h('form', {}, fields, h('div', { class: 'row-actions end' }, h('button', { class: 'primary', text })));
  node.addEventListener('submit', (event) => {
    event.preventDefault();
    send();
  });
  return node;
}
