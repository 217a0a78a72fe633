// Rules and reservations that programs have added for a limited time (GET /v1/rules): shows and removes them.

import { get, post } from './api.js';
import { mayAct, toast } from './change.js';
import { card, h, keyed, put } from './dom.js';
import { duration, rate } from './format.js';
import { matchWords, ruleWords } from './policy.js';
import { store } from './store.js';

const REFRESH_MS = 5_000;

export function programs() {
  const list = h('ul', { class: 'rules' });
  const node = card('programs', 'Rules of programs', h('p', { class: 'hint', text: 'They apply to flows that none of the rules above matches, until their time ends.' }), list);
  node.hidden = true;
  let ended = false;
  const load = () =>
    get('/v1/rules').then(
      ({ rules }) => {
        if (ended) return;
        node.hidden = rules.length === 0;
        keyed(list, rules, (rule) => rule.name, (rule) => row(rule.name, () => remove(rule.name)));
      },
      () => {},
    );
  const remove = async (name) => {
    if (!mayAct()) return;
    try {
      const done = await post('/v1/rules', { name, rule: null });
      toast([done.message, ...(done.warnings ?? [])].join('. '));
      await load();
    } catch (failure) {
      toast(failure.message, true);
    }
  };
  load();
  const timer = setInterval(load, REFRESH_MS);
  return {
    node,
    show: () => {},
    end: () => {
      ended = true;
      clearInterval(timer);
    },
  };
}

function row(name, remove) {
  const [match, words, kept, whose] = ['rule-match', 'rule-words', 'rule-words', 'rule-words'].map((style) => h('span', { class: style }));
  const button = h('button', { type: 'button', text: 'Remove', 'aria-label': `Remove rule ${name}`, onclick: remove });
  return {
    node: h(
      'li',
      { class: 'rule', 'data-rule': name },
      h('span', { class: 'rule-text' }, match, words, kept, whose),
      h('span', { class: 'rule-actions' }, button),
    ),
    show: ({ entry, reservation, program, process, remaining_ms }) => {
      match.replaceChildren(...matchWords(entry).flat());
      put(words, entry.unmet ? `${ruleWords(entry)} (does not apply now: ${entry.unmet})` : ruleWords(entry));
      put(kept, reservationWords(reservation));
      kept.hidden = !reservation;
      const owner = process ? `${program ?? 'a program'} (number ${process})` : (program ?? 'a program');
      put(whose, remaining_ms > 0 ? `${name}, from ${owner}, for ${duration(remaining_ms)} more` : `${name}, from the ${owner}`);
      // Only the remote controller removes its rules.
      button.hidden = Boolean(program) && !process;
      button.disabled = !store.mayChange;
    },
  };
}

function reservationWords(reservation) {
  if (!reservation) return '';
  const { down_bps, up_bps, link, kept, reason } = reservation;
  const rates = [down_bps && `${rate(down_bps)} down`, up_bps && `${rate(up_bps)} up`].filter(Boolean).join(', ');
  return kept ? `keeps ${rates} free on ${link}` : `cannot keep ${rates} free: ${reason ?? 'no link has room'}`;
}
