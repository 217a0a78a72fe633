// The view Flows: every live TCP connection and UDP flow.

import { post } from './api.js';
import { clientName, isGateway, knownClient, loadClients } from './clients.js';
import { edit, editClient } from './rules.js';
import { dialog, toast } from './change.js';
import { attr, clean, clear, h, put, select } from './dom.js';
import { NONE, bytes, count, duration, plural, rate, rtt, tail } from './format.js';
import { Table } from './table.js';
import { accent, on, store } from './store.js';

/** Period in which the names of clients are read. */
const NAMES_MS = 15_000;

const age = (flow) => (flow.born === null ? null : performance.now() - flow.born);
const both = (flow) => (flow.down === null && flow.up === null ? null : (flow.down ?? 0) + (flow.up ?? 0));
const linksOf = (flow) => (flow.by_link?.length ? flow.by_link.map((item) => item.link) : [flow.link]);

/** The program of a flow, or the client to which it belongs. */
const whose = (flow) => (flow.client ? clientName(flow.client) : tail(flow.application));

const COLUMNS = [
  {
    key: 'app',
    label: 'Application',
    sort: (flow) => whose(flow).toLowerCase(),
    cell: appCell,
  },
  { key: 'remote', label: 'Destination', sort: (flow) => flow.remote, text: (flow) => flow.remote },
  { key: 'link', label: 'Link', sort: (flow) => linksOf(flow).join(' '), cell: linkCell },
  { key: 'down', label: 'Receiving', num: true, sort: (flow) => flow.down, text: (flow) => rate(flow.down) },
  { key: 'up', label: 'Sending', num: true, sort: (flow) => flow.up, text: (flow) => rate(flow.up) },
  {
    key: 'moved',
    label: 'Moved',
    num: true,
    sort: (flow) => (flow.rx_bytes === null && flow.tx_bytes === null ? null : flow.rx_bytes + flow.tx_bytes),
    text: (flow) => (flow.rx_bytes === null && flow.tx_bytes === null ? NONE : bytes(flow.rx_bytes + flow.tx_bytes)),
  },
  { key: 'rtt', label: 'Round trip', num: true, sort: (flow) => flow.rtt_us, text: (flow) => rtt(flow.rtt_us) },
  { key: 'class', label: 'Class', sort: (flow) => flow.class, text: (flow) => flow.class ?? NONE },
  {
    key: 'carry',
    label: 'Carried',
    sort: (flow) => flow.carry + (flow.peer ?? ''),
    text: (flow) => `${flow.peer ? `${flow.carry}, ${flow.peer}` : flow.carry}${flow.moved_to ? ', moved' : ''}`,
  },
  { key: 'age', label: 'Age', num: true, sort: age, text: (flow) => duration(age(flow)) },
];

function appCell(flow, node) {
  const [name, own] = [whose(flow), flow.virtual_interface];
  const text = `${name}\u0000${own ?? ''}`;
  if (node.shown === text) return;
  node.shown = text;
  attr(node, 'title', flow.client ? `Client ${flow.client}` : own ? `${flow.application}, through the virtual interface ${own}` : flow.application);
  node.replaceChildren(clean(name), ...(own ? [' ', h('span', { class: 'through', text: own })] : []));
}

function linkCell(flow, node) {
  const names = linksOf(flow);
  const text = names.join('\u0000');
  if (node.shown === text) return;
  node.shown = text;
  attr(node, 'title', names.length > 1 ? names.join(', ') : null);
  // More than two names do not fit: show only their colours.
  const few = names.length < 3;
  node.replaceChildren(
    ...names.map((name) => h('span', { class: `tag link-${accent(name)}` }, h('span', { class: 'swatch' }), few && name)),
    ...(few ? [] : [h('span', { class: 'count', text: `${names.length} links` }), h('span', { class: 'hidden-visually', text: `: ${names.join(', ')}` })]),
  );
}

export function mount(root) {
  const search = h('input', {
    type: 'search',
    placeholder: 'Filter: program, address, link…',
    'aria-label': 'Filter flows',
    spellcheck: 'false',
    value: new URLSearchParams(location.hash.split('?')[1]).get('filter') ?? '',
  });
  const link = select([['', 'All links']], '', { 'aria-label': 'Link' });
  const carry = select(
    [
      ['', 'Any carriage'],
      ['direct', 'Direct'],
      ['bond', 'Over several links'],
    ],
    '',
    { 'aria-label': 'Carriage' },
  );
  const said = h('p', { class: 'said' });
  const none = h('p', { class: 'no-rows', hidden: true });
  const table = new Table({ label: 'Flows', columns: COLUMNS, key: (flow) => flow.id, open: openFlow, sort: { key: 'down', down: true } });
  table.node.classList.add('flows');
  root.append(h('div', { class: 'tools' }, search, link, carry, said), h('div', { class: 'card flush' }, table.node, none));
  const show = () => {
    const all = [...store.flows.values()];
    const test = passes(search.value, link.value, carry.value);
    const rows = all.filter(test);
    table.show(rows);
    put(said, rows.length === all.length ? plural(all.length, 'flow') : `${count(rows.length)} of ${plural(all.length, 'flow')}`);
    none.hidden = rows.length > 0;
    put(none, all.length ? 'No flow matches the filter.' : 'No live flows. A flow appears here when a program connects.');
  };
  const showLinks = () => {
    const names = (store.status?.links ?? []).map((item) => item.name);
    if (link.names === names.join('\u0000')) return;
    link.names = names.join('\u0000');
    const chosen = link.value;
    link.replaceChildren(h('option', { value: '', text: 'All links' }), ...names.map((name) => h('option', { value: name, text: name })));
    link.value = names.includes(chosen) ? chosen : '';
  };
  for (const [node, name] of [
    [search, 'input'],
    [link, 'change'],
    [carry, 'change'],
  ]) {
    node.addEventListener(name, () => {
      table.reorder();
      show();
    });
  }
  showLinks();
  show();
  // For the names of clients. New ones appear, and names change.
  const name = () => isGateway() && !document.hidden && loadClients().catch(() => {});
  name();
  const timer = setInterval(name, NAMES_MS);
  const ends = [on(['flows', 'clients'], show), on(['status'], showLinks), on(['policy'], name), () => table.end(), () => clearInterval(timer)];
  return () => ends.forEach((end) => end());
}

/** Whether all words of the filter occur in the texts of the row. */
function passes(text, link, carry) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return (flow) =>
    (!link || linksOf(flow).includes(link)) &&
    (!carry || (carry === 'direct') === (flow.carry === 'direct')) &&
    (!words.length || words.every((word) => (word.startsWith(CLIENT) ? flow.client === word.slice(CLIENT.length) : searchText(flow).includes(word))));
}

/** A word of the filter that begins so names a client by its whole address: that of one client may begin that of another. */
const CLIENT = 'client:';

const searchText = (flow) =>
  `${flow.application} ${flow.name ?? ''} ${flow.client ?? ''} ${flow.virtual_interface ?? ''} ${whose(flow)} ${flow.remote} ${flow.protocol} ${linksOf(flow).join(' ')} ${flow.class ?? ''} ${
    flow.carry
  } ${flow.peer ?? ''} ${flow.pid ?? ''}`.toLowerCase();

// A flow that goes on in UDP.
const isInBond = (flow) => flow.moved_to === 'bond';

const movedText = (flow) =>
  isInBond(flow)
    ? 'its packets go on in UDP, over all links of the bond to its host'
    : `its packets leave over ${flow.moved_to}, with that link’s address`;

const encryptionText = (flow) =>
  flow.carry === 'direct' && !isInBond(flow)
    ? 'Braid adds none: only the program’s own'
    : `Braid encrypts it between this device and ${flow.peer ?? 'the other end'}`;

function openFlow(flow) {
  const why = h('div', { class: 'why' }, h('p', { class: 'hint', text: 'Loading…' }));
  const facts = [
    ...(flow.client
      ? [['Client', [flow.client, clientName(flow.client)].filter((text, place, all) => all.indexOf(text) === place).join(', ')]]
      : [
          ['Program', flow.application],
          ['Process', [flow.name, flow.pid && `number ${flow.pid}`].filter(Boolean).join(', ') || NONE],
        ]),
    ...(flow.virtual_interface ? [['Through', `the virtual interface ${flow.virtual_interface}`]] : []),
    [flow.accepted ? 'Here' : 'From', flow.local ?? NONE],
    [flow.accepted ? 'Opened by' : 'To', flow.remote],
    ['Protocol', flow.protocol.toUpperCase()],
    ['Link', linksOf(flow).join(', ')],
    ...(typeof flow.fast_path === 'boolean' ? [['Fast path', flow.fast_path ? 'its packets take it' : 'not used now']] : []),
    ...(flow.moved_to ? [['Moved', movedText(flow)]] : []),
    ...(flow.late ? [['Queue', 'its packets wait until the link can take them']] : []),
    ['Carriage', flow.peer ? `${flow.carry}, through ${flow.peer}` : flow.carry],
    ['Encryption', encryptionText(flow)],
    ['Scheduler', flow.scheduler],
    ['Received', bytes(flow.rx_bytes)],
    ['Sent', bytes(flow.tx_bytes)],
    ['Expected size', bytes(flow.demand_bytes)],
    ['Retransmitted', flow.retransmissions === null || flow.retransmissions === undefined ? NONE : plural(flow.retransmissions, 'segment')],
    ['Rule', flow.rule ? `the ${ordinal(flow.rule)} rule` : flow.program_rule ? `${flow.program_rule}, of ${flow.program_rule.startsWith('controller:') ? 'the remote controller' : 'a program'}` : 'none matched'],
  ];
  const actions = h(
    'div',
    { class: 'row-actions' },
    h('button', {
      type: 'button',
      text: `Choose links for this ${flow.client ? 'client' : 'program'}…`,
      onclick: () => {
        box.close();
        if (flow.client) editClient(knownClient(flow.client));
        else edit(flow.application, flow.name);
      },
    }),
  );
  const box = dialog(`${whose(flow)} → ${flow.remote}`, [
    h(
      'dl',
      { class: 'facts-list' },
      facts.map(([name, text]) => [h('dt', { text: name }), h('dd', { text })]),
    ),
    flow.by_link?.length ? shares(flow) : null,
    h('h3', { text: 'Why this link' }),
    why,
    actions,
    flow.carry !== 'direct' || (flow.protocol === 'tcp' && !flow.client && !flow.virtual_interface) ? moveForm(flow) : null,
  ]);
  post('/v1/explain', { flow: flow.id }).then(
    (answer) => explain(why, answer),
    (failure) => put(why, failure.message),
  );
}

const ordinal = (place) => ['first', 'second', 'third'][place - 1] ?? `${place}th`;

function shares(flow) {
  const all = flow.by_link.reduce((sum, item) => sum + item.rx_bytes + item.tx_bytes, 0) || 1;
  return h(
    'div',
    { class: 'shares' },
    flow.by_link.map((item) => {
      const bar = h('span', { class: 'bar' });
      bar.style.width = `${((item.rx_bytes + item.tx_bytes) / all) * 100}%`;
      return h(
        'div',
        { class: `share link-${accent(item.link)}` },
        h('span', { text: item.link }),
        h('span', { class: 'track' }, bar),
        h('span', { class: 'num', text: bytes(item.rx_bytes + item.tx_bytes) }),
      );
    }),
  );
}

function explain(why, answer) {
  clear(why);
  why.append(h('p', { text: answer.reason }));
  if (!answer.candidates?.length) return;
  const row = (item) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row', text: item.link }),
      h('td', { class: 'num', text: (item.capacity_assumed ? 'assumed ' : '') + rate(item.capacity_bps) }),
      h('td', { class: 'num', text: bytes(item.load_bytes) }),
      h('td', { class: 'num', text: item.finish_us === null ? NONE : `${(item.finish_us / 1e6).toFixed(2)} s` }),
      h('td', { text: item.allowed ? (item.link === answer.link ? 'chosen' : '') : (item.reason ?? 'not allowed') }),
    );
  why.append(
    h(
      'div',
      { class: 'scroll-x', tabindex: '0', role: 'region', 'aria-label': 'Links considered' },
      h(
        'table',
        { class: 'plain' },
        h(
          'thead',
          {},
          h(
            'tr',
            {},
            ['Link', 'Capacity', 'Load', 'Would finish in', ''].map((text, place) =>
              text ? h('th', { scope: 'col', class: place && place < 4 ? 'num' : null, text }) : h('td'),
            ),
          ),
        ),
        h('tbody', {}, answer.candidates.map(row)),
      ),
    ),
  );
}

/** Form to move a flow that a relay carries to another link. */
function moveForm(flow) {
  const to = select([['', flow.carry === 'direct' ? 'Its own link' : 'All links'], ...(store.status?.links ?? []).map((link) => [link.name, link.name])], '', {
    'aria-label': 'Move to',
  });
  const button = h('button', {
    type: 'button',
    text: 'Move',
    onclick: () => {
      post('/v1/move', { what: String(flow.id), to: to.value || null }).then(
        (answer) => toast(answer.message),
        (failure) => toast(failure.message, true),
      );
    },
  });
  return h('div', { class: 'row-actions' }, h('span', { text: 'Move to' }), to, button);
}
