// The view Relays and paths: peers that carry flows over several links, and the paths to them. Settings uses the same forms.

import { post } from './api.js';
import { dialog, toast } from './change.js';
import { attr, empty, field, h, keyed, put } from './dom.js';
import { NONE, bytes, loss, rate, rtt, state } from './format.js';
import { accent, on, store } from './store.js';

export function mount(root) {
  const list = h('div', { class: 'peers' });
  root.append(list, joinForm());
  const show = () =>
    keyed(
      list,
      store.peers.length ? store.peers : [null],
      (peer) => peer?.name ?? '',
      (peer) =>
        peer
          ? card(peer)
          : {
              node: empty(
                'No relay yet',
                'With a relay on any server, one connection uses all links at once and survives the loss of any. Paste its invitation.',
              ),
            },
    );
  show();
  return on(['peers'], show);
}

const KINDS = { relay: 'Relay', server: 'Server that runs Braid' };

function card(first) {
  let name = first.name;
  const [pill, reason, rows] = [h('span', { class: 'pill' }), h('p', { class: 'reason' }), h('tbody')];
  const heads = ['Link', 'State', 'Round trip', 'Send rate', 'Loss', 'In flight', 'Received', 'Sent'];
  const node = h(
    'article',
    { class: 'card peer', 'aria-label': `Peer ${first.name}`, 'data-peer': first.name },
    h(
      'div',
      { class: 'link-head' },
      h('h2', { text: first.name }),
      h('span', { class: 'kind', text: `${KINDS[first.kind] ?? 'Peer'} at ${first.address}` }),
      pill,
    ),
    reason,
    h(
      'div',
      { class: 'scroll-x', tabindex: '0', role: 'region', 'aria-label': `Paths to ${first.name}` },
      h(
        'table',
        { class: 'plain' },
        h(
          'thead',
          {},
          h(
            'tr',
            {},
            heads.map((text, place) => h('th', { scope: 'col', class: place > 1 ? 'num' : null, text })),
          ),
        ),
        rows,
      ),
    ),
    h(
      'div',
      { class: 'row-actions' },
      h('button', {
        type: 'button',
        class: 'danger',
        text: first.kind === 'server' ? 'Forget its key…' : 'Leave…',
        onclick: () => leave(name, first.kind),
      }),
    ),
  );
  const show = (peer) => {
    name = peer.name;
    const [word, tone] = state(peer.state);
    put(pill, word);
    attr(pill, 'data-tone', tone);
    put(reason, peer.reason ?? (peer.packets ? 'Also carries other protocols than TCP and UDP' : ''));
    keyed(rows, peer.paths, (path) => path.link, pathRow);
  };
  return { node, show };
}

function pathRow(first) {
  const cells = Array.from({ length: 7 }, (_, place) => h('td', { class: place ? 'num' : null }));
  const node = h(
    'tr',
    {},
    h('th', { scope: 'row' }, h('span', { class: `tag link-${accent(first.link)}` }, h('span', { class: 'swatch' }), first.link)),
    cells,
  );
  return {
    node,
    show: (path) => {
      const [word, tone] = state(path.state);
      attr(cells[0], 'class', `tone-${tone}`);
      [
        path.reason ? `${word}: ${path.reason}` : word,
        rtt(path.rtt_us),
        rate(path.rate_bps),
        loss(path.loss),
        bytes(path.queued),
        bytes(path.rx_bytes),
        bytes(path.tx_bytes),
      ].forEach((text, place) => put(cells[place], text ?? NONE));
    },
  };
}

/** Leaves a relay after confirmation. */
export function leave(name, kind) {
  const box = dialog(kind === 'server' ? `Forget ${name}?` : `Leave ${name}?`, [
    h('p', {
      text:
        kind === 'server'
          ? 'Braid forgets its key and will trust the next key it presents. Flows that it carries end.'
          : 'Flows that it carries end; new flows go direct. To rejoin you need an invitation.',
    }),
    h(
      'div',
      { class: 'row-actions end' },
      h('button', { type: 'button', text: 'Cancel', onclick: () => box.close() }),
      h('button', {
        type: 'button',
        class: 'danger',
        text: kind === 'server' ? 'Forget' : 'Leave',
        onclick: () => {
          box.close();
          post('/v1/leave', { name }).then(
            (answer) => toast(answer.message),
            (failure) => toast(failure.message, true),
          );
        },
      }),
    ),
  ]);
}

/** Form to join a relay with an invitation. */
export function joinForm() {
  const line = h('textarea', { rows: '3', required: true, spellcheck: 'false', autocomplete: 'off', placeholder: 'braid1-…' });
  const name = h('input', { placeholder: 'home', spellcheck: 'false', autocomplete: 'off' });
  const button = h('button', { class: 'primary', text: 'Join' });
  const problem = h('p', { class: 'problem', role: 'alert', hidden: true });
  const form = h(
    'form',
    { class: 'card join' },
    h('h2', { text: 'Join a relay' }),
    field('Invitation', line, 'The line that “braid relay invite” prints on the server'),
    field('Name', name, 'Default: the name of the host'),
    problem,
    h('div', { class: 'row-actions end' }, button),
  );
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    button.disabled = true;
    problem.hidden = true;
    try {
      const answer = await post('/v1/join', { line: line.value.trim(), name: name.value.trim() || null });
      toast([answer.message, ...(answer.warnings ?? [])].join(' '));
      form.reset();
    } catch (failure) {
      problem.hidden = false;
      put(problem, failure.message);
    }
    button.disabled = false;
  });
  return form;
}
