// The mock's configuration: a model that is written as TOML, and the API's edits on it.

import { createHash } from 'node:crypto';

const HEAD = '# My networks. The modem costs money: keep it for when it is needed.\n';

export class Config {
  /** `lan`: the LAN devices of a gateway; `own`: whether there is a virtual interface. */
  constructor(lan = [], own = null) {
    Object.assign(this, { lan, own });
    this.model = {
      scheduler: 'max-throughput',
      utility: 0.6,
      links: [{ name: 'wwan0', role: 'normal', metered: true, cap: '10 GB', reset_day: 1, cost_per_gb: 2.5 }],
      apps: [
        { match: { name: 'backup-tool', port: 443 }, class: 'bulk', weight: 0.5 },
        { match: { destination: '10.20.0.0/16' }, links: ['eth0'] },
      ],
    };
    this.past = [];
  }

  text(model = this.model) {
    const lines = [HEAD, `scheduler = "${model.scheduler}"`, `utility = ${literal(model.utility)}   # the slider's place`];
    if (model.carry) lines.push(`carry = ${literal(model.carry)}`);
    if (model.relay) lines.push(`relay = ${literal(model.relay)}`);
    if (model.fallback) lines.push(`fallback = ${literal(model.fallback)}`);
    if (this.lan.length) lines.push('', '[gateway]', `lan = ${literal(this.lan)}`);
    if (model.bond) lines.push('', '[bond]', ...Object.entries(model.bond).map(([key, value]) => `${key} = ${literal(value)}`));
    for (const link of model.links) lines.push('', '[[link]]', ...Object.entries(link).map(([key, value]) => `${key} = ${literal(value)}`));
    for (const app of model.apps) lines.push('', '[[app]]', ...Object.entries(app).map(([key, value]) => `${key} = ${literal(value)}`));
    return `${lines.join('\n')}\n`;
  }

  revision(model = this.model) {
    return createHash('sha256').update(this.text(model)).digest('hex').slice(0, 16);
  }

  view() {
    return { path: '/etc/braid/braid.toml', text: this.text(), revision: this.revision(), writable: true, can_undo: this.past.length > 0 };
  }

  ruleFor(application) {
    return this.model.apps.find((app) => app.match.exe === application);
  }

  policy() {
    const { model } = this;
    return {
      scheduler: model.scheduler,
      affinity: null,
      default_demand_bytes: 1_000_000,
      utility: String(model.utility),
      utility_setting: utilitySetting(model.utility),
      carry: model.carry ?? 'direct',
      relay: model.relay ?? null,
      fallback: model.fallback ?? 'direct',
      lan: this.lan,
      virtual_interface: this.own ? { name: 'braid0', addresses: ['10.99.0.1', 'fd99::1'] } : null,
      bond_scheduler: model.bond?.scheduler ?? null,
      bond_copies: model.bond?.copies ?? null,
      detection: { everybody: false, hosts: ['files.example.org'], networks: ['10.8.0.0/16'], hold_ms: 300 },
      measurement: null,
      links: model.links.map((link) => ({
        matches: `name = "${link.name}"`,
        devices: [link.name],
        role: link.role ?? 'normal',
        priority: link.priority ?? 0,
        metered: link.metered ?? false,
        cap_bytes: link.cap ? Number(link.cap.split(' ')[0]) * 1e9 : null,
        reset_day: link.reset_day ?? null,
        probe: null,
        cost_per_gb: link.cost_per_gb ?? null,
      })),
      apps: model.apps.map((app) => ({
        matches: Object.entries(app.match)
          .map(([key, value]) => `${key} = ${JSON.stringify(value)}`)
          .join(', '),
        links: app.links ?? null,
        prefer: app.prefer ?? [],
        class: app.class ?? null,
        affinity: app.affinity ?? null,
        carry: app.carry ?? '',
        relay: app.relay ?? null,
        fallback: app.fallback ?? null,
        weight: app.weight ?? 1,
        when: app.when ? Object.entries(app.when).map(([key, value]) => `${key} = ${JSON.stringify(value)}`).join(', ') : null,
        unmet: app.when ? 'moving is unknown' : null,
      })),
      exclude: [],
    };
  }

  preview({ revision, edits }) {
    if (revision !== this.revision()) return { problem: [409, 'The configuration changed', 'Read it again.'] };
    const model = structuredClone(this.model);
    const changes = edits.map((edit) => change(model, edit));
    const bad = model.links.find((link) => link.cap && !/^\d+ (GB|MB)$/.test(link.cap));
    if (bad)
      return {
        problem: [422, 'The configuration would be refused', `line 9: cap = "${bad.cap}" is not an amount of data; write it like "10 GB"`],
      };
    return { text: this.text(model), changes, warnings: [], revision: this.revision(model), model };
  }

  apply(sent) {
    const plan = this.preview(sent);
    if (plan.problem) return plan;
    this.past.push(this.model);
    this.model = plan.model;
    return { ...plan, model: undefined };
  }

  undo() {
    if (!this.past.length) return { problem: [409, 'Nothing to undo', 'No change was applied since the start.'] };
    this.model = this.past.pop();
    return this.view();
  }
}

function utilitySetting(utility) {
  if (typeof utility === 'number') return { function: 'fixed', value: utility, plugged_in: null };
  if (typeof utility === 'string') return { function: utility, plugged_in: utility === 'battery' ? 1 : null };
  return { function: 'step', plugged_in: 1, ...utility };
}

const literal = (value) =>
  Array.isArray(value)
    ? `[${value.map(literal).join(', ')}]`
    : value && typeof value === 'object'
      ? `{ ${Object.entries(value)
          .map(([key, item]) => `${key} = ${literal(item)}`)
          .join(', ')} }`
      : JSON.stringify(value);

function merge(target, { set, unset = [] }) {
  Object.assign(target, set);
  unset.forEach((key) => delete target[key]);
  return [
    ...Object.entries(set).map(([key, value]) => `${key} becomes ${literal(value)}`),
    ...unset.map((key) => `${key} is left out`),
  ].join(', ');
}

function change(model, edit) {
  if (edit.op === 'set' || edit.op === 'unset') {
    const [key, ...way] = edit.path.toReversed();
    const table = way.reduceRight((at, part) => (at[part] ??= {}), model);
    const before = table[key];
    if (edit.op === 'set') table[key] = edit.value;
    else delete table[key];
    return `${edit.path.join('.')}: ${literal(before)} becomes ${literal(edit.value)}`;
  }
  if (edit.op === 'link') {
    let link = model.links.find((item) => item.name === edit.name);
    if (!link) model.links.push((link = { name: edit.name }));
    return `Link ${edit.name}: ${merge(link, edit)}`;
  }
  if (edit.op === 'app') return `Rule ${edit.index + 1}: ${merge(model.apps[edit.index], edit)}`;
  if (edit.op === 'app-add') {
    model.apps.splice(edit.at, 0, edit.value);
    return `A new rule for ${literal(edit.value.match)}`;
  }
  const [app] = model.apps.splice(edit.index, 1);
  if (edit.op === 'app-remove') return `The rule for ${literal(app.match)} goes`;
  model.apps.splice(edit.to, 0, app);
  return `Rule ${edit.index + 1} becomes rule ${edit.to + 1}`;
}
