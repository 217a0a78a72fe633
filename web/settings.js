// The view Settings. Every form opens a preview; nothing changes before the user applies it there.

import { dialog, mayChange, previewButton, propose, undo } from './change.js';
import { context } from './context.js';
import { attr, card, empty, field, full, h, keyed, put, select } from './dom.js';
import { NONE, state } from './format.js';
import { joinForm, leave } from './peers.js';
import { conditionWords, matchWords, ruleWords } from './policy.js';
import { programs } from './programs.js';
import { editRule } from './rules.js';
import { accent, on, store } from './store.js';
import { tradeoff } from './tradeoff.js';

const SCHEDULERS = [
  ['max-throughput', 'Fastest', 'Each flow uses the link on which it finishes first'],
  ['least-finish', 'Least finish', 'The link that finishes its own load and the flow first (DNIS, DBAS)'],
  ['least-makespan', 'Least makespan', 'The link with which the load of all links is done first; of equal ones the system’s first (DNIS, DBAS)'],
  ['operetta', 'Thrifty', 'The cheapest link, in energy and money, that reaches the target throughput'],
  ['weighted-round-robin', 'By capacity', 'Links take turns in proportion to their capacity'],
  ['round-robin', 'Turn by turn', 'Links take turns, whatever their speed'],
  ['random', 'Random', 'A random link for each flow, whatever its speed'],
  ['rtt-share', 'By round trip', 'Links with a shorter round trip get more flows'],
  ['handover', 'Hand over', 'All flows use the link with the shortest round trip, until another is clearly better'],
  ['only-one', 'One link', 'The system’s own choice; Braid only watches'],
];

export function mount(root) {
  const parts = [schedulers(), carriage(), bonds(), tradeoff(), links(), rules(), programs(), context(), relays(), questions(), file()];
  root.append(
    h(
      'div',
      { class: 'settings' },
      parts.map((part) => part.node),
    ),
  );
  const show = () => parts.forEach((part) => part.show());
  show();
  const off = on(['policy', 'status', 'peers'], show);
  return () => {
    off();
    parts.forEach((part) => part.end?.());
  };
}

function schedulers() {
  const items = SCHEDULERS.map(([value, label, hint]) => {
    const radio = h('input', { type: 'radio', name: 'scheduler', value });
    return [
      radio,
      h('label', { class: 'radio' }, radio, h('span', {}, h('b', { text: label }), h('small', { text: hint }), h('code', { text: value }))),
    ];
  });
  const button = previewButton(
    () => [{ op: 'set', path: ['scheduler'], value: chosen().value }],
    () => reset(),
  );
  const chosen = () => items.find(([radio]) => radio.checked)?.[0] ?? {};
  let now = null;
  const reset = () =>
    items.forEach(([radio]) => {
      radio.checked = radio.value === now;
    }) ?? mark();
  const mark = () => {
    button.disabled = !chosen().value || chosen().value === now;
  };
  items.forEach(([radio]) => radio.addEventListener('change', mark));
  const node = card(
    'scheduler',
    'Scheduler',
    h(
      'div',
      { class: 'radios schedulers', role: 'radiogroup', 'aria-labelledby': 'set-scheduler' },
      items.map(([, label]) => label),
    ),
    h('div', { class: 'row-actions end' }, button),
  );
  return {
    node,
    show: () => {
      const current = store.policy?.scheduler ?? store.status?.scheduler ?? null;
      if (current === now) return;
      now = current;
      reset();
      mark();
    },
  };
}

/** `carry`, `relay` and `fallback` of all flows that no rule carries otherwise. */
function carriage() {
  const all = h('input', { type: 'checkbox', role: 'switch' });
  const relay = select([], '');
  const wrapped = field('Relay', relay);
  const note = h('p', { class: 'hint' });
  const only = h('input', { type: 'checkbox' });
  const confine = h(
    'label',
    { class: 'check' },
    only,
    h('span', { class: 'stacked' }, 'Nothing but through the relay', h('small', { text: 'While no relay is reachable, flows fail instead of going direct' })),
  );
  // Keys that mean nothing without `carry`.
  const settled = () => [...(now.relay ? ['relay'] : []), ...(now.confined ? ['fallback'] : [])];
  const edits = () => {
    if (!all.checked) return [{ op: 'unset', path: ['carry'] }, ...settled().map((key) => ({ op: 'unset', path: [key] }))];
    const found = [{ op: 'set', path: ['carry'], value: 'bond' }];
    if (relay.value) found.push({ op: 'set', path: ['relay'], value: relay.value });
    else if (now.relay) found.push({ op: 'unset', path: ['relay'] });
    if (only.checked) found.push({ op: 'set', path: ['fallback'], value: 'none' });
    else if (now.confined) found.push({ op: 'unset', path: ['fallback'] });
    return found;
  };
  const button = previewButton(edits, () => reset());
  let now = { bonds: false, relay: '', names: null, confined: false };
  const mark = () => {
    wrapped.hidden = !all.checked || ((now.names ?? []).length < 2 && !now.relay);
    confine.hidden = !all.checked;
    put(note, all.checked && !now.names?.length ? `No relay is joined. Until one is, flows ${only.checked ? 'fail' : 'go direct'}.` : '');
    note.hidden = !note.textContent;
    button.disabled = all.checked === now.bonds && (!all.checked || (relay.value === now.relay && only.checked === now.confined));
  };
  const reset = () => {
    all.checked = now.bonds;
    only.checked = now.confined;
    // Of several relays the configuration must name one.
    const names = [...new Set([...(now.names ?? []), now.relay].filter(Boolean))];
    const any = names.length > 1 && !(now.bonds && !now.relay) ? [] : [['', 'Any']];
    relay.replaceChildren(...[...any, ...names.map((name) => [name, name])].map(([value, text]) => h('option', { value, text })));
    relay.value = now.relay || (any.length ? '' : names[0]);
    mark();
  };
  all.addEventListener('change', mark);
  relay.addEventListener('change', mark);
  only.addEventListener('change', mark);
  const node = card(
    'carriage',
    'Everything over all links',
    h('p', {
      class: 'hint',
      text: 'Carries all TCP and UDP flows over all links at once through a relay, also those of the gateway’s clients, except what rules carry otherwise. While no relay is reachable, they go direct, unless you forbid it.',
    }),
    h('label', { class: 'check' }, all, 'Bond everything'),
    h('div', { class: 'form-grid' }, wrapped),
    confine,
    note,
    h('div', { class: 'row-actions end' }, button),
  );
  reset();
  return {
    node,
    show: () => {
      const names = store.peers.filter((peer) => peer.kind !== 'server').map((peer) => peer.name);
      const next = { bonds: store.policy?.carry === 'bond', relay: store.policy?.relay ?? '', names, confined: store.policy?.fallback === 'none' };
      if (JSON.stringify(next) === JSON.stringify(now)) return;
      now = next;
      reset();
    },
  };
}

const BOND_SCHEDULERS = [
  ['', 'Automatic: miDRR, or OPERETTA’s weights with “Thrifty”'],
  ['midrr', 'miDRR: every path with room takes data, flows take turns by weight'],
  ['round-robin', 'Round robin: each path takes the same number of bytes'],
  ['weighted-round-robin', 'Weighted round robin: in proportion to the rates of the paths'],
  ['rtt-share', 'By round trip: in inverse proportion to it, within each flow'],
  ['earliest-completion', 'Earliest completion: the path on which the data arrives first'],
  ['min-rtt', 'Shortest round trip: the first such path that has room'],
  ['redundant', 'Redundant: copies over several paths'],
  ['weights', 'OPERETTA’s weights: the least energy for the target throughput'],
];

function bonds() {
  const scheduler = select(BOND_SCHEDULERS, '');
  const copies = h('input', { type: 'number', min: '2', max: '8', step: '1', value: '2' });
  const wrapped = field('Copies', copies);
  const edits = () => {
    const found = [{ op: scheduler.value ? 'set' : 'unset', path: ['bond', 'scheduler'] }];
    if (scheduler.value) found[0].value = scheduler.value;
    // Only "redundant" takes copies.
    if (scheduler.value === 'redundant') found.push({ op: 'set', path: ['bond', 'copies'], value: Number(copies.value) });
    else if (now.copies !== null) found.push({ op: 'unset', path: ['bond', 'copies'] });
    return found;
  };
  const button = previewButton(edits, () => reset());
  let now = { scheduler: '', copies: null };
  const mark = () => {
    const redundant = scheduler.value === 'redundant';
    wrapped.hidden = !redundant;
    button.disabled = scheduler.value === now.scheduler && (!redundant || Number(copies.value) === now.copies);
  };
  const reset = () => {
    scheduler.value = now.scheduler;
    copies.value = String(now.copies ?? 2);
    mark();
  };
  scheduler.addEventListener('change', mark);
  copies.addEventListener('input', mark);
  reset();
  const node = card(
    'bonds',
    'Bonds',
    h('p', { class: 'hint', text: 'How the flows of a bond share its paths, in both directions if the other end supports it.' }),
    h('div', { class: 'form-grid' }, full('Scheduler of bonds', scheduler), wrapped),
    h('div', { class: 'row-actions end' }, button),
  );
  return {
    node,
    show: () => {
      const next = { scheduler: store.policy?.bond_scheduler ?? '', copies: store.policy?.bond_copies ?? null };
      if (next.scheduler === now.scheduler && next.copies === now.copies) return;
      now = next;
      reset();
    },
  };
}

const ROLES = [
  ['normal', 'In use'],
  ['backup', 'Backup'],
  ['excluded', 'Never used'],
];

function links() {
  const list = h('div', { class: 'link-settings' });
  const node = card('links', 'Links', list);
  return {
    node,
    show: () => {
      const found = store.status?.links ?? [];
      keyed(
        list,
        found.length ? found : [null],
        (link) => link?.name ?? '',
        (link) => (link ? linkRow(link) : { node: empty('No links') }),
      );
    },
  };
}

const entryOf = (name) => store.policy?.links.find((entry) => entry.devices.includes(name)) ?? {};

function linkRow(first) {
  const [summary, pill] = [h('span', { class: 'choice' }), h('span', { class: 'pill' })];
  const node = h(
    'div',
    { class: `link-setting link-${accent(first.name)}`, 'data-link': first.name },
    h('span', { class: 'swatch' }),
    h('b', { text: first.name }),
    pill,
    summary,
    h('button', {
      type: 'button',
      text: 'Change…',
      'aria-label': `Change link ${first.name}`,
      onclick: () => mayChange() && editLink(first.name),
    }),
  );
  return {
    node,
    show: (link) => {
      const entry = entryOf(link.name);
      const [word, tone] = state(link.state);
      put(pill, word);
      attr(pill, 'data-tone', tone);
      const role = ROLES.find(([key]) => key === (link.role ?? entry.role))?.[1] ?? NONE;
      put(
        summary,
        [
          role,
          entry.priority ? `priority ${entry.priority}` : null,
          entry.metered ? 'metered' : null,
          entry.cap_bytes ? `${amount(entry.cap_bytes)} a month` : null,
          entry.cost_per_gb ? `${entry.cost_per_gb} / GB` : null,
          entry.when ? conditionWords(entry) : null,
        ]
          .filter(Boolean)
          .join(' · '),
      );
    },
  };
}

/** An amount of data in the configuration's notation. */
function amount(bytes) {
  for (const [unit, size] of [
    ['TB', 1e12],
    ['GB', 1e9],
    ['MB', 1e6],
    ['kB', 1e3],
  ]) {
    if (bytes >= size && Number.isInteger((bytes / size) * 1000)) return `${bytes / size} ${unit}`;
  }
  return `${bytes} B`;
}

function editLink(name) {
  const entry = { role: 'normal', priority: 0, metered: false, cap_bytes: null, reset_day: null, cost_per_gb: null, ...entryOf(name) };
  const text = (value, props) =>
    h('input', { value: value === null || value === undefined ? '' : String(value), spellcheck: 'false', ...props });
  const inputs = {
    role: select(ROLES, entry.role),
    priority: text(entry.priority, { type: 'number', min: '0', max: '255', step: '1' }),
    metered: h('input', { type: 'checkbox', checked: entry.metered }),
    cap: text(entry.cap_bytes ? amount(entry.cap_bytes) : '', { placeholder: '10 GB' }),
    reset_day: text(entry.reset_day, { type: 'number', min: '1', max: '31', step: '1', placeholder: '1' }),
    cost_per_gb: text(entry.cost_per_gb, { type: 'number', min: '0', step: 'any', placeholder: 'free' }),
  };
  const form = h(
    'form',
    {},
    h(
      'div',
      { class: 'form-grid' },
      field('Role', inputs.role, 'A backup is used while no other link works'),
      field('Priority', inputs.priority, 'Links with 0 are used first'),
      field('Monthly allowance', inputs.cap, 'Empty: none'),
      field('Reset day', inputs.reset_day),
      field('Cost of a gigabyte', inputs.cost_per_gb, 'In any currency, the same for all links'),
    ),
    h('label', { class: 'check' }, inputs.metered, 'Metered: count its traffic'),
    h(
      'div',
      { class: 'row-actions end' },
      h('button', { type: 'button', text: 'Cancel', onclick: () => box.close() }),
      h('button', { class: 'primary', text: 'Preview…' }),
    ),
  );
  const box = dialog(`Link ${name}`, form);
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    box.close();
    propose([linkEdit(name, entry, inputs)]);
  });
}

function linkEdit(name, entry, inputs) {
  const number = (input) => (input.value.trim() === '' ? null : Number(input.value));
  const wanted = {
    role: inputs.role.value,
    priority: number(inputs.priority) ?? 0,
    metered: inputs.metered.checked,
    cap: inputs.cap.value.trim() || null,
    reset_day: number(inputs.reset_day),
    cost_per_gb: number(inputs.cost_per_gb),
  };
  const had = { ...entry, cap: entry.cap_bytes ? amount(entry.cap_bytes) : null };
  const [set, unset] = [{}, []];
  for (const [key, value] of Object.entries(wanted)) {
    if (value === (had[key] ?? null)) continue;
    if (value === null) unset.push(key);
    else set[key] = value;
  }
  return unset.length ? { op: 'link', name, set, unset } : { op: 'link', name, set };
}

function rules() {
  const list = h('ol', { class: 'rules' });
  const none = h('p', { class: 'hint', text: 'No rules: Braid chooses for every program. You can also add rules in the view Apps.' });
  const node = h(
    'section',
    { class: 'card', 'aria-labelledby': 'set-rules' },
    h(
      'div',
      { class: 'card-head' },
      h('h2', { id: 'set-rules', text: 'Rules' }),
      h('p', { class: 'legend', text: 'the first that matches decides' }),
      h('button', { type: 'button', text: 'Add a rule…', onclick: () => mayChange() && editRule(-1) }),
    ),
    list,
    none,
  );
  return {
    node,
    show: () => {
      const found = (store.policy?.apps ?? []).map((rule, index) => ({ rule, index, last: index === store.policy.apps.length - 1 }));
      none.hidden = found.length > 0;
      keyed(list, found, (item) => `${item.index} ${item.last} ${JSON.stringify(item.rule)}`, ruleRow);
    },
  };
}

function ruleRow({ rule, index, last }) {
  const move = (to, arrow, word) =>
    h('button', {
      type: 'button',
      class: 'quiet',
      text: arrow,
      'aria-label': `Move rule ${index + 1} ${word}`,
      disabled: to < 0 || (last && to > index),
      onclick: () => propose([{ op: 'app-move', index, to }]),
    });
  return {
    node: h(
      'li',
      { class: 'rule' },
      h('span', { class: 'rule-number', text: String(index + 1) }),
      h(
        'span',
        { class: 'rule-text' },
        h('span', { class: 'rule-match' }, matchWords(rule)),
        h('span', { class: 'rule-words', text: ruleWords(rule) }),
        rule.when && h('span', { class: 'rule-words', text: conditionWords(rule) }),
      ),
      h(
        'span',
        { class: 'rule-actions' },
        move(index - 1, '↑', 'up'),
        move(index + 1, '↓', 'down'),
        h('button', {
          type: 'button',
          text: 'Edit…',
          'aria-label': `Edit rule ${index + 1}`,
          onclick: () => mayChange() && editRule(index),
        }),
      ),
    ),
  };
}

function relays() {
  const list = h('div', { class: 'link-settings' });
  const form = joinForm();
  form.classList.remove('card');
  const node = card('relays', 'Relays', list, form);
  return {
    node,
    show: () =>
      keyed(
        list,
        store.peers,
        (peer) => peer.name,
        (peer) => {
          const pill = h('span', { class: 'pill' });
          return {
            node: h(
              'div',
              { class: 'link-setting' },
              h('b', { text: peer.name }),
              pill,
              h('span', { class: 'choice', text: peer.address }),
              h('button', {
                type: 'button',
                class: 'danger',
                text: peer.kind === 'server' ? 'Forget…' : 'Leave…',
                'aria-label': `Leave ${peer.name}`,
                onclick: () => leave(peer.name, peer.kind),
              }),
            ),
            show: (now) => {
              const [word, tone] = state(now.state);
              put(pill, word);
              attr(pill, 'data-tone', tone);
            },
          };
        },
      ),
  };
}

/** What Braid sends without being asked: questions to hosts, and measurements. The configuration file sets both. */
function questions() {
  const [detection, measurement] = [h('p', {}), h('p', {})];
  return {
    node: card('questions', 'Detection and measurement', detection, measurement),
    show: () => {
      put(detection, detectionWords(store.policy?.detection));
      put(measurement, measurementWords(store.policy?.measurement));
    },
  };
}

function detectionWords(asked) {
  if (!asked) return 'Braid asks no hosts whether they run Braid.';
  const hosts = [
    asked.everybody ? 'every public host that answers' : null,
    asked.hosts.length ? asked.hosts.join(', ') : null,
    asked.networks.length ? `hosts of the private networks ${asked.networks.join(', ')}` : null,
  ].filter(Boolean);
  const hold = asked.hold_ms ? ` The first connection to each waits up to ${asked.hold_ms} ms for its answer.` : '';
  return `Braid asks ${hosts.join(' and ')} whether they run Braid.${hold}`;
}

function measurementWords(settings) {
  if (!settings) return 'Braid learns capacities from ordinary transfers only.';
  const { servers, every_s, max_bytes, max_daily_bytes } = settings;
  const limits = `at most ${amount(max_bytes)} at once and ${amount(max_daily_bytes)} a day`;
  return `Braid measures each idle link every ${Math.round(every_s / 60)} minutes with ${servers.join(', ')}: ${limits}.`;
}

function file() {
  const said = h('p', {});
  const back = h('button', { type: 'button', text: 'Undo the last change', onclick: undo });
  const look = h('button', {
    type: 'button',
    text: 'Show the file',
    onclick: () =>
      dialog(
        'Configuration',
        store.config.text.trim()
          ? h('pre', { class: 'code-block', tabindex: '0', text: store.config.text })
          : empty('The file is empty', 'Braid uses the defaults.'),
        { class: 'wide' },
      ),
  });
  const node = card(
    'file',
    'Configuration file',
    said,
    h('div', { class: 'row-actions' }, back, look),
  );
  return {
    node,
    show: () => {
      const { config } = store;
      back.disabled = !config?.can_undo || !store.mayChange;
      look.disabled = !config;
      put(
        said,
        !config
          ? 'Braid cannot read the configuration.'
          : `${config.path ?? 'No file: Braid uses the defaults, and the first change creates a file'}${
              store.mayChange ? (config.writable ? '' : '. Braid cannot write it.') : '. This session is read-only.'
            }`,
      );
    },
  };
}
