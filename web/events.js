// The view Events: what happened, in plain words, newest first.

import { h, keyed, put, empty, select } from './dom.js';
import { clock, day, plural } from './format.js';
import { on, store } from './store.js';

const KINDS = { link: 'Link', flow: 'Flow', peer: 'Relay', config: 'Settings', battery: 'Battery', policy: 'Policy' };

export function mount(root) {
  const kind = select([['', 'All events'], ...Object.entries(KINDS)], '', { 'aria-label': 'Kind of event' });
  const only = h('input', { type: 'checkbox' });
  const said = h('p', { class: 'said' });
  const list = h('div', { class: 'days' });
  root.append(h('div', { class: 'tools' }, kind, h('label', { class: 'check' }, only, 'Warnings only'), said), list);
  const show = () => {
    const found = store.notes.filter((note) => (!kind.value || note.kind === kind.value) && (!only.checked || note.level === 'warning'));
    found.sort((a, b) => b.at_ms - a.at_ms || b.id - a.id);
    put(said, plural(found.length, 'event'));
    const days = [...new Set(found.map((note) => day(note.at_ms)))].map((name) => ({
      name,
      notes: found.filter((note) => day(note.at_ms) === name),
    }));
    keyed(
      list,
      days.length ? days : [null],
      (item) => item?.name ?? '',
      (item) =>
        item
          ? oneDay(item)
          : {
              node: empty('No events yet', 'Events list links that come and go, flows that moved, relays, and changed settings.'),
            },
    );
  };
  kind.addEventListener('change', show);
  only.addEventListener('change', show);
  show();
  return on(['notes'], show);
}

function oneDay({ name }) {
  const rows = h('ol', { class: 'notes card flush' });
  const node = h('section', { 'aria-label': name }, h('h2', { class: 'section-title', text: name }), rows);
  return {
    node,
    show: ({ notes }) =>
      keyed(
        rows,
        notes,
        (note) => `${note.id} ${note.at_ms}`,
        (note) => ({
          node: h(
            'li',
            { class: note.level === 'warning' ? 'note warning' : 'note', 'data-kind': note.kind },
            h('time', { datetime: new Date(note.at_ms).toISOString(), text: clock(note.at_ms) }),
            h('span', { class: 'note-kind', text: KINDS[note.kind] ?? note.kind }),
            h(
              'span',
              { class: 'note-text' },
              note.level === 'warning' && h('span', { class: 'hidden-visually', text: 'Warning: ' }),
              note.text,
            ),
          ),
        }),
      ),
  };
}
