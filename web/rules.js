// The dialog to edit a rule, for one program or for any condition.

import { dialog, mayChange, propose } from './change.js';
import { field, fresh, h, select } from './dom.js';
import { tail } from './format.js';
import { isClient, readConditions, ruleOf } from './policy.js';
import { accent, store } from './store.js';

const CLASSES = [
  ['', 'As learnt'],
  ['real-time', 'Real-time'],
  ['browser', 'Browser'],
  ['bulk', 'Bulk'],
  ['unclassified', 'Unclassified'],
];
const CARRIES = [
  ['', 'Default'],
  ['auto', 'All links where the destination runs Braid'],
  ['direct', 'One link for each flow'],
  ['bond', 'All links at once, through a relay'],
  ['duplicate', 'Each packet over several links'],
];
/** Carriages that need a relay, so that there may be none. */
const BY_RELAY = ['bond', 'duplicate'];
const FALLBACKS = [
  ['', 'Default'],
  ['direct', 'They go direct'],
  ['none', 'They fail'],
];
const AFFINITIES = [
  ['', 'Default'],
  ['none', 'Flows may use different links'],
  ['destination', 'One link for each destination'],
  ['application', 'One link for the program'],
];

const CONDITIONS = [
  ['exe', 'Program', '/usr/bin/curl', 'the full path'],
  ['name', 'Process name', 'curl', 'up to 15 characters'],
  ['port', 'Destination port', '443'],
  ['destination', 'Destination', '192.0.2.0/24', 'an address or prefix'],
  ['cgroup', 'Control group', '/user.slice'],
  ['user', 'User', 'alice', 'a name or number'],
  ['client', 'Client', '192.168.7.20', 'of the gateway or braid proxy: an address, prefix, hardware address or name'],
];

/** Match of a new rule for a program: its path, or its process name if the path is unknown. */
const identity = (application, name) => (application.startsWith('/') ? { exe: application } : { name: name ?? application });

/** Opens the rule of one program, or of the client with this address. */
export function edit(application, name) {
  if (isClient(application)) return editClient(store.clients?.find((client) => client.address === application) ?? { address: application });
  open(tail(application), ruleOf({ application, name }), { conditions: identity(application, name), fixed: true });
}

/** Opens the rule of one client of the gateway. A new one names its hardware address, if it is known: addresses change. */
export function editClient({ address, mac, name }) {
  const index = ruleOf({ address, mac, name });
  const conditions = index < 0 ? { client: mac ?? address } : readConditions(store.policy.apps[index].matches);
  open(name ?? address, index, { conditions, fixed: true });
}

/** Opens the rule at `index`, counted from 0; -1 opens a new rule. */
export function editRule(index) {
  const rule = store.policy.apps[index];
  const conditions = rule ? readConditions(rule.matches) : {};
  open(rule ? 'Rule' : 'New rule', index, { conditions: conditions ?? {}, fixed: conditions === null, text: rule?.matches });
}

function open(title, index, { conditions, fixed, text }) {
  const rule = store.policy?.apps[index] ?? { links: null, prefer: [], carry: '', weight: 1 };
  const match = fixed ? fixedMatch(conditions, text) : matchFields(conditions);
  const links = linkChoice(rule);
  const relays = [
    ...new Set([...store.peers.filter((peer) => peer.kind !== 'server').map((peer) => peer.name), rule.relay].filter(Boolean)),
  ];
  const inputs = {
    class: select(CLASSES, rule.class ?? ''),
    carry: select(CARRIES, rule.carry),
    fallback: select(FALLBACKS, rule.fallback ?? ''),
    affinity: select(AFFINITIES, rule.affinity ?? ''),
    relay: select([['', 'Any'], ...relays.map((name) => [name, name])], rule.relay ?? ''),
    weight: h('input', { type: 'number', min: '0.05', max: '650', step: 'any', value: String(rule.weight) }),
    rate: h('input', { type: 'text', placeholder: '8 Mbit/s or 10 %', value: rule.rate ?? '' }),
    guarantee: h('input', { type: 'text', placeholder: '2 Mbit/s or 50 %', value: rule.guarantee ?? '' }),
  };
  const fallback = field('While no relay takes them', inputs.fallback);
  const showFallback = () => {
    fallback.hidden = !BY_RELAY.includes(inputs.carry.value);
  };
  inputs.carry.addEventListener('change', showFallback);
  showFallback();
  const form = h(
    'form',
    { class: 'rule-form' },
    match.node,
    links.node,
    h(
      'div',
      { class: 'form-grid' },
      field('Class', inputs.class),
      field('Carried', inputs.carry),
      field('Relay', inputs.relay),
      fallback,
      field('Affinity', inputs.affinity),
      field('Weight', inputs.weight, 'Share relative to other flows through a relay, or on the same link; default 1'),
      field('At most', inputs.rate, 'Together on each link: a rate, or a percentage of its capacity'),
      field('At least', inputs.guarantee, 'Together on each link: a rate, or a percentage of its capacity'),
    ),
    h(
      'div',
      { class: 'row-actions end' },
      index >= 0 &&
        h('button', { type: 'button', class: 'danger', text: 'Remove this rule…', onclick: () => leave([{ op: 'app-remove', index }]) }),
      h('button', { type: 'button', text: 'Cancel', onclick: () => box.close() }),
      h('button', { class: 'primary', text: 'Preview…' }),
    ),
  );
  const box = dialog(title, form, { class: 'wide' });
  const leave = (edits) => {
    if (!mayChange()) return;
    box.close();
    propose(edits);
  };
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    if (links.problem()) return;
    const wanted = {
      ...links.read(),
      class: inputs.class.value,
      affinity: inputs.affinity.value,
      carry: inputs.carry.value,
      relay: inputs.relay.value,
      fallback: fallback.hidden ? '' : inputs.fallback.value,
      weight: Number(inputs.weight.value),
      rate: inputs.rate.value.trim(),
      guarantee: inputs.guarantee.value.trim(),
    };
    leave(edits(index, rule, match.read(), wanted));
  });
}

/** Edits that turn the rule at `index` into the wanted one; only keys that differ are listed. */
function edits(index, rule, match, wanted) {
  const had = {
    links: rule.links ?? '',
    prefer: rule.prefer.length ? rule.prefer : '',
    class: rule.class ?? '',
    affinity: rule.affinity ?? '',
    carry: rule.carry,
    relay: rule.relay ?? '',
    fallback: rule.fallback ?? '',
    weight: rule.weight,
    rate: rule.rate ?? '',
    guarantee: rule.guarantee ?? '',
  };
  const same = rule.matches !== undefined && JSON.stringify(readConditions(rule.matches)) === JSON.stringify(match);
  const set = match && !same ? { match } : {};
  const unset = [];
  for (const [key, value] of Object.entries(wanted)) {
    if (JSON.stringify(value) === JSON.stringify(had[key])) continue;
    if (value === '' || (key === 'weight' && value === 1)) unset.push(key);
    else set[key] = value;
  }
  if (index < 0) return [{ op: 'app-add', at: 0, value: set }];
  return [unset.length ? { op: 'app', index, set, unset } : { op: 'app', index, set }];
}

function fixedMatch(conditions, text) {
  const words =
    text ??
    Object.entries(conditions)
      .map(([key, value]) => `${key} = ${JSON.stringify(value)}`)
      .join(', ');
  return { node: h('p', { class: 'hint code', text: words }), read: () => (text ? null : conditions) };
}

function matchFields(conditions) {
  const inputs = CONDITIONS.map(([key, label, example, hint]) => {
    const input = h('input', {
      placeholder: example,
      value: conditions[key] === undefined ? '' : String(conditions[key]),
      spellcheck: 'false',
    });
    if (key === 'port') input.inputMode = 'numeric';
    return [key, input, field(label, input, hint)];
  });
  const read = () =>
    Object.fromEntries(
      inputs
        .filter(([, input]) => input.value.trim())
        .map(([key, input]) => {
          const text = input.value.trim();
          return [key, /^\d+$/.test(text) && (key === 'port' || key === 'user') ? Number(text) : text];
        }),
    );
  return {
    node: h(
      'fieldset',
      {},
      h('legend', { text: 'Flows that match all of these' }),
      h(
        'div',
        { class: 'form-grid' },
        inputs.map(([, , node]) => node),
      ),
    ),
    read,
  };
}

/** Choice of links: any, preferred links, or only some links. */
function linkChoice(rule) {
  const known = store.status?.links.map((link) => link.name) ?? [];
  const chosen = rule.links ?? rule.prefer;
  const group = fresh('links');
  const start = rule.links ? 'links' : rule.prefer.length ? 'prefer' : '';
  const kinds = [
    ['', 'Any link', 'Braid chooses'],
    ['prefer', 'Prefer these', 'others while none of these works'],
    ['links', 'Only these', 'flows fail while none of these works'],
  ];
  const boxes = [...new Set([...known, ...chosen])].map((name) =>
    h('input', { type: 'checkbox', value: name, checked: chosen.includes(name) }),
  );
  const list = h(
    'div',
    { class: 'checks', role: 'group', 'aria-label': 'Links' },
    boxes.map((box) => h('label', { class: `check link-${accent(box.value)}` }, box, h('span', { class: 'swatch' }), box.value)),
  );
  const radios = kinds.map(([value, label, hint]) => {
    const radio = h('input', { type: 'radio', name: group, value, checked: value === start, onchange: () => show() });
    return [radio, h('label', { class: 'radio' }, radio, h('span', {}, h('b', { text: label }), h('small', { text: hint })))];
  });
  const mode = () => radios.find(([radio]) => radio.checked)[0].value;
  const show = () =>
    boxes.forEach((box) => {
      box.disabled = mode() === '';
      box.setCustomValidity('');
    });
  list.addEventListener('change', show);
  show();
  /** Reports an empty selection at the first box if links must be chosen. */
  const problem = () => {
    const missing = mode() !== '' && !boxes.some((box) => box.checked);
    boxes[0]?.setCustomValidity(missing ? 'Choose at least one link, or “Any link”.' : '');
    return missing && boxes[0] && !boxes[0].reportValidity();
  };
  const read = () => {
    const names = boxes.filter((box) => box.checked).map((box) => box.value);
    const some = names.length ? names : '';
    return {
      links: mode() === 'links' ? some : '',
      prefer: mode() === 'prefer' ? some : rule.links && mode() === 'links' && rule.prefer.length ? rule.prefer : '',
    };
  };
  return {
    node: h(
      'fieldset',
      {},
      h('legend', { text: 'Links' }),
      h(
        'div',
        { class: 'radios' },
        radios.map(([, label]) => label),
      ),
      list,
    ),
    read,
    problem,
  };
}
