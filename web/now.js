// The view Now: the current state of every link, and its recent past.

import { attr, empty, h, keyed, put } from './dom.js';
import { NONE, bytes, count, joules, loss, number, plural, rate, rateParts, rtt, state, watts } from './format.js';
import { accent, linkRates, on, store } from './store.js';
import { byApplication, byLink, timeline } from './timeline.js';

const STACKS = [
  ['Links', byLink, false],
  ['Programs', byApplication, true],
];

export function mount(root) {
  const chart = timeline('Throughput over time', byLink());
  const stacks = STACKS.map(([text, source, named], place) =>
    h('button', {
      type: 'button',
      text,
      'aria-pressed': String(place === 0),
      onclick: () => {
        stacks.forEach((button, other) => attr(button, 'aria-pressed', String(other === place)));
        chart.show(source(), named);
      },
    }),
  );
  const links = h('div', { class: 'links' });
  const own = h('div', { class: 'links' });
  const ownSection = h(
    'section',
    { 'aria-labelledby': 'own-title', hidden: true },
    h('h2', { id: 'own-title', class: 'section-title', text: 'Virtual interface' }),
    own,
  );
  const warnings = h('ul', { class: 'warnings', hidden: true });
  root.append(
    warnings,
    h(
      'section',
      { class: 'card', 'aria-labelledby': 'throughput' },
      h(
        'div',
        { class: 'card-head' },
        h('h2', { id: 'throughput', text: 'Throughput' }),
        h('p', { class: 'legend', text: 'received above the line, sent below' }),
        h('div', { class: 'segmented', role: 'group', 'aria-label': 'Stacked by' }, stacks),
        chart.spans,
      ),
      chart.legend,
      chart.node,
    ),
    h('section', { 'aria-labelledby': 'links-title' }, h('h2', { id: 'links-title', class: 'section-title', text: 'Links' }), links),
    ownSection,
  );
  const showLinks = () => {
    const found = store.status?.links ?? [];
    keyed(
      links,
      found.length ? found : [null],
      (link) => link?.name ?? '',
      (link) => (link ? card(link) : nothing()),
    );
    const device = store.status?.virtual_interface;
    ownSection.hidden = !device;
    keyed(own, device ? [device] : [], ({ name }) => name, ownCard);
    const said = store.status?.warnings ?? [];
    warnings.hidden = !said.length;
    keyed(
      warnings,
      said,
      (text) => text,
      (text) => ({ node: h('li', { text }) }),
    );
  };
  showLinks();
  const off = on(['status'], showLinks);
  return () => {
    off();
    chart.end();
  };
}

function nothing() {
  return {
    node: empty(
      store.status ? 'No links' : 'Waiting for Braid',
      store.status ? 'No interface of this machine has a default route.' : 'The first values arrive within a second.',
    ),
  };
}

const KINDS = { wired: 'Wired', wireless: 'Wi-Fi', cellular: 'Cellular', vpn: 'VPN', virtual: 'Virtual' };

function fact(label, title) {
  const value = h('dd', { text: NONE });
  return { node: h('div', { class: 'fact', title }, h('dt', { text: label }), value), value };
}

function gauge(arrow, word) {
  const [figure, unit, of] = [h('span', { class: 'figure' }), h('span', { class: 'unit' }), h('span', { class: 'of' })];
  const bar = h('span', { class: 'bar' });
  const node = h(
    'div',
    { class: 'gauge' },
    h(
      'p',
      {},
      h('span', { class: 'arrow', 'aria-hidden': 'true', text: arrow }),
      h('span', { class: 'hidden-visually', text: word }),
      figure,
      unit,
      of,
    ),
    h('div', { class: 'track' }, bar),
  );
  return {
    node,
    show: (bps, capacity, unlimited = 'capacity unknown') => {
      const [text, word] = rateParts(bps);
      put(figure, text);
      put(unit, word);
      put(of, capacity ? `of ${rate(capacity)}` : unlimited);
      bar.style.width = `${capacity && bps ? Math.min((bps / capacity) * 100, 100) : 0}%`;
    },
  };
}

function card(first) {
  const [down, up] = [gauge('↓', 'receives'), gauge('↑', 'sends')];
  const facts = {
    rtt: fact('Round trip'),
    loss: fact('Loss', 'Share of retransmitted segments'),
    cost: fact('Cost', 'Price of a gigabyte'),
    flows: fact('Flows'),
    power: fact('Power', 'Current power of its traffic, above idle'),
    energy: fact('Energy', 'Energy of its traffic since Braid started'),
    received: fact('Received', 'Since Braid started'),
    sent: fact('Sent', 'Since Braid started'),
  };
  const [pill, reason] = [h('span', { class: 'pill' }), h('p', { class: 'reason' })];
  const allowance = h(
    'div',
    { class: 'allowance', hidden: true },
    h('span', { class: 'track' }, h('span', { class: 'bar' })),
    h('span', { class: 'hint' }),
  );
  const node = h(
    'article',
    { class: `card link link-${accent(first.name)}`, 'aria-label': `Link ${first.name}`, 'data-link': first.name },
    h(
      'div',
      { class: 'link-head' },
      h('h3', { text: first.name }),
      h('span', { class: 'kind', text: KINDS[first.kind] ?? first.kind }),
      pill,
    ),
    reason,
    h('div', { class: 'gauges' }, down.node, up.node),
    h(
      'dl',
      { class: 'fact-grid' },
      Object.values(facts).map((item) => item.node),
    ),
    allowance,
  );
  const show = (link) => {
    const sample = store.samples.at(-1)?.links.find((item) => item.name === link.name);
    const [word, tone] = state(link.state);
    put(pill, word);
    attr(pill, 'data-tone', tone);
    put(reason, link.reason ?? '');
    const rates = linkRates(link);
    down.show(rates.down, link.capacity_down_bps);
    up.show(rates.up, link.capacity_up_bps);
    put(facts.rtt.value, rtt(link.rtt_us));
    put(facts.loss.value, loss(link.loss));
    put(facts.cost.value, link.cost_per_gb === null || link.cost_per_gb === undefined ? NONE : `${number(link.cost_per_gb)} / GB`);
    put(facts.power.value, watts(sample?.power_w));
    put(facts.energy.value, joules(link.energy_j));
    put(facts.flows.value, count(link.flows));
    put(facts.received.value, bytes(link.rx_bytes));
    put(facts.sent.value, bytes(link.tx_bytes));
    allowance.hidden = !link.cap_bytes;
    if (link.cap_bytes) {
      allowance.firstChild.firstChild.style.width = `${Math.min(((link.used_bytes ?? 0) / link.cap_bytes) * 100, 100)}%`;
      put(allowance.lastChild, `${bytes(link.used_bytes)} of ${bytes(link.cap_bytes)} this month`);
    }
  };
  return { node, show };
}

/** The virtual interface: a device whose flows use the links, so it has no capacity of its own. */
function ownCard(first) {
  const [down, up] = [gauge('↓', 'receives'), gauge('↑', 'sends')];
  const [pill, reason, addresses] = [h('span', { class: 'pill' }), h('p', { class: 'reason' }), h('dd')];
  const flows = h('a', { href: `#/flows?filter=${encodeURIComponent(first.name)}` });
  const node = h(
    'article',
    { class: 'card own', 'aria-label': `Virtual interface ${first.name}`, 'data-own': first.name },
    h('div', { class: 'link-head' }, h('h3', { text: first.name }), h('span', { class: 'kind', text: 'Flows use the links' }), pill),
    reason,
    h('div', { class: 'gauges' }, down.node, up.node),
    h(
      'dl',
      { class: 'fact-grid' },
      h('div', { class: 'fact wide' }, h('dt', { text: 'Addresses' }), addresses),
      h('div', { class: 'fact' }, h('dt', { text: 'Flows' }), h('dd', {}, flows)),
    ),
  );
  const show = (own) => {
    const [word, tone] = state(own.up ? 'up' : 'down');
    put(pill, word);
    attr(pill, 'data-tone', tone);
    put(reason, own.reason ?? '');
    down.show(own.rate_down_bps, null, '');
    up.show(own.rate_up_bps, null, '');
    put(addresses, own.addresses.join(', '));
    put(flows, count(own.flows));
    attr(flows, 'aria-label', `${plural(own.flows, 'flow')} through ${own.name}`);
  };
  return { node, show };
}
