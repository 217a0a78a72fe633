// The policy, in a form that the page's forms can show.

import { get } from './api.js';
import { h } from './dom.js';
import { store, notify } from './store.js';

/** Reloads the policy, the configuration, and the rights of this session. */
export async function refreshPolicy() {
  const optional = (path) => get(path).catch(() => null);
  const [policy, config, session] = await Promise.all([get('/v1/policy'), optional('/v1/config'), optional('/v1/session')]);
  Object.assign(store, { policy, config, mayChange: session?.may_change ?? false });
  notify('policy');
}

/** Parses `exe = "/usr/bin/curl", port = 443` into `{exe: '/usr/bin/curl', port: 443}`; `null` if the text has another form. */
export function readConditions(text) {
  const found = {};
  const entry = /\s*([a-z_]+)\s*=\s*("(?:[^"\\]|\\.)*"|-?\d+|true|false)\s*(,|$)/y;
  while (entry.lastIndex < text.length) {
    const match = entry.exec(text);
    if (!match) return null;
    try {
      found[match[1]] = JSON.parse(match[2]);
    } catch {
      return null;
    }
    if (match[3] === '') break;
  }
  return found;
}

/** Whether an application is a client of the gateway: such an application is named by its address. */
export const isClient = (application) => /^(\d+\.){3}\d+$|^[0-9a-f]*:[0-9a-f]*:[0-9a-f:.]*$/i.test(application);

/**
 * Index of the rule for exactly this program, or for this client of the gateway (by address, hardware address or name); -1 if there is none. A program
 * has an `application`, and a `name` if it is known.
 */
export function ruleOf({ application, name, address, mac }) {
  const client = address ?? (isClient(application) ? application : null);
  const known = client ? [client, mac, address && name].filter(Boolean) : [];
  return (store.policy?.apps ?? []).findIndex(({ matches }) => {
    const conditions = readConditions(matches);
    if (!conditions || Object.keys(conditions).length !== 1) return false;
    if (client) return known.includes(conditions.client);
    return conditions.exe === application || (!application.startsWith('/') && conditions.name === (name ?? application));
  });
}

/** The conditions of a rule, as pieces of text and nodes. */
export function matchWords(rule) {
  const conditions = readConditions(rule.matches);
  return conditions ? Object.entries(conditions).map(([key, value]) => [h('span', { class: 'cond', text: key }), ` ${value} `]) : [rule.matches];
}

const CARRIES = { direct: 'over one link each', bond: 'over several links at once', duplicate: 'each packet over several links' };

/** What a rule does, in plain words. */
export function ruleWords(rule) {
  const words = [];
  if (rule.links) words.push(`only ${rule.links.join(', ')}`);
  if (rule.prefer.length) words.push(`prefers ${rule.prefer.join(', ')}`);
  if (CARRIES[rule.carry]) words.push(CARRIES[rule.carry]);
  if (rule.relay) words.push(`through ${rule.relay}`);
  if (rule.fallback) words.push(rule.fallback === 'none' ? 'or not at all' : 'or directly');
  if (rule.class) words.push(`as ${rule.class}`);
  if (rule.affinity) words.push(rule.affinity === 'none' ? 'flows may use different links' : `one link for each ${rule.affinity}`);
  if (rule.weight !== 1) words.push(`weight ${rule.weight}`);
  if (rule.rate) words.push(`at most ${rule.rate} of a link`);
  if (rule.guarantee) words.push(`at least ${rule.guarantee} of a link`);
  return words.join('; ') || 'defaults';
}

/** The condition of an entry, and why it does not hold now. */
export const conditionWords = (entry) => `when ${entry.when}${entry.unmet ? ` (not now: ${entry.unmet})` : ' (now)'}`;
