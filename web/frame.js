// What the page of the daemon and that of a network's controller have in common: the logo, the colours, the state of the connection, the session.

import { openSession, takeToken } from './api.js';
import { clear, field, h, icon, put, s } from './dom.js';

const THEMES = [
  ['auto', 'Same as system'],
  ['light', 'Light'],
  ['dark', 'Dark'],
];
const THEME_ICONS = {
  auto: 'M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16',
  light: 'M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2m0 16v2M2 12h2m16 0h2M5 5l1.500 1.500m11 11L19 19M5 19l1.500-1.500m11-11L19 5',
  dark: 'M20 14A8 8 0 1 1 10 4a6.500 6.500 0 0 0 10 10z',
};

/** The theme choice, from theme.js. */
const { theme } = window;

export function logo() {
  return s(
    'svg',
    { viewBox: '0 0 32 32', class: 'logo', 'aria-hidden': 'true' },
    s('path', { d: 'M4 8c10 0 14 16 24 16', class: 'strand-a' }),
    s('path', { d: 'M4 24C14 24 18 8 28 8', class: 'strand-b' }),
    s('path', { d: 'M4 16h24', class: 'strand-c' }),
  );
}

/** The button that changes the colours. `changed` is called now, and after each change. */
export function themeButton(changed) {
  const button = h('button', { type: 'button', class: 'quiet theme', onclick: () => theme.next() });
  const show = () => {
    const [name, label] = THEMES.find(([key]) => key === theme.choice());
    button.replaceChildren(icon(THEME_ICONS[name]));
    button.setAttribute('aria-label', `Colours: ${label.toLowerCase()}. Change.`);
    button.title = `Colours: ${label.toLowerCase()}`;
    changed?.();
  };
  addEventListener('theme', show);
  show();
  return button;
}

const SAID = { connecting: 'Connecting', live: 'Live', lost: 'Offline', refused: 'Signed out' };

/** A lamp that shows the state of the connection, and a banner while the connection is lost, with a button that calls `retry`. */
export function connectionLamp(retry) {
  const lamp = h(
    'span',
    { class: 'live', 'data-state': 'connecting' },
    h('span', { class: 'lamp' }),
    h('span', { class: 'live-text', text: SAID.connecting }),
  );
  const banner = h('div', { class: 'banner', role: 'alert', hidden: true });
  const show = (state) => {
    lamp.dataset.state = state;
    put(lamp.lastChild, SAID[state]);
    document.body.classList.toggle('stale', state === 'lost');
    banner.hidden = state !== 'lost';
    if (banner.hidden) clear(banner);
    else if (!banner.firstChild) {
      banner.append(
        h('span', { text: 'The connection to Braid is lost. The page shows old data and keeps trying to reconnect.' }),
        h('button', { type: 'button', class: 'quiet', text: 'Try now', onclick: retry }),
      );
    }
  };
  return { lamp, banner, show };
}

/** Starts a session with the token in the page's address, if there is one. Resolves to the reason if that fails, else to `null`. */
export async function startSession() {
  const token = takeToken();
  if (!token) return null;
  return openSession(token).then(
    () => null,
    (failure) => failure.message,
  );
}

/** Asks for a token in place of what `main` shows. `command` opens the page with one. */
export function signIn(main, command, problem) {
  clear(main);
  const token = h('input', { type: 'password', autocomplete: 'off', required: true });
  const form = h(
    'form',
    { class: 'card narrow' },
    h('h2', { text: 'Sign in' }),
    h('p', { text: `This page needs Braid’s token. Run “${command}” on the machine itself to open the page with it.` }),
    field('Token', token),
    problem && h('p', { class: 'problem', role: 'alert', text: problem }),
    h('button', { class: 'primary', text: 'Sign in' }),
  );
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    openSession(token.value.trim()).then(
      () => location.reload(),
      (failure) => signIn(main, command, failure.message),
    );
  });
  main.append(form);
  token.focus();
}
