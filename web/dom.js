// Creates and changes elements. External text is inserted only as text nodes and attributes: the page never parses markup.

// Control characters, and those that change the writing direction, have no width or break lines, as `steers` in crates/model: with one in its name, a
// program could make what follows read as something else.
const DECEPTIVE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** The text without characters that deceive. */
export const clean = (text) => (typeof text === 'string' ? text.replace(DECEPTIVE, '\ufffd') : text);

const SVG = 'http://www.w3.org/2000/svg';

/** Creates an element. `props` holds attributes, `class`, `text`, and listeners such as `onclick`; children are nodes, texts, or nothing. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Like `h`, for SVG. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'text') node.textContent = clean(value);
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'value' || name === 'checked' || name === 'selected') node[name] = value;
    else if (value === true) node.setAttribute(name, '');
    else node.setAttribute(name === 'className' ? 'class' : name, clean(value));
  }
  const present = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...present.map(clean));
  return node;
}

/** Sets the text of a node only if it differs, to avoid needless layout. */
export function put(node, text) {
  const value = clean(String(text));
  if (node.textContent !== value) node.textContent = value;
}

/** Sets or removes an attribute, only if it changes. */
export function attr(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = clean(String(value));
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Keeps one child of `parent` for each of `items`; nodes are reused by key. `make(item)` returns `{node, show(item), end()}`. */
export function keyed(parent, items, key, make) {
  const old = parent.parts ?? (parent.parts = new Map());
  const now = new Map();
  const wanted = new Set(items.map(key));
  // First, because a node that is inserted again loses its focus and its transitions.
  for (const [name, part] of old) {
    if (wanted.has(name)) continue;
    part.end?.();
    part.node.remove();
  }
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    if (now.has(name)) continue;
    const part = old.get(name) ?? make(item);
    part.show?.(item);
    now.set(name, part);
    if (part.node === place) place = place.nextSibling;
    else parent.insertBefore(part.node, place);
  }
  parent.parts = now;
}

export function clear(node) {
  node.replaceChildren();
  node.parts = undefined;
}

let serial = 0;

/** Returns a unique id. */
export function fresh(word) {
  serial += 1;
  return `${word}-${serial}`;
}

/** A control with its label, and an optional hint below it. */
export function field(label, control, hint) {
  control.id ||= fresh('field');
  const note = hint && h('span', { class: 'hint', id: `${control.id}-hint`, text: hint });
  if (note) control.setAttribute('aria-describedby', note.id);
  return h('div', { class: 'field' }, h('label', { for: control.id, text: label }), control, note);
}

/** A field of a form that needs the whole width: its options are sentences. */
export function full(label, control) {
  const node = field(label, control);
  node.classList.add('full');
  return node;
}

/** A `<select>` of `[value, label]` pairs. */
export function select(options, value, props = {}) {
  const node = h(
    'select',
    props,
    options.map(([key, label]) => h('option', { value: key, text: label })),
  );
  node.value = value;
  return node;
}

/** An icon of the page, from paths on a 24 px grid. */
export function icon(path) {
  return s('svg', { viewBox: '0 0 24 24', class: 'icon', 'aria-hidden': 'true' }, s('path', { d: path }));
}

/** A section of a view with its title, whose id is `set-` and `name`. */
export function card(name, title, ...children) {
  const id = `set-${name}`;
  return h('section', { class: 'card', 'aria-labelledby': id }, h('h2', { id, text: title }), children);
}

/** A placeholder for an empty view, with the reason. */
export function empty(title, text) {
  return h('div', { class: 'empty' }, h('p', { class: 'empty-title', text: title }), text && h('p', { text }));
}

/** Calls `refresh` now, every `ms`, and when the page becomes visible again; returns a function that ends it. */
export function repeat(refresh, ms) {
  document.addEventListener('visibilitychange', refresh);
  const timer = setInterval(refresh, ms);
  refresh();
  return () => {
    clearInterval(timer);
    document.removeEventListener('visibilitychange', refresh);
  };
}
