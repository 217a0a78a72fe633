// The view Applications: what Braid learnt of programs, and the rules that the user made for them.

import { applicationName, isGateway, knownClient, loadClients } from './clients.js';
import { attr, empty, fresh, h, keyed, put, s } from './dom.js';
import { NONE, bytes, count, duration, joules, percent, plural, rate } from './format.js';
import { isClient, ruleOf, ruleWords } from './policy.js';
import { edit } from './rules.js';
import { on, store } from './store.js';
import { ofApplication, recall, timeline } from './timeline.js';

const SHOWN = 300;
/** Period of the small charts, in seconds. */
const LATELY = 150;
const [WIDE, HIGH] = [120, 28];

export function mount(root) {
  const search = h('input', {
    type: 'search',
    placeholder: 'Filter: program, class…',
    'aria-label': 'Filter applications',
    spellcheck: 'false',
  });
  const said = h('p', { class: 'said' });
  const list = h('div', { class: 'apps', role: 'list' });
  const none = h('div', {});
  root.append(h('div', { class: 'tools' }, search, said), list, none);
  const show = () => {
    const all = grouped();
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = all.filter((app) => words.every((word) => `${app.application} ${applicationName(app.application)} ${app.name} ${app.class}`.toLowerCase().includes(word)));
    const moved = lately();
    const shown = found.slice(0, SHOWN).map((app) => ({ ...app, moved: moved.get(app.application) ?? [] }));
    keyed(list, shown, (app) => app.application, card);
    put(said, found.length > SHOWN ? `${SHOWN} of ${count(found.length)}: filter to see others` : plural(found.length, 'application'));
    none.replaceChildren(
      ...(found.length
        ? []
        : [
            empty(
              all.length ? 'No application matches the filter' : 'No applications yet',
              all.length ? null : 'A program appears here after its first connections, with the usual size of its flows.',
            ),
          ]),
    );
  };
  search.addEventListener('input', show);
  show();
  recall('appSamples').then(show);
  // For the names of clients, which are applications, too.
  const name = () => isGateway() && loadClients().catch(() => {});
  name();
  const ends = [on(['apps', 'policy', 'flows', 'clients'], show), on(['policy'], name)];
  return () => {
    ends.forEach((end) => end());
    list.parts?.forEach((part) => part.end());
  };
}

/** Bits per second that each application received in the last minutes, newest last. */
function lately() {
  const samples = store.appSamples.slice(-LATELY);
  const found = new Map();
  samples.forEach(({ apps }, at) => {
    for (const { application, rx_bps } of apps) {
      if (!found.has(application)) found.set(application, new Array(samples.length).fill(0));
      found.get(application)[at] = rx_bps ?? 0;
    }
  });
  return found;
}

/** One entry for each program, with its ports, the busiest first. */
function grouped() {
  const found = new Map();
  for (const app of store.apps) {
    const group = found.get(app.application) ?? {
      application: app.application,
      name: app.name,
      ports: [],
      flows: 0,
      samples: 0,
      energy_j: app.energy_j,
    };
    group.ports.push(app);
    group.flows += app.flows;
    group.samples += app.samples;
    found.set(app.application, group);
  }
  for (const group of found.values()) {
    group.ports.sort((a, b) => b.samples - a.samples);
    Object.assign(group, {
      class: group.ports[0].class,
      class_source: group.ports[0].class_source,
      demand_bytes: group.ports[0].demand_bytes,
    });
  }
  return [...found.values()].sort((a, b) => b.flows - a.flows || b.samples - a.samples || (a.application < b.application ? -1 : 1));
}

const SOURCES = { user: 'your choice', executable: 'known program', port: 'from its port', pattern: 'from its behaviour' };

function card(first) {
  let app = first;
  const [kind, demand, energy, down, up, flows] = Array.from({ length: 6 }, () => h('dd'));
  const choice = h('p', { class: 'choice' });
  const spark = sparkline();
  const name = h('h2', { class: 'app-name' });
  const path = isClient(first.application) ? `Client ${first.application}` : first.application;
  const button = h('button', {
    type: 'button',
    text: 'Choose links…',
    onclick: () => edit(app.application, app.name),
  });
  const more = h('div', { class: 'app-more', id: fresh('history'), hidden: true });
  const unfold = h('button', {
    type: 'button',
    text: 'History',
    'aria-expanded': 'false',
    'aria-controls': more.id,
    onclick: () => {
      if (shown) shown.end();
      shown = shown ? null : history(app, more);
      more.hidden = !shown;
      attr(unfold, 'aria-expanded', String(Boolean(shown)));
    },
  });
  let shown = null;
  const node = h(
    'article',
    { class: 'card app', role: 'listitem', 'data-app': first.application },
    h('div', { class: 'app-head' }, name, h('p', { class: 'path', title: path, text: path }), choice),
    h('div', { class: 'app-spark' }, spark.node),
    h(
      'dl',
      { class: 'app-facts' },
      [
        ['Class', kind],
        ['Usual flow', demand],
        ['Receiving', down],
        ['Sending', up],
        ['Flows', flows],
        ['Energy', energy],
      ].map(([label, value]) => h('div', { class: 'fact' }, h('dt', { text: label }), value)),
    ),
    h('div', { class: 'app-actions' }, unfold, button),
    more,
  );
  const show = (now) => {
    app = now;
    if (shown && shown.ports !== ports(app)) {
      shown.ports = ports(app);
      shown.learnt.replaceChildren(learnt(app));
    }
    const called = applicationName(app.application);
    put(name, called);
    attr(button, 'aria-label', `Choose links for ${called}`);
    attr(unfold, 'aria-label', `History of ${called}`);
    const rates = store.appRates.get(app.application);
    put(kind, app.class);
    attr(kind, 'title', SOURCES[app.class_source]);
    put(demand, bytes(app.demand_bytes));
    put(flows, count(app.flows));
    put(energy, joules(app.energy_j));
    put(down, rates ? rate(rates.down) : app.flows ? NONE : rate(0));
    put(up, rates ? rate(rates.up) : app.flows ? NONE : rate(0));
    spark.show(app.moved, app);
    const at = ruleOf(isClient(app.application) ? knownClient(app.application) : app);
    put(choice, at < 0 ? 'Braid chooses' : `Your rule: ${ruleWords(store.policy.apps[at])}`);
    choice.classList.toggle('own', at >= 0);
  };
  return { node, show, end: () => shown?.end() };
}

const ports = (app) => JSON.stringify(app.ports.map((item) => [item.port, item.samples, item.demand_bytes]));

/** Traffic of the application, over minutes to a month, and what Braid learnt of it. */
function history(app, root) {
  const chart = timeline(`Throughput of ${applicationName(app.application)}`, ofApplication(app.application));
  const table = h('div', {}, learnt(app));
  root.replaceChildren(
    h(
      'div',
      { class: 'card-head' },
      h('h3', { text: 'Throughput' }),
      h('p', { class: 'legend', text: 'received above the line, sent below' }),
      chart.spans,
    ),
    chart.node,
    h('h3', { text: 'Learnt, by destination port' }),
    table,
  );
  return {
    learnt: table,
    ports: ports(app),
    end: () => {
      chart.end();
      root.replaceChildren();
    },
  };
}

function sparkline() {
  const area = s('path', { class: 'spark-area' });
  const path = s('path', { class: 'spark-line' });
  const node = s('svg', { viewBox: `0 0 ${WIDE} ${HIGH}`, class: 'spark', preserveAspectRatio: 'none', role: 'img' }, area, path);
  return {
    node,
    show: (values, app) => {
      const peak = Math.max(...values, 1);
      const step = WIDE / (LATELY - 1);
      const points = values.map(
        (value, at) => `${(WIDE - (values.length - 1 - at) * step).toFixed(1)},${(HIGH - 1 - (value / peak) * (HIGH - 3)).toFixed(1)}`,
      );
      const line = points.length > 1 ? `M${points.join('L')}` : '';
      attr(path, 'd', line);
      attr(area, 'd', line && `${line}V${HIGH}H${points[0].split(',')[0]}Z`);
      attr(
        node,
        'aria-label',
        values.length
          ? `Received in the last minutes by ${applicationName(app.application)}: at most ${rate(peak === 1 ? 0 : peak)}`
          : 'Nothing received',
      );
    },
  };
}

/** Table of what Braid learnt, by destination port. */
function learnt(app) {
  const row = (item) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row', text: item.port === null ? 'any' : String(item.port) }),
      h('td', { class: 'num', text: bytes(item.demand_bytes) }),
      h('td', { class: 'num', text: percent(item.confidence, 0) }),
      h('td', { class: 'num', text: count(item.samples) }),
      h('td', { class: 'num', text: rate(item.rate_down_bps) }),
      h('td', { class: 'num', text: rate(item.rate_up_bps) }),
      h('td', { class: 'num', text: item.age_ms === null ? NONE : `${duration(item.age_ms)} ago` }),
    );
  const heads = ['Port', 'Usual flow', 'Confidence', 'Samples', 'Receives', 'Sends', 'Last'];
  return h(
    'div',
    { class: 'scroll-x', tabindex: '0', role: 'region', 'aria-label': 'Learnt, by destination port' },
    h(
      'table',
      { class: 'plain' },
      h(
        'thead',
        {},
        h(
          'tr',
          {},
          heads.map((text, place) => h('th', { scope: 'col', class: place ? 'num' : null, text })),
        ),
      ),
      h('tbody', {}, app.ports.slice(0, 20).map(row)),
    ),
  );
}
