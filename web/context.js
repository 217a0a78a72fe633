// Facts about the context that conditions of rules (`when`) refer to: shows them, sets them and clears those that a user set.

import { get, post } from './api.js';
import { mayAct, toast } from './change.js';
import { card, field, h, keyed, put } from './dom.js';
import { clock } from './format.js';
import { refreshPolicy } from './policy.js';
import { store } from './store.js';

const REFRESH_MS = 5_000;
const SOURCES = { set: 'set by a user', sensor: 'from a sensor', system: 'from the system' };

export function context() {
  const list = h('div', { class: 'link-settings' });
  const none = h('p', { class: 'hint', text: 'No facts are known.' });
  const name = h('input', { placeholder: 'moving', required: true, maxlength: '32', pattern: '[a-z][a-z0-9_\\-]*', spellcheck: 'false' });
  const value = h('input', { placeholder: 'true', required: true, maxlength: '64', spellcheck: 'false' });
  const minutes = h('input', { type: 'number', min: '1', max: '10080', step: '1', placeholder: 'until cleared' });
  const button = h('button', { class: 'primary', text: 'Set' });
  const form = h(
    'form',
    {},
    h(
      'div',
      { class: 'form-grid' },
      field('Fact', name, 'A name that a rule’s when has'),
      field('Value', value),
      field('For minutes', minutes, 'Empty: until it is cleared'),
    ),
    h('div', { class: 'row-actions end' }, button),
  );
  let ended = false;
  const load = () =>
    get('/v1/context').then(
      ({ facts }) => {
        if (ended) return;
        none.hidden = facts.length > 0;
        keyed(
          list,
          facts,
          // There is a fact for each wireless network.
          (fact) => `${fact.name} ${fact.source === 'set' ? '' : fact.value}`,
          (fact) => factRow(fact.name, () => change({ name: fact.name, value: null })),
        );
      },
      () => {},
    );
  const change = async (wanted) => {
    if (!mayAct()) return false;
    try {
      const done = await post('/v1/context', wanted);
      toast([done.message, ...(done.warnings ?? [])].join('. '));
      // Other rules may apply now.
      await Promise.all([load(), refreshPolicy()]);
      return true;
    } catch (failure) {
      toast(failure.message, true);
      return false;
    }
  };
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    const wanted = { name: name.value.trim(), value: value.value.trim() };
    if (minutes.value) wanted.for_ms = Number(minutes.value) * 60_000;
    if (await change(wanted)) form.reset();
  });
  load();
  const timer = setInterval(load, REFRESH_MS);
  return {
    node: card('context', 'Context', h('p', { class: 'hint', text: 'Facts that rules with a condition (when) refer to.' }), list, none, form),
    show: () => {
      button.disabled = !store.mayChange;
    },
    end: () => {
      ended = true;
      clearInterval(timer);
    },
  };
}

function factRow(name, clear) {
  const [value, source] = [h('code', {}), h('span', { class: 'choice' })];
  const button = h('button', { type: 'button', text: 'Clear', 'aria-label': `Clear fact ${name}`, onclick: clear });
  return {
    node: h('div', { class: 'link-setting', 'data-fact': name }, h('b', { text: name }), value, source, button),
    show: (fact) => {
      put(value, fact.value);
      const until = typeof fact.remaining_ms === 'number' ? `, until ${clock(Date.now() + fact.remaining_ms)}` : '';
      put(source, `${SOURCES[fact.source] ?? fact.source}${until}`);
      // Facts of sensors and of the system have no value to clear.
      button.hidden = fact.source !== 'set' || !store.mayChange;
    },
  };
}
