// Dialogs, and the change of settings: preview with a summary and the changed lines of the file, apply, undo.

import { post } from './api.js';
import { fresh, h } from './dom.js';
import { store } from './store.js';
import { refreshPolicy } from './policy.js';

/** Opens a dialog with a title and a close button and returns it. When closed, it is removed and the focus returns to its former place. */
export function dialog(title, content, props = {}) {
  const id = fresh('dialog');
  const box = h(
    'dialog',
    { 'aria-labelledby': id, class: props.class },
    h(
      'header',
      {},
      h('h2', { id, text: title }),
      h('button', { type: 'button', class: 'quiet close', 'aria-label': 'Close', text: '×', onclick: () => box.close() }),
    ),
    h('div', { class: 'dialog-body' }, content),
  );
  box.addEventListener('close', () => box.remove());
  box.addEventListener('pointerdown', (event) => event.target === box && box.close());
  document.body.append(box);
  box.showModal();
  return box;
}

/** Shows a short message; a failure stays until the user closes it. */
export function toast(text, failed = false, action = null) {
  const close = () => node.remove();
  const node = h(
    'div',
    { class: failed ? 'toast failed' : 'toast' },
    h('p', { text }),
    action &&
      h('button', {
        type: 'button',
        class: 'quiet',
        text: action[0],
        onclick: () => {
          close();
          action[1]();
        },
      }),
    h('button', { type: 'button', class: 'quiet close', 'aria-label': 'Dismiss', text: '×', onclick: close }),
  );
  document.getElementById('toasts').append(node);
  if (!failed) setTimeout(close, action ? 15_000 : 6_000);
}

const READ_ONLY = 'This session is read-only: it cannot change anything.';

/** Whether this session may change what is not in the configuration; shows the reason if not. */
export function mayAct() {
  if (!store.mayChange) toast(READ_ONLY, true);
  return store.mayChange;
}

/** Whether this session may change settings; shows the reason if not. */
export function mayChange() {
  const reason = !store.config
    ? 'Braid cannot read the configuration, so this page cannot change it.'
    : !store.mayChange
      ? READ_ONLY
      : store.config.writable
        ? null
        : `Braid cannot write ${store.config.path ?? 'its configuration'}, so this page cannot change it.`;
  if (reason) toast(reason, true);
  return !reason;
}

/** Previews the effect of `edits`, and applies them if the user confirms. Resolves to whether they were applied. */
export async function propose(edits) {
  if (!mayChange()) return false;
  const before = store.config;
  let plan;
  try {
    plan = await post('/v1/config/preview', { revision: before.revision, edits });
  } catch (failure) {
    return refused(failure);
  }
  if (plan.text === before.text) {
    toast('Nothing to change: the settings are already like this.');
    return false;
  }
  return new Promise((resolve) => {
    let applied = false;
    const apply = h('button', {
      type: 'button',
      class: 'primary',
      text: 'Apply',
      onclick: async () => {
        apply.disabled = true;
        applied = await send(before.revision, edits);
        box.close();
      },
    });
    const box = dialog(
      'Apply this change?',
      [
        h(
          'ul',
          { class: 'changes' },
          plan.changes.map((text) => h('li', { text })),
        ),
        plan.warnings.length
          ? h(
              'ul',
              { class: 'warnings' },
              plan.warnings.map((text) => h('li', { text })),
            )
          : null,
        h('h3', { text: store.config.path ? `In ${store.config.path}` : 'In the configuration' }),
        showDiff(before.text, plan.text),
        h('div', { class: 'row-actions end' }, h('button', { type: 'button', text: 'Cancel', onclick: () => box.close() }), apply),
      ],
      { class: 'preview' },
    );
    box.addEventListener('close', () => resolve(applied));
    apply.focus();
  });
}

/** A button that proposes the edits that `edits()` returns, disabled at first. `reset` runs if they were not applied. */
export function previewButton(edits, reset) {
  return h('button', {
    type: 'button',
    class: 'primary',
    text: 'Preview…',
    disabled: true,
    onclick: async () => {
      if (!(await propose(edits()))) reset();
    },
  });
}

async function send(revision, edits) {
  try {
    const done = await post('/v1/config', { revision, edits });
    await refreshPolicy();
    toast(done.changes.length === 1 ? `Applied: ${done.changes[0]}` : `${done.changes.length} changes applied`, false, ['Undo', undo]);
    return true;
  } catch (failure) {
    return refused(failure);
  }
}

/** Undoes the last applied change. */
export async function undo() {
  try {
    await post('/v1/config/undo');
    await refreshPolicy();
    toast('The last change is undone');
  } catch (failure) {
    refused(failure);
  }
}

function refused(failure) {
  if (failure.status === 409) {
    refreshPolicy().catch(() => {});
    toast('The configuration was changed elsewhere. The page has reloaded it; check it and try again.', true);
  } else toast(failure.message, true);
  return false;
}

const CONTEXT = 3;

/** The changed lines with some context, as in `diff -u`. */
export function showDiff(before, after) {
  const lines = diff(before.split('\n'), after.split('\n'));
  const near = lines.map((_, at) => lines.slice(Math.max(at - CONTEXT, 0), at + CONTEXT + 1).some(([mark]) => mark !== ' '));
  const rows = [];
  lines.forEach(([mark, text], at) => {
    if (near[at])
      rows.push(
        h(
          'div',
          { class: `line ${{ '+': 'added', '-': 'taken', ' ': 'kept' }[mark]}` },
          h('span', { class: 'mark', text: mark }),
          text || ' ',
        ),
      );
    else if (near[at - 1]) rows.push(h('div', { class: 'line gap', text: '⋯' }));
  });
  return h('div', { class: 'diff', tabindex: '0', role: 'region', 'aria-label': 'Lines of the configuration that change' }, rows);
}

/** `[mark, line]` for the shortest edit from one text to the other. Equal lines at both ends are skipped first. */
function diff(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const [x, y] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const table = Array.from({ length: x.length + 1 }, () => new Uint32Array(y.length + 1));
  for (let i = x.length - 1; i >= 0; i -= 1) {
    for (let j = y.length - 1; j >= 0; j -= 1) {
      table[i][j] = x[i] === y[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  const found = a.slice(0, start).map((text) => [' ', text]);
  let [i, j] = [0, 0];
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) {
      found.push([' ', x[i]]);
      i += 1;
      j += 1;
    } else if (i < x.length && (j === y.length || table[i + 1][j] >= table[i][j + 1])) found.push(['-', x[i++]]);
    else found.push(['+', y[j++]]);
  }
  return [...found, ...a.slice(a.length - end).map((text) => [' ', text])];
}
